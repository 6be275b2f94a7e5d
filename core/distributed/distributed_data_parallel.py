"""DistributedDataParallel, the public wrapper. It maps Megatron's names to calls of the engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.grad_attribute import attributes_alone
from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.contract.placement import MemStats
from core.distributed.describe import describe_model, where
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.engine import Engine
from core.distributed.guard.finite import Finding
from core.distributed.guard.misuse import StepGuard, refuse_reshaped
from core.distributed.guard.replicas import refuse_unequal, unequal_weights
from core.distributed.hooks import hook, owned_params
from core.distributed.materialize import MARK, Init, broadcast_weights, make_all, make_and_shard
from core.distributed.reduce.grad_reducer import StepReport
from core.distributed.wire.collective_events import resolve
from core.distributed.wire.overlap import OverlapReport
from core.groups.agree import SyncError
from core.groups.process_groups import ProcessGroups
from core.watch.collector_pause import collector_paused


class DistributedDataParallel(nn.Module):
    """Wrap a model chunk so that its gradients are reduced in buckets across data-parallel ranks.

    Reducing each gradient separately would launch one small collective per parameter. The wrapper instead stores
    gradients in contiguous buffers, whose buckets are reduced as soon as backward has filled them
    (``overlap_grad_reduce``). Buffers can also be sharded, with the optimizer state and the parameters (ZeRO-1 to
    ZeRO-3).

        config = DistributedDataParallelConfig(overlap_grad_reduce=True)
        model = DistributedDataParallel(None, config, model)
        for batch in data:
            model.zero_grad_buffer()
            loss_of(model, batch).backward()
            finalize_model_grads([model])
            optimizer.step()

    After ``finalize_model_grads``, ``param.main_grad`` holds the gradient averaged over data-parallel ranks (or per
    token, with ``num_tokens``). ``param.grad`` is the same tensor, or ``None`` if no rank used the parameter. If
    gradients are sharded, only this rank's shard of ``main_grad`` is valid and ``param.grad`` is a ``GradPlaceholder``,
    which raises ``SyncError`` when it is used.

    Constructing the wrapper is collective over all ranks that hold this chunk. If several wrapped models share process
    groups, ranks may run them in different orders, so their gradients are reduced in ``finalize_model_grads`` instead
    of during backward. Wrap them as one module to overlap the reduction.

    Args:
        config (ModelParallelConfig, optional): ``None`` for a model without tensor, sequence or expert parallelism.
        ddp_config: How gradients are reduced and sharded. Not modified.
        module: Any module whose parameters are all on one device.
        disable_bucketing: Use a single bucket per buffer, for chunks whose gradients are not on the critical path.
        pg_collection: Process groups of the model. Defaults to the groups of ``parallel_state``.

    Raises:
        LayoutMismatch: On all ranks, if ranks hold different models or different copies of a weight.
        ContractError: If a parameter's tags contradict each other, or no rule reduces its partial gradient.
        ValueError: If this rank's module or config cannot be used.
        TypeError: If the arguments are in another order, or of another type.
    """

    def __init__(
        self,
        config: Any = None,
        ddp_config: DistributedDataParallelConfig | None = None,
        module: nn.Module | None = None,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroups | None = None,
    ) -> None:
        misplaced = isinstance(config, (nn.Module, DistributedDataParallelConfig))
        misplaced = misplaced or not isinstance(ddp_config, DistributedDataParallelConfig | None)
        if misplaced or not isinstance(module, nn.Module):
            given = ", ".join(type(argument).__name__ for argument in (config, ddp_config, module))
            raise TypeError(
                f"DistributedDataParallel was given ({given}) and takes a config or None, then core.distributed's "
                "DistributedDataParallelConfig or None, then the module; call "
                "DistributedDataParallel(module=model), or DistributedDataParallel(None, "
                "DistributedDataParallelConfig(...), model)"
            )
        if pg_collection is not None and not isinstance(pg_collection, ProcessGroups):
            raise TypeError(
                f"pg_collection is a {type(pg_collection).__name__}; pass core.groups.process_groups.ProcessGroups("
                "dp_cp=..., ...) with the groups that the model is split over"
            )
        super().__init__()
        self.config = config
        self.ddp_config = DistributedDataParallelConfig() if ddp_config is None else ddp_config
        self.module = module
        self.groups = pg_collection if pg_collection is not None else parallel_state.get_process_groups()
        self.groups.require("dp_cp")
        with collector_paused():
            self._wrap(disable_bucketing or self.groups.rank("pp") > 0)

    # -- wrapping ---------------------------------------------------------------------------------------------------

    def _wrap(self, one_bucket: bool) -> None:
        init: Init | None = None
        for part in self.module.modules():  # a materialized one may be inside
            init = vars(part).pop(MARK, init)
        if init is not None and not self.ddp_config.shards_parameters:
            make_all(self.module, init)
            init = None
        engine = Engine(
            self.module, self.config, self.ddp_config, self.groups, one_bucket=one_bucket, owned=owned_params()
        )
        self.engine, self.plan, self.all_buffers = engine, engine.plan, engine.buffers
        self.contracts: dict[str, GradientContract] = engine.plan.contracts
        self.collectives = engine.collectives
        self.grad_buffers = [buffer for buffer in engine.buffers if buffer.layout.key.data_group == "dp_cp"]
        self.expert_parallel_buffers = [b for b in engine.buffers if b.layout.key.data_group == "expt_dp"]
        self.nan_watch = engine.reducer.watch
        self.reducer, self.grad_sync, self.param_sync = engine.reducer, engine.grad_sync, engine.params
        self.step_guard = StepGuard(self, self.reducer, engine.ids, engine.weights)
        if init is not None:
            make_and_shard(self.module, init, engine.params, engine.plan, self.groups, self.ddp_config.initial_weights)
        elif self.ddp_config.initial_weights == "broadcast":
            broadcast_weights(engine.plan, self.groups, engine.params.collectives)
        elif self.ddp_config.initial_weights == "check":
            refuse_unequal(unequal_weights(engine.weights.copies(cut=False), self.groups), self.groups, step=0)
        if init is None:
            engine.params.shard_params(engine.plan.named.values())
        if engine.buffer_sync is not None:
            engine.buffer_sync.broadcast()
        hook(engine)

    # -- a step -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if "reducer" not in vars(self) and self.training and torch.is_grad_enabled():
            raise _copy_error("reducer")  # its gradients would not be reduced
        engine = vars(self).get("engine")  # a copy has none
        if engine is not None and self.training and not torch.compiler.is_compiling():  # a compiled one reads none
            watch = engine.model_watch
            if watch.numels != list(map(torch.Tensor.numel, watch.params)):  # 0.05 ms for 1,000 parameters
                refuse_reshaped(watch.names, watch.params, watch.shapes)  # autograd's error would name no parameter
        if engine is not None and engine.buffer_sync is not None:
            syncs = torch.is_grad_enabled() and self.reducer.no_sync_depth == 0
            once = self.reducer.shards_gradients
            engine.buffer_sync.before_forward(self.reducer.steps, syncs=syncs, once_a_step=once)
        with nullcontext() if engine is None else engine.params.reading():
            return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward accumulates gradients without reducing them. May be nested.

        For gradient accumulation, use it for every microbatch except the last, so that each step needs only one
        reduction.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """False while backward accumulates without reducing, as inside ``no_sync``.

        Loops such as nanoGPT's set this attribute of torch's DDP. Its value is read when backward runs.
        """
        return self.reducer.no_sync_depth == 0

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, syncs: bool) -> None:
        """Enable or disable reduction in backward."""
        self.reducer.no_sync_depth = 0 if syncs else 1

    def start_grad_sync(self, *unused: Any, force_all_reduce: bool = False) -> None:
        """Launch every bucket that backward has not launched yet, asynchronously. Collective over the data group.

        If several models share the group, ``finalize_model_grads`` launches their buckets instead, in an order that it
        checks.

        Args:
            unused: Accepted for Megatron's callers and ignored.
            force_all_reduce (bool, optional): Give every rank full gradients even if they are sharded.
        """
        self.reducer.start(force_all_reduce=force_all_reduce, early=True)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Launch the remaining buckets and wait for the data-parallel reduction. Idempotent.

        Collective over the data group. ``finalize_model_grads`` runs the sync rules (sequence parallelism, tied
        embeddings).

        Args:
            force_all_reduce (bool, optional): Give every rank full gradients even if they are sharded.
        """
        self.reducer.agree_on_order()
        self.reducer.finish(force_all_reduce=force_all_reduce)

    def zero_grad_buffer(self) -> None:
        """Zero all gradients and begin a new step.

        Gradients that were not finalized are dropped. With overlap enabled their reduction has already started, so
        after a backward pass the ranks must either all drop the step or all keep it.
        """
        with attributes_alone():
            self.reducer.discard()
            for buffer in self.all_buffers:
                buffer.zero()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Call ``zero_grad_buffer``. ``set_to_none`` is ignored, because gradients stay allocated in the buffer."""
        self.zero_grad_buffer()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply every gradient by a number or 0-dim tensor. Raises SyncError if a bucket is in flight."""
        for bucket in self.engine.buckets:
            bucket.scale_gradients(scaling_factor)

    def param_shard(self, param: nn.Parameter) -> tuple[int, torch.Tensor] | None:
        """Return this rank's shard of a sharded parameter, or ``None`` if it is not sharded. Does not communicate.

        An optimizer writes the shard between ``begin_param_update`` and ``record_param_write``, which every rank of the
        shard group must call.

        Returns:
            (offset in the flattened parameter, 1-D tensor of elements).
        """
        engine = vars(self).get("engine")  # a copy has none
        return None if engine is None else engine.params.own_part_of(param)

    def begin_param_update(self) -> None:
        """Wait until no rank reads the old parameters, before an optimizer writes shards. Collective over the shard
        groups.

        Raises:
            SyncError: Inside ``gathered``, because the write would be lost.
        """
        self.engine.params.begin_update()

    def record_param_write(self) -> None:
        """Finish an update after this rank has written its shards. Collective over the shard groups."""
        self.engine.params.invalidate()
        self.engine.params.barrier()

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """All-gather the parameters whose shards the optimizer has written, and wait. Collective over the shard groups.

        Args:
            unused: Accepted for Megatron's callers and ignored.
            force_sync, force_dispatch: Megatron's arguments, ignored because the gather always completes.
        """
        self.param_sync.finish_update()

    def finish_param_sync(self) -> None:
        """Wait for parameter gathers that the optimizer started bucket by bucket. No-op after the optimizer's
        ``step``.
        """
        self.param_sync.finish()

    def gathered(self) -> AbstractContextManager[None]:
        """Context manager in which all parameters are unsharded, to evaluate, export, generate or modify them.

            with model.gathered():
                torch.save(model.state_dict(), "weights.pt")

        Every rank of the data-parallel group must enter and leave the context. Writes are kept, and all ranks must
        write the same values. Nothing is communicated if parameters are not sharded.

        Raises:
            SyncError: Inside a forward or backward.
        """
        return self.engine.params.gathered()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Broadcast each weight from the first rank of its group of copies: data-parallel, and tensor-parallel if
        replicated.
        """
        with self.gathered():
            broadcast_weights(self.plan, self.groups, self.param_sync.collectives)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Return a copy that computes the same outputs, for weight averages and evaluation. Does not communicate.

        The copy has a plain module and no buffers. Its forward raises ``SyncError`` in training mode if gradients
        would be recorded, and so does every call that reduces. Wrap ``copy.module`` to train it. Copy sharded
        parameters inside ``gathered``.
        """
        if "param_sync" in vars(self):
            self.param_sync.finish()
            if not self.engine.params.stays_unsharded:
                raise SyncError(
                    "the parameters are sharded and not gathered, so there is nothing to copy; do it inside "
                    "`with model.gathered():`, on all ranks"
                )
        copied = type(self).__new__(type(self))
        memo |= {id(self): copied, id(self.config): self.config, id(self.ddp_config): self.ddp_config}
        state = {name: value for name, value in vars(self).items() if name not in _ENGINE}
        copied.__dict__.update(copy.deepcopy(state, memo))
        for param, twin in zip(self.parameters(), copied.parameters(), strict=True):
            vars(twin).update({name: tag for name, tag in vars(param).items() if name != "main_grad"})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and ``torch.save``: a copy, as from ``copy.deepcopy``."""
        return copy.deepcopy(self).__dict__

    def __getattr__(self, name: str) -> Any:
        if name in _ENGINE:
            raise _copy_error(name)
        if name in _ELSEWHERE:
            raise AttributeError(f"DistributedDataParallel has no {name!r} as torch's has; {_ELSEWHERE[name]}")
        if name != "module":  # tools look up what state_dict() lists, which has no prefix for the wrapper
            module = vars(self.module)
            for kind in ("_modules", "_parameters", "_buffers"):
                if name in module[kind]:
                    return module[kind][name]
        return super().__getattr__(name)

    # -- looking in -------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return a table of buffers, buckets, bytes, groups and divisors, with each parameter's reductions in order."""
        chosen = "every" if self.ddp_config.reduces_every_microbatch else "last"
        table = describe_model(self.plan, self.all_buffers, self.groups, chosen, self.engine.params.units)
        return f"{table}{self.engine.params.eviction.describe()}"

    @property
    def memstats(self) -> MemStats | None:
        """Return memory statistics of the first step under ``Placement(memory_budget_bytes=...)``, to pass to the next
        run.

        The result is ``None`` without a budget, before that step has ended, or if ranks have used different modules.
        """
        return self.engine.params.eviction.memstats

    def where(self, name: str) -> str:
        """Explain in one sentence where a parameter's gradient is stored now and why ``.grad`` has its value.

        ``name`` is as in ``module.named_parameters()``. Raises ValueError if no parameter has this name.
        """
        return where(name, self.all_buffers, self.plan.frozen)

    def step_report(self) -> StepReport:
        """Return the communication cost of the last finished step's reductions on this rank."""
        report = self.reducer.step_report()
        resolve(report.events)
        return report

    def overlap_report(self) -> OverlapReport:
        """Return when each collective of the last finished step was launched, completed and waited for on this rank.

        ``print(report.table())`` shows how much communication was exposed, including the last parameter gathers.
        """
        report = OverlapReport(tuple(self.reducer.step_report().events), tuple(self.param_sync.events()))
        resolve((*report.reductions, *report.gathers))
        return report

    def reduced_so_far(self) -> dict[str, torch.Tensor]:
        """Return copies of this rank's shards for microbatches that are already reduced, to save an unfinished step.

        The result is empty unless ``reduce_microbatches`` is 'every'. In that mode this call first reduces the
        gradients that backward left in ``.grad``, so copy ``.grad`` after it. All other gradients of the open step are
        in ``.grad``. Each rank saves its own result. Every rank must make this call after the same microbatch.
        """
        self.reducer.complete_microbatch()
        found = {name: bucket.reduced_so_far() for name, bucket in self._sharded_buckets().items()}
        return {name: shard for name, shard in found.items() if shard is not None}

    def restore_reduced(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Continue a step from a saved result of ``reduced_so_far``. Call it after ``zero_grad_buffer()``.

        Raises ValueError, before anything is changed, if the buckets differ.
        """
        buckets = self._sharded_buckets()
        for name, shard in saved.items():
            if name not in buckets or shard.shape != buckets[name].memory.owned_grad.shape:
                here = (
                    "does not exist"
                    if name not in buckets
                    else f"has {buckets[name].memory.owned_grad.numel()} elements"
                )
                raise ValueError(
                    f"rank {dist.get_rank()}: the saved partial gradients hold {shard.numel()} elements of {name}, "
                    f"which {here} here; a step is continued with the layout, strategy and bucket size of its begin"
                )
        for name, shard in saved.items():
            buckets[name].restore(shard)

    def unequal_weights(self) -> Finding | None:
        """Return the first weight whose copies differ within this stage, or ``None``. Collective over the groups of
        copies.
        """
        return unequal_weights(self.engine.weights.copies(), self.groups)

    def reading(self) -> AbstractContextManager[None]:
        """Context manager in which parameters can be read without running a forward.

        If parameters are sharded, each unit is unsharded while it is used, and all ranks must read in the same order.
        """
        return self.engine.params.reading()

    def _sharded_buckets(self) -> dict[str, Bucket]:
        return {
            f"buffer {number} {bucket.layout.describe()}": bucket
            for number, buffer in enumerate(self.all_buffers)
            for bucket in buffer.buckets
            if bucket.memory.pool is not None
        }

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the module's state dict without a wrapper prefix. Collective if parameters are sharded."""
        with self.engine.params.gathered("state_dict()"):
            state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return ``state_dict``, under the name that Megatron's checkpoint code calls.

        Args:
            prefix, keep_vars: As for ``state_dict``.
        """
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the wrapped module and return missing and unexpected names, as torch does.

        Collective over the data-parallel group if parameters are sharded.

        Args:
            state_dict: State dict of the module, or of torch's DDP, whose names begin with 'module.'.
            strict: As in torch, names must match exactly.
            assign: Must be ``False``, because it would replace parameters whose memory is in the buffer.

        Raises:
            ValueError: If ``assign`` is ``True``.
        """
        if assign:
            raise ValueError(
                "assign=True replaces parameters, which would leave their buffers behind; load with assign=False"
            )
        with self.engine.params.gathered("load_state_dict()"):
            return self.module.load_state_dict(_without_prefix(state_dict, self.module), strict=strict)


def _without_prefix(state: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Remove torch DDP's prefix from names, unless the module's own names begin with it."""
    prefix = "module."
    if not state or not all(name.startswith(prefix) for name in state):
        return state
    if any(name.startswith(prefix) for name in module.state_dict()):
        return state
    return {name.removeprefix(prefix): value for name, value in state.items()}


# Methods of torch's DDP, and their replacement here.
_ELSEWHERE = {
    "register_comm_hook": "to send gradients in another dtype set grad_communication_dtype in the config, and to "
    "reduce them otherwise give sync_rules",
    "join": "each step's reductions need all ranks: give them as many batches, or count tokens, of which a rank may "
    "have none (finalize_model_grads(..., num_tokens))",
}
# Attributes created with the engine, which a copy does not have.
_ENGINE = frozenset(
    (
        *("groups", "engine", "plan", "contracts", "collectives"),
        *("all_buffers", "grad_buffers", "expert_parallel_buffers", "reducer", "grad_sync", "param_sync"),
        *("nan_watch", "step_guard"),
    )
)


def _copy_error(missing: str) -> SyncError:
    return SyncError(
        f"this DistributedDataParallel is a copy of a wrapped model and has no {missing}: copies have no gradient "
        "buffers and are not reduced. Evaluate with it, or wrap its module to train it: "
        "DistributedDataParallel(copy.config, copy.ddp_config, copy.module)"
    )
