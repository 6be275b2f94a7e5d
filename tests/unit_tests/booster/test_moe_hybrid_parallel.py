"""MoeHybridParallelPlugin: losses, norms and weights of steps with experts over data ranks, against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin, MoeHybridParallelPlugin
from tests.unit_tests.booster.test_hybrid_parallel import (
    LAYERS,
    STEPS,
    new_optimizer,
    sequence,
    steps_of,
    trained_alone,
)
from tests.unit_tests.hugging_face.models import small
from tests.unit_tests.ranks import ranks

FP64 = torch.float64
VALUES: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def boosted_moe(tp: int, pp: int, ep: int, **options: Any) -> tuple[Booster, Any, Any]:
    micro = {"num_microbatches": 2} if pp > 1 else {}
    plugin = MoeHybridParallelPlugin(tp, pp, ep, precision="fp32", **{**micro, **options})
    booster = Booster(plugin=plugin)
    model = small("qwen3_moe", FP64, num_hidden_layers=LAYERS, **VALUES)
    model, optimizer, *_ = booster.boost(model, new_optimizer(model))
    return booster, model, optimizer


def check(world: int, tp: int, pp: int, ep: int, **options: Any) -> None:
    reference = small("qwen3_moe", FP64, num_hidden_layers=LAYERS, **VALUES)
    start = {name: param.detach().clone() for name, param in reference.named_parameters()}
    expected, expected_norms = trained_alone(
        reference, world // (tp * pp * options.get("sp_size", 1)), options.get("max_norm", 0.0)
    )
    booster, model, optimizer = boosted_moe(tp, pp, ep, **options)
    groups = parallel_state.get_process_groups()
    assert groups.size("ep") == ep
    losses, norms = steps_of(booster, model, optimizer, groups.rank("dp"), range(STEPS), pp)
    total = torch.tensor(losses, dtype=FP64)
    torch.distributed.all_reduce(total, torch.distributed.ReduceOp.AVG, group=groups.dp)
    assert total.tolist() == pytest.approx(expected, abs=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-6)
    for name, value in booster.checkpoint_io.model_tensors(model):
        wanted = reference.get_parameter(name)
        assert float((value - wanted).abs().max()) < 1e-5, name
        assert float((wanted - start[name]).abs().max()) > 1e-3, name


@ranks(2)
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_two_ranks_with_experts_train_as_one_process(rank: int, world: int, zero_stage: int) -> None:
    check(world, 1, 1, 2, zero_stage=zero_stage, max_norm=0.5, overlap_communication=zero_stage == 3)


@ranks(4)
@pytest.mark.parametrize(
    ("tp", "pp", "options"),
    [
        (2, 1, {"zero_stage": 3}),
        (1, 2, {"zero_stage": 2}),
        (2, 1, sequence("split_gather", zero_stage=1)),
        (1, 1, sequence("all_to_all", sp_size=2, zero_stage=3)),
        pytest.param(1, 2, sequence("ring_attn", sp_size=2), marks=pytest.mark.nightly),
        pytest.param(2, 1, sequence("ring_attn", sp_size=2, parallel_output=False), marks=pytest.mark.nightly),
        pytest.param(1, 1, {"zero_stage": 1}, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.in_suite(2)
def test_four_ranks_with_experts_train_as_one_process(
    rank: int, world: int, tp: int, pp: int, options: dict[str, Any]
) -> None:
    check(world, tp, pp, 2, max_norm=0.5, **options)


@ranks(4)
@pytest.mark.parametrize("shard", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.nightly
def test_training_goes_on_with_experts_elsewhere(rank: int, world: int, shard: bool, tmp_path: Path) -> None:
    """Files of experts over 2 of 4 data ranks go on without expert parallelism, over tp, and in transformers."""
    import transformers

    names = ("model", "optimizer") if shard else ("model.bin", "optimizer.bin")
    booster, model, optimizer = boosted_moe(1, 1, 2, zero_stage=3)
    steps_of(booster, model, optimizer, 0, range(2), 1)
    booster.save_model(model, tmp_path / names[0], shard=shard, use_safetensors=shard)
    booster.save_optimizer(optimizer, tmp_path / names[1], shard=shard)
    expected, _ = steps_of(booster, model, optimizer, 0, range(2, 4), 1)
    parallel_state.destroy_model_parallel()
    for tp, ep in ((2, 1), (2, 2)):
        booster, model, optimizer = boosted_moe(tp, 1, ep, zero_stage=0)
        booster.load_model(model, tmp_path / names[0])
        booster.load_optimizer(optimizer, tmp_path / names[1])
        losses, _ = steps_of(booster, model, optimizer, 0, range(2, 4), 1)
        assert losses == pytest.approx(expected, abs=1e-5)
        parallel_state.destroy_model_parallel()
    if shard and rank == 0:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@ranks(4)
def test_what_does_not_fit_is_refused_by_name(rank: int, world: int) -> None:
    def refused(message: str, *sizes: int, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            MoeHybridParallelPlugin(*sizes, precision="fp32", **options)

    refused("ep_size 3 does not divide the 4 data and sequence ranks", 1, 1, 3)
    refused("ep_size is 0; it is a number of ranks", 1, 1, 0)
    refused("moe_dp_outside=True would put stages between", 1, 2, 2, moe_dp_outside=True, num_microbatches=2)
    with pytest.raises(TypeError, match="its name is moe_dp_outside"):
        MoeHybridParallelPlugin(1, 1, 2, dp_outside=True)
    with pytest.raises(TypeError, match="no_such_option"):
        MoeHybridParallelPlugin(1, 1, 2, no_such_option=True)
    booster = Booster(plugin=MoeHybridParallelPlugin(1, 1, 2, precision="fp32"))
    model = small("llama", torch.float32)
    with pytest.raises(ValueError, match="has no experts that its plan would cut"):
        booster.boost(model, new_optimizer(model))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2)
    booster = Booster(plugin=HybridParallelPlugin(1, 2, precision="fp32", num_microbatches=2))
    model = small("llama", torch.float32)
    with pytest.raises(ValueError, match="stages 2 ranks apart, which is dp_outside=False, and .* dp_outside=True"):
        booster.boost(model, new_optimizer(model))
