"""Models split over tensor parallelism against one process that splits nothing; and what is refused or caught."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.booster.mixed_precision.fp8 import use_fp8_linears
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.contract.gradient_contract import declare_gradient
from core.distributed.guard.finite import ReplicaDriftError
from core.hugging_face import PlanError, read_plan, save_split, split_model
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.families.check import check_on_rank
from tests.families.tiny import families, tiny_config, tiny_model
from tests.unit_tests.hugging_face.models import small, tokens, whole
from tests.unit_tests.ranks import ranks

# Family -> values of its configuration. The last four have whole parameters between column and row projections that
# Transformers' own plan has no rule for.
SAMPLE: dict[str, dict[str, Any]] = {
    "llama/LlamaConfig": {},
    "gemma3/Gemma3TextConfig": {},
    "deepseek_v3/DeepseekV3Config": {},
    "qwen3_moe/Qwen3MoeConfig": {},
    "apertus/ApertusConfig": {},
    "qwen3_vl_moe/Qwen3VLMoeTextConfig": {},
    "glm4_moe/Glm4MoeConfig": {"use_qk_norm": True},
    "phi/PhiConfig": {"qk_layernorm": True},
}


@ranks(2)
@pytest.mark.parametrize("name", SAMPLE)
@pytest.mark.in_suite(5)
def test_gradients_of_a_family_are_those_of_one_process(rank: int, world: int, name: str) -> None:
    verdict = check_on_rank(name, families()[name], world, SAMPLE[name])
    assert verdict.answer == "equal", verdict
    ruleless = {"apertus": 8, "qwen3_vl_moe": 8, "glm4_moe": 8, "phi": 16}.get(name.split("/")[0], 0)
    assert verdict.summed[1] == ruleless


@ranks(4)
@pytest.mark.parametrize("name", ["llama/LlamaConfig", "deepseek_v3/DeepseekV3Config", "apertus/ApertusConfig"])
@pytest.mark.in_suite(1)
def test_gradients_at_tp_4_are_those_of_one_process(rank: int, world: int, name: str) -> None:
    verdict = check_on_rank(name, families()[name], world)
    assert verdict.answer == "equal", verdict


def trained(model: Any, steps: int, data_ranks: int, sharded: bool = False) -> list[float]:
    """Losses of steps of Adam on the whole batch, on one process or as one rank of a job."""
    groups = parallel_state.get_process_groups() if parallel_state.model_parallel_is_initialized() else None
    if groups is None:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    else:
        config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=True)
        model = DistributedDataParallel(None, config, model)
        options = OptimizerConfig(lr=3e-3, optimizer="adam", weight_decay=0.0, clip_grad=0.0, adam_eps=1e-8)
        options = dataclasses.replace(options, use_distributed_optimizer=sharded, adam_beta2=0.999)
        optimizer = get_megatron_optimizer(options, [model])
    losses = []
    for _ in range(steps):
        batches = [tokens(seed=n) for n in range(data_ranks)]
        if groups is None:
            optimizer.zero_grad()
            loss = torch.stack([model(input_ids=b, labels=b).loss for b in batches]).mean()
            loss.backward()
            optimizer.step()
        else:
            model.zero_grad_buffer()
            batch = batches[groups.rank("dp_cp")]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            finalize_model_grads([model])
            optimizer.step()
            loss = loss.detach()  # gloo divides a mean in a thread of its own, where autograd would record it
            torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG, group=groups.dp_cp)
        losses.append(float(loss.detach()))
    return losses


@ranks(4)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("parallel_output", [False, True])
@pytest.mark.in_suite()
def test_training_over_tp_and_dp_follows_one_process(
    rank: int, world: int, sharded: bool, parallel_output: bool
) -> None:
    model = small("qwen3", torch.float32, tie_word_embeddings=True)
    expected = trained(copy.deepcopy(model), 5, 2)
    start = copy.deepcopy(dict(model.named_parameters()))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    split_model(model, parallel_output=parallel_output)
    found = trained(model, 5, 2, sharded)
    assert found == pytest.approx(expected, abs=2e-5)
    assert expected[0] - expected[-1] > 0.01
    for name, parameter in model.named_parameters():
        moved = whole(model, name, parameter) - start[name]
        assert moved.abs().max() > 1e-3


@ranks(2)
@pytest.mark.parametrize("num_items", [None, 7])
def test_the_loss_of_split_logits_is_that_of_whole_ones(rank: int, world: int, num_items: int | None) -> None:
    model = small("llama", torch.float32)
    reference = copy.deepcopy(model)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    split_model(model, parallel_output=True)
    ids = tokens()
    labels = ids.masked_fill(ids % 3 == 0, -100)
    options = {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items)}
    output = model(input_ids=ids, labels=labels, **options)
    expected = reference(input_ids=ids, labels=labels, **options)
    assert output.logits.shape[-1] == 49  # of 97: never whole on a rank
    torch.testing.assert_close(output.loss, expected.loss)
    output.loss.backward()
    expected.loss.backward()
    grad = whole(model, "lm_head.weight", model.lm_head.weight.grad)
    torch.testing.assert_close(grad, reference.lm_head.weight.grad)
    with pytest.raises(ValueError, match="was replaced, as for layers split over tensor parallelism"):
        use_fp8_linears(model)


@ranks(2)
def test_the_loss_of_split_logits_is_refused_where_the_model_has_another(rank: int, world: int) -> None:
    model = small("llama")
    model.loss_function = lambda **arguments: None
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with pytest.raises(PlanError, match="parallel_output knows the loss ForCausalLMLoss, and the model has <lambda>"):
        split_model(model, parallel_output=True)


@ranks(2)
def test_a_contract_that_is_missing_is_found_in_the_first_step(rank: int, world: int) -> None:
    model = small("apertus")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    report = split_model(model)
    name = "model.layers.1.mlp.act_fn.alpha_p"
    assert name in report.partial
    declare_gradient(model.get_parameter(name))  # as if it were whole: the loss stays right, its gradient does not
    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), model)
    wrapped(input_ids=tokens()).logits.square().mean().backward()
    with pytest.raises(ReplicaDriftError, match=name):
        finalize_model_grads([wrapped])


@ranks(2)
@pytest.mark.parametrize(
    ("module", "change", "message"),
    [
        ("model.layers.1.mlp.up_proj", {"before": ""}, "no seam of the plan sums it"),
        ("model.layers.1.mlp.down_proj", {"after": ""}, "no seam of the plan sums it"),
        (
            "model.layers.0.self_attn.o_proj",
            {"before": "scatter"},
            "its forward fails once it is split: RuntimeError: .*in module 'Linear'",
        ),
        ("model.norm", {"before": "copy"}, "its output is whole"),
        ("model.norm", {"after": "reduce"}, "which is whole already"),
    ],
)
def test_a_plan_with_a_wrong_seam_is_refused(
    rank: int, world: int, module: str, change: dict[str, str], message: str
) -> None:
    model = small("llama")
    plan = read_plan(model)
    from core.hugging_face import Seam

    seam = plan.seams.get(module, Seam(module, "test"))
    seams = {**plan.seams, module: dataclasses.replace(seam, **change)}
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with pytest.raises(PlanError, match=message):
        split_model(model, dataclasses.replace(plan, seams=seams))


@ranks(2)
def test_fused_weights_that_are_cut_as_one_are_refused_by_the_output(rank: int, world: int) -> None:
    """The rule that Transformers 5.23 has for inkling: gate and up in one piece, so ranks mix the two."""
    model = small("mixtral")
    plan = read_plan(model)
    splits = {name: dataclasses.replace(split, blocks=1) for name, split in plan.splits.items()}
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with pytest.raises(PlanError, match="its output for the example differs from the unsplit model's by"):
        split_model(model, dataclasses.replace(plan, splits=splits))


@ranks(2, timeout_s=40.0)
def test_a_forward_that_fails_on_one_rank_alone_is_refused_on_all(rank: int, world: int) -> None:
    """A hook of the user's, say. That rank would prove the split without labels, and wait in another collective."""
    model = small("llama")
    if rank == 1:

        def refuse(module: torch.nn.Module, inputs: Any) -> None:
            if module.training:
                raise RuntimeError("no gradient to hook")

        model.model.layers[0].register_forward_pre_hook(refuse)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    message = "no gradient to hook" if rank == 1 else "with labels: rank 1 failed: RuntimeError: no gradient to hook"
    with pytest.raises((PlanError, RuntimeError), match=message):
        split_model(model)


@ranks(2)
def test_a_split_model_is_refused_again_and_can_be_copied(rank: int, world: int) -> None:
    model = small("phi")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    split_model(model)
    with pytest.raises(PlanError, match="was split already"):
        split_model(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].mlp.fc2.weight.zero_()
    ids = tokens()
    assert not torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)
    assert twin.model.layers[0].mlp.fc2.forward.module is twin.model.layers[0].mlp.fc2
    assert model.model.layers[0].mlp.fc2.bias is not None


@ranks(2)
def test_sizes_that_do_not_fit_are_refused_before_anything_is_cut(rank: int, world: int) -> None:
    model = small("llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with pytest.raises(PlanError, match=r"q_proj.weight' \[24, 48\] holds 3 heads"):
        split_model(model)
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (24, 48)


@ranks(2)
@pytest.mark.parametrize("name", ["beam/BeamConfig", "bailing_hybrid/BailingHybridConfig"])
def test_rounding_to_16_bits_is_no_wrong_plan(rank: int, world: int, name: str) -> None:
    """beam gives logits in fp32; a router of bailing_hybrid chooses another expert after another rounding."""
    model = tiny_model(tiny_config(families()[name])).bfloat16()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    split_model(model)


@ranks(2)
def test_a_padding_row_gets_no_gradient_on_the_rank_that_holds_it(rank: int, world: int) -> None:
    model = small("llama", pad_token_id=60)  # the second rank's
    reference = copy.deepcopy(model)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    split_model(model)
    ids = 58 + tokens() % 5
    for each in (model, reference):
        each(input_ids=ids).logits.square().mean().backward()
    name = "model.embed_tokens.weight"
    grad = whole(model, name, model.get_parameter(name).grad)
    torch.testing.assert_close(grad, reference.get_parameter(name).grad, rtol=1e-6, atol=1e-12)
    assert not grad[60].any()
    assert grad[59].any()
    with pytest.raises(ValueError, match=r"token ids are in \[97, 97\], expected 0 <= id < 97"):
        model(input_ids=torch.full((1, 2), 97))


def test_one_process_splits_nothing_and_says_so() -> None:
    model = small("llama")
    before = model(input_ids=tokens()).logits
    report = split_model(model)
    assert report.tp == 1
    assert torch.equal(model(input_ids=tokens()).logits, before)


@pytest.mark.nightly
@ranks(2, timeout_s=160.0)
@pytest.mark.parametrize("part", range(10))
def test_every_family_is_equal_or_refused(rank: int, world: int, part: int) -> None:
    for name in list(families())[part::10]:
        verdict = check_on_rank(name, families()[name], world)
        assert verdict.answer != "wrong", verdict
        torch.distributed.barrier()


@ranks(2)
def test_what_takes_a_split_model_for_whole_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    """A rank's part would be saved or resized as if it were the model."""
    model = small("llama")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    split_model(model, parallel_output=True)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(PlanError, match="save_pretrained would save this rank's part .* call save_split"):
            each.save_pretrained(tmp_path)
        with pytest.raises(PlanError, match="resize the whole model before it is split"):
            each.resize_token_embeddings(101)
    save_split(model, tmp_path)
