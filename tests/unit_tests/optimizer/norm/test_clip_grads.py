"""The norm of all gradients in every layout, against sums over ranks that a loop in Python adds up."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import declare_gradient, finalize_model_grads
from core.groups.process_groups import ProcessGroups
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.norm.clip_grads import clip_coefficient
from core.optimizer.norm.norm_pass import ROW_ELEMENTS
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

LAYOUTS: dict[str, dict[str, int]] = {
    "dp4": {},
    "dp4_2instances": {"num_distributed_optimizer_instances": 2},
    "tp2_dp2": {"tensor_model_parallel_size": 2},
    "pp2_dp2": {"pipeline_model_parallel_size": 2},
    "tp2_pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "cp2_dp2": {"context_parallel_size": 2},
    "ep2_dp4": {"expert_model_parallel_size": 2},
    "ep4_dp4": {"expert_model_parallel_size": 4},
    "ep2_2instances": {"expert_model_parallel_size": 2, "num_distributed_optimizer_instances": 2},
    "tp2_ep2": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "tp2_etp1_ep2": {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
ZEROS = 3  # elements at the start of every parameter that get no gradient
SIZES = {"column": 130, "norm": 67, "head_norm": 5, "stage": 300, "expert": 77, "embedding": 201}
VALUES = {"column": 2.0, "norm": 3.0, "head_norm": 5.0, "stage": 7.0, "expert": 11.0, "embedding": 13.0}


class Place:
    """Where a rank of 4 stands in a layout; tp varies fastest, then data or expert ranks, then pp."""

    def __init__(self, rank: int, layout: dict[str, int]) -> None:
        tp, pp = layout.get("tensor_model_parallel_size", 1), layout.get("pipeline_model_parallel_size", 1)
        self.ep_size = layout.get("expert_model_parallel_size", 1)
        self.etp_size = layout.get("expert_tensor_parallel_size", tp)
        self.data_size = 4 // tp // pp
        self.rank, self.tp = rank, rank % tp
        self.data, self.pp = rank // tp % self.data_size, rank // tp // self.data_size
        self.etp, self.ep = rank % self.etp_size, rank // self.etp_size % self.ep_size
        self.last_stage = self.pp == pp - 1

    def holds(self, name: str) -> bool:
        return name != "embedding" or self.pp == 0 or self.last_stage

    def part(self, name: str) -> tuple[Any, ...]:
        """Ranks with equal parts hold the same elements of a parameter."""
        if name == "expert":
            return name, self.etp, self.ep, self.pp
        if name == "embedding":
            return (name,)
        return (name, self.tp, self.pp) if name == "column" else (name, self.pp)

    def partial_gradient(self, name: str) -> float:
        """What backward leaves in every element on this rank."""
        value = VALUES[name] * (1 + self.data) * (1 + 0.25 * self.pp)
        if name == "column":
            value *= 1 + self.tp
        if name == "head_norm":
            value *= 1 + 0.5 * self.tp  # partial over tp
        if name == "expert":
            value = VALUES[name] * (1 + self.rank)
        return value

    def gradient(self, name: str, everyone: "list[Place]") -> float:
        """The whole gradient of every element: sums over who adds, divided by the data ranks."""
        same = [p for p in everyone if p.part(name) == self.part(name) and p.holds(name)]
        if name in ("norm", "stage", "embedding"):
            same = [p for p in same if p.tp == self.tp]  # tensor-parallel ranks hold equal ones already
        return sum(p.partial_gradient(name) for p in same) / self.data_size


def make_model(place: Place) -> nn.Module:
    model = nn.Module()
    for name, size in SIZES.items():
        if place.holds(name):
            param = nn.Parameter(torch.ones(size, dtype=torch.float64))
            model.register_parameter(name, param)
            if name == "column":
                param.tensor_model_parallel = True
            if name == "head_norm":
                declare_gradient(param, partial_over=("tp",))
            if name == "expert":
                param.allreduce = False
                param.tensor_model_parallel = True
            if name == "embedding":
                param.shared_embedding = True
    return model


def expected_norm(everyone: list[Place]) -> tuple[float, int]:
    """The norm, and the number of zeros."""
    parts = {}
    for place in everyone:
        for name, size in SIZES.items():
            if place.holds(name):
                parts[place.part(name)] = (size - ZEROS) * place.gradient(name, everyone) ** 2
    return math.sqrt(sum(parts.values())), ZEROS * len(parts)


# Several instances of the optimizer share shards, so there are none without shards.
CASES = [
    (layout, strategy)
    for layout, sizes in LAYOUTS.items()
    for strategy in ("no_shard", "optim", "optim_grads")
    if strategy != "no_shard" or "num_distributed_optimizer_instances" not in sizes
]


@ranks(4)
@pytest.mark.parametrize(("layout", "strategy"), CASES)
@pytest.mark.in_suite()
def test_every_element_is_counted_once_and_clipped_alike(rank: int, world: int, layout: str, strategy: str) -> None:
    sizes = LAYOUTS[layout]
    instances = sizes.get("num_distributed_optimizer_instances", 1)
    parallel_state.initialize_model_parallel(**sizes)
    everyone = [Place(r, sizes) for r in range(world)]
    place = everyone[rank]
    model = make_model(place)
    ddp = wrap(
        model,
        data_parallel_sharding_strategy=strategy,
        num_distributed_optimizer_instances=instances,
        initial_weights="ignore",
    )
    config = OptimizerConfig(
        optimizer="sgd", sgd_momentum=0.0, lr=10.0, weight_decay=0.0, clip_grad=1.0, log_num_zeros_in_grad=True
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    optimizer.zero_grad()
    sum(p[ZEROS:].sum() * place.partial_gradient(name) for name, p in model.named_parameters()).backward()
    finalize_model_grads([ddp])
    updated, norm, zeros = optimizer.step()

    want, want_zeros = expected_norm(everyone)
    assert updated and zeros == want_zeros
    assert norm == pytest.approx(want, rel=1e-12)
    for name, param in model.named_parameters():
        move = 10.0 * place.gradient(name, everyone) / (want + 1e-6)
        assert torch.allclose(param[ZEROS:], torch.full_like(param[ZEROS:], 1.0 - move), rtol=1e-10, atol=0), name
        assert bool((param[:ZEROS] == 1).all()), name
        assert move > 1e-3


@ranks(4)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_nan_in_an_uncounted_copy_is_seen_by_all_stages(rank: int, world: int, strategy: str) -> None:
    sizes = LAYOUTS["tp2_pp2"]
    parallel_state.initialize_model_parallel(**sizes)
    place = Place(rank, sizes)
    model = make_model(place)
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, initial_weights="ignore")
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=1.0), [ddp])
    optimizer.zero_grad()
    sum(p.sum() for p in model.parameters()).backward()
    finalize_model_grads([ddp])
    if rank == 3:  # tensor rank 1 of the last stage: its copy of the norm weight counts nowhere
        bucket = next(b for b in ddp.grad_buffers[0].buckets if any(p is model.norm for p in b.params))
        bucket.valid_part([p is model.norm for p in bucket.params].index(True))[0] = float("nan")
    stats = optimizer.meter.measure()
    assert stats.culprit is not None and stats.culprit.startswith("rank 3: the gradient of 'norm' holds nan in 1 of")
    assert optimizer.step() == (False, None, None)
    assert all(bool((p == 1).all()) for p in model.parameters())


@ranks(1)
def test_the_norm_of_a_long_fp32_gradient_is_exact_to_five_digits(rank: int, world: int) -> None:
    """Adding 20 million equal squares in fp32 loses percents; torch does so on CPU."""
    parallel_state.initialize_model_parallel()
    numel = 20_000_000 + 3
    model = nn.Module()
    model.register_parameter("long", nn.Parameter(torch.zeros(numel)))
    ddp = wrap(model, initial_weights="ignore")
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1.0), [ddp])
    assert numel > 1000 * ROW_ELEMENTS
    ddp.grad_buffers[0].buckets[0].memory.grad.fill_(1e-3)
    value = torch.tensor(1e-3).item()
    assert optimizer.meter.measure().norm == pytest.approx(value * math.sqrt(numel), rel=1e-5)


def test_the_coefficient_never_enlarges() -> None:
    assert clip_coefficient(1.0, 0.5) == 1.0
    assert clip_coefficient(1.0, 4.0) == pytest.approx(0.25, rel=1e-6)
    assert clip_coefficient(0.0, 4.0) == 1.0
    assert clip_coefficient(1.0, 0.0) == 1.0


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_copies_in_virtual_pipeline_chunks_count_once(rank: int, world: int, strategy: str) -> None:
    """All chunks of all stages hold copies of one parameter; layers of equal names in two chunks are two parameters."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, create_gloo_process_groups=False
    )
    chunks = []
    for _ in range(2):
        model = nn.Module()
        model.register_parameter("copied", nn.Parameter(torch.ones(10, dtype=torch.float64)))
        model.register_parameter("layer", nn.Parameter(torch.ones(20, dtype=torch.float64)))
        model.copied.pipeline_parallel = True
        chunks.append(wrap(model, data_parallel_sharding_strategy=strategy, initial_weights="ignore"))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=1.0), chunks)
    optimizer.zero_grad()
    for number, chunk in enumerate(chunks):
        value = 10.0**number * (1 + rank)  # 1 and 2 in the first chunk, 10 and 20 in the second
        (chunk.module.copied.sum() * value + chunk.module.layer.sum() * value).backward()
    finalize_model_grads(chunks)
    copied = 33.0**2 * 10
    layers = (1 + 4 + 100 + 400) * 20
    assert optimizer.step()[1] == pytest.approx(math.sqrt(copied + layers), rel=1e-12)
    assert len(optimizer.state_dict()["state"]) == 4


def norm_over_tp(rank: int, optimizer_groups: list[str], model_groups: list[str] | None = None) -> tuple[Any, float]:
    """(the optimizer's norm, the true one) of a parameter that is split over two ranks, whose gradient is rank + 1."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = nn.Module()
    model.column = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.column.tensor_model_parallel = True
    wrapped_with = (
        None if model_groups is None else parallel_state.ProcessGroupCollection.use_mpu_process_groups(model_groups)
    )
    ddp = wrap(model, initial_weights="ignore", pg_collection=wrapped_with)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=1.0),
        [ddp],
        pg_collection=parallel_state.ProcessGroupCollection.use_mpu_process_groups(optimizer_groups)
        if optimizer_groups != ["model's"]
        else None,
    )
    ((rank + 1.0) * model.column.sum()).backward()
    finalize_model_grads([ddp])
    return optimizer.step()[1], math.sqrt(3 * 1 + 3 * 4)


@ranks(2)
@pytest.mark.parametrize("given", [["mp", "dp_cp"], ["tp", "pp", "dp_cp"], ["tp", "dp_cp"], ["intra_dist_opt"]])
def test_a_collection_that_spans_the_model_is_enough_for_the_norm(rank: int, world: int, given: list[str]) -> None:
    norm, want = norm_over_tp(rank, given)
    assert norm == pytest.approx(want, rel=1e-12)


@ranks(2)
@pytest.mark.parametrize("given", [[], ["dp_cp"], ["pp", "dp_cp"]])
def test_a_collection_without_a_group_of_the_model_is_refused_by_its_name(
    rank: int, world: int, given: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"pg_collection\.tp holds ranks None, and .* wrapped with \[0, 1\]"):
        norm_over_tp(rank, given)


@ranks(2)
def test_a_collection_that_is_wrong_on_one_rank_is_refused_on_all(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"pg_collection\.tp holds ranks None, and .* wrapped with \[0, 1\]"):
        norm_over_tp(rank, ["model's"] if rank == 0 else ["dp_cp"])


@ranks(2)
def test_a_collection_with_another_group_than_the_model_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = parallel_state.get_process_groups()
    ddp = wrap(nn.Linear(2, 2), initial_weights="ignore")
    swapped = ProcessGroups(tp=groups.dp_cp, pp=groups.pp, dp_cp=groups.tp)
    with pytest.raises(ValueError, match=r"pg_collection\.tp holds ranks \[0\], and .* wrapped with \[0, 1\]"):
        get_megatron_optimizer(OptimizerConfig(lr=1.0), [ddp], pg_collection=swapped)


@ranks(2)
def test_a_model_whose_groups_leave_out_ranks_of_the_job_must_say_which_it_is_split_over(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="1 of the job's 2 ranks, because the groups lack 'tp', 'pp'"):
        norm_over_tp(rank, ["model's"], ["dp_cp"])


@ranks(2)
def test_a_model_on_one_rank_of_a_job_has_a_norm_of_its_own_where_its_groups_say_so(rank: int, world: int) -> None:
    alone, _ = dist.new_subgroups(1)
    model = nn.Linear(2, 1, bias=False).double()
    ddp = wrap(model, initial_weights="ignore", pg_collection=ProcessGroups(tp=alone, pp=alone, dp_cp=alone))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=1.0), [ddp])
    ((rank + 1.0) * model.weight.sum()).backward()
    finalize_model_grads([ddp])
    assert optimizer.step()[1] == pytest.approx((rank + 1) * math.sqrt(2), rel=1e-12)
