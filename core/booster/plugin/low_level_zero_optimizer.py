"""LowLevelZeroOptimizer: the optimizer interface of a training loop, over the engine's sharded optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.booster.checkpoint_io.checks import match_groups, packed_groups
from core.booster.checkpoint_io.sharded_states import (
    full_states,
    load_parts,
    of_all_stages,
    on_host,
    own_part,
    update_groups,
)
from core.booster.plugin.limit_agreement import check_limit
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.distributed.reduce.grad_reducer import OPEN, StepState
from core.groups.agree import SyncError
from core.hugging_face.cut_model import CutModel
from core.interface import OptimizerWrapper
from core.interface.model import all_of
from core.interface.optimizer import check_clip_value, check_max_norm
from core.optimizer.adopted_optimizer import AdoptedOptimizer
from core.optimizer.norm.clip_grads import clip_coefficient
from core.optimizer.optimizer_state import plain_numbers
from core.optimizer.step.scaled_backward import scaled_backward


class LowLevelZeroOptimizer(OptimizerWrapper):
    """Boosted optimizer of a ZeRO plugin.

    In a step, gradients are reduced (once, at the first call that needs them), measured, and applied. State is indexed
    and named by the full model's parameters, so that it fits any layout. Every rank must call ``step``, ``zero_grad``,
    clipping and norms together.

    Args:
        optim: The user's torch optimizer, whose groups now list this rank's master weights.
        max_norm: The plugin's limit of the gradient norm, or 0 for no clipping.
        full_groups: Names in the full model of the parameters in each group of the user's optimizer.
    """

    clips_full_gradient = True  # for wrappers around this one: its clipping includes the other ranks' parts

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        engine: AdoptedOptimizer,
        chunks: Sequence[DistributedDataParallel],
        max_norm: float,
        cut: CutModel,
        full_groups: Sequence[Sequence[str]],
        *,
        verbose: bool = False,
    ) -> None:
        super().__init__(optim)
        self.scaler = engine.grad_scaler
        self.engine = engine
        self.chunks = list(chunks)
        self.model = self.chunks[0]
        self.cut = cut
        self.full_groups = full_groups
        self.param_names = {param: name for name, param in cut.parameters.items()}
        self.name_of_number = list(itertools.chain.from_iterable(full_groups))
        number_of = {name: number for number, name in enumerate(self.name_of_number)}
        mine = itertools.chain.from_iterable(engine.user_params)
        self.numbers = [number_of[self.param_names[param]] for param in mine]  # number of each parameter here
        self.place_here = {number: place for place, number in enumerate(self.numbers)}
        self.max_norm = max_norm
        self.verbose = verbose
        self.found_inf = False  # True if the last step's gradients overflowed
        self._measured = False  # see `_ready`
        self._clip_once: float | None = None  # replaces max_norm in this step
        self._is_bounded = False  # True if values were clipped after a norm in this step
        self._stepped_at = -1  # number of finalized steps when the last step was made

    @property
    def _together(self) -> list[dist.ProcessGroup]:
        """Return the groups of ranks that hold parts of one gradient, for exchanging a few numbers."""
        groups = self.model.groups
        return [groups.control("dp_cp"), *(groups.require(name) for name in ("tp", "pp") if groups.size(name) > 1)]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [param for params in self.engine.user_params for param in params]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError, because the buffers are already laid out and parameters cannot be added."""
        raise RuntimeError(
            "add_param_group came after boost, when the optimizer's shards are laid out already; add the group to the "
            "torch optimizer before boost"
        )

    # -- one step, in order -----------------------------------------------------------------------------------------

    @property
    def _ready(self) -> bool:
        """Return ``True`` if this step's gradients are reduced and measured, and none were dropped since."""
        return self._measured and not any(chunk.reducer.open for chunk in self.chunks)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop all gradients and begin a new step. Collective if a reduction has begun."""
        self.engine.zero_grad()
        self._begin()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with all_of(chunk.no_sync() for chunk in self.chunks):
            yield

    def backward(self, loss: torch.Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any) -> None:
        """Accumulate the gradient of the unscaled ``loss``, and reduce it unless within ``no_sync``.

        Raises RuntimeError if this step's gradients are already reduced.
        """
        self._expect_open("backward")
        scaled = loss if self.scaler is None else self.scale_loss(loss)
        scaled.backward(inputs=inputs, retain_graph=retain_graph, **kwargs)

    def backward_by_grad(
        self, tensor: torch.Tensor, grad: torch.Tensor, inputs: Any = None, retain_graph: bool = False
    ) -> None:
        """Continue a backward from a gradient that already has the loss scale."""
        self._expect_open("backward_by_grad")
        with scaled_backward(self.scaler):
            torch.autograd.backward(tensor, grad, inputs=inputs, retain_graph=retain_graph)

    def unscale_grad(self) -> None:
        """Do nothing, because the scale is divided out when the gradient is used."""
        if self.scaler is None:
            super().unscale_grad()

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float | None = None, error_if_nonfinite: bool = False, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Clip this step's gradient to ``max_norm`` instead of the plugin's limit. Return the norm before this call.

        The norm is that of the unscaled gradient. Several calls in one step act in their order, as with torch's
        functions. ``norm_type`` must be the plugin's. Collective.

        Raises:
            ValueError: On every rank, if ``max_norm`` is not positive or differs between ranks.
            RuntimeError: If a norm and then values were clipped in this step already.
        """
        measured = self.engine.config.grad_norm_type
        if norm_type not in (None, measured):
            raise ValueError(
                f"norm_type is {norm_type}, and the gradient's norm is measured with {measured}; make the plugin with "
                f"norm_type={norm_type}"
            )
        self._make_ready()  # first: this rank may have had no backward, where others agree on theirs
        check_limit("max_norm", max_norm, check_max_norm, self._together)
        if self.found_inf and error_if_nonfinite:
            raise RuntimeError(f"the gradient's norm is {self._grad_norm}, so it cannot be clipped")
        if self._is_bounded:
            raise RuntimeError(
                "clip_grad_by_norm() came after clip_grad_by_norm() and clip_grad_by_value() in one step; leave out "
                "the first or the last of the three"
            )
        before = self._norm()
        if self._clip_once is not None:  # clipped already, and to the lower one in the end
            before, max_norm = before * clip_coefficient(self._clip_once, before), min(max_norm, self._clip_once)
        self._clip_once, self._grad_norm = max_norm, before
        return torch.tensor(before, dtype=torch.float64, device="cpu")

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Clamp each element of this step's unscaled gradient to [-clip_value, clip_value]. Collective.

        Several calls in one step act in their order, as with torch's functions. The plugin's limit ``max_norm`` is
        applied last. ``get_grad_norm`` returns the clamped gradient's norm, unless a norm was clipped before. Raises
        ValueError on every rank if ``clip_value`` is not positive or differs between ranks.
        """
        self._make_ready()  # first: this rank may have had no backward, where others agree on theirs
        check_limit("clip_value", clip_value, check_clip_value, self._together)
        if self.found_inf:
            return
        if self._clip_once is None:
            self.engine.clamp(clip_value)
            self._grad_norm = self.engine.measured_norm
        else:
            self.engine.clamp(clip_value, self._clip_once)
            self._is_bounded = True

    def get_param_grad(self, param: nn.Parameter) -> torch.Tensor:
        """Return a parameter's full, reduced, unscaled gradient, clipped if this step has clipped it. Collective.

        The parameter's ``.grad`` is empty after the reduction. Call this after the last backward and before ``step``.
        """
        self._make_ready()
        return self.engine.full_gradient(param, self._clip_once or 0.0)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update the parameters, or skip the step on all ranks if a gradient on any rank overflowed. Collective.

        Raises TypeError if a closure is passed.
        """
        if any(argument is not None for argument in (*args, *kwargs.values())):
            raise TypeError("step() takes no closure: its backward would come after the gradients were reduced")
        self._make_ready()
        made = self.engine.apply(self.max_norm if self._clip_once is None else self._clip_once)
        self.record_step(skipped=not made)
        if self.verbose and self.model.groups.rank("dp_cp") == 0:
            scale = 1.0 if self.scaler is None else self.scaler.value
            what = "made" if made else "skipped"
            print(f"step {what}, gradient norm {self._norm():.6g}, loss scale {scale:g}", flush=True)
        self._stepped_at = self._finalized()
        self._begin()

    def sync_grad(self) -> None:
        """Reduce this step's gradients now, for a gradient handler. Idempotent. Collective."""
        self._make_ready()

    def _make_ready(self) -> None:
        """Reduce remaining gradients and measure them, once per step."""
        if self._ready:
            return
        if self._measured:  # the model's zero_grad has dropped the measured gradients
            self._begin()
        reducers = [chunk.reducer for chunk in self.chunks]
        # Asks reducers, because a stage without trained parameters has no bucket.
        done = all(reducer.state not in (*OPEN, StepState.REDUCED) for reducer in reducers)
        stepped = self._finalized() == self._stepped_at
        # Other code, such as a gradient accumulation wrapper, may have finalized; a step was not made since then.
        if not done or stepped:
            # A reducer without buckets cannot detect dropped gradients, so only a forward marks a new step.
            reducing = [r for r in reducers if r.buckets or r.state is StepState.AWAITED]
            if done and not any(reducer.has_new_step for reducer in reducing):
                raise SyncError(
                    "step() (or clipping) came a second time without a backward in between; call zero_grad() and "
                    "booster.backward(loss, optimizer) before each step"
                )
            finalize_model_grads(self.chunks)
        self.found_inf = self.engine.prepare_grads()
        self._grad_norm = self.engine.measured_norm
        self._measured = True

    def _finalized(self) -> int:
        """Return the number of steps whose gradients have been reduced so far."""
        return sum(chunk.reducer.steps for chunk in self.chunks)

    def _begin(self) -> None:
        self._measured = self._is_bounded = False
        self._clip_once = None

    def _norm(self) -> float:
        return float("nan") if self._grad_norm is None else self._grad_norm

    def _expect_open(self, what: str) -> None:
        if self._ready:
            raise RuntimeError(
                f"{what}() came after this step's gradients were reduced (by clipping, a norm or get_param_grad); call "
                "step() or zero_grad() first, and clip only before step()"
            )

    # -- state, in the form of the whole model ------------------------------------------------------------------------

    def packed_groups(self) -> list[dict[str, Any]]:
        """Return the groups with indices and names of all parameters of the full model."""
        return packed_groups(self.engine.param_groups, self.full_groups)

    def full_states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (index, state) of each parameter of the full model. Collective: every rank must exhaust it."""
        joined = ((self.numbers[place], self._joined(place, state)) for place, state in full_states(self.engine))
        yield from of_all_stages(joined, self.cut.groups.pp)

    def _joined(self, place: int, state: dict[str, Any]) -> dict[str, Any]:
        """Join a full parameter's state from its slices. Collective over the groups that split it."""
        name = self.name_of_number[self.numbers[place]]
        return {
            key: self.cut.whole_of(name, value) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
            for key, value in state.items()
        }

    def place(self, number: int, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a full parameter's state in torch's format, or {} on another stage."""
        place = self.place_here.get(number)
        if place is None:
            return {}
        name = self.name_of_number[number]
        sliced = {
            key: self.cut.slice_of(name, value) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
            for key, value in state.items()
        }
        return own_part(self.engine, place, sliced)

    def load_states(self, groups: Sequence[Mapping[str, Any]], states: Mapping[int, dict[str, Any]]) -> None:
        """Load parts that ``place`` returned, by parameter index in the full model, and saved groups."""
        load_parts(self.engine, {self.place_here[n]: state for n, state in states.items() if n in self.place_here})
        update_groups(self.engine, groups)

    def inner_state(self) -> dict[str, Any]:
        """Return the full model's state in torch's format, with masters, in host memory on every rank. Collective.

        Use Booster.save_optimizer(shard=True) for a state that does not fit on a rank.
        """
        states = {number: on_host(state) for number, state in self.full_states()}
        return {"state": states, "param_groups": plain_numbers(self.packed_groups())}

    def load_inner_state(self, state_dict: dict[str, Any]) -> None:
        """Load the state from ``inner_state`` in any layout, or from a torch optimizer over the full model."""
        numbers = match_groups(state_dict["param_groups"], self.packed_groups())
        found = {numbers[int(number)]: state for number, state in state_dict["state"].items()}
        self.load_states(state_dict["param_groups"], {number: self.place(number, s) for number, s in found.items()})
