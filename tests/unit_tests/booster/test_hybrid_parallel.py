"""HybridParallelPlugin: losses and weights of steps in layouts, against one process; checkpoints between layouts."""

import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin
from core.booster.plugin.microbatches import microbatches_of
from core.groups import agree
from core.hugging_face import PlanError, gather_logits
from core.verify.in_double import InDouble
from tests.unit_tests.booster.booster_reference import own_loss, sequence
from tests.unit_tests.hugging_face.models import small, tokens
from tests.unit_tests.ranks import ranks

STEPS, ROWS, LAYERS = 3, 4, 4


def batch_of(step: int, data_rank: int) -> dict[str, torch.Tensor]:
    ids = tokens(ROWS, seed=10 * step + data_rank)
    return {"input_ids": ids, "labels": ids}


def new_optimizer(model: Any) -> torch.optim.Optimizer:
    """Two groups, whose sizes differ between stages."""
    wide = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() == 1]
    return torch.optim.AdamW([{"params": wide}, {"params": rest, "lr": 3e-2}], lr=1e-2, weight_decay=0.1, eps=1e-4)


def trained_alone(model: Any, data_ranks: int, max_norm: float, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Losses and norms of steps on the whole batch."""
    optimizer = new_optimizer(model)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.stack([model(**batch_of(step, rank)).loss for rank in range(data_ranks)]).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or 1e9)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


def steps_of(
    booster: Booster, model: Any, optimizer: Any, data_rank: int, steps: range, pp: int, accumulate: int = 1
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        rows = ROWS // accumulate
        parts = []
        for number in range(accumulate):
            batch = {k: v[number * rows : (number + 1) * rows] for k, v in batch_of(step, data_rank).items()}
            last = number == accumulate - 1
            with contextlib.nullcontext() if last else booster.no_sync(model, optimizer):
                if pp > 1:

                    def share(outputs: Any, batch: Any) -> torch.Tensor:
                        return own_loss(outputs, batch) / accumulate

                    outcome = booster.execute_pipeline(iter([batch]), model, share, optimizer)
                    parts.append(outcome["loss"] * accumulate)
                else:
                    loss = model(**batch).loss
                    booster.backward(loss / accumulate, optimizer)
                    parts.append(loss.detach())
        optimizer.step()
        norms.append(optimizer.get_grad_norm())
        losses.append(float(torch.stack(parts).mean()))
    return losses, norms


def check(
    family: str,
    tp: int,
    pp: int,
    world: int,
    options: dict[str, Any],
    values: dict[str, Any],
    accumulate: int = 1,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-4,
) -> None:
    """tolerance: of the norms, relative; that of losses is a tenth."""
    max_norm = options.get("max_norm", 0.0)
    model = small(family, dtype, num_hidden_layers=LAYERS, **values)
    data_ranks = world // (tp * pp * options.get("sp_size", 1))
    reference = small(family, dtype, num_hidden_layers=LAYERS, **values)
    start = {name: param.detach().clone() for name, param in reference.named_parameters()}
    expected, expected_norms = trained_alone(reference, data_ranks, max_norm, steps)
    micro = {"num_microbatches": 2 * options.get("num_model_chunks", 1)} if pp > 1 else {}
    booster = Booster(plugin=HybridParallelPlugin(tp, pp, precision="fp32", **{**micro, **options}))
    optimizer = new_optimizer(model)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    groups = parallel_state.get_process_groups()
    assert groups.size("dp") == data_ranks
    losses, norms = steps_of(booster, boosted, optimizer, groups.rank("dp"), range(steps), pp, accumulate)
    total = torch.tensor(losses, dtype=torch.float64)
    torch.distributed.all_reduce(total, torch.distributed.ReduceOp.AVG, group=groups.dp)
    assert total.tolist() == pytest.approx(expected, abs=tolerance / 10)
    assert norms == pytest.approx(expected_norms, rel=tolerance)
    for name, value in booster.checkpoint_io.model_tensors(boosted):
        wanted = reference.get_parameter(name)
        assert float((value - wanted).abs().max()) < 2e-4, name
        assert float((wanted - start.get(name, wanted)).abs().max()) > 1e-3 or name not in start


LAYOUTS = [
    (2, 1, {"zero_stage": 0, "logits_chunk": 5}),
    (1, 2, {"zero_stage": 1, "max_norm": 0.5}),
    (1, 1, {"zero_stage": 3, "max_norm": 0.5, "logits_chunk": 4}),
    (2, 1, sequence("split_gather", zero_stage=2, logits_chunk=7)),
    (1, 1, sequence("ring_attn", sp_size=2, zero_stage=1, max_norm=0.5, logits_chunk=3)),
]


@ranks(2)
@pytest.mark.parametrize(("tp", "pp", "options"), LAYOUTS)
def test_two_ranks_train_as_one_process(rank: int, world: int, tp: int, pp: int, options: dict[str, Any]) -> None:
    check("llama", tp, pp, world, options, {})


@ranks(4)
@pytest.mark.parametrize(
    ("tp", "pp", "options"),
    [
        (2, 2, {"zero_stage": 0, "max_norm": 0.5}),
        (1, 2, {"zero_stage": 3, "dp_outside": False, "logits_chunk": 5}),
        (2, 1, {"zero_stage": 3, "max_norm": 0.5, "parallel_output": False, "overlap_communication": False}),
        (2, 2, sequence("ring", zero_stage=2, max_norm=0.5, logits_chunk=5)),
        (1, 1, sequence("all_to_all", sp_size=2, zero_stage=3, max_norm=0.5)),
        (2, 1, sequence("all_to_all", sp_size=2, inner_ring_size=None, parallel_output=False)),
        (1, 2, sequence("ring_attn", sp_size=2, inner_ring_size=2, zero_stage=1)),
    ],
)
@pytest.mark.in_suite(4)
def test_four_ranks_train_as_one_process(rank: int, world: int, tp: int, pp: int, options: dict[str, Any]) -> None:
    check("llama", tp, pp, world, options, {"tie_word_embeddings": True})


@ranks(4)
def test_a_family_that_needs_whole_hidden_states_behind_its_layers_joins_them(rank: int, world: int) -> None:
    for tp, options in ((2, sequence("ring_attn", sp_size=2)), (1, sequence("all_to_all", sp_size=2, zero_stage=3))):
        check("gpt2", tp, 1, world, options, NIGHTLY["gpt2"])
        parallel_state.destroy_model_parallel()


@ranks(2)
@pytest.mark.parametrize(("style", "zero_stage"), [("interleaved", 3), ("zbv", 2), ("zbv", 3)])
def test_schedules_of_several_stages_a_rank_train_as_one_process(
    rank: int, world: int, style: str, zero_stage: int
) -> None:
    """In chunks, the loss reads the weight of the output layer, which with 'zbv' is the first stage's."""
    options = {"pp_style": style, "num_model_chunks": 2, "max_norm": 0.5, "zero_stage": zero_stage, "logits_chunk": 5}
    check("llama", 1, 2, world, options, {"tie_word_embeddings": True})


@ranks(4)
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_accumulated_batches_train_as_one_batch(rank: int, world: int, tp: int, pp: int) -> None:
    check("llama", tp, pp, world, {"zero_stage": 1, "num_microbatches": 2}, {}, accumulate=2)


NIGHTLY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


@pytest.mark.nightly
@ranks(4, timeout_s=120.0)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_layouts_train_as_one_process(rank: int, world: int, family: str, tp: int, pp: int, zero_stage: int) -> None:
    micro = {"num_microbatches": 4} if pp > 1 else {}
    check(family, tp, pp, world, {"zero_stage": zero_stage, "max_norm": 0.5, **micro}, NIGHTLY[family])


OWN_RANKS = ("all_to_all", "ring_attn")  # sequences over ranks of their own
SIZES: dict[str, Sequence[Any]] = {
    "family": list(NIGHTLY),
    "tp": [1, 2, 4],
    "pp": [1, 2, 4],
    "dp": [1, 2, 4, 8],
    "mode": [None, "split_gather", "ring", "all_to_all", "ring_attn"],
    "zero_stage": [0, 1, 2, 3],
}


def layouts_of_pairs(world: int) -> list[tuple[Any, ...]]:
    """Few layouts in which every two sizes meet that any layout has together."""
    legal = [
        values
        for values in itertools.product(*SIZES.values())
        for _, tp, pp, dp, mode, _ in [values]
        if tp * pp * dp * (2 if mode in OWN_RANKS else 1) == world and (tp > 1 or mode in (None, *OWN_RANKS))
    ]
    pairs_of = {values: set(itertools.combinations(enumerate(values), 2)) for values in legal}
    missing = set().union(*pairs_of.values())
    found = []
    while missing:
        found.append(max(legal, key=lambda values: len(pairs_of[values] & missing)))
        missing -= pairs_of[found[-1]]
    return found


@pytest.mark.nightly
@ranks(8, timeout_s=170.0)
@pytest.mark.parametrize(tuple(SIZES), layouts_of_pairs(8))
def test_20_steps_on_8_ranks_are_one_process(
    rank: int, world: int, family: str, tp: int, pp: int, dp: int, mode: str | None, zero_stage: int
) -> None:
    """With sizes, modes, stages and families paired in every way.

    In fp64: by a rounding of fp32 a token between two experts goes to another one.
    """
    options: dict[str, Any] = {"zero_stage": zero_stage, "max_norm": 0.5}
    if pp > 1:
        options["num_microbatches"] = 4
    if mode is not None:
        options |= sequence(mode, sp_size=2 if mode in OWN_RANKS else 1)
    with InDouble():
        check(family, tp, pp, world, options, NIGHTLY[family], steps=20, dtype=torch.float64, tolerance=1e-8)


@pytest.mark.nightly
@ranks(8, timeout_s=170.0)
def test_sharded_parameters_have_the_bits_of_sharded_gradients_for_20_steps(rank: int, world: int) -> None:
    results = []
    for zero_stage in (2, 3):
        model = small("qwen3_moe", torch.float64, num_hidden_layers=LAYERS, **NIGHTLY["qwen3_moe"])
        booster = Booster(plugin=HybridParallelPlugin(2, 1, precision="fp32", zero_stage=zero_stage, max_norm=0.5))
        boosted, optimizer, *_ = booster.boost(model, new_optimizer(model))
        data_rank = parallel_state.get_data_parallel_rank()
        results.append(steps_of(booster, boosted, optimizer, data_rank, range(20), 1))
        parallel_state.destroy_model_parallel()
    assert results[0] == results[1]


# -- checkpoints ----------------------------------------------------------------------------------------------------


def boosted_llama(tp: int, pp: int, *, shift: float = 0.0, **options: Any) -> tuple[Booster, Any, Any, Any]:
    """A booster, the model and optimizer that it boosted, and a scheduler."""
    micro = {"num_microbatches": 2} if pp > 1 else {}
    booster = Booster(plugin=HybridParallelPlugin(tp, pp, precision="fp32", **{**micro, **options}))
    model = small("llama", torch.float32, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(shift)
    optimizer = new_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, None, None, scheduler)
    return booster, model, optimizer, scheduler


@ranks(4)
@pytest.mark.parametrize(
    ("before", "after", "shard"),
    [
        *(((2, 2, 0), (1, 4, 1), True), ((1, 2, 3), (2, 1, 1), False)),
        pytest.param((4, 1, 0), (2, 1, 3), True, marks=pytest.mark.nightly),
        pytest.param((2, 2, 0), (1, 4, 1), False, marks=pytest.mark.nightly),
        pytest.param((1, 2, 3), (2, 1, 1), True, marks=pytest.mark.nightly),
        pytest.param((4, 1, 0), (2, 1, 3), False, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.in_suite(1)
def test_training_goes_on_in_another_layout(
    rank: int, world: int, before: tuple[int, ...], after: tuple[int, ...], shard: bool, tmp_path: Path
) -> None:
    """The losses and weights after a change of layout are those of training on without one."""
    import transformers

    results: list[list[float]] = []
    names = ("model", "optimizer") if shard else ("model.bin", "optimizer.bin")
    for tp, pp, stage in (before, after):
        saves = (tp, pp, stage) == before
        micro = {"num_microbatches": 4} if pp == 4 else {}
        booster, model, optimizer, scheduler = boosted_llama(
            tp, pp, shift=0.0 if saves else 1.0, zero_stage=stage, **micro
        )
        if saves:
            for _ in range(2):
                steps_of(booster, model, optimizer, 0, range(1), pp)
                scheduler.step()
            booster.save_model(model, tmp_path / names[0], shard=shard, use_safetensors=shard)
            booster.save_optimizer(optimizer, tmp_path / names[1], shard=shard)
            booster.save_lr_scheduler(scheduler, tmp_path / "scheduler.bin")
        else:
            booster.load_model(model, tmp_path / names[0])
            booster.load_optimizer(optimizer, tmp_path / names[1])
            booster.load_lr_scheduler(scheduler, tmp_path / "scheduler.bin")
            assert optimizer.param_groups[1]["lr"] == pytest.approx(3e-2 * 0.75)
        losses, _ = steps_of(booster, model, optimizer, 0, range(2, 5), pp)
        results.append(losses)
        if shard and saves and rank == 0:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
            assert loaded.config.num_hidden_layers == LAYERS
        parallel_state.destroy_model_parallel()
    assert results[0] == pytest.approx(results[1], abs=1e-5)
    said = agree.gather(results[0], None, "the losses")
    assert all(theirs == pytest.approx(results[0], abs=1e-5) for theirs in said.values())


# -- precisions and options -----------------------------------------------------------------------------------------


@ranks(2)
@pytest.mark.parametrize(("precision", "tp", "pp"), [("fp16", 1, 2), ("bf16", 2, 1), ("bf16", 1, 2)])
def test_half_precision_stays_near_one_process(rank: int, world: int, precision: str, tp: int, pp: int) -> None:
    reference = small("llama", torch.float32, num_hidden_layers=LAYERS)
    expected, expected_norms = trained_alone(reference, 1, 0.5)
    micro = {"num_microbatches": 2} if pp > 1 else {}
    options = {"initial_scale": 256, "max_norm": 0.5, "zero_stage": 1}
    booster = Booster(plugin=HybridParallelPlugin(tp, pp, precision=precision, **micro, **options))
    model = small("llama", torch.float32, num_hidden_layers=LAYERS)
    boosted, optimizer, *_ = booster.boost(model, new_optimizer(model))
    losses, norms = steps_of(booster, boosted, optimizer, 0, range(STEPS), pp)
    assert losses == pytest.approx(expected, abs=2e-2)
    assert norms == pytest.approx(expected_norms, rel=5e-2)
    if precision == "fp16":
        assert optimizer.scaler.value == 256


@ranks(2)
def test_an_overflow_on_one_stage_skips_the_step_on_all(rank: int, world: int) -> None:
    plugin = HybridParallelPlugin(1, 2, precision="fp16", num_microbatches=2, initial_scale=2.0**31, hysteresis=1)
    booster = Booster(plugin=plugin)
    model = small("llama", torch.float32, num_hidden_layers=LAYERS)
    boosted, optimizer, *_ = booster.boost(model, new_optimizer(model))
    before = [param.detach().clone() for param in boosted.parameters()]
    steps_of(booster, boosted, optimizer, 0, range(1), 2)
    assert optimizer.scaler.value == 2.0**30
    assert all(torch.equal(a, b) for a, b in zip(before, boosted.parameters(), strict=True))


@ranks(2)
def test_outputs_of_a_pipeline_and_its_evaluation(rank: int, world: int) -> None:
    from core.booster.plugin import PipelineGradientCheckpointConfig

    config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 2])
    options: dict[str, Any] = {"gradient_checkpoint_config": config, "enable_flash_attention": True}
    plugin = HybridParallelPlugin(
        1, 2, precision="fp32", microbatch_size=1, num_layers_per_stage=[1, 3], parallel_output=False, **options
    )
    booster = Booster(plugin=plugin)
    model = small("llama", torch.float32, num_hidden_layers=LAYERS, attn_implementation="eager")
    reference = small("llama", torch.float32, num_hidden_layers=LAYERS)
    boosted, optimizer, *_ = booster.boost(model, new_optimizer(model))
    part = boosted.unwrap()
    flags = [layer.gradient_checkpointing for layer in part.model.layers if list(layer.parameters())]
    assert flags == ([True] if rank == 0 else [True, True, False])
    assert part.config._attn_implementation == "sdpa"
    expected = reference(**batch_of(0, 0))
    with torch.no_grad():
        result = booster.execute_pipeline(iter([batch_of(0, 0)]), boosted, own_loss, return_outputs=True)
    assert float(result["loss"]) == pytest.approx(float(expected.loss.detach()), abs=1e-5)
    assert (result["outputs"] is None) == (rank == 0)
    if rank == 1:
        torch.testing.assert_close(result["outputs"]["logits"], expected.logits.detach(), rtol=1e-4, atol=1e-4)
    result = booster.execute_pipeline(iter([batch_of(0, 0)]), boosted, own_loss, optimizer, return_loss=False)
    assert result == {"loss": None, "outputs": None}
    with pytest.raises(TypeError, match="takes an iterator, and got a list"):
        booster.execute_pipeline([batch_of(0, 0)], boosted, own_loss, optimizer)
    with pytest.raises(RuntimeError, match="call booster.execute_pipeline"):
        boosted(**batch_of(0, 0))


@ranks(2)
@pytest.mark.parametrize("pp", [1, 2])
def test_split_logits_are_refused_until_they_are_gathered(rank: int, world: int, pp: int) -> None:
    """A criterion of the user's would compute a softmax over a part of the vocabulary, and pass for right."""
    if pp == 2:
        booster, model, optimizer, _ = boosted_llama(1, 2)
        gathered = booster.execute_pipeline(iter([batch_of(0, 0)]), model, own_criterion, optimizer)["loss"]
        reference = small("llama", torch.float32, num_hidden_layers=LAYERS, tie_word_embeddings=True)
        assert float(gathered) == pytest.approx(float(reference(**batch_of(0, 0)).loss.detach()), abs=1e-5)
        return
    booster, model, optimizer, _ = boosted_llama(2, 1)
    reference = small("llama", torch.float32, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    batch = batch_of(0, 0)
    own_criterion(reference(**batch), batch).backward()
    output = model(**batch)
    with pytest.raises(PlanError, match=r"cross_entropy of logits|float of logits|__getitem__ of logits"):
        torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    booster.backward(own_criterion(output, batch), optimizer)
    optimizer.step()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    assert optimizer.get_grad_norm() == pytest.approx(float(wanted), rel=1e-5)
    with pytest.raises(PlanError, match="return_dict=False hides"):
        model(**batch, return_dict=False)


@ranks(4)
def test_logits_of_a_part_of_the_sequence_become_whole_for_a_criterion_and_as_outputs(rank: int, world: int) -> None:
    """Also where they are those of a part of the vocabulary; the gradient is that of one process."""
    for tp, pp in ((1, 2), (2, 1)):
        options = sequence("ring_attn", sp_size=2, zero_stage=1)
        booster, model, optimizer, _ = boosted_llama(tp, pp, **options)
        reference = small("llama", torch.float32, num_hidden_layers=LAYERS, tie_word_embeddings=True)
        batch = batch_of(0, 0)
        expected = reference(**batch)
        own_criterion(expected, batch).backward()
        if pp == 2:
            outcome = booster.execute_pipeline(iter([batch]), model, own_criterion, optimizer, return_outputs=True)
            loss, outputs = outcome["loss"], outcome["outputs"]
        else:
            output = model(**batch)
            loss = own_criterion(output, batch)
            booster.backward(loss, optimizer)
            outputs = {"logits": gather_logits(output.logits).detach()}
        assert float(loss) == pytest.approx(float(expected.loss.detach()), abs=1e-5)
        assert (outputs is None) == (parallel_state.get_pipeline_model_parallel_rank() < pp - 1)
        if outputs is not None:
            torch.testing.assert_close(outputs["logits"], expected.logits.detach(), rtol=1e-4, atol=1e-4)
        optimizer.step()
        wanted = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
        assert optimizer.get_grad_norm() == pytest.approx(float(wanted), rel=1e-5)
        parallel_state.destroy_model_parallel()


@ranks(2)
@pytest.mark.parametrize("mode", ["ring_attn", "all_to_all"])
def test_a_forward_that_fails_on_one_rank_is_named_where_others_wait_for_it(
    rank: int, world: int, mode: str, tmp_path: Path
) -> None:
    """Though the rank goes on, and so no connection breaks: a program may catch the error."""
    booster, model, *_ = boosted_llama(1, 1, **sequence(mode, sp_size=2))
    heard = tmp_path / "heard"

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.write_text(record.getMessage())

    if rank == 0:
        logging.getLogger("core.watch.rank_watch").addHandler(Listener())
    else:

        def fail(*_: Any) -> None:
            raise RuntimeError("no memory left")

        hook = model.unwrap().model.layers[0].self_attn.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no memory left"):
            model(**batch_of(0, 0))
        hook.remove()
        begun = time.monotonic()
        while not heard.exists() and time.monotonic() < begun + 20.0:
            time.sleep(0.05)
        assert "failed, and others may wait for it: RuntimeError: no memory left" in heard.read_text()
        assert time.monotonic() < begun + 8.0
    reference = small("llama", torch.float32, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    loss = model(**batch_of(0, 0)).loss  # it failed before its first exchange, which rank 0 is in
    assert float(loss.detach()) == pytest.approx(float(reference(**batch_of(0, 0)).loss.detach()), abs=1e-5)


def own_criterion(outputs: Any, batch: Any) -> torch.Tensor:
    logits = gather_logits(outputs.logits)[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp_size": 3}, "World size 2 is not divisible by tp_size 3"),
    ({"zero_stage": 4}, "zero_stage is 4; expected 0, 1, 2 or 3"),
    ({"zero_stage": 3, "overlap_allgather": True}, "with zero_stage=3 nothing is gathered there"),
    ({"pp_size": 2}, "give num_microbatches or microbatch_size"),
    ({"pp_style": "gpipe"}, "pp_style 'gpipe' is none of"),
    ({"pp_style": "zbv"}, "needs a pipeline"),
    ({"num_model_chunks": 2}, "num_model_chunks is 2 with pp_style='1f1b'"),
    ({"cpu_offload": True}, "cpu_offload=True is an option of ZeRO"),
    ({"sp_size": 2}, "sp_size=2 needs enable_sequence_parallelism=True"),
    ({"enable_sequence_parallelism": True}, "'split_gather' is over the tensor-parallel ranks, and tp_size is 1"),
    (sequence("ring", tp_size=2, sp_size=4), "sp_size is 4, and 'ring' takes the 2 tensor-parallel ranks"),
    (sequence("all_to_all"), "'all_to_all' needs separate ranks for the sequence, but sp_size is None"),
    (sequence("ring_attn", sp_size=4), r"World size 2 is not divisible by tp_size 1 \* pp_size 1 \* sp_size 4"),
    (sequence("ring_attn", sp_size=0), "sp_size is 0; it is a number of ranks"),
    ({"sequence_parallelism_mode": "sideways"}, "none of split_gather, ring, all_to_all, ring_attn"),
    ({"precision": "fp64"}, "precision 'fp64' is none of"),
    ({"custom_policy": "llama"}, "expected a core.hugging_face.Policy"),
]


@ranks(2)
def test_options_that_cannot_work_are_refused_by_name(rank: int, world: int) -> None:
    for options, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32", **options})


@ranks(2)
def test_models_that_cannot_be_cut_are_refused_on_all_ranks(rank: int, world: int) -> None:
    booster = Booster(plugin=HybridParallelPlugin(2, 1, precision="fp32"))
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="splitting takes a transformers model"):
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    odd = small("llama", torch.float32, num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    with pytest.raises(ValueError, match="holds 3 heads"):
        booster.boost(odd, new_optimizer(odd))
    stepped = small("llama", torch.float32)
    optimizer = new_optimizer(stepped)
    stepped(**batch_of(0, 0)).loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="already has state for the unsplit model"):
        booster.boost(stepped, optimizer)


def test_microbatches_are_rows_of_all_tensors_and_as_large_as_was_said() -> None:
    batch = {"input_ids": tokens(batch=8), "attention_mask": torch.ones(8, 12)}
    assert [len(part["attention_mask"]) for part in microbatches_of(batch, None, 2)] == [2] * 4
    assert [len(part["input_ids"]) for part in microbatches_of(batch, 2, 2)] == [4] * 2  # the number wins
    with pytest.raises(ValueError, match="a batch of 8 rows does not divide into 2 microbatches of 3"):
        microbatches_of(batch, None, 3)
    with pytest.raises(ValueError, match=r"cut into microbatches by rows, and it has \{'cache_position': \[12\]\}"):
        microbatches_of({**batch, "cache_position": torch.arange(12)}, 4, None)
