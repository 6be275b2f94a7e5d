"""The loss of a model with labels: the mean over the whole batch's labels, under every plugin and in every layout."""

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import ShardingStrategy

pytest.importorskip("transformers")

import transformers

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from core.booster.plugin.label_mean import loss_of_full_batch
from core.verify.in_double import InDouble
from tests.unit_tests.booster.booster_reference import full_weights, own_loss, sequence
from tests.unit_tests.hugging_face.models import VOCABULARY, small, tokens
from tests.unit_tests.ranks import ranks

ROWS, LENGTH, STEPS = 4, 12, 2
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
BERT = {**SIZES, "intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def built(kind: str) -> Any:
    """A model of each head: its loss by `loss_function`, or by a cross entropy in its own forward."""
    transformers.logging.set_verbosity_error()
    if kind == "causal":
        return small("llama", num_hidden_layers=4)
    if kind == "experts":
        return small("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    torch.manual_seed(0)
    if kind == "masked":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT))
    elif kind == "classified":
        model = transformers.BertForTokenClassification(transformers.BertConfig(**BERT, num_labels=5))
    elif kind == "llama classified":
        config = transformers.LlamaConfig(**SIZES, intermediate_size=64, num_labels=5, classifier_dropout=0.0)
        model = transformers.LlamaForTokenClassification(config)
    else:
        sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
        )
    return model.double()


def batch_of(kind: str, step: int, data_rank: int) -> dict[str, torch.Tensor]:
    """Row 0 of each rank has no label at all, and rows and ranks have ever fewer of them."""
    ids = tokens(ROWS, LENGTH, seed=10 * step + data_rank)
    labels = ids.clone() if "classified" not in kind else ids % 5
    for row in range(ROWS):
        labels[row, : LENGTH - 3 * row + 2 * data_rank] = -100
    if kind == "seq2seq":
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1), "labels": labels}
    return {"input_ids": ids, "labels": labels}


def shifts(kind: str) -> bool:
    return kind in ("causal", "experts")


def whole_mean(model: Any, kind: str, batches: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The mean over all labels that are not -100, from logits."""
    inputs = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    if shifts(kind):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def count_of(kind: str, batches: Sequence[dict[str, torch.Tensor]]) -> int:
    """As transformers' Trainer counts for num_items_in_batch."""
    labels = torch.cat([batch["labels"] for batch in batches])
    return int((labels[:, 1:] if shifts(kind) else labels).ne(-100).sum())


def descent(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def trained_alone(kind: str, data_ranks: int, loss_of: Callable[..., torch.Tensor] = whole_mean) -> tuple[Any, Any]:
    """The model after the steps, and their losses."""
    model = built(kind)
    optimizer = descent(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, kind, [batch_of(kind, step, rank) for rank in range(data_ranks)])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def hybrid_sharded() -> TorchFSDPPlugin:
    """Shards of two ranks, and two copies of them."""
    pairs = [[dist.new_group(pair) for pair in sides] for sides in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    rank = dist.get_rank()
    groups = pairs[0][rank // 2], pairs[1][rank % 2]
    return TorchFSDPPlugin(groups, ShardingStrategy.HYBRID_SHARD)


DATA_PLUGINS: dict[str, Callable[[], Any]] = {
    "torch's DDP": TorchDDPPlugin,
    "torch's FSDP": TorchFSDPPlugin,
    "torch's FSDP, hybrid": hybrid_sharded,
    "ZeRO 1": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "ZeRO 2": lambda: LowLevelZeroPlugin(stage=2, precision="fp32"),
}


def boosted(kind: str, tp: int, pp: int, **options: Any) -> tuple[Booster, Any, Any]:
    if "plugin" in options:
        booster = Booster(plugin=DATA_PLUGINS[options["plugin"]]())
        model = built(kind)
        model, optimizer, *_ = booster.boost(model, descent(model))
        return booster, model, optimizer
    if options.pop("gemini", False):
        chunks = {"min_chunk_size_m": 0, "search_range_m": 0, "hidden_dim": 4096}
        booster = Booster(plugin=GeminiPlugin(tp_size=tp, precision="fp32", **chunks, **options))
        model = built(kind)
        model, optimizer, *_ = booster.boost(model, descent(model))
        return booster, model, optimizer
    plugin = MoeHybridParallelPlugin if "ep_size" in options else HybridParallelPlugin
    micro = {"num_microbatches": ROWS} if pp > 1 else {}
    booster = Booster(plugin=plugin(tp, pp, precision="fp32", **{**micro, **options}))
    model = built(kind)
    model, optimizer, *_ = booster.boost(model, descent(model))
    return booster, model, optimizer


def assert_trained(booster: Booster, model: Any, reference: Any, kind: str) -> None:
    start = dict(built(kind).named_parameters())
    moved = []
    of_torch = isinstance(booster.plugin, (TorchDDPPlugin, TorchFSDPPlugin))
    for name, value in full_weights(model).items() if of_torch else booster.checkpoint_io.model_tensors(model):
        if name in start:
            wanted = reference.get_parameter(name).detach()
            torch.testing.assert_close(value.to(wanted), wanted, rtol=1e-7, atol=1e-9)
            moved.append(float((wanted - start[name]).abs().max()))
    assert max(moved) > 1e-2


def check(
    kind: str,
    tp: int,
    pp: int,
    world: int,
    *,
    num_items: bool = False,
    accumulate: bool = False,
    criterion: Any = None,
    **options: Any,
) -> None:
    """Steps in a layout are those of one process. num_items: give the batch its count, as Trainer does.

    accumulate: the rows come in two halves, of which the first is not reduced.
    """
    data_ranks = world // (tp * pp * options.get("sp_size", 1))
    with InDouble():
        reference, expected = trained_alone(kind, data_ranks)
        booster, model, optimizer = boosted(kind, tp, pp, **options)
        data_rank = booster.plugin.data_rank()
        for step in range(STEPS):
            optimizer.zero_grad()
            batch: dict[str, Any] = dict(batch_of(kind, step, data_rank))
            halves = [{k: v[part] for k, v in batch.items()} for part in (slice(0, 2), slice(2, 4))]
            said = count_of(kind, [batch_of(kind, step, rank) for rank in range(data_ranks)])
            total = 0.0
            for number, part in enumerate(halves if accumulate else [batch]):
                if num_items:
                    part["num_items_in_batch"] = torch.tensor(said) if number else said
                if accumulate and number == 0:
                    with booster.no_sync(model, optimizer):
                        total += one_batch(booster, model, optimizer, pp, part, criterion)
                else:
                    total += one_batch(booster, model, optimizer, pp, part, criterion)
            optimizer.step()
            assert total == pytest.approx(expected[step], abs=1e-9), step
        assert_trained(booster, model, reference, kind)


def one_batch(booster: Booster, model: Any, optimizer: Any, pp: int, batch: dict[str, Any], criterion: Any) -> float:
    if pp > 1:
        return float(booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"])
    loss = model(**batch).loss
    booster.backward(loss, optimizer)
    return float(loss.detach())


HEADS = [
    *(("causal", tp, pp) for tp, pp in ((1, 1), (1, 2), (2, 1))),
    *((kind, 1, pp) for kind in ("masked", "classified", "llama classified") for pp in (1, 2)),
    ("seq2seq", 1, 1),
]


@ranks(2)
@pytest.mark.parametrize(("kind", "tp", "pp"), HEADS)
def test_the_loss_of_each_head_is_the_mean_over_the_labels_of_the_whole_batch(
    rank: int, world: int, kind: str, tp: int, pp: int
) -> None:
    check(kind, tp, pp, world, criterion=own_loss if kind == "causal" else None)


LAYOUTS: list[tuple[int, int, dict[str, Any]]] = [
    (1, 2, {"zero_stage": 1, "logits_chunk": 3}),
    (1, 2, {"pp_style": "interleaved", "num_model_chunks": 2, "zero_stage": 2}),
    (2, 2, {}),
    (2, 1, {"zero_stage": 3}),
    (1, 1, {"ep_size": 2, "zero_stage": 1, "logits_chunk": 3}),
    (2, 1, sequence("split_gather")),
    (1, 1, sequence("all_to_all", sp_size=2, parallel_output=False)),
    (1, 1, sequence("ring_attn", sp_size=2, zero_stage=2)),
    (1, 2, sequence("ring_attn", sp_size=2)),
    *((tp, 1, {"gemini": True}) for tp in (1, 2, 4)),
]


@ranks(4)
@pytest.mark.parametrize(("tp", "pp", "options"), LAYOUTS)
@pytest.mark.in_suite(4)
def test_the_loss_is_one_in_every_layout(rank: int, world: int, tp: int, pp: int, options: dict[str, Any]) -> None:
    check("experts" if "ep_size" in options else "causal", tp, pp, world, **options)


@ranks(2)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("accumulate", [False, True], ids=["at once", "accumulated"])
def test_num_items_in_batch_is_what_the_sum_is_divided_by(rank: int, world: int, pp: int, accumulate: bool) -> None:
    options = {"num_microbatches": 2} if pp > 1 else {}
    check("causal", 1, pp, world, num_items=True, accumulate=accumulate, **options)
    parallel_state.destroy_model_parallel()
    check("masked", 1, pp, world, num_items=True, accumulate=accumulate, **options)


@ranks(2)
@pytest.mark.parametrize("plugin", [name for name in DATA_PLUGINS if "hybrid" not in name])
def test_plugins_of_data_ranks_take_that_mean_too(rank: int, world: int, plugin: str) -> None:
    """With TorchDDPPlugin, TorchFSDPPlugin and LowLevelZeroPlugin a user had the mean of the ranks' means."""
    check("causal", 1, 1, world, plugin=plugin)
    check("masked", 1, 1, world, plugin=plugin, num_items=True, accumulate=True)


@ranks(4)
def test_a_hybrid_of_shards_and_copies_takes_that_mean_too(rank: int, world: int) -> None:
    check("causal", 1, 1, world, plugin="torch's FSDP, hybrid")


@ranks(2)
def test_one_plugin_takes_one_mean_in_every_layout(rank: int, world: int) -> None:
    """GeminiPlugin's is over the labels of all ranks, for a user who sets tp_size."""
    for tp in (1, 2):
        check("causal", tp, 1, world, gemini=True)
        parallel_state.destroy_model_parallel()
    check("masked", 1, 1, world, gemini=True, num_items=True)


@ranks(2)
@pytest.mark.parametrize("pp", [1, 2])
def test_a_criterion_of_logits_keeps_the_mean_of_means(rank: int, world: int, pp: int) -> None:
    """Over microbatches and data ranks; a multiple of the model's loss is that multiple of the whole batch's."""
    data_ranks, micro = 2 // pp, ROWS // 2

    def ends(outputs: Any, batch: Any) -> torch.Tensor:
        return outputs.logits[batch["labels"] != -100].pow(2).mean()

    def means(model: Any, kind: str, batches: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
        parts = [{k: v[i : i + micro] for k, v in b.items()} for b in batches for i in range(0, ROWS, micro)]
        parts = parts if pp > 1 else list(batches)
        return torch.stack([ends(model(input_ids=part["input_ids"]), part) for part in parts]).mean()

    def thrice(outputs: Any, batch: Any) -> torch.Tensor:
        return 3.0 * outputs.loss

    with InDouble():
        reference, expected = trained_alone("causal", data_ranks, means)
        options = {"num_microbatches": 2} if pp > 1 else {}
        booster, model, optimizer = boosted("causal", 1, pp, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = batch_of("causal", step, booster.plugin.data_rank())
            if pp > 1:
                loss = booster.execute_pipeline(iter([batch]), model, ends, optimizer)["loss"]
                assert float(loss) == pytest.approx(expected[step], abs=1e-9)
            else:
                booster.backward(ends(model(**batch), batch), optimizer)
            optimizer.step()
        assert_trained(booster, model, reference, "causal")
        batches = [batch_of("causal", 7, other) for other in range(data_ranks)]
        wanted = 3.0 * whole_mean(reference, "causal", batches)
        batch = batches[booster.plugin.data_rank()]
        optimizer.zero_grad()
        if pp > 1:
            tripled = booster.execute_pipeline(iter([batch]), model, thrice, optimizer)["loss"]
        else:
            tripled = thrice(model(**batch), batch)
        assert float(tripled) == pytest.approx(float(wanted), rel=1e-9)


@ranks(2)
@pytest.mark.parametrize("pp", [1, 2])
def test_an_evaluation_is_a_ranks_own(rank: int, world: int, pp: int) -> None:
    """A data rank may have more batches to evaluate than the others, so nothing is added over them."""
    with InDouble():
        booster, model, optimizer = boosted("causal", 1, pp)
        data_rank = booster.plugin.data_rank()
        for step in range(1 + data_rank):
            batch = batch_of("causal", step, data_rank)
            wanted = float(whole_mean(built("causal"), "causal", [batch]))
            with torch.no_grad():
                if pp > 1:
                    loss = booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]
                else:
                    loss = model(**batch).loss
            assert float(loss) == pytest.approx(wanted, abs=1e-9)
        if pp > 1:
            with pytest.raises(ValueError, match="an iterator that has no batch left; make one by iter"):
                booster.execute_pipeline(iter([]), model, None, optimizer)


@ranks(2)
@pytest.mark.parametrize("pp", [1, 2])
def test_a_batch_without_any_label_trains_nothing(rank: int, world: int, pp: int) -> None:
    with InDouble():
        booster, model, optimizer = boosted("causal", 1, pp)
        before = [param.detach().clone() for param in model.parameters()]
        batch = batch_of("causal", 0, 0)
        batch["labels"] = torch.full_like(batch["labels"], -100)
        assert one_batch(booster, model, optimizer, pp, batch, None) == 0.0
        optimizer.step()
        assert optimizer.get_grad_norm() == 0.0
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@ranks(1, 2)
def test_labels_may_come_by_place_and_outputs_as_a_tuple(rank: int, world: int) -> None:
    with InDouble():
        booster, model, _ = boosted("causal", 1, 1)
        batches = [batch_of("causal", 0, other) for other in range(world)]
        batch = batches[booster.plugin.data_rank()]
        loss = model(batch["input_ids"], None, None, None, None, batch["labels"], return_dict=False)[0]
        assert float(loss) == pytest.approx(float(whole_mean(built("causal"), "causal", batches)), abs=1e-9)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an argument": ({"use_cache": True}, "use_cache in stages"),
    "a tuple": ({"return_dict": False}, "return_dict in stages: a stage finds"),
    "rows": ({"attention_mask": torch.ones(ROWS + 1, LENGTH)}, "cut into microbatches by rows"),
    "tokens": ({"input_ids": torch.full((ROWS, LENGTH), 10**6)}, "index out of range"),
}


@ranks(2)
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_stages_refuse_a_batch_together_and_the_next_one_trains(
    rank: int, world: int, name: str, everywhere: bool
) -> None:
    """In a notebook or a sweep, which catches the error; also where only one rank was given that batch."""
    change, said = REFUSED[name]
    with InDouble():
        reference, expected = trained_alone("causal", 1)
        booster, model, optimizer = boosted("causal", 1, 2, num_microbatches=2)
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = batch_of("causal", step, 0)
            odd = {**batch, **change} if everywhere or rank == 0 else batch
            begun = time.monotonic()
            with pytest.raises((ValueError, IndexError, RuntimeError), match=said):
                booster.execute_pipeline(iter([odd]), model, None, optimizer)
            assert time.monotonic() < begun + 10.0
            assert one_batch(booster, model, optimizer, 2, batch, None) == pytest.approx(expected[step], abs=1e-9)
            optimizer.step()
        assert_trained(booster, model, reference, "causal")
        with pytest.raises(ValueError, match="an iterator that has no batch left"):
            booster.execute_pipeline(iter([batch] if rank else []), model, None, optimizer)


@ranks(2)
def test_batches_of_two_lengths_pass_one_after_another(rank: int, world: int) -> None:
    with InDouble():
        booster, model, optimizer = boosted("causal", 1, 2, num_microbatches=2)
        reference = built("causal")
        for length in (LENGTH, 9, LENGTH):
            ids = tokens(ROWS, length, seed=length)
            loss = one_batch(booster, model, optimizer, 2, {"input_ids": ids, "labels": ids}, None)
            wanted = whole_mean(reference, "causal", [{"input_ids": ids, "labels": ids}])
            assert loss == pytest.approx(float(wanted), abs=1e-9)
            optimizer.zero_grad()


def test_trainers_steps_are_those_that_the_layouts_are_compared_with(tmp_path: Any) -> None:
    """Of rows accumulated one by one, in one process."""
    pytest.importorskip("accelerate")
    model = built("causal")
    rows = [{k: v[row] for k, v in batch_of("causal", step, 0).items()} for step in range(STEPS) for row in range(ROWS)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ROWS,
        num_train_epochs=1,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        train_sampling_strategy="sequential",
        disable_tqdm=True,
    )
    optimizer = descent(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    with InDouble():
        transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, scheduler)).train()
        reference, _ = trained_alone("causal", 1)
    for name, param in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), param, rtol=1e-6, atol=1e-8)


@ranks(2)
def test_a_compiled_loss_over_all_ranks_labels_has_the_same_value_and_no_warning(rank: int, world: int) -> None:
    """Users of torch.compile: the exchange of labels was traced up to its watch's clock, with a warning a graph."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        return loss_of_full_batch((x * 2).sum(), torch.tensor(rank + 1.0).double(), None, [dist.group.WORLD])

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo")
        x = torch.tensor([rank + 1.0], requires_grad=True)
        found = torch.compile(loss, backend="aot_eager")(x)
        found.backward()
    torch.testing.assert_close(found.item(), (1 * 2.0 + 2 * 4.0) / 3)  # sums over labels of both ranks
    torch.testing.assert_close(x.grad, torch.tensor([2.0 * (rank + 1) * world / 3]))
