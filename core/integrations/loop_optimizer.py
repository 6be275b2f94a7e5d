"""LoopOptimizer: a user's torch optimizer over a wrapped model, stepped by a loop that is another library's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from core import parallel_state
from core.booster.checkpoint_io.sharded_states import full_state_dict, load_full_state_dict
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.buffer.bucket import BucketState
from core.interface.optimizer import check_max_norm
from core.optimizer.adopted_optimizer import AdoptedOptimizer
from core.optimizer.groups.model_check import params_of
from core.optimizer.optimizer import MegatronOptimizer
from core.optimizer.optimizer_config import OptimizerConfig
from core.optimizer.step.inner_step import Factors, InnerStep


class LoopOptimizer(AdoptedOptimizer):
    """Optimizer for other libraries' loops: reduces gradients if the loop has not, and steps a torch optimizer.

        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(None, config, model)
        optimizer = LoopOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        loss_of(model, batch).backward()
        optimizer.clip(1.0)
        optimizer.step()

    Works with every sharding strategy. Param groups stay the user's dictionaries, so an existing scheduler keeps
    working. A step whose gradients are not finite is skipped on all ranks, with a warning. Collective: every rank
    must create it and call its methods together.

    Args:
        model: The wrapped model.
        user: A torch optimizer over exactly the model's trainable parameters.

    Raises:
        ValueError: If ``user`` has other parameters, or needs full parameters that shards may cut.
    """

    def __init__(self, model: DistributedDataParallel, user: torch.optim.Optimizer) -> None:
        _check_parameters(model, user)
        self._collected: dict[str, Any] | None = None
        super().__init__(OptimizerConfig(clip_grad=0.0), model, user)
        self.param_names = {param: contract.name for _, param, contract in params_of([model])}

    # -- one step, in order -----------------------------------------------------------------------------------------

    def _take_gradients(self) -> str | None:
        if any(masters.bucket.step.state is not BucketState.FINAL for masters in self.masters):
            finalize_model_grads(self.model_chunks)
        return super()._take_gradients()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the next step by their global norm.

        Args:
            max_norm: Limit of the norm; math.inf only measures.
            norm_type: Must be the optimizer's norm, 2.

        Returns:
            The norm before clipping, 0-dim.

        Raises:
            ValueError: If the limit is not positive, or another norm is requested.
        """
        check_max_norm(max_norm)
        if norm_type != self.config.grad_norm_type:
            raise ValueError(
                f"norm_type is {norm_type}, but the norm of sharded gradients is the "
                f"{self.config.grad_norm_type:g}-norm; leave it out"
            )
        self.prepare_grads()
        return torch.tensor(self.clip_grad_norm(max_norm), dtype=torch.float64, device=self.meter.device)

    def _update(self, step: InnerStep, factors: Sequence[Factors]) -> None:
        if self.model_chunks[0].ddp_config.sharded:
            super()._update(step, factors)
        else:
            MegatronOptimizer._update(self, step, factors)

    def record_step(self, *, skipped: bool) -> None:
        """Mark the torch optimizer as stepped, because LR schedulers warn if it was not."""
        super().record_step(skipped=skipped)
        self.user._opt_called = True

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the full state as torch has it, with parameter names. Collective, except inside ``collected``."""
        if self._collected is not None:
            return self._collected
        return full_state_dict(self, self.param_names)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Inside it ``state_dict()`` can be called by one rank alone. Collective: every rank enters it."""
        self._collected = full_state_dict(self, self.param_names)
        try:
            yield
        finally:
            self._collected = None

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a full state dict of this class, or of the torch optimizer over the same parameters."""
        load_full_state_dict(self, self.param_names, state_dict)


def _check_parameters(model: DistributedDataParallel, user: torch.optim.Optimizer) -> None:
    held = {id(param) for group in user.param_groups for param in group["params"]}
    trained = {id(param): contract.name for _, param, contract in params_of([model])}
    missing = [name for key, name in trained.items() if key not in held]
    if missing:
        raise ValueError(
            f"the optimizer lacks {len(missing)} of the model's trainable parameters, the first {missing[0]!r}; their "
            "gradients would be reduced and never used. Set requires_grad to False before the model is wrapped, or "
            "give one optimizer all of them, in groups"
        )
    foreign = sum(1 for group in user.param_groups for p in group["params"] if p.requires_grad and id(p) not in trained)
    if foreign:
        raise ValueError(
            f"{foreign} of the optimizer's parameters are not in the wrapped model; make the optimizer of "
            "model.parameters(), of one model"
        )


def config_or_default(given: DistributedDataParallelConfig | None) -> DistributedDataParallelConfig:
    """Return the config, by default like torch's DDP: replicated gradients, overlapped reduction, rank 0's weights.

    Buffers are broadcast from rank 0, unless the config says False.

    Raises:
        TypeError: If ``given`` is another kind of object.
    """
    if given is not None and not isinstance(given, DistributedDataParallelConfig):
        raise TypeError(
            f"ddp_config is {given!r}; expected a core.distributed.DistributedDataParallelConfig, such as "
            'DistributedDataParallelConfig(data_parallel_sharding_strategy="optim")'
        )
    config = given or DistributedDataParallelConfig(overlap_grad_reduce=True, initial_weights="broadcast")
    return replace(config, broadcast_buffers=True) if config.broadcast_buffers is None else config


def data_parallel_groups(library: str) -> Any:
    """Return parallel_state's groups, or create a data group of all ranks. Collective if none exist yet.

    Args:
        library: Name of the library, for the error text.

    Raises:
        ValueError: If ranks of one model would get different batches from the library's data loaders.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    groups = parallel_state.get_process_groups()
    world = torch.distributed.get_world_size()
    if groups.size("dp") != world:
        raise ValueError(
            f"{library} distributes batches to {world} ranks, but parallel_state has a data group of "
            f"{groups.size('dp')}, so ranks of one model would train on different batches. Write your own loop for "
            "that layout (docs/source/your_own_loop.md)"
        )
    return groups


def finalize_new(model: DistributedDataParallel) -> None:
    """Reduce gradients that a backward of this step has added. Collective; ranks must have run the same backwards."""
    if model.reducer.open and model.reducer.gradients > 0:
        finalize_model_grads([model])
