"""ChainedOptimizer: several optimizers that measure, skip, clip and step as one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from core.optimizer.optimizer import MegatronOptimizer
from core.optimizer.optimizer_state import Entry

# Options that all chained optimizers must share, because they step or skip together.
COMMON = (
    "clip_grad",
    "grad_norm_type",
    "grad_norm_skip_threshold",
    "log_num_zeros_in_grad",
    "fp16",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "hysteresis",
)


class ChainedOptimizer(MegatronOptimizer):
    """Combines optimizers over different model chunks, so that they share a gradient norm and a loss scale, and step or
    skip together.

    ``get_megatron_optimizer`` already covers dense and expert parameters of all chunks. A chain is for models with
    different configurations, such as a slow-learning encoder paired with a faster decoder:

        first = get_megatron_optimizer(slow, [encoder])
        optimizer = ChainedOptimizer([first, get_megatron_optimizer(fast, [decoder])])

    The loss scale is the first optimizer's. Every rank of the job must create and step the chain together.

    Args:
        chained_optimizers: Optimizers with equal clipping, skipping and loss-scale options, over different chunks.

    Raises:
        ValueError: If the list is empty, if an option or the process groups differ, or if two optimizers share a chunk.
    """

    def __init__(self, chained_optimizers: Sequence[MegatronOptimizer]) -> None:
        self.chained_optimizers = list(chained_optimizers)
        self._check()
        first = self.chained_optimizers[0]
        self.config = first.config
        self.model_chunks = [chunk for optimizer in self.chained_optimizers for chunk in optimizer.model_chunks]
        self.world_groups = first.world_groups
        self.masters = [masters for optimizer in self.chained_optimizers for masters in optimizer.masters]
        self.grad_scaler = first.grad_scaler
        for optimizer in self.chained_optimizers:
            optimizer.grad_scaler = self.grad_scaler
        self._before_first_step()

    def _check(self) -> None:
        if not self.chained_optimizers:
            raise ValueError("ChainedOptimizer was given no optimizer; pass a list of at least one")
        first = self.chained_optimizers[0]
        seen: dict[int, int] = {}
        for number, optimizer in enumerate(self.chained_optimizers):
            for name in COMMON:
                mine, other = getattr(optimizer.config, name), getattr(first.config, name)
                if mine != other:
                    raise ValueError(
                        f"OptimizerConfig.{name} is {other} in optimizer 0 of the chain and {mine} in optimizer "
                        f"{number}; they step or skip together, by one norm and one loss scale. Make it equal"
                    )
            if optimizer.world_groups != first.world_groups:
                raise ValueError(
                    f"optimizers 0 and {number} of the chain decide over different process groups; wrap their models "
                    "with the same pg_collection"
                )
            for chunk in optimizer.model_chunks:
                if seen.setdefault(id(chunk), number) != number:
                    raise ValueError(
                        f"optimizers {seen[id(chunk)]} and {number} of the chain hold the same model chunk, whose "
                        "parameters would be updated twice; give each its own"
                    )

    def model_of_buckets(self) -> list[Hashable]:
        """Return the model of each bucket. Buckets of different optimizers never belong to one model."""
        return [
            (number, model)
            for number, optimizer in enumerate(self.chained_optimizers)
            for model in optimizer.model_of_buckets()
        ]

    # -- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step every optimizer with the shared factors. Always returns ``True``."""
        stats = self._spent = self._measured()
        self._spent_of, self._stats = self._reductions(), None
        begin = 0
        for optimizer in self.chained_optimizers:
            end = begin + len(optimizer.masters)
            optimizer._stats = replace(stats, factors=stats.factors[begin:end])
            optimizer._limits = self._limits
            optimizer.step_with_ready_grads()
            begin = end
        self.step_was_skipped = False
        self.skip_log.made(self._scale)
        return True

    def record_step(self, *, skipped: bool) -> None:
        """Record the outcome of the last step on every optimizer of the chain."""
        self.step_was_skipped = skipped
        for optimizer in self.chained_optimizers:
            optimizer.record_step(skipped=skipped)

    # -- what users of Megatron call --------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.chained_optimizers for group in optimizer.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:
        return self.chained_optimizers[0].defaults

    @property
    def state(self) -> Any:
        """Inner optimizers' state by master weight, merged into a new dictionary. Writing to it has no effect."""
        return {master: state for optimizer in self.chained_optimizers for master, state in optimizer.state.items()}

    # -- state ------------------------------------------------------------------------------------------------------

    def state_by_parameter(self) -> dict[str, list[Entry]]:
        """Return all optimizers' entries by parameter name. Raises ValueError if two of them share a name."""
        entries: dict[str, list[Entry]] = {}
        for optimizer in self.chained_optimizers:
            for name, found in optimizer.state_by_parameter().items():
                if name in entries:
                    raise ValueError(
                        f"two optimizers of the chain hold a parameter named {name!r}; use the state of each one of "
                        "chained_optimizers"
                    )
                entries[name] = found
        return entries

    @torch.no_grad()
    def load_state_by_parameter(self, entries: Mapping[str, Any]) -> None:
        """Load each optimizer's own parameters from entries as ``state_by_parameter`` returns them.

        Raises:
            ValueError: If two optimizers have parameters of the same name, or an optimizer lacks entries.
        """
        self.state_by_parameter()  # names must be unambiguous
        for optimizer in self.chained_optimizers:
            optimizer.load_state_by_parameter(entries)

    def state_dict(self) -> Any:
        """Return a list of the optimizers' state dicts, or the state dict itself for a chain of one."""
        states = [optimizer.state_dict() for optimizer in self.chained_optimizers]
        return states[0] if len(states) == 1 else states

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Load the state that ``state_dict`` of an equal chain returned.

        Args:
            state_dict: A list with one state dict per optimizer, or one state dict for a chain of one.

        Raises:
            ValueError: If the number of optimizers differs.
        """
        states = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        if len(states) != len(self.chained_optimizers):
            raise ValueError(
                f"the saved chain holds {len(states)} optimizers and this one {len(self.chained_optimizers)}; build "
                "the same chain"
            )
        for optimizer, state in zip(self.chained_optimizers, states, strict=True):
            optimizer.load_state_dict(state)
