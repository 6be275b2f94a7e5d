"""Engine: the components of one wrapped model chunk."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.file_tier import FileTier
from core.distributed.buffer.grad_buffer import GradBuffer, dtype_named
from core.distributed.buffer.memory_tier import HostTier, MemoryTier
from core.distributed.contract.gradient_contract import divisor_of
from core.distributed.contract.placement import Placement
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.guard.agreement import ControlGroup
from core.distributed.guard.finite import LargeGradWatch, NonFiniteWatch
from core.distributed.guard.first_steps import FirstSteps
from core.distributed.guard.misuse import ModelWatch
from core.distributed.guard.replicas import WeightWatch
from core.distributed.layout.model_plan import ModelPlan, groups_of, option_table, plan_model
from core.distributed.layout.places import Places, places_of
from core.distributed.materialize import DeferredParameter
from core.distributed.reduce.buffer_sync import BufferSync
from core.distributed.reduce.grad_reducer import GradReducer, Launches
from core.distributed.reduce.model_order import ModelOrder
from core.distributed.reduce.sync_rules import GradSync
from core.distributed.router_state import ROUTER_STATE, refuse_unknown_state
from core.distributed.sharded.eviction import Budget, Window
from core.distributed.sharded.param_unit import units_of
from core.distributed.sharded.plain_params import PlainParams
from core.distributed.sharded.sharded_parameter import ShardedParameter
from core.distributed.sharded.unsharder import Unsharder
from core.distributed.wire.collective_events import clock_for
from core.distributed.wire.collectives import Collectives
from core.distributed.wire.formats import gradient_collectives
from core.groups import agree
from core.groups.agree import control_device
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import COPY_AXES, DATA_KINDS


class Engine:
    """Components of one wrapped model chunk, created in the order of their dependencies.

    Collective over all ranks with this chunk. ``options`` are keyword arguments of ``plan_model``.
    """

    def __init__(
        self,
        module: nn.Module,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        groups: ProcessGroups,
        **options: Any,
    ) -> None:
        _finish_begun_steps(groups)
        self.module = module
        self.plan = plan = _plan_together(module, config, ddp_config, groups, options)
        self.ids = frozenset({id(module), *map(id, plan.params.values())})  # ids: module, reduced parameters
        self.collectives = plain = Collectives(
            ordered=ddp_config.deterministic_reduction
            or ddp_config.reduce_scatter_with_fp32_accumulation
            or getattr(config, "deterministic_mode", False),
            clock=clock_for(plan.device),
        )
        placement = ddp_config.placement
        self.tier = None if placement is None else _tier(plan, placement, groups)  # memory of offloaded shards
        places = Places() if placement is None else places_of(plan, ddp_config)
        units = units_of(plan, ddp_config, groups, self.tier, places) if ddp_config.shards_parameters else []
        shards = [[unit.shard for unit in of_buffer] for of_buffer in units[: len(plan.layout.buffers)]]
        grads = [] if self.tier is None else _place_grads(plan, places, groups, self.tier)
        self.buffers = [
            GradBuffer(
                layout,
                plan,
                ddp_config,
                groups_of(layout.key.data_group, ddp_config, groups),
                divisor_of(groups, config),
                param_shards or (),
                offloaded or {},
            )
            for layout, param_shards, offloaded in itertools.zip_longest(plan.layout.buffers, shards, grads)
        ]
        plain.channels += [channel for buffer in self.buffers for channel in buffer.channels]
        self.buckets = [self.buffers[buffer].buckets[bucket] for buffer, bucket in plan.buckets]  # in launch order
        if plan.shared:
            for bucket in self.buckets:
                bucket.memory.params_stay = any(slot.name in plan.shared for slot in bucket.layout.slots)
        for number, index in places.states:
            self.buffers[number].buckets[index].memory.state_tier = self.tier
        gathers = Collectives(channels=plain.channels, clock=plain.clock)
        self.params: PlainParams | Unsharder = PlainParams(self.buckets, gathers)
        if units:
            self.params = Unsharder(list(itertools.chain(*units)), self.buckets, gathers, groups)
            if placement is not None:
                _set_residents(self.params, self.buffers, placement, groups)
        # Without overlap too, sharded gradients are reduced in backward: else all would need memory at once.
        unasked = Launches.ONE_BY_ONE if ddp_config.shards_gradients else Launches.AT_THE_END
        asked = Launches.IN_BACKWARD if ddp_config.overlap_grad_reduce else unasked
        watches_nan = ddp_config.check_for_nan_in_grad or ddp_config.record_nan_in_grad
        self.routers = [part for part in module.modules() if any(hasattr(part, name) for name in ROUTER_STATE)]
        self.model_watch = ModelWatch(module, plan, self.buckets)
        self.large_grads = LargeGradWatch(self.buckets) if ddp_config.check_for_large_grads else None
        members = [set(dist.get_process_group_ranks(group)) for group in _data_groups(groups)]
        wire_dtype = ddp_config.grad_communication_dtype
        nested = all(other <= members[0] for other in members[1:])
        self.reducer = GradReducer(
            self.buckets,
            plain if wire_dtype is None else gradient_collectives(wire_dtype, plain),
            _control_groups(self.buckets, groups),
            self.model_watch.problems,
            launches=asked if plan.may_overlap else Launches.AT_THE_END,
            every_microbatch=ddp_config.reduces_every_microbatch and plan.may_overlap,
            may_join=nested and not any(unit.is_collective for unit in self.params.units),
            watch=NonFiniteWatch(self.buckets) if watches_nan else None,
            pop_gathers=self.params.pop_gathers,
        )
        self.grad_sync = GradSync(self.buckets, plan.rules, groups, plain, list(plan.params))
        self.buffer_sync = BufferSync.chosen(module, plan.contracts, groups, ddp_config.broadcast_buffers)
        self.weights = WeightWatch(plan, groups, self.params, ddp_config)
        self.reducer.at_begin = self.weights.record
        self._make_first_steps = partial(FirstSteps, module, plan, self.buckets, groups, ddp_config, config)

    @functools.cached_property
    def first_steps(self) -> FirstSteps:
        """Check of the first two steps, created in the first of them."""
        return self._make_first_steps()


def _finish_begun_steps(groups: ProcessGroups) -> None:
    """Launch the rest of steps that models on the same groups have begun, before this wrap's first collective."""
    for name in DATA_KINDS:
        if groups.size(name) > 1:
            control = groups.control(name)
            on_cpu = control_device(control).type == "cpu"
            ModelOrder.of(groups.require(name)).finish_begun_steps(control if on_cpu else None)


def _plan_together(
    module: nn.Module, config: Any, ddp_config: DistributedDataParallelConfig, groups: ProcessGroups, options: Any
) -> ModelPlan:
    """Plan locally, then compare the plan with other ranks before any other collective: all ranks raise, or none.

    Collective over the data groups and the tensor-parallel groups. Raises LayoutMismatch on every rank if a rank has
    another model or other options. This rank's own error is raised after the other ranks know of it.
    """
    failure: Exception | None = None
    plan: ModelPlan | None = None
    try:
        hidden = [name for name, param in module.named_parameters() if isinstance(param, ShardedParameter)]
        if hidden:
            raise ValueError(
                f"parameter {hidden[0]!r} is sharded by another wrapper (optim_grads_params), which has its values, or "
                "had them until it was deleted; wrap a parameter once, and take a state dict before deleting a wrapper"
            )
        refuse_unknown_state(dict(module.named_modules()), config)
        plan = plan_model(module, config, ddp_config, groups, **options)
        for name, param in plan.named.items() if ddp_config.shards_parameters else ():
            if type(param) not in (nn.Parameter, DeferredParameter):
                raise ValueError(
                    f"parameter {name!r} is a {type(param).__name__}, and code that checks for this class would behave "
                    "differently, because sharding a parameter changes its class; use a plain torch.nn.Parameter, or "
                    "set data_parallel_sharding_strategy='optim_grads'"
                )
    except (ValueError, RuntimeError, TypeError) as error:
        failure = error
    table = option_table(config, ddp_config)
    fingerprints = (
        (f"group {name!r}", groups.control(name), [] if plan is None else [*table, *plan.fingerprint(name)])
        for name in (*DATA_KINDS, *COPY_AXES)
        if groups.size(name) > 1
    )
    agree.same(fingerprints, failure)
    assert plan is not None, "agree.same raises this rank's failure"
    return plan


def _tier(plan: ModelPlan, placement: Placement, groups: ProcessGroups) -> MemoryTier | None:
    """Create the memory for offloaded shards. Collective over the data groups; if it fails on one rank, all raise."""
    if not placement.offloads:
        return None
    tier: MemoryTier
    with agree.together(_data_groups(groups), "the memory of offloaded shards"):
        placement.check_for(plan.device.type)
        if placement.directory is not None:
            tier = FileTier(placement.directory)
        else:
            tier = HostTier(plan.device, pin_memory=placement.pin_memory)
    return tier


def _place_grads(
    plan: ModelPlan, places: Places, groups: ProcessGroups, tier: MemoryTier
) -> list[dict[int, torch.Tensor]]:
    """Allocate memory of offloaded gradients: for each buffer, by bucket index. Collective; OSError without room."""
    offloaded: list[dict[int, torch.Tensor]] = [{} for _ in plan.layout.buffers]
    with agree.together(_data_groups(groups), "the memory of offloaded gradients"):
        for number, index in sorted(places.grads):
            layout = plan.layout.buffers[number]
            numel = layout.buckets[index].numel // layout.shards
            offloaded[number][index] = tier.zeros(numel, dtype_named(layout.key.grad_dtype))
    return offloaded


def _set_residents(
    unsharder: Unsharder, buffers: Sequence[GradBuffer], placement: Placement, groups: ProcessGroups
) -> None:
    """Set how many buckets stay gathered: a few, or up to a budget. ValueError on all ranks if two do not fit."""
    if placement.memory_budget_bytes is None:
        unsharder.eviction = Window(placement.prefetch)
        return
    pools = [buffer.pool.memory for buffer in buffers if buffer.pool is not None]
    always = sum(memory.nbytes for memory in (*pools, *(buffer.grad_data for buffer in buffers)))
    with agree.together(_data_groups(groups), "the budget of memory", ValueError):
        unsharder.eviction = Budget(unsharder.units, placement, always)


def _data_groups(groups: ProcessGroups) -> list[dist.ProcessGroup]:
    return [groups.require(name) for name in DATA_KINDS if groups.size(name) > 1]


def _control_groups(buckets: Sequence[Bucket], groups: ProcessGroups) -> list[ControlGroup]:
    control = []
    for name in DATA_KINDS:
        members = tuple(bucket for bucket in buckets if bucket.contracts[0].data_group == name)
        if members or name == "dp_cp":
            model = ModelOrder.of(groups.require(name)).wraps
            control.append(ControlGroup(name, groups.control(name), members, model))
    return control
