"""DistributedDataParallel: the wrapper that users see. Plans, allocates, hooks; the engine below it does the work."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.agree import SyncError, control_device
from core.collector_pause import collector_paused
from core.distributed.buffer.bucket import Bucket, BucketGroups
from core.distributed.buffer.grad_buffer import GradBuffer
from core.distributed.buffer.streamed_bucket import StreamedBucket
from core.distributed.contract.gradient_contract import GradientContract, divisor_of
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.guard.agreement import ControlGroup
from core.distributed.guard.finite import Finding, LargeGradientWatch, NonFiniteWatch
from core.distributed.guard.model_watch import ModelWatch
from core.distributed.guard.replicas import broadcast_weights, refuse_unequal, unequal_within_stage
from core.distributed.guard.same_model import Facts, check_same
from core.distributed.guard.step_guard import StepGuard
from core.distributed.layout.model_plan import (
    ModelPlan,
    option_table,
    plan_model,
    replica_group_name,
    shard_group_name,
)
from core.distributed.measure.describe import describe_model
from core.distributed.measure.overlap_report import OverlapReport
from core.distributed.measure.step_clock import resolve
from core.distributed.reduce.fused_kernels import check_declared, ignore_dummies
from core.distributed.reduce.grad_reducer import GradReducer, StepReport
from core.distributed.reduce.param_gatherer import ParamSync, finish_gathers
from core.distributed.reduce.shared_wire import SharedWire
from core.distributed.reduce.sync_rules import GradSync
from core.distributed.reduce.weak_link import WeakLink
from core.distributed.wire.collectives import Collectives
from core.distributed.wire.formats import gradient_collectives
from core.distributed.wire.simulated_wire import over_wire
from core.process_groups import ProcessGroups

HOOK = "core.distributed"
CONTROL_TWIN = {"dp_cp": "dp_cp_gloo", "expt_dp": "expt_dp_gloo"}


class DistributedDataParallel(nn.Module):
    """Wrap a model chunk so that its gradients are kept in contiguous buffers and reduced over data parallelism.

        model = DistributedDataParallel(None, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
        for batch in data:
            model.zero_grad_buffer()
            loss_of(model, batch).backward()
            finalize_model_grads([model])
            optimizer.step()

    config: a ModelParallelConfig, or None for a model without tensor, sequence or expert parallelism.
    ddp_config: how gradients are kept and reduced. module: any nn.Module whose parameters lie on one device.
    disable_bucketing: one bucket a buffer, for chunks whose gradients are not on the critical path.
    pg_collection: ProcessGroups; parallel_state's by default.

    Several wrapped models on the same groups reduce in their `finalize_model_grads`, not in backward: ranks may use
    them in different orders. To overlap, wrap them as one module.

    After `finalize_model_grads` gradients are the mean over the data-parallel ranks of what each rank's backwards
    added up (per token: see finalize_model_grads), in `param.main_grad`; and in `param.grad` unless they are sharded:
    then only this rank's shard of `main_grad` is valid, and `param.grad` is a GradPlaceholder, which refuses to be
    used. A parameter that no rank has used has no `.grad`, as with torch. Neither config is written to.

    Collective over all ranks that hold this chunk. Raises LayoutMismatch on all of them where ranks hold different
    models, or other copies of a weight; ContractError or ValueError for what one rank can know alone.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig | None = None,
        module: nn.Module | None = None,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroups | None = None,
    ) -> None:
        misplaced = isinstance(config, (nn.Module, DistributedDataParallelConfig))
        if misplaced or not isinstance(ddp_config, DistributedDataParallelConfig) or not isinstance(module, nn.Module):
            given = ", ".join(type(argument).__name__ for argument in (config, ddp_config, module))
            raise TypeError(
                f"DistributedDataParallel was given ({given}) and takes a config or None, then core.distributed's "
                "DistributedDataParallelConfig, then the module; call DistributedDataParallel(None, "
                "DistributedDataParallelConfig(), model)"
            )
        if pg_collection is not None and not isinstance(pg_collection, ProcessGroups):
            raise TypeError(
                f"pg_collection is a {type(pg_collection).__name__}; pass core.process_groups.ProcessGroups(dp_cp=..., "
                "...) with the groups that the model is split over"
            )
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.groups = pg_collection if pg_collection is not None else parallel_state.get_process_groups()
        self.groups.require("dp_cp")
        with collector_paused():
            self._wrap(disable_bucketing or self.groups.rank("pp") > 0)

    # -- wrapping ---------------------------------------------------------------------------------------------------

    def _wrap(self, one_bucket: bool) -> None:
        config, ddp_config, module = self.config, self.ddp_config, self.module
        for name, twin in CONTROL_TWIN.items():
            if self.groups.size(name) > 1:
                group = self.groups.require(name)
                control = getattr(self.groups, twin) or (group if control_device(group).type == "cpu" else None)
                SharedWire.of(group).quiesce(control)
        self.plan = self._plan_together(one_bucket)
        self.contracts: dict[str, GradientContract] = self.plan.contracts
        on_wire = over_wire(ddp_config.simulated_wire, self.plan.device)
        plain = Collectives(
            ordered=ddp_config.deterministic_reduction
            or ddp_config.reduce_scatter_with_fp32_accumulation
            or getattr(config, "deterministic_mode", False)
        )
        self.collectives = on_wire(plain)
        all_buffers = [self._allocate(number) for number in range(len(self.plan.layout.buffers))]
        plain.channels += [channel for buffer in all_buffers for channel in buffer.channels]
        self.grad_buffers = [buffer for buffer in all_buffers if buffer.layout.key.data_group == "dp_cp"]
        self.expert_parallel_buffers = [buffer for buffer in all_buffers if buffer.layout.key.data_group == "expt_dp"]
        order = [all_buffers[buffer].buckets[bucket] for buffer, bucket in self.plan.order]
        if self.plan.shared:
            for bucket in order:
                bucket.params_stay = any(slot.name in self.plan.shared for slot in bucket.layout.slots)
        watches_nan = ddp_config.check_for_nan_in_grad or ddp_config.record_nan_in_grad
        self.nan_watch = NonFiniteWatch(order) if watches_nan else None
        self.large_watch = LargeGradientWatch(order) if ddp_config.check_for_large_grads else None
        wire_is_free = self.plan.wire_is_free
        self.reducer = GradReducer(
            order,
            on_wire(gradient_collectives(ddp_config.grad_communication_dtype, plain)),
            self._control_groups(order),
            ModelWatch(module, self.plan, order).problems,
            in_backward=(ddp_config.overlap_grad_reduce or ddp_config.shards_gradients) and wire_is_free,
            wait_at_once=not ddp_config.overlap_grad_reduce,
            many_rounds=ddp_config.reduces_every_microbatch and wire_is_free,
            watch=self.nan_watch,
            channels=plain.channels,
        )
        self.grad_sync = GradSync(order, self.plan.rules, self.groups, self.collectives, list(self.plan.params))
        self.param_sync = ParamSync(order, on_wire(Collectives(channels=plain.channels)))
        self.stages_checked = False
        self.step_guard = StepGuard(self, self.reducer)
        self._hook_params(order)
        self._check_initial_weights()
        self._hook_module()

    def _plan_together(self, one_bucket: bool) -> ModelPlan:
        """Plan locally, then compare with the other ranks before anything else is sent: all raise, or none."""
        options = option_table(self.config, self.ddp_config)
        failure: Exception | None = None
        plan: ModelPlan | None = None
        try:
            plan = plan_model(self.module, self.config, self.ddp_config, self.groups, one_bucket=one_bucket)
        except (ValueError, RuntimeError, TypeError) as error:
            failure = error
        for name in ("dp_cp", "expt_dp"):
            if self.groups.size(name) > 1:
                failure = self._compare(None if plan is None else plan.facts(name, options), name, failure)
        for name in ("tp", "expt_tp"):
            if self.groups.size(name) > 1:
                failure = self._compare(None if plan is None else plan.facts_over_tp(options, name), name, failure)
        if plan is None or failure is not None:
            raise failure or RuntimeError("this model could not be planned")
        return plan

    def _compare(self, facts: Facts | None, name: str, failure: Exception | None) -> Exception | None:
        """A failure in one group must still be told to the next group, so it is returned and raised at the end."""
        try:
            check_same(facts, self.groups.require(name), name, failure)
        except (ValueError, RuntimeError, TypeError) as error:
            return error
        return failure

    def _check_initial_weights(self) -> None:
        if self.ddp_config.initial_weights == "broadcast":
            self.broadcast_params()
        elif self.ddp_config.initial_weights == "check":
            refuse_unequal(self.unequal_weights(), self.groups, at_wrap=True, trained=False)

    def unequal_weights(self) -> Finding | None:
        """The first weight whose copies within this stage are not equal. Collective over all groups of such copies."""
        return unequal_within_stage(self.plan, self.groups, [*self.grad_buffers, *self.expert_parallel_buffers])

    def _allocate(self, number: int) -> GradBuffer:
        layout = self.plan.layout.buffers[number]
        data_group = layout.key.data_group
        shard_name = shard_group_name(data_group, self.ddp_config)
        replica_name = replica_group_name(data_group, self.ddp_config)
        replica = None if replica_name is None else self.groups.require(replica_name)
        groups = BucketGroups(self.groups.require(data_group), self.groups.require(shard_name), replica)
        return GradBuffer(
            layout,
            self.plan.params,
            self.plan.contracts,
            groups,
            sharded=self.ddp_config.sharded,
            scale=self._scale_before(data_group),
            average=self.ddp_config.average_in_collective,
            scale_later=self.ddp_config.scale_in_optimizer,
            streamed=self.ddp_config.shards_gradients,
            share_memory=self.ddp_config.share_host_memory,
            device=self.plan.device,
        )

    def _scale_before(self, data_group: str) -> float:
        """What a bucket is multiplied by before its reduction, to come out divided by the contract's divisor."""
        averaged = self.groups.size(data_group) if self.ddp_config.average_in_collective else 1
        return averaged / divisor_of(self.groups, self.config)

    def _control_groups(self, order: list[Bucket]) -> list[ControlGroup]:
        control = []
        for name, twin in CONTROL_TWIN.items():
            buckets = tuple(bucket for bucket in order if bucket.contracts[0].data_group == name)
            if buckets or name == "dp_cp":
                group = self.groups.require(name)
                model = SharedWire.of(group).next_model
                control.append(ControlGroup(name, getattr(self.groups, twin) or group, buckets, model))
        return control

    def _hook_module(self) -> None:
        """On the wrapped module, so that calling it without the wrapper is the same."""
        self.module.register_forward_pre_hook(partial(_begin_forward, WeakLink(self)), prepend=True)
        # A step that Ctrl-C interrupted has left gathers in flight; whoever then saves or loads finds them complete.
        finish = partial(finish_gathers, WeakLink(self.param_sync))
        self.module.register_state_dict_pre_hook(finish)
        self.module.register_load_state_dict_pre_hook(finish)

    def _hook_params(self, order: list[Bucket]) -> None:
        # A bound method is made and called faster than a partial.
        reducer_of = WeakLink(self.reducer)
        for bucket in order:
            arrived = self._make_hook(bucket)
            for index, param in enumerate(bucket.params):
                if "grad_added_to_main_grad" in param.__dict__:
                    ignore_dummies(param, bucket.contracts[index].name)
                hook_gradient(param, MethodType(arrived, index))
                param.grad_reducer = reducer_of

    def _make_hook(self, bucket: Bucket) -> Callable[[int, torch.Tensor], None]:
        # Weak, so that deleting the wrapper leaves a plain module, which can be wrapped again.
        reducer_of, bucket_of = weakref.ref(self.reducer), weakref.ref(bucket)

        def arrived(index: int, param: torch.Tensor) -> None:
            reducer, bucket = reducer_of(), bucket_of()
            if reducer is not None and bucket is not None:
                if param.__dict__.get("grad_added_to_main_grad"):
                    check_declared(param, bucket.contracts[index].name)
                reducer.arrive(bucket, index)

        return arrived

    # -- a step -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without reducing: for every backward of a step but the last. May be nested."""
        self.reducer.no_sync_depth += 1
        try:
            yield
        finally:
            self.reducer.no_sync_depth -= 1

    def start_grad_sync(self, *unused: Any, force_all_reduce: bool = False) -> None:
        """Launch every bucket that backward has not launched yet. Collective over the data group, asynchronous.

        Where several models share the group it launches nothing: finalize_model_grads does, in an order that it checks.
        """
        self.reducer.start(force_all_reduce=force_all_reduce, early=True)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Complete the data-parallel reduction, launching what is left. Idempotent. Collective over the data group.

        Sync rules (sequence parallelism, tied embeddings) are `finalize_model_grads`' part.
        """
        self.reducer.finish(force_all_reduce=force_all_reduce)
        self.reducer.attach()

    def zero_grad_buffer(self) -> None:
        """Zero all gradients and begin a new step.

        Gradients that were not finalized are dropped; under overlap that is collective, as their reduction has begun: a
        step may be dropped after a backward on every rank, or on none.
        """
        self.reducer.discard()
        for buffer in (*self.grad_buffers, *self.expert_parallel_buffers):
            buffer.zero()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """The same as zero_grad_buffer: gradients live in the buffer, where there is nothing to set to None."""
        self.zero_grad_buffer()

    def check_memory(self) -> None:
        """Raise SyncError if somebody has freed the memory of gradients or parameters."""
        for buffer in (*self.grad_buffers, *self.expert_parallel_buffers):
            buffer.check_memory()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply every gradient by a factor (a number, or a 0-dim tensor)."""
        for buffer in (*self.grad_buffers, *self.expert_parallel_buffers):
            buffer.scale_gradients(scaling_factor)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather the parameters whose shards the optimizer has just written. Collective over the shard groups.

        They are complete when it returns, with or without `force_sync` (Megatron's argument), so that every read after
        it is right.
        """
        if self.ddp_config.sharded:
            self.param_sync.gather()

    def start_bucket_param_sync(self, bucket: Bucket) -> None:
        """Gather one bucket's parameters, for an optimizer that is about to update the next one; returns at once.

        Called for every bucket, in one order on all ranks, instead of `start_param_sync`; then `finish_param_sync`,
        before anybody reads or writes a parameter. Collective over the bucket's shard group.
        """
        self.param_sync.start_bucket(bucket)

    def finish_param_sync(self) -> None:
        """Wait for the gathers of `start_bucket_param_sync`; nothing to do after the optimizer's `step`."""
        self.param_sync.finish()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Make all copies within a stage equal to those of each group's first rank.

        Collective over the data groups and those of tensor-parallel copies.
        """
        broadcast_weights(self.plan, self.groups, self.param_sync.collectives)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(0)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises TypeError: a copy would need process groups and buffers of its own."""
        raise TypeError(
            "DistributedDataParallel cannot be copied or pickled: it holds process groups and buffers. Give the model "
            "inside, ddp.module, to copy.deepcopy, AveragedModel or torch.save; its copy is a plain module"
        )

    # -- looking in -------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """A table of buffers, buckets, bytes, groups and divisors, and each parameter's reductions in order."""
        buffers = [*self.grad_buffers, *self.expert_parallel_buffers]
        return describe_model(self.plan, buffers, self.groups, self.ddp_config.reduce_microbatches)

    def step_report(self) -> StepReport:
        """What the reductions of the last finished step cost on this rank."""
        report = self.reducer.step_report()
        resolve(report.events)
        return report

    def overlap_report(self) -> OverlapReport:
        """When each collective of the last finished step was ready, launched, done and waited for, on this rank, and
        what of that time was exposed; with the parameter gathers that were last waited for. `print(report.table())`.
        """
        report = OverlapReport(tuple(self.reducer.step_report().events), tuple(self.param_sync.events()))
        resolve((*report.reductions, *report.gathers))
        return report

    # -- in the middle of a step ------------------------------------------------------------------------------------

    def reduced_so_far(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's shards of microbatches that are reduced already, to save a step that is not over.

        Empty unless reduce_microbatches is 'every', where it launches first what backward has left in `.grad`: copy
        `.grad` after it, not before. Other gradients of an open step are there. Each rank saves its own. Collective:
        every rank calls it after the same microbatch.
        """
        self.reducer.complete_round()
        found = {name: bucket.reduced_so_far() for name, bucket in self._streamed()}
        return {name: shard for name, shard in found.items() if shard is not None}

    def restore_reduced(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Continue a step from what `reduced_so_far` returned on this rank, after zero_grad_buffer().

        Raises ValueError, before anything is changed, when the buckets are others.
        """
        buckets = dict(self._streamed())
        for name, shard in saved.items():
            if name not in buckets or shard.shape != buckets[name].shard.shape:
                here = "does not exist" if name not in buckets else f"has {buckets[name].shard.numel()} elements"
                raise ValueError(
                    f"rank {dist.get_rank()}: the saved partial gradients hold {shard.numel()} elements of {name}, "
                    f"which {here} here; a step is continued with the layout, strategy and bucket size of its begin"
                )
        for name, shard in saved.items():
            buckets[name].restore(shard)

    def _streamed(self) -> Iterator[tuple[str, StreamedBucket]]:
        for number, buffer in enumerate((*self.grad_buffers, *self.expert_parallel_buffers)):
            for bucket in buffer.buckets:
                if isinstance(bucket, StreamedBucket):
                    yield f"buffer {number} {bucket.layout.describe()}", bucket

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The wrapped module's state dict, without a prefix for the wrapper."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """The same as state_dict, under the name that Megatron's checkpoint code calls."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the wrapped module. `assign` would replace parameters that live in the buffer, and is refused."""
        if assign:
            raise ValueError(
                "assign=True replaces parameters, which would leave their buffers behind; load with assign=False"
            )
        return self.module.load_state_dict(state_dict, strict=strict)


def _begin_forward(wrapper_of: WeakLink[DistributedDataParallel], module: nn.Module, _inputs: Any) -> None:
    """Note that a step begins. Raises SyncError where gradients would be reduced twice, or have no memory."""
    wrapper = wrapper_of()
    if wrapper is None:
        return
    outside = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)  # its forward is running
    if outside is not None and any(part is module for part in outside.modules()):
        raise SyncError(
            f"the forward of {type(module).__name__} runs inside torch's DistributedDataParallel, and it is wrapped by "
            "core.distributed's too: both would reduce its gradients, each into the other's. Leave one of the two out"
        )
    wrapper.check_memory()
    if torch.is_grad_enabled():
        wrapper.reducer.forward_seen = True


def hook_gradient(param: nn.Parameter, hook: Callable[[torch.Tensor], None]) -> None:
    """Have `hook` called with the parameter whenever autograd has added to its gradient."""
    if type(param) is nn.Parameter and param._post_accumulate_grad_hooks is None:
        # As register_post_accumulate_grad_hook does, which takes ten times as long for a handle that nobody would use.
        # torch numbers its hooks, so a name is nobody else's key.
        hooks: OrderedDict[Any, Any] = OrderedDict()
        hooks[HOOK] = hook
        param._post_accumulate_grad_hooks = hooks
    else:
        param.register_post_accumulate_grad_hook(hook)
