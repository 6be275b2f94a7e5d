"""Random layouts, tags and options together: what every parameter must get is counted rank by rank, by brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import DistributedDataParallel, declare_gradient, finalize_model_grads
from core.model_parallel_config import ModelParallelConfig
from tests.unit_tests.rank_codes import MUTATIONS, Bag, contributions, mutate_reductions, ramp, somewhere, wrong
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

KINDS = (
    "plain",
    "sharded",
    "sequence",
    "declared",
    "averaged",
    "pipeline",
    "pipeline sequence",
    "expert",
    "expert sharded",
    "expert sequence",
    "word",
    "word sharded",
)
SHAPES = ((), (1,), (5,), (19, 17), (40, 13), (128,))


@dataclass
class Plan:
    """One random job; the same on all ranks that draw it from the same seed."""

    tp: int
    pp: int
    cp: int
    ep: int
    expt_tp: int
    dp: int
    expt_dp: int
    chunks: int
    per_token: bool
    instances: int
    options: dict[str, Any]
    stages: list[list[tuple[str, str, tuple[int, ...]]]] = field(default_factory=list)  # stage -> (name, kind, shape)
    skipped: set[tuple[int, int, str]] = field(default_factory=set)  # (rank, chunk, name) without a gradient
    tokens: list[int] = field(default_factory=list)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


def draw(seed: int, world: int) -> Plan:
    rng = random.Random(seed)
    while True:
        tp, pp, cp = (rng.choice([size for size in (1, 2, 4) if size <= world]) for _ in range(3))
        ep, expt_tp = (rng.choice([size for size in (1, 2, 4) if size <= world]) for _ in range(2))
        if world % (tp * pp * cp) == 0 and world % (expt_tp * ep * pp) == 0:
            break
    dp, expt_dp = world // (tp * pp * cp), world // (expt_tp * ep * pp)
    per_token = rng.random() < 0.3
    sharded = rng.random() < 0.5
    plan = Plan(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        expt_tp=expt_tp,
        dp=dp,
        expt_dp=expt_dp,
        chunks=rng.choice([1, 2]) if pp > 1 else 1,
        per_token=per_token,
        # without experts, so that the two grids cannot disagree on what an instance is
        instances=2 if sharded and ep == 1 and expt_tp == tp and cp == 1 and dp % 2 == 0 and rng.random() < 0.5 else 1,
        options={
            "data_parallel_sharding_strategy": "optim" if sharded else "no_shard",
            "overlap_grad_reduce": rng.random() < 0.6,
            "bucket_size": rng.choice([None, 1, 50, 400]),
            "average_in_collective": not per_token and rng.random() < 0.4,
            "deterministic_reduction": rng.random() < 0.3,
            "check_for_nan_in_grad": rng.random() < 0.3,
        },
        # the ranks of a tensor-parallel group see the same tokens
        tokens=[count for _ in range(world // tp) for count in [rng.choice([0, 1, 5, 12])] * tp],
    )
    plan.options["num_distributed_optimizer_instances"] = plan.instances
    common = [(kind, rng.choice(SHAPES)) for kind in KINDS if "pipeline" in kind]
    words = [(kind, rng.choice(SHAPES)) for kind in KINDS if "word" in kind]
    for stage in range(pp):
        here = [(kind, rng.choice(SHAPES)) for kind in KINDS if "pipeline" not in kind and "word" not in kind]
        here += [(rng.choice(KINDS[:3]), rng.choice(SHAPES)) for _ in range(rng.randrange(4))]
        rng.shuffle(here)
        where = rng.randrange(len(here) + 1)
        here[where:where] = common  # copies come in the same order on all stages
        if stage in (0, pp - 1):
            here += words
        # A pipeline-replicated parameter is known by its name, in all chunks.
        plan.stages.append(
            [
                (f"copy_{kind.replace(' ', '_')}" if "pipeline" in kind else f"p{n}", kind, shape)
                for n, (kind, shape) in enumerate(here)
            ]
        )
    for rank in range(world):
        for chunk in range(plan.chunks):
            for name, _, _ in plan.stages[place(plan, rank)["pp"]]:
                # Alike on tensor-parallel ranks: a copy that only some of them have used is refused.
                block = max(plan.tp, plan.expt_tp)
                if rank % block == 0 and rng.random() < 0.15:
                    plan.skipped.update((rank + other, chunk, name) for other in range(block))
    return plan


def place(plan: Plan, rank: int) -> dict[str, int]:
    """Coordinates in the order tp-cp-ep-dp-pp; of the dense grid, and of the expert grid with an e before."""
    dense, expert = rank, rank
    found = {}
    for axis, size in (("tp", plan.tp), ("cp", plan.cp), ("dp", plan.dp), ("pp", plan.pp)):
        dense, found[axis] = divmod(dense, size)
    for axis, size in (("etp", plan.expt_tp), ("ep", plan.ep), ("edp", plan.expt_dp), ("epp", plan.pp)):
        expert, found[axis] = divmod(expert, size)
    return found


def sharing(plan: Plan, rank: int, *axes: str) -> list[int]:
    """The ranks with the same coordinates on these axes."""
    here = place(plan, rank)
    return [r for r in range(plan.world) if all(place(plan, r)[axis] == here[axis] for axis in axes)]


def has(plan: Plan, kind: str, stage: int, chunk: int) -> bool:
    """Words lie in the first chunk of the first stage and the last chunk of the last one."""
    if "word" not in kind:
        return True
    return (stage, chunk) in ((0, 0), (plan.pp - 1, plan.chunks - 1))


def expected(plan: Plan, rank: int, chunk: int, name: str, kind: str, backwards: int) -> float:
    """The code that this parameter must carry on this rank."""

    def code(r: int, c: int, n: str) -> float:
        return 0.0 if (r, c, n) in plan.skipped else backwards * (c + 1) * 10.0**r

    def whole(r: int, c: int, n: str) -> float:
        members = sharing(plan, r, "etp", "ep", "epp") if "expert" in kind else sharing(plan, r, "tp", "pp")
        return sum(code(member, c, n) for member in members)

    def word_of(r: int) -> tuple[int, str]:
        stage = place(plan, r)["pp"]
        return (0 if stage == 0 else plan.chunks - 1), next(n for n, k, _ in plan.stages[stage] if k == kind)

    if "word" in kind:
        ends = [r for r in sharing(plan, rank, "tp", "cp", "dp") if place(plan, r)["pp"] in (0, plan.pp - 1)]
        value = sum(whole(r, *word_of(r)) for r in ends)
    elif "pipeline" in kind:
        axes = ("cp", "dp") if "sequence" in kind and sequence_parallel(plan) else ("tp", "cp", "dp")
        value = sum(whole(r, c, name) for r in sharing(plan, rank, *axes) for c in range(plan.chunks))
    elif kind == "declared" or (kind == "sequence" and sequence_parallel(plan)):
        value = sum(whole(r, chunk, name) for r in sharing(plan, rank, "cp", "dp", "pp"))
    elif kind == "expert sequence" and sequence_parallel(plan):
        value = sum(whole(r, chunk, name) for r in sharing(plan, rank, "ep", "edp", "epp"))
    elif kind == "averaged":
        value = sum(whole(r, chunk, name) for r in sharing(plan, rank, "cp", "dp", "pp")) / plan.tp
    else:
        value = whole(rank, chunk, name)
    if plan.per_token:  # the last stage knows the numbers
        last = [r for r in range(plan.world) if place(plan, r)["pp"] == plan.pp - 1 and place(plan, r)["tp"] == 0]
        return value / max(1, sum(plan.tokens[r] for r in last))
    return value / (plan.dp * plan.cp)


def sequence_parallel(plan: Plan) -> bool:
    return plan.tp > 1


class Skipping(Bag):
    """A bag some of whose parameters are not used."""

    unused: frozenset[str] = frozenset()

    def forward(self, code: float) -> torch.Tensor:
        used = [(p * ramp(p)).sum() * code for n, p in self.named_parameters() if n not in self.unused]
        return torch.stack(used).sum()


def build(plan: Plan, config: ModelParallelConfig, rank: int, chunk: int) -> DistributedDataParallel:
    stage = place(plan, rank)["pp"]
    here = [(name, kind, shape) for name, kind, shape in plan.stages[stage] if has(plan, kind, stage, chunk)]
    bag = Skipping(**{name: shape for name, _, shape in here})
    for name, kind, _ in here:
        split = "sharded" in kind
        if split:
            bag.tag(name, tensor_model_parallel=True, partition_dim=0)
        if kind == "declared":
            declare_gradient(getattr(bag, name), partial_over=("tp",))
        if kind == "averaged":
            bag.tag(name, average_gradients_across_tp_domain=True)
        if "pipeline" in kind:
            bag.tag(name, pipeline_parallel=True)
        if "expert" in kind:
            bag.tag(name, allreduce=False)
        if "word" in kind and plan.pp > 1:
            bag.tag(name, shared_embedding=True)
        if kind == "expert sequence":
            bag.tag(name, sequence_parallel=sequence_parallel(plan))
        if not split and kind not in ("declared", "averaged") and "expert" not in kind:
            bag.tag(name, sequence_parallel=sequence_parallel(plan) and "sequence" in kind)
    bag.unused = frozenset(name for name, _, _ in here if (rank, chunk, name) in plan.skipped)
    return wrap(bag, config, disable_bucketing=chunk > 0, first_steps="ignore", **plan.options)


def checked(plan: Plan, rank: int) -> Iterator[list[str]]:
    """What is wrong after each of four steps: of one backward, of two microbatches, of one, of two synced backwards."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=plan.tp,
        pipeline_model_parallel_size=plan.pp,
        virtual_pipeline_model_parallel_size=plan.chunks if plan.chunks > 1 else None,
        context_parallel_size=plan.cp,
        expert_model_parallel_size=plan.ep,
        expert_tensor_parallel_size=plan.expt_tp,
        num_distributed_optimizer_instances=plan.instances,
    )
    config = ModelParallelConfig(
        tensor_model_parallel_size=plan.tp,
        pipeline_model_parallel_size=plan.pp,
        sequence_parallel=sequence_parallel(plan),
        calculate_per_token_loss=plan.per_token,
    )
    chunks = [build(plan, config, rank, chunk) for chunk in range(plan.chunks)]
    tokens = torch.tensor(plan.tokens[rank]) if plan.per_token else None
    for backwards, synced in ((1, True), (2, False), (1, True), (2, True)):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        for number, chunk in reversed(list(enumerate(chunks))):
            for _ in range(backwards - 1):
                with nullcontext() if synced else chunk.no_sync():
                    chunk((number + 1) * 10.0**rank).backward()
            chunk((number + 1) * 10.0**rank).backward()
        finalize_model_grads(chunks, num_tokens=tokens)
        lines = []
        for number, chunk in enumerate(chunks):
            stage = place(plan, rank)["pp"]
            want = {
                name: expected(plan, rank, number, name, kind, backwards)
                for name, kind, _ in plan.stages[stage]
                if has(plan, kind, stage, number)
            }
            found = {
                name: 0.0 if value != value and want[name] == 0 else value
                for name, value in contributions(chunk).items()
            }
            kinds = {name: kind for name, kind, _ in plan.stages[stage]}
            lines += [f"chunk {number} {kinds.get(line.split(':')[0])} {line}" for line in wrong(found, want)]
        yield lines


def run(seed: int, rank: int, world: int) -> None:
    plan = draw(seed, world)
    assert dist.get_world_size() == plan.world
    for number, lines in enumerate(checked(plan, rank)):
        assert not lines, f"seed {seed}, step {number}, rank {rank}: {lines[:5]}\n{plan}"
    parallel_state.destroy_model_parallel()


@ranks(4)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.in_suite(6)
def test_every_parameter_of_a_random_job_gets_what_it_must(rank: int, world: int, seed: int) -> None:
    run(seed, rank, world)


@ranks(4)
@pytest.mark.parametrize("group_name", ["dp_cp", "tp", "pp", "expt_dp", "embd"])
@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.in_suite()
def test_random_jobs_turn_red_when_a_reduction_is_spoilt(rank: int, world: int, group_name: str, mutation: str) -> None:
    sizes = {"dp_cp": "dp", "tp": "tp", "pp": "pp", "expt_dp": "expt_dp", "embd": "pp"}
    seed = next(n for n in range(100) if getattr(draw(n, world), sizes[group_name]) > 1)
    build = parallel_state.initialize_model_parallel
    with ExitStack() as stack:

        def built(**arguments: Any) -> None:
            build(**arguments)
            stack.enter_context(mutate_reductions(group_name, mutation))

        stack.enter_context(mock.patch.object(parallel_state, "initialize_model_parallel", built))
        lines = next(checked(draw(seed, world), rank))
    assert somewhere(bool(lines))


@ranks(8)
@pytest.mark.parametrize("seed", range(100, 106))
@pytest.mark.in_suite(3)
def test_every_parameter_of_a_random_job_on_eight_ranks(rank: int, world: int, seed: int) -> None:
    run(seed, rank, world)


@ranks(2, 4, 8, timeout_s=600)
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_many_random_jobs(rank: int, world: int, seed: int) -> None:
    for more in range(5):
        run(20 * seed + more, rank, world)
