"""GradAccumOptimizer: scales each loss, and steps, clips and reduces once per cycle of microbatches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.distributed_data_parallel import DistributedDataParallel
from core.distributed.finalize_model_grads import finalize_model_grads
from core.distributed.wire.collectives import Collectives
from core.gradient_accumulation.cycle import Accumulation, AccumulationError, StandIn, shared_state
from core.groups.agree import control_device
from core.groups.rank_grid import AXES
from core.optimizer.norm.clip_loose import clip_loose_gradients
from core.optimizer.optimizer import MegatronOptimizer
from core.optimizer.optimizer_state import plain_numbers
from core.optimizer.step.scaled_backward import scaled_backward

TorchDDP = nn.parallel.DistributedDataParallel


class GradAccumOptimizer(StandIn, torch.optim.Optimizer):
    """Optimizer wrapper for gradient accumulation.

    Each loss is scaled by 1 / ``accumulate_size``. ``step``, ``zero_grad`` and clipping do nothing until a step is due.

    Args:
        optim (Optimizer): A torch optimizer, one from ``get_megatron_optimizer``, or one with ColossalAI's ``backward``
            and ``clip_grad_by_norm``.
        accumulate_size (int): Number of microbatches per step.
        model (Module, optional): Its wrappers (torch's and core's DistributedDataParallel) stay under no_sync,
            including the forward, for all microbatches except the last. core's wrapper is finalized at the end of the
            cycle unless the loop has done so.
        state (Accumulation, optional): State shared with the other wrappers.
        data_group (Callable[[], ProcessGroup], optional): Returns the group over which tokens are summed. Defaults to
            the group of torch's DistributedDataParallel, else only this rank.
    """

    _inner = "optim"

    def __init__(
        self,
        optim: Any,
        accumulate_size: int,
        model: nn.Module | None = None,
        *,
        state: Accumulation | None = None,
        data_group: Callable[[], dist.ProcessGroup] | None = None,
    ) -> None:
        self.accumulation = shared_state(state, accumulate_size)
        self.optim = optim
        self.model = model
        modules = [] if model is None else list(model.modules())
        self._ours = [module for module in modules if isinstance(module, DistributedDataParallel)]
        self._torchs = [module for module in modules if isinstance(module, TorchDDP)]
        self._data_group = data_group
        self._norm: Any = None
        self._delays_reductions = False
        self._no_sync = ExitStack()
        weakref.finalize(self, self._no_sync.close)  # a model that outlives this object reduces again
        self.accumulation.optimizer = weakref.ref(self)
        self.hold_reductions()

    @property
    def accumulate_size(self) -> int:
        """Number of microbatches per step."""
        return self.accumulation.size

    @property
    def accumulate_step(self) -> int:
        """Number of microbatches accumulated in this cycle."""
        return self.accumulation.count

    @property
    def is_due(self) -> bool:
        """True if the next ``step`` updates the parameters."""
        return self.accumulation.is_due

    def backward(self, loss: torch.Tensor, num_tokens: float | torch.Tensor | None = None) -> None:
        """Accumulate the gradient of loss / accumulate_size.

        Args:
            loss (Tensor): Mean over the microbatch, or a sum over tokens if ``num_tokens`` is given.
            num_tokens (float | Tensor, optional): Number of tokens in the microbatch. The loss is then not scaled. At
                the end of the cycle gradients are divided by the tokens of the entire cycle and data group, so
                microbatches may differ in size.
        """
        tokens = self._begin(num_tokens)
        scaled = loss / self.accumulation.size if tokens is None else loss
        if hasattr(self.optim, "backward"):
            self.optim.backward(scaled)
        elif hasattr(self.optim, "scale_loss"):
            self.optim.scale_loss(scaled).backward()
        else:
            scaled.backward()
        self.accumulation.backward_done(tokens)

    def backward_by_grad(
        self, tensor: torch.Tensor, grad: torch.Tensor, num_tokens: float | torch.Tensor | None = None
    ) -> None:
        """Run backward from a gradient of the next pipeline stage or another source, whose loss is already scaled.

        Args:
            tensor (Tensor): Output to differentiate.
            grad (Tensor): Gradient of the output.
            num_tokens (float | Tensor, optional): Number of tokens in the microbatch, as in ``backward``.
        """
        tokens = self._begin(num_tokens)
        if hasattr(self.optim, "backward_by_grad"):
            self.optim.backward_by_grad(tensor, grad)
        else:
            with scaled_backward(getattr(self.optim, "grad_scaler", None)):
                torch.autograd.backward(tensor, grad)
        self.accumulation.backward_done(tokens)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the inner optimizer if a step is due, and return its result. Otherwise return ``None``."""
        if not self.accumulation.is_due:
            self.accumulation.stepped()
            return None
        self._settle()
        result = self.optim.step(*args, **kwargs)
        refused = isinstance(result, tuple) and bool(result) and result[0] is False
        skipped = refused or bool(getattr(self.optim, "step_was_skipped", False))
        self._norm = None
        self.accumulation.updated(made=not skipped)
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero gradients at the beginning of a cycle. No-op later in a cycle."""
        if self.accumulation.count == 0:
            self.optim.zero_grad(*args, **kwargs)

    def discard(self) -> None:
        """Drop the gradients of this cycle and start a new one. All ranks must call it."""
        self._norm = None
        self.accumulation.begin()
        for wrapper in self._ours:
            wrapper.zero_grad_buffer()  # waits for reductions in flight
        self.optim.zero_grad()

    def clip_grad_norm(self, model: nn.Module | None, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip the full gradient once, if a step is due.

        Args:
            model (Module): Model whose gradients are clipped. ``None`` for all parameters of the optimizer.
            max_norm (float): Maximum norm. 0 or less disables clipping.
            norm_type (float, optional): Order of the norm.

        Returns:
            The norm before clipping, or ``None`` if no step is due.

        Raises:
            ValueError: If only the optimizer can compute the norm.
        """
        if not self.accumulation.is_due or max_norm <= 0:
            return None
        if self._norm is None:
            self._check_clipping()
            self._settle()
            if hasattr(self.optim, "clip_grad_by_norm"):
                self._norm = self.optim.clip_grad_by_norm(max_norm)
            else:
                params = self._params() if model is None else list(model.parameters())
                self._norm = clip_loose_gradients(params, max_norm, norm_type)
        return self._norm

    def clip_grad_by_norm(self, max_norm: float) -> Any:
        """Call ``clip_grad_norm`` on the model, under ColossalAI's name."""
        return self.clip_grad_norm(self.model, max_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, this rank's position in the cycle, and its partial gradients.

        Raises:
            AccumulationError: If a step is due and its gradients may be in flight to other ranks.
        """
        state = self.accumulation
        if state.reduced or state.handled or (state.is_due and self._ours):
            raise AccumulationError(
                "a step is due and its gradients may be on their way to other ranks; save after optimizer.step(), or "
                "before the last microbatch of a cycle"
            )
        gradients: dict[str, torch.Tensor] = {}
        reduced: list[dict[str, torch.Tensor]] = [{} for _ in self._ours]
        if state.count > 0:
            reduced = [wrapper.reduced_so_far() for wrapper in self._ours]  # first: it may take gradients out of .grad
            named = self._named_params()
            gradients = {n: p.grad.detach().clone() for n, p in named.items() if p.grad is not None}
        return {
            **plain_numbers(self.optim.state_dict()),
            "accumulation": {
                "size": state.size,
                "count": state.count,
                "tokens": state.tokens,
                "schedule_due": state.schedule_due,
                "gradients": gradients,
                "reduced": reduced,
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state from ``state_dict``, also mid-cycle, or a state of only the inner optimizer.

        Each rank loads its own state.

        Raises:
            ValueError: If the size or the parameters differ. Nothing is changed in this case.
        """
        inner = dict(state_dict)
        saved = inner.pop("accumulation", None) or {"count": 0, "gradients": {}, "size": self.accumulation.size}
        named = self._named_params()
        if saved["count"] and saved["size"] != self.accumulation.size:
            raise ValueError(
                f"the saved state is {saved['count']} microbatches into a cycle of {saved['size']}, and "
                f"accumulate_size is {self.accumulation.size}; save at the end of a cycle, or load with the same size"
            )
        unknown = [name for name in saved["gradients"] if name not in named]
        if unknown:
            raise ValueError(f"the saved partial gradients name {unknown[0]!r}, which this model does not have")
        for wrapper, reduced in zip(self._ours, saved.get("reduced") or [{}] * len(self._ours), strict=True):
            wrapper.zero_grad_buffer()
            wrapper.restore_reduced(reduced)
        self.optim.load_state_dict(inner)
        for name, param in named.items():
            _restore_gradient(param, saved["gradients"].get(name))
        self._norm = None
        self.accumulation.count = saved["count"]
        self.accumulation.tokens = saved.get("tokens")
        self.accumulation.schedule_due = bool(saved.get("schedule_due", False))
        self.accumulation.reduced = False
        self.accumulation.handled.clear()
        self.accumulation.stepped()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a GradAccumOptimizer is not copied or pickled; save its state_dict()")

    def _begin(self, num_tokens: float | torch.Tensor | None) -> float | None:
        state = self.accumulation
        state.expect_backward()
        if state.count > 0 and (num_tokens is None) != (state.tokens is None):
            raise AccumulationError(
                "some microbatches of this cycle gave num_tokens and others did not; their gradients would be scaled "
                "differently. Give it for all of them or for none"
            )
        return None if num_tokens is None else float(num_tokens)  # exact up to 2**53

    # -- the boundary -----------------------------------------------------------------------------------------------

    def hold_reductions(self) -> None:
        """Reduce only in the last microbatch. torch's wrapper decides in forward, so this must be set before it."""
        if self.accumulation.is_last:
            self._no_sync.close()
            self._delays_reductions = False
        elif not self._delays_reductions:
            for wrapper in (*self._ours, *self._torchs):
                self._no_sync.enter_context(wrapper.no_sync())
            self._delays_reductions = True

    def _settle(self) -> None:
        """Fully reduce and scale the accumulated gradient, once per cycle, before clipping or the step."""
        state = self.accumulation
        if len(state.handled) < state.handlers:
            raise AccumulationError(
                f"{state.handlers - len(state.handled)} of {state.handlers} gradient handlers did not run before the "
                "step that is due; call handle_gradient() of each after backward, before clipping and step()"
            )
        self.finalize()
        if state.tokens is not None and not state.reduced:
            self._divide_by_tokens(state.tokens)
        state.reduced = True

    def finalize(self) -> None:
        """Finalize the gradients of core's wrappers, unless the loop has done so."""
        if any(wrapper.reducer.open for wrapper in self._ours):
            tokens = self.accumulation.tokens
            finalize_model_grads(
                self._ours, None if tokens is None else torch.tensor(tokens, dtype=torch.float64, device="cpu")
            )

    def _divide_by_tokens(self, tokens: float) -> None:
        """Convert the rank-mean of token sums to the mean over all tokens of the data group."""
        total, size = tokens, 1
        group = self._token_group()
        if group is not None and dist.get_world_size(group) > 1:
            size = dist.get_world_size(group)
            summed = torch.tensor(tokens, dtype=torch.float64, device=control_device(group))
            Collectives().all_reduce(summed, group, "num_tokens").wait()
            total = float(summed)
        finalized = {id(param) for wrapper in self._ours for param in wrapper.parameters()}
        grads = [p.grad for p in self._params() if p.grad is not None and id(p) not in finalized]
        if grads:
            torch._foreach_mul_(grads, size / (total or 1.0))

    def _token_group(self) -> dist.ProcessGroup | None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        if self._data_group is not None:
            return self._data_group()
        return self._torchs[0].process_group if self._torchs else None

    def _check_clipping(self) -> None:
        if getattr(self.optim, "clips_full_gradient", False):
            return
        if isinstance(self.optim, MegatronOptimizer):
            raise ValueError(
                "this optimizer clips inside step(), by a norm over all ranks; set OptimizerConfig(clip_grad=...) and "
                "leave clip_grad_norm out"
            )
        for wrapper in self._ours:
            split = any(wrapper.groups.size(axis.name) > 1 for axis in AXES if axis.carries == "activations")
            if split or wrapper.ddp_config.sharded:
                raise ValueError(
                    "each rank holds a part of the gradient here, and a norm of parts clips wrongly; use "
                    "get_megatron_optimizer with OptimizerConfig(clip_grad=...)"
                )

    def _params(self) -> list[nn.Parameter]:
        return list(self._named_params().values())

    def _named_params(self) -> dict[str, nn.Parameter]:
        if self.model is not None:
            return dict(self.model.named_parameters())
        params = (param for group in self.optim.param_groups for param in group["params"])
        return {str(number): param for number, param in enumerate(params)}


def _restore_gradient(param: nn.Parameter, saved: torch.Tensor | None) -> None:
    if param.grad is not None and saved is not None:
        param.grad.copy_(saved)  # it may be a view of a buffer
    elif saved is not None:
        if saved.dtype != param.dtype:
            param.grad_dtype = saved.dtype
        param.grad = saved.detach().clone().to(param.device)
    elif getattr(param, "main_grad", None) is None:
        param.grad = None
