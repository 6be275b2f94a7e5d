"""Gradient handlers that reduce over process groups.

Groups default to those of ``parallel_state``. ``bucket_cap_mb`` limits the MiB per collective (a larger tensor is sent
separately). ``deterministic`` sums in rank order, like the engine's deterministic_reduction.

Handlers that average over data ranks skip parameters that a wrapper reduces. These are determined in every call,
because a wrapper may have been deleted since the last one. Gradients of torch's DistributedDataParallel are compared
between ranks, because ``no_sync`` may have left them local.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed.contract.gradient_contract import ContractError
from core.distributed.hooks import engine_of
from core.distributed.wire.collectives import Collectives
from core.gradient_handler.base import BaseGradientHandler
from core.gradient_handler.loose_gradients import GradientHandlerError, LooseGradient, LooseReduction, Wrapper
from core.gradient_handler.registry import GRADIENT_HANDLER
from core.groups.agree import SyncError
from core.groups.param_attributes import data_group_of


class GroupGradientHandler(BaseGradientHandler):
    """Base class of handlers that sum loose gradients over groups chosen by a subclass.

    ``traffic`` counts the data sent.

    Args:
        model: Model with the gradients.
        optimizer: Optimizer of the parameters.
        bucket_cap_mb: Maximum MiB per collective. Unlimited by default.
        deterministic: Sum in rank order.
    """

    same_names = True  # True if the parameters of a group are named alike on all its ranks

    def __init__(
        self, model: nn.Module, optimizer: Any, *, bucket_cap_mb: float | None = None, deterministic: bool = False
    ) -> None:
        super().__init__(model, optimizer)
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}; it must be above 0, or None for no cap")
        self.bucket_cap_mb = bucket_cap_mb
        self.collectives = Collectives(ordered=deterministic)
        self.traffic = self.collectives.traffic
        self._reduction: LooseReduction | None = None
        self._planned: list[int] = []

    @abstractmethod
    def gradients(self) -> list[LooseGradient]:
        """List the gradients of this handler, in an order that all ranks of a group share. Called once."""

    def wrappers(self) -> dict[int, Wrapper]:
        """Return the wrappers that currently reduce parameters instead of this handler, by id of the parameter."""
        return {}

    def not_ready(self, wrappers: Mapping[int, Wrapper]) -> Exception | None:
        """Return an error if this rank cannot reduce now, else ``None``."""
        if [id(param) for param in self._model.parameters()] != self._planned:
            return GradientHandlerError(
                "the model's parameters are not those of the first call; make a new handler after changing the model"
            )
        return None

    def handle_gradient(self) -> None:
        """Reduce the gradients in place. Collective over the handler's groups. No-op without process groups."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        if self._reduction is None:
            self._planned = [id(param) for param in self._model.parameters()]
        wrappers = self.wrappers()
        failure = self.not_ready(wrappers)
        if self._reduction is None:
            self._reduction = LooseReduction(
                self.gradients(),
                self.collectives,
                bucket_cap_mb=self.bucket_cap_mb,
                same_names=self.same_names,
                failure=failure,
            )
        self._reduction.run(wrappers, failure)


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(GroupGradientHandler):
    """Averages all gradients over the data-parallel ranks (including context-parallel ones).

    It rejects an expert's parameter (``allreduce=False``) with a ContractError; use MoeGradientHandler for it.

    Args:
        model: Model with the gradients.
        optimizer (Optimizer): Optimizer of the parameters.
        group: Ranks to average over. Defaults to the data x context parallel group of ``parallel_state``.
        options: Further arguments of GroupGradientHandler: ``bucket_cap_mb`` and ``deterministic``.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, *, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(model, optimizer, **options)
        self._group = group

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Group that gradients are averaged over."""
        return self._group if self._group is not None else parallel_state.get_process_groups().require("dp_cp")

    def gradients(self) -> list[LooseGradient]:
        """List all gradients of the model."""
        scale = 1.0 / dist.get_world_size(self.data_group)
        return [LooseGradient(name, p, self._group_of(p), scale) for name, p in self._model.named_parameters()]

    def wrappers(self) -> dict[int, Wrapper]:
        """Find the wrappers inside the model that average parameters."""
        return averaged_by_wrappers(self._model)

    def not_ready(self, wrappers: Mapping[int, Wrapper]) -> Exception | None:
        """Return an error also for experts without a wrapper, and for a wrapper over fewer ranks than the handler."""
        for name, param in self._model.named_parameters():
            wrapper = wrappers.get(id(param))
            error = self._refusal(name, param) if wrapper is None else None
            if wrapper is not None:
                ours = set(dist.get_process_group_ranks(self._group_of(param)))
                done = set(dist.get_process_group_ranks(wrapper.group))
                if not ours <= done:  # neither leaving it nor averaging it again would give the mean over the group
                    error = ContractError(
                        f"parameter {name!r} is averaged by {wrapper.name} over ranks {sorted(done)} and by this "
                        f"handler over {sorted(ours)}; wrap the model with all of these ranks, or leave the wrapper or "
                        "the handler out"
                    )
            if error is not None:
                return error
        return super().not_ready(wrappers)

    def _group_of(self, param: nn.Parameter) -> dist.ProcessGroup:
        return self.data_group

    def _refusal(self, name: str, param: nn.Parameter) -> ContractError | None:
        if not is_expert(param):
            return None
        return ContractError(
            f"parameter {name!r} is an expert's; averaging it over all data-parallel ranks would mix different "
            "experts. Use MoeGradientHandler"
        )


@GRADIENT_HANDLER.register_module
class SequenceParallelGradientHandler(DataParallelGradientHandler):
    """Averages all gradients over ranks with different samples or different parts of a sequence.

    Each rank's loss is the mean over its part of the sequence, so the average is the gradient of the global mean.
    ``group`` is data x sequence, and defaults to the data x context parallel group of ``parallel_state``.
    """


@GRADIENT_HANDLER.register_module
class MoeGradientHandler(DataParallelGradientHandler):
    """Averages dense gradients over data-parallel ranks and sums expert gradients over their replicas.

    An expert is marked by ``allreduce=False``, ``moe_info`` or ``ep_group``. Its gradient is a sum over tokens from all
    ranks, each normalized only by its own rank's loss. So it is divided by the size of the full data group, like a
    dense gradient.

    Args:
        model (Module): Model with the gradients.
        optimizer (Optimizer): Optimizer of the parameters.
        expert_group (ProcessGroup, optional): Ranks with the same experts. Defaults to the group of ``parallel_state``;
            a parameter's ``moe_info.dp_group`` takes precedence.
        options: Further arguments of DataParallelGradientHandler, such as the data ``group``.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, *, expert_group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        super().__init__(model, optimizer, **options)
        self._expert_group = expert_group

    def _group_of(self, param: nn.Parameter) -> dist.ProcessGroup:
        if not is_expert(param):
            return self.data_group
        own = getattr(getattr(param, "moe_info", None), "dp_group", None) or self._expert_group
        return own if own is not None else parallel_state.get_process_groups().require("expt_dp")

    def _refusal(self, name: str, param: nn.Parameter) -> ContractError | None:
        return None


@GRADIENT_HANDLER.register_module
class PipelineSharedModuleGradientHandler(GroupGradientHandler):
    """Sums the gradients of a module shared by several pipeline stages, such as a tied embedding.

    The attribute ``pipeline_shared_module_pg`` of a shared parameter is its group. Each stage has a part of the
    gradient, so the parts are summed, not averaged. It also works on a model in core's DistributedDataParallel, after
    ``finalize_model_grads``, unless the wrapper sums the parameter itself (``shared_embedding``) or shards its
    gradient.
    """

    same_names = False

    def gradients(self) -> list[LooseGradient]:
        """List the gradients of parameters with a group."""
        return [LooseGradient(name, param, _stages_of(param)) for name, param in self._shared()]

    def not_ready(self, wrappers: Mapping[int, Wrapper]) -> Exception | None:
        """Return an error also for gradients that a wrapper has not finalized yet, sums itself, or shards."""
        for name, param in self._shared():
            engine = engine_of(param)
            if engine is None:
                continue
            contract, bucket = next(
                (contract, bucket)
                for bucket in engine.reducer.buckets
                for owned, contract in zip(bucket.params, bucket.contracts, strict=True)
                if owned is param
            )
            if contract.crosses_stages:
                return ContractError(
                    f"parameter {name!r} has pipeline_shared_module_pg, and DistributedDataParallel already sums it "
                    "over pipeline stages (shared_embedding or a declaration); drop one of the two"
                )
            if bucket.sharded:
                return ContractError(
                    f"parameter {name!r}: its gradient is sharded by DistributedDataParallel, so nothing is left in "
                    ".grad to add; set param.shared_embedding = True before wrapping and leave this handler out"
                )
            if engine.reducer.open:
                return SyncError(
                    f"rank {dist.get_rank()}: PipelineSharedModuleGradientHandler came before finalize_model_grads; "
                    "call finalize_model_grads([model]) first"
                )
        return super().not_ready(wrappers)

    def _shared(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, param) for name, param in self._model.named_parameters() if _stages_of(param) is not None]


def _stages_of(param: nn.Parameter) -> Any:
    return getattr(param, "pipeline_shared_module_pg", None)


# -- existing reductions --------------------------------------------------------------------------------------------


def is_expert(param: nn.Parameter) -> bool:
    """Return ``True`` for an expert's parameter, marked by ``allreduce=False`` or ColossalAI's ``moe_info``,
    ``ep_group``.
    """
    if data_group_of(param) == "expt_dp" or getattr(param, "ep_group", None) is not None:
        return True
    info = getattr(param, "moe_info", None)
    return info is not None and getattr(info, "ep_size", 1) > 1


def averaged_by_wrappers(model: nn.Module) -> dict[int, Wrapper]:
    """Return the wrapper inside the model that averages a parameter, by id of the parameter."""
    found: dict[int, Wrapper] = {}
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            torchs = Wrapper("torch's DistributedDataParallel", module.process_group, may_be_local=True)
            ignored = module.parameters_to_ignore
            found.update({id(param): torchs for name, param in module.module.named_parameters() if name not in ignored})
    for engine in {engine for param in model.parameters() if (engine := engine_of(param)) is not None}:
        for bucket in engine.reducer.buckets:
            ours = Wrapper("DistributedDataParallel", bucket.groups.data, may_be_local=False)
            found.update({id(param): ours for param in bucket.params})
    return found
