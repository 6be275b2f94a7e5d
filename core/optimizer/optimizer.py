"""MegatronOptimizer: one step from reduced gradients to updated parameters.

    measure (norm, zeros, finiteness; one reduction over everybody) -> skip or clip -> inner torch optimizer over master
    weights -> parameters' memory -> (sharded) gather

Where a rank owns all of a bucket or only a shard of it, everything here is the same; the bucket says which.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from core.distributed.bucket import Bucket, BucketState, SyncError
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.grad_buffer import GradBuffer
from core.optimizer.clip_grads import GradMeter, GradStats, clip_coefficient, scale_gradients
from core.optimizer.inner_optimizer import inner_optimizer
from core.optimizer.master_weights import BucketMasters, Run, masters_of
from core.optimizer.optimizer_config import OptimizerConfig
from core.optimizer.optimizer_state import (
    entry_of,
    load_groups,
    load_run,
    needed_part,
    save_groups,
    stretches_of_equal_steps,
)
from core.optimizer.param_groups import ParamGroups
from core.process_groups import ProcessGroups

logger = logging.getLogger(__name__)


class ModelChunk(Protocol):
    """What the optimizer needs of a wrapped model."""

    ddp_config: DistributedDataParallelConfig
    groups: ProcessGroups
    module: torch.nn.Module
    buffers: list[GradBuffer]
    expert_parallel_buffers: list[GradBuffer]

    def zero_grad_buffer(self) -> None:
        """Zero all gradients and begin a new step."""

    def start_param_sync(self) -> None:
        """Gather updated parameters from their owners."""


class MegatronOptimizer:
    """Updates the parameters of wrapped model chunks; made by `get_megatron_optimizer`.

    Every rank of the job calls `step` together.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[ModelChunk],
        param_groups: ParamGroups,
        everybody: Sequence[dist.ProcessGroup],
    ) -> None:
        self.config = config
        self.model_chunks = list(model_chunks)
        self.masters = [masters_of(bucket, param_groups.of) for bucket in self._buckets()]
        torch_groups = param_groups.torch_groups(config)
        for masters in self.masters:
            for run in masters.runs:
                torch_groups[run.group]["params"].append(run.master)
        self.optimizer = inner_optimizer(config, torch_groups)
        self.names = self._qualified_names()
        self.meter = GradMeter(self.masters, everybody)
        self.steps_skipped = 0

    # -- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Update the parameters from reduced gradients. Collective: every rank of the job.

        Returns (was the update made, global gradient norm before clipping, zeros among the gradients if counted).
        A NaN or Inf anywhere skips the step on all ranks, with a warning that names it: (False, None, None).
        Raises SyncError when `finalize_model_grads` has not made the gradients ready.
        """
        self._expect_final_gradients()
        self._follow_freezing()
        stats = self.meter.measure(count_zeros=self.config.log_num_zeros_in_grad)
        if self._must_skip(stats):
            self.steps_skipped += 1
            return False, None, None
        for masters in self.masters:
            masters.load_gradients()
        scale_gradients(self.masters, clip_coefficient(self.config.clip_grad, stats.norm))
        self._attach_gradients()
        self.optimizer.step()
        for masters in self.masters:
            masters.store_parameters()
        self._publish()
        return True, stats.norm, stats.num_zeros

    def _buckets(self) -> list[Bucket]:
        return [
            bucket
            for chunk in self.model_chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            for bucket in buffer.buckets
        ]

    def _qualified_names(self) -> dict[int, str]:
        """id(parameter) -> its name, with the chunk's number before it where there are several chunks."""
        prefixes = ["" if len(self.model_chunks) == 1 else f"model{i}." for i in range(len(self.model_chunks))]
        return {
            id(param): prefix + contract.name
            for prefix, chunk in zip(prefixes, self.model_chunks, strict=True)
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
            for bucket in buffer.buckets
            for param, contract in zip(bucket.params, bucket.contracts, strict=True)
        }

    def _expect_final_gradients(self) -> None:
        for masters in self.masters:
            bucket = masters.bucket
            whole = bucket.state is BucketState.REDUCED and not any(contract.rules for contract in bucket.contracts)
            if bucket.state is not BucketState.FINAL and not whole:
                raise SyncError(
                    f"rank {dist.get_rank()}: optimizer.step() came while {bucket.layout.describe()} was "
                    f"{bucket.state.value}; its gradients are not reduced. Call finalize_model_grads([model]) "
                    "after the last backward and before step()"
                )

    def _must_skip(self, stats: GradStats) -> bool:
        threshold = self.config.grad_norm_skip_threshold
        if stats.culprit is None and math.isfinite(stats.norm) and stats.norm <= threshold:
            return False
        if dist.get_rank() == 0:
            reason = stats.culprit or f"gradient norm {stats.norm:.4g}, grad_norm_skip_threshold {threshold:.4g}"
            logger.warning("optimizer step skipped on all ranks, parameters unchanged: %s", reason)
        return True

    def _follow_freezing(self) -> None:
        """Cut parameters that were frozen after the wrap out of their run: no decay and no momentum moves them."""
        for masters in self.masters:
            for run in list(masters.runs):
                trainable = [piece.param.requires_grad for piece in run.slices]
                if len(set(trainable)) > 1:
                    self._split(masters, run, _stretch_lengths(trainable))

    def _split(self, masters: BucketMasters, run: Run, counts: list[int]) -> list[Run]:
        parts = masters.split(run, counts, self.optimizer.state)
        params = self.optimizer.param_groups[run.group]["params"]
        index = next(i for i, master in enumerate(params) if master is run.master)
        params[index : index + 1] = [part.master for part in parts]
        return parts

    def _attach_gradients(self) -> None:
        for masters in self.masters:
            for run in masters.runs:
                run.master.grad = run.grad if run.slices[0].param.requires_grad else None

    def _publish(self) -> None:
        """Make updated parameters known to other ranks; nothing to do where every rank updates all of them."""

    # -- what users of Megatron call --------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups; a scheduler may set 'lr' and 'weight_decay'."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """The master weights that this rank updates."""
        return [master for group in self.param_groups for master in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero all gradients and begin a new step. They stay views of the buffer, whatever `set_to_none` is."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward on: without fp16 there is no loss scale."""
        return loss

    def get_loss_scale(self) -> torch.Tensor:
        """The factor in `scale_loss`."""
        return torch.ones(1, dtype=torch.float32, device=self.meter.device)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Take master weights from the model's parameters; call it after loading weights into the model."""
        for masters in self.masters:
            masters.load_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The param groups, and this rank's part of the state by parameter name (see optimizer_state.py)."""
        state = self.optimizer.state
        return {
            "param_groups": save_groups(self.param_groups),
            "state": {
                self.names[id(piece.param)]: entry_of(masters, run, piece, state.get(run.master, {}))
                for masters in self.masters
                for run in masters.runs
                for piece in run.slices
            },
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state. Load the model's weights too: in full precision they are the masters.

        Raises ValueError, before anything is changed, when a parameter or elements that this rank needs are missing.
        """
        entries = state_dict["state"]
        missing = [n for m in self.masters for p in m.slices if (n := self.names[id(p.param)]) not in entries]
        if missing:
            raise ValueError(
                f"the saved optimizer state lacks {missing[0]!r} (and {len(missing) - 1} more); was it saved by "
                "another model or another rank?"
            )
        parts = {
            id(piece): needed_part(name, piece, entries[name])
            for masters in self.masters
            for piece in masters.slices
            for name in (self.names[id(piece.param)],)
        }
        load_groups(self.param_groups, state_dict["param_groups"])
        self.optimizer.state.clear()
        for masters in self.masters:
            for whole in list(masters.runs):
                lengths = stretches_of_equal_steps([parts[id(piece)] for piece in whole.slices])
                for run in self._split(masters, whole, lengths) if len(lengths) > 1 else [whole]:
                    fused = bool(self.param_groups[run.group].get("fused"))
                    state = load_run(masters, run, [parts[id(piece)] for piece in run.slices], fused=fused)
                    if state:
                        self.optimizer.state[run.master] = state


def _stretch_lengths(flags: Sequence[bool]) -> list[int]:
    lengths: list[int] = []
    for index, flag in enumerate(flags):
        if index and flags[index - 1] == flag:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


class ReplicatedOptimizer(MegatronOptimizer):
    """Every rank of a data group updates every parameter, from equal gradients to equal parameters."""
