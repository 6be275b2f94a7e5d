"""Experts of transformers models over expert parallelism, against one process that holds all of them, in fp64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.groups import agree
from core.hugging_face import (
    PlanError,
    load_split,
    save_split,
    split_model,
    split_stages,
    stage_activations,
    stage_forward_step,
    stages_config,
)
from core.hugging_face.cut.experts import ExpertsForward
from core.hugging_face.cut.slices import whole_of
from core.pipeline_parallel import PipelineRunner, plan_pipeline, wrap_stages
from core.verify.in_double import InDouble
from tests.families.check import check_on_rank, whole_tensor
from tests.families.tiny import families
from tests.unit_tests.hugging_face.models import small, tokens, whole_copy
from tests.unit_tests.ranks import ranks

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        **{"first_k_dense_replace": 1, "num_key_value_heads": 8},
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def start(tp: int = 1, ep: int = 2, expt_tp: int | None = None, pp: int = 1) -> Any:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=expt_tp,
    )
    return parallel_state.get_process_groups()


def compare(model: Any, groups: Any, length: int = 11) -> None:
    """Output, loss and every gradient, of other tokens on each data rank; the length does not divide by anything."""
    data_ranks, mine = groups.size("dp_cp"), groups.rank("dp_cp")
    reference = whole_copy(model)
    batches = [tokens(length=length, seed=7 + rank) for rank in range(data_ranks)]
    losses = [reference(input_ids=ids, labels=ids).loss for ids in batches]
    torch.stack(losses).mean().backward()
    report = split_model(model)
    held = sum(parameter.numel() for parameter in model.parameters())
    assert held < 0.8 * sum(parameter.numel() for parameter in reference.parameters())
    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
    loss = wrapped(input_ids=batches[mine], labels=batches[mine]).loss
    loss.backward()
    finalize_model_grads([wrapped])
    assert abs(float(loss - losses[mine].detach())) < 1e-10
    largest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    assert largest > 1e-3
    for name, parameter in model.named_parameters():
        found = whole_tensor(name, parameter.grad, report.plan)
        assert found is not None, name
        assert float((found - reference.get_parameter(name).grad).abs().max()) < 1e-10 * largest, name


def in_double(run: Any) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            run()
    finally:
        torch.set_default_dtype(torch.float32)


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_on_two_ranks_are_one_process(rank: int, world: int, family: str) -> None:
    groups = start()
    in_double(lambda: compare(small(family, **FAMILIES[family]), groups))


@ranks(4)
@pytest.mark.parametrize(
    ("family", "tp", "ep", "expt_tp"),
    [
        ("qwen3_moe", 2, 2, 2),  # experts split over tp too
        ("qwen3_moe", 2, 4, 1),  # whole experts, over the ranks of tp and dp
        ("mixtral", 1, 2, 1),  # each expert on two data ranks
        ("deepseek_v3", 2, 2, 1),  # with shared experts, which are split over tp
    ],
)
@pytest.mark.in_suite(2)
def test_experts_over_four_ranks_are_one_process(
    rank: int, world: int, family: str, tp: int, ep: int, expt_tp: int
) -> None:
    groups = start(tp, ep, expt_tp)
    in_double(lambda: compare(small(family, **FAMILIES[family]), groups))


@ranks(4)
def test_experts_under_a_pipeline_are_one_process(rank: int, world: int) -> None:
    groups = start(ep=2, pp=2)

    def run() -> None:
        model = small("qwen3_moe", num_hidden_layers=4, **FAMILIES["qwen3_moe"])
        reference, layout = whole_copy(model), plan_pipeline(4, 2)
        batches = [[tokens(seed=10 * rank + n) for n in range(2)] for rank in range(2)]
        losses = [reference(input_ids=ids, labels=ids).loss for batch in batches for ids in batch]
        torch.stack(losses).mean().backward()
        stages = split_stages(model, layout)
        wrapped = wrap_stages(stages_config(layout), DistributedDataParallelConfig(), stages)
        shape = stage_activations(stages[0], 2, 12)
        mine = [{"input_ids": ids, "labels": ids} for ids in batches[groups.rank("dp_cp")]]
        PipelineRunner(wrapped, layout, stage_forward_step, shape).step(mine)
        largest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
        for name, parameter in stages[0].named_parameters():
            found = whole_tensor(name, parameter.grad, stages[0].split_report.plan)
            assert found is not None, name
            assert float((found - reference.get_parameter(name).grad).abs().max()) < 1e-10 * largest, name

    in_double(run)


@ranks(2)
def test_a_rank_without_a_token_takes_part(rank: int, world: int) -> None:
    """Routers of zeros send all tokens to the same experts; those of the other rank have gradients of zero."""
    groups = start()
    model = small("mixtral", **FAMILIES["mixtral"])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    split_model(model)
    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), model)
    ids = tokens(seed=rank)
    wrapped(input_ids=ids, labels=ids).loss.backward()
    finalize_model_grads([wrapped])
    grad = model.model.layers[0].mlp.experts.down_proj.grad
    assert grad.shape[0] == 2
    assert sorted(agree.gather(bool(grad.any()), groups.ep, "who had tokens").values()) == [False, True]


# -- directories ----------------------------------------------------------------------------------------------------


@ranks(4)
@pytest.mark.parametrize(
    ("family", "tp", "ep", "expt_tp"), [("qwen3_moe", 2, 2, 2), ("mixtral", 2, 4, 1), ("gpt_oss", 1, 2, 1)]
)
def test_a_directory_is_loaded_by_slices_and_saved_whole(
    rank: int, world: int, family: str, tp: int, ep: int, expt_tp: int, tmp_path: Path
) -> None:
    """One tensor an expert (qwen3_moe, mixtral) and fused ones (gpt_oss); what is saved has the same bits and keys."""
    import transformers
    from safetensors import safe_open

    groups = start(tp, ep, expt_tp)
    reference = small(family, torch.float32, num_hidden_layers=2, **FAMILIES[family])
    if rank == 0:
        reference.save_pretrained(tmp_path / "before", max_shard_size="20KB")
    torch.distributed.barrier()
    model = load_split(tmp_path / "before", attn_implementation="eager", experts_implementation="eager")
    plan = model.split_report.plan
    for name, parameter in model.named_parameters():
        assert torch.equal(whole_of(parameter.detach(), plan.splits.get(name), groups), reference.get_parameter(name))
    experts = sum(p.numel() for name, p in reference.named_parameters() if name in plan.splits and "experts" in name)
    rest = sum(p.numel() for name, p in reference.named_parameters()) - experts
    assert model.bytes_read <= 4 * (experts / (ep * expt_tp) + rest)
    save_split(model, tmp_path / "after")
    if rank == 0:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after")
        for name, parameter in reference.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter), name
        index = json.loads((tmp_path / "before" / "model.safetensors.index.json").read_text())
        with safe_open(tmp_path / "after" / "model.safetensors", framework="pt") as after:
            assert set(after.keys()) == set(index["weight_map"])


# -- what must not pass silently ------------------------------------------------------------------------------------


@ranks(4)
def test_what_cannot_be_cut_is_refused_on_all_ranks(rank: int, world: int) -> None:
    groups = start(2, 4, 1)
    with pytest.raises(PlanError, match="llama .* has no experts that its plan would cut"):
        split_model(small("llama"))
    with pytest.raises(PlanError, match=r"6 experts .* are not divisible by 4 expert-parallel ranks. Sizes that fit:"):
        split_model(small("mixtral", num_local_experts=6, num_experts_per_tok=2))
    model = small("mixtral", **FAMILIES["mixtral"])
    split_model(model)
    experts: Any = model.model.layers[0].mlp.experts
    with pytest.raises(PlanError, match="one weight for each of these, and it was called otherwise"):
        experts(torch.zeros(3, 32), torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 4))
    assert experts.forward.dispatcher.ep is groups.ep


@ranks(2)
@pytest.mark.parametrize("mutation", ["weights", "divisor"])
def test_a_wrong_exchange_is_seen(rank: int, world: int, mutation: str) -> None:
    groups = start()
    with pytest.MonkeyPatch.context() as patch:
        if mutation == "weights":
            run = ExpertsForward._run
            patch.setattr(ExpertsForward, "_run", lambda self, h, c, w: run(self, h, c, w.detach()))
        else:
            import core.hugging_face.cut.parts as split_module

            patch.setattr(split_module, "EXPERT_TAGS", {"expert_dim": 0})
        with pytest.raises((AssertionError, RuntimeError, ValueError)):
            in_double(lambda: compare(small("mixtral", **FAMILIES["mixtral"]), groups))


@ranks(2)
@pytest.mark.parametrize("name", ["granitemoe/GraniteMoeConfig", "olmoe/OlmoeConfig", "llama/LlamaConfig"])
def test_check_compares_experts(rank: int, world: int, name: str) -> None:
    verdict = check_on_rank(name, families()[name], 1, ep=2)
    assert verdict.answer == ("refused" if "llama" in name else "equal"), verdict


@pytest.mark.nightly
@ranks(2, timeout_s=600.0)
@pytest.mark.parametrize("part", range(6))
def test_every_family_with_experts_is_equal_or_refused(rank: int, world: int, part: int) -> None:
    chosen = [name for name, kind in families().items() if getattr(kind, "base_model_ep_plan", None)]
    for name in chosen[part::6]:
        verdict = check_on_rank(name, families()[name], 1, ep=2)
        assert verdict.answer != "wrong", verdict
        torch.distributed.barrier()
