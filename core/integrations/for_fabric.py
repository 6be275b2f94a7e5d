"""Lightning Fabric's strategy over this package's wrapper: ``Fabric(strategy=FabricStrategy(ddp_config))``."""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.extras import require
from core.integrations.loop_optimizer import LoopOptimizer, config_or_default, data_parallel_groups, finalize_new
from core.optimizer.grad_scaler import GradScaler

if TYPE_CHECKING:
    from lightning_fabric.strategies import DDPStrategy as Base
else:
    Base = object


class StrategyParts(Base):
    """Mixin that adds data-parallel sharding to Fabric's DDPStrategy.

    ``from core.integrations import FabricStrategy`` combines both:

        strategy = FabricStrategy(DistributedDataParallelConfig(...))
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        model, optimizer = fabric.setup(model, optimizer)

    Args:
        ddp_config: Reduction and sharding of gradients. None replicates everything, as torch's DDP does.
        kwargs: Arguments of Fabric's DDPStrategy; torch DDP's own arguments are rejected.
    """

    def __init__(self, ddp_config: DistributedDataParallelConfig | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self._ddp_kwargs:
            raise ValueError(
                f"FabricStrategy was given {', '.join(sorted(self._ddp_kwargs))}, which speak to torch's DDP; say it "
                "in ddp_config=DistributedDataParallelConfig(...), or leave it out"
            )
        self.ddp_config = config_or_default(ddp_config)
        self.wrapped: list[DistributedDataParallel] = []
        self._backward_sync_control = SyncControl()

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap the model. Collective."""
        groups = data_parallel_groups("Fabric")
        self.wrapped.append(DistributedDataParallel(None, self.ddp_config, module, pg_collection=groups))
        return self.wrapped[-1]

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return an optimizer that steps this rank's part of its model. Collective.

        Raises:
            ValueError: If no model was set up.
        """
        self._take_scaler()
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for model in self.wrapped:
            if any(id(param) in held for param in model.module.parameters()):
                return LoopOptimizer(model, optimizer)
        raise ValueError(
            "an optimizer was set up whose parameters are in no model that was; call fabric.setup(model, optimizer), "
            "or fabric.setup_module(model) first"
        )

    def _take_scaler(self) -> None:
        """Put our loss scale, which asks all ranks, in the place of torch's, with its numbers."""
        theirs = getattr(self.precision, "scaler", None)
        if theirs is None or isinstance(theirs, GradScaler):
            return
        self.precision.scaler = GradScaler(
            self.root_device.type,
            init_scale=theirs.get_scale(),
            growth_factor=theirs.get_growth_factor(),
            backoff_factor=theirs.get_backoff_factor(),
            growth_interval=theirs.get_growth_interval(),
            enabled=theirs.is_enabled(),
        )

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward. Outside ``no_backward_sync`` all gradients are reduced afterwards. Collective there."""
        super().backward(tensor, module, *args, **kwargs)
        for model in self.wrapped:
            if model.require_backward_grad_sync:
                finalize_new(model)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the gradients of the next step by their global norm, and return the norm before. Collective."""
        self._unscale(optimizer)
        norm: torch.Tensor = optimizer.clip(max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the gradient's norm is {norm.item()}, so it cannot be clipped; to have such steps skipped, pass "
                "error_if_nonfinite=False"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Clamp each element of the reduced gradients. Collective."""
        self._unscale(optimizer)
        optimizer.prepare_grads()
        optimizer.clamp(clip_val)

    def _unscale(self, optimizer: Any) -> None:
        scaler = getattr(self.precision, "scaler", None)
        if scaler is not None:
            scaler.unscale_(optimizer)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the full state dict, without a prefix. Collective if parameters are sharded."""
        return module.state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a full state dict. Collective if parameters are sharded."""
        module.load_state_dict(state_dict, strict=strict)


class SyncControl:
    """The object that Fabric asks for ``no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """The wrapper's ``no_sync`` where ``enabled`` is True."""
        if not enabled:
            return nullcontext()
        assert isinstance(module, DistributedDataParallel), "set up by this strategy"
        return module.no_sync()


def _package() -> Any:
    """Fabric, of the package ``lightning``, or its own."""
    try:
        return importlib.import_module("lightning.fabric")
    except ImportError:
        return require("lightning_fabric", "core.integrations.FabricStrategy", "integrations")


@functools.cache
def derived() -> Any:
    """The class to use: Fabric's, with these parts. MissingExtra where Fabric is not installed."""
    bases = (StrategyParts, _package().strategies.DDPStrategy)
    return type("FabricStrategy", bases, {"__doc__": StrategyParts.__doc__})
