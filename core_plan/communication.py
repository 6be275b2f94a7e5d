"""Communication of a step: group, number of calls, bytes, time, and the communicators that it uses."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.distributed import DistributedDataParallelConfig
from core.distributed.buffer.grad_buffer import dtype_named
from core.distributed.layout.model_plan import ModelPlan, shard_and_replica
from core.groups.rank_grid import GRADIENT_KINDS, GRID_KINDS, RankGrid, parse_tokens
from core_plan.device import Device, Link
from core_plan.planned_groups import PlannedGroups
from core_plan.run_memory import RankMemory, Run, StageParts
from core_plan.step_figures import PartFigures

RINGS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Communication:
    """Communication of one rank over one group in a step. ``link`` is 'inside' a machine or 'between' machines."""

    group: str
    collective: str
    link: str
    calls: int
    nbytes: int
    seconds: float


def link_of(groups: PlannedGroups, name: str, device: Device) -> str:
    """Return 'inside' if every group of this kind is within one machine, else 'between': the slowest group counts."""
    key = name, device.ranks_per_machine
    if key not in groups.links:
        groups.links[key] = "between" if _leaves_a_machine(groups, name, device.ranks_per_machine) else "inside"
    return groups.links[key]


def _leaves_a_machine(groups: PlannedGroups, name: str, ranks_per_machine: int) -> bool:
    """Return True if any group of a kind spans several machines.

    All full groups have the same offsets from their first rank, and so do their subgroups. They differ only in the
    position of the first rank within its machine.
    """
    own = groups.ranks(name)
    grid, kind = groups.grid, _kind_of_whole(name)
    if kind not in GRID_KINDS:
        return own[0] // ranks_per_machine != own[-1] // ranks_per_machine
    if grid.world_size <= ranks_per_machine or len(own) == 1:
        return False
    if own[-1] - own[0] >= ranks_per_machine:
        return True
    whole = groups.ranks(kind)
    ends = [(part[0] - whole[0], part[-1] - whole[0]) for part in _parts_like(groups, name, whole)]
    firsts = _places_of_firsts(grid, *GRID_KINDS[kind], ranks_per_machine)
    return any(
        (at + low) // ranks_per_machine != (at + high) // ranks_per_machine for low, high in ends for at in firsts
    )


def _kind_of_whole(name: str) -> str:
    """Return the kind of the full groups that contain groups of this kind."""
    return "pp" if name in ("embd", "pos_embd") else name.removeprefix("intra_").removeprefix("inter_")


def _parts_like(groups: PlannedGroups, name: str, whole: list[int]) -> list[list[int]]:
    """Return the subgroups of a full group that are groups of the kind ``name``."""
    if name in ("embd", "pos_embd"):  # each pipeline has one such subgroup
        return [groups.ranks(name)]
    size = groups.size(name)
    if name.startswith("inter_"):
        apart = len(whole) // size
        return [whole[first::apart] for first in range(apart)]
    return [whole[first : first + size] for first in range(0, len(whole), size)]


def _places_of_firsts(grid: RankGrid, tokens: str, expert: bool, ranks_per_machine: int) -> set[int]:
    """Return the positions, within a machine, of the first rank of each group that spans the axes ``tokens``."""
    places = {0}
    for token in set(grid.axes) - set(parse_tokens(tokens)):
        stride, size = grid.stride(token, expert), grid.size(token, expert)
        steps = range(min(size, ranks_per_machine))  # positions repeat after that
        places = {(place + step * stride) % ranks_per_machine for step in steps for place in places}
    return places


def communication_of(
    groups: PlannedGroups, name: str, collective: str, calls: int, nbytes: int, device: Device
) -> Communication:
    """Return the time of some calls: latency once per call, and bytes one after the other."""
    where, ranks = link_of(groups, name, device), groups.size(name)
    machines = 1 if where == "inside" else machines_of(groups, name, device)
    link = device.link(collective, ranks) if where == "inside" else device.between
    rate = link.bytes_per_s if where == "inside" else rate_between(collective, ranks, machines, device)
    latency_s = link.latency_s
    if link.hop_s or device.inside.hop_s:
        latency_s += hops_seconds(collective, ranks, machines, device.inside, device.between)
    return Communication(name, collective, where, calls, nbytes, calls * latency_s + nbytes / rate)


def machines_of(groups: PlannedGroups, name: str, device: Device) -> int:
    """Return the number of machines spanned by a group that leaves its machine; at least 2."""
    key = name, device.ranks_per_machine
    if key not in groups.machines:
        groups.machines[key] = max(2, len({rank // device.ranks_per_machine for rank in groups.ranks(name)}))
    return groups.machines[key]


def rate_between(collective: str, ranks: int, machines: int, device: Device) -> float:
    """Return the bytes per second that each rank of a multi-machine group sends; at most the rate inside a machine.

    A ring or a tree crosses machines on the network links of all its ranks there: NCCL splits the data over them
    (NVIDIA/nccl, issues 601 and 1277: 360 GB/s on 8 links of 400 Gbit/s). In an all-to-all, data between ranks of one
    machine stays inside.
    """
    in_machine = max(1, ranks // machines)
    rate = device.between.bytes_per_s
    if collective in RINGS:
        rate *= in_machine
    elif collective == "all_to_all":
        rate *= (ranks - 1) / (ranks - in_machine)
    return min(rate, device.inside.bytes_per_s)


def hops_seconds(collective: str, ranks: int, machines: int, inside: Link, between: Link) -> float:
    """Return the seconds of a collective's sequential hops, as in NCCL's tuning.cc.

    A ring passes all ranks once for all-gather or reduce-scatter, and twice for all-reduce. A tree goes up and down,
    over the ranks of a machine and the logarithm of the machines; the faster of the two is used. Other collectives send
    to all ranks at once.
    """
    far = between.hop_s if machines > 1 else inside.hop_s
    if collective not in RINGS:
        return far
    ring = (ranks - machines) * inside.hop_s + (machines - 1) * between.hop_s
    if collective != "all_reduce":
        return ring
    in_machine = max(0, ranks // machines - 1)
    return 2 * min(ring, in_machine * inside.hop_s + math.ceil(math.log2(machines)) * between.hop_s)


def layer_communication(
    parts: Sequence[PartFigures], phase: str, groups: PlannedGroups, device: Device
) -> list[Communication]:
    """Return the communication of the layers of one stage for one microbatch."""
    total: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for part in parts:
        for key, (calls, nbytes) in part.sent[phase].items():
            total[key][0] += calls
            total[key][1] += nbytes
    return [communication_of(groups, *key, calls, nbytes, device) for key, (calls, nbytes) in total.items()]


def gradient_communication(
    plans: Sequence[ModelPlan],
    ddp_config: DistributedDataParallelConfig,
    groups: PlannedGroups,
    device: Device,
    microbatches: int,
) -> tuple[list[Communication], list[Communication]]:
    """Return (a step's gradient reductions, its parameter all-gathers), bucket by bucket in the wrapper's layout.

    If ranks of a host map each other's buffers, sharded parameters are read in place, and nothing is copied.
    """
    reductions: Counter[tuple[str, str, int]] = Counter()
    gathers: Counter[tuple[str, str, int]] = Counter()
    rounds = microbatches if ddp_config.reduces_every_microbatch else 1
    maps = device.gradients is not None and ddp_config.share_host_memory
    for plan in plans:
        for layout in plan.layout.buffers:
            shard, replica = shard_and_replica(layout.key.data_group, ddp_config)
            grad, param = (dtype_named(name).itemsize for name in layout.key[:2][::-1])
            for bucket in layout.buckets:
                if ddp_config.sharded:
                    reductions[shard, "reduce_scatter", part_sent(bucket.numel * grad, groups.size(shard))] += rounds
                    if replica is not None:
                        cut = bucket.numel * grad // max(1, groups.size(shard))
                        reductions[replica, "all_reduce", 2 * part_sent(cut, groups.size(replica))] += rounds
                    copied = 0 if maps and ddp_config.shards_parameters else bucket.numel * param
                    times = param_gathers(ddp_config, microbatches)
                    gathers[shard, "all_gather", part_sent(copied, groups.size(shard))] += times
                else:
                    reductions[shard, "all_reduce", 2 * part_sent(bucket.numel * grad, groups.size(shard))] += rounds
    if device.gradients is not None:  # ranks of one host read each other's buffers
        device = replace(device, inside=device.gradients, collectives={})
    return _communication(reductions, groups, device), _communication(gathers, groups, device)


def param_gathers(ddp_config: DistributedDataParallelConfig, microbatches: int) -> int:
    """Return the number of all-gathers of a bucket's parameters per step of a sharded optimizer."""
    if not ddp_config.shards_parameters:
        return 1
    return 2 * microbatches if ddp_config.reshard_after_forward else microbatches


def part_sent(nbytes: int, ranks: int) -> int:
    """Return the bytes that a rank sends if each rank has an equal part of ``nbytes``."""
    return nbytes * (ranks - 1) // ranks


def _communication(
    counted: Mapping[tuple[str, str, int], int], groups: PlannedGroups, device: Device
) -> list[Communication]:
    total: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for (name, collective, nbytes), calls in counted.items():
        if groups.size(name) > 1:
            total[name, collective][0] += calls
            total[name, collective][1] += calls * nbytes
    return [communication_of(groups, *key, calls, nbytes, device) for key, (calls, nbytes) in total.items()]


def rule_communication(
    plans: Sequence[ModelPlan], ddp_config: DistributedDataParallelConfig, groups: PlannedGroups, device: Device
) -> list[Communication]:
    """Return the communication of the sync rules after the data-parallel reduction, from the contracts."""
    counted: Counter[tuple[str, str, int]] = Counter()
    for plan in plans:
        grads = {slot.name: layout for layout in plan.layout.buffers for slot in layout.slots}
        for name, contract in plan.contracts.items():
            layout = grads[name]
            nbytes = plan.params[name].numel() * dtype_named(layout.key.grad_dtype).itemsize
            kept = nbytes // (layout.shards if ddp_config.sharded else 1)
            for axis in (*contract.partial_over, *contract.averaged_over):
                counted[axis, "all_reduce", 2 * part_sent(kept, groups.size(axis))] += 1
    return _communication(counted, groups, device)


def communicators(run: Run, memory: RankMemory, parts: StageParts) -> list[tuple[str, int]]:
    """Return (groups that share it, number of ranks) of each communicator with several ranks that this rank uses.

    Groups with equal ranks share a communicator; gradients have their own: Note [Gradient groups] in
    core/groups/process_groups.py. Sharded parameters gathered by collectives have one more.
    """
    groups = run.groups_of(memory.rank)
    names = [name for stage in memory.stages for part in parts[stage] for row in part.sent.values() for name, _ in row]
    names += ["pp"]
    for plan in memory.plans:
        for layout in plan.layout.buffers:
            names += filter(None, shard_and_replica(layout.key.data_group, run.ddp))
        for contract in plan.contracts.values():
            names += [*contract.partial_over, *contract.averaged_over, *["embd"] * contract.crosses_stages]
    found: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name in dict.fromkeys(names):
        if groups.size(name) > 1:
            found.setdefault((tuple(groups.ranks(name)), name in GRADIENT_KINDS), []).append(name)
    shared = [("/".join(kinds), len(ranks)) for (ranks, _), kinds in found.items()]
    if not run.ddp.shards_parameters or (run.on_cpu and run.one_host and run.ddp.share_host_memory):
        return shared
    layouts = (layout for plan in memory.plans for layout in (*plan.layout.buffers, *plan.frozen_layout.buffers))
    gathered = dict.fromkeys(shard_and_replica(layout.key.data_group, run.ddp)[0] for layout in layouts)
    return shared + [(f"gathers over {name}", groups.size(name)) for name in gathered if groups.size(name) > 1]
