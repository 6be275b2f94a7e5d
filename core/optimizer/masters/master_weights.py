"""Master weights: the memory that the inner torch optimizer updates, bucket by bucket.

A bucket's owned range is cut into parameter shards. Adjacent shards of one param group are joined to segments, so that
torch steps few long tensors instead of many short ones.

Full-precision parameters are their own masters. They are stepped in place: in the bucket's one tensor (created by
flat_parameters.py for a replicated bucket), or separately if parameters cannot move. master_storage.py lists the
storage formats of all other masters. A segment whose master, gradients or moments are not kept in full precision is
stepped through scratch memory (scratch.py), in pieces that fit there. The exception is a segment kept in one 16-bit
dtype that torch's kernel accepts (``steps_16_bits``), which is stepped in place.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from core.distributed.buffer.bucket import Bucket
from core.distributed.buffer.file_tier import FileTier
from core.distributed.buffer.memory_tier import HostTier, copy_to_host
from core.distributed.wire import huge_pages
from core.optimizer.algorithms.backends import choose
from core.optimizer.masters.flat_parameters import FlatParameters
from core.optimizer.masters.master_storage import CopyStorage, ParameterStorage, RemainderStorage
from core.optimizer.masters.param_shards import ParamShard, cut_shards, join_shards, owned_shards
from core.optimizer.optimizer_config import OptimizerConfig

LOW_PRECISION = (torch.bfloat16, torch.float16)
NUMBERS = ("step", "mu_product", "eta", "mu")  # 0-dim tensors in the state of torch's algorithms
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


@dataclass(slots=True, eq=False)
class Segment:
    """Adjacent shards of one param group, and the tensor that the inner optimizer steps for them.

    ``master`` and ``grad`` of a segment in scratch memory are valid only during its step.
    """

    shards: tuple[ParamShard, ...]
    reduced: torch.Tensor  # [numel], view of the reduced gradients, in their dtype
    master: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.empty(0, device="cpu")))
    grad: torch.Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    in_scratch: bool = False
    wave: int = 0  # segments of a bucket with the same wave are in scratch at the same time
    at: int = 0  # first element in the scratch memory
    storage: ParameterStorage | None = None  # None: the parameters are the master, stepped in place
    moments: dict[str, torch.Tensor] = field(default_factory=dict)  # [numel] each, moments kept in 16 bits
    live: bool = True  # False if its parameters are frozen, or have no gradient on any rank

    @property
    def start(self) -> int:
        return self.shards[0].start

    @property
    def numel(self) -> int:
        return self.reduced.numel()

    @property
    def group(self) -> int:
        return self.shards[0].group

    @property
    def norm_group(self) -> str | None:
        """Name of the norm by which its gradients are clipped."""
        return self.shards[0].norm_group


def storage_of(
    config: OptimizerConfig, dtype: torch.dtype, *, contiguous: bool = True, together: bool = True, apart: bool = False
) -> type[ParameterStorage] | None:
    """Return the storage class of masters for parameters of this dtype, or ``None`` if the parameters are the masters.

    ``together`` means that a bucket's parameters are in one tensor, and ``apart`` that parameters are on another device
    than the one that steps their gradients.
    """
    if dtype not in LOW_PRECISION:
        return None if (contiguous or together) and not apart else CopyStorage
    if not config.use_precision_aware_optimizer or not contiguous:
        return CopyStorage
    if config.main_params_dtype == dtype:
        return ParameterStorage
    remainders = dtype == torch.bfloat16 and config.store_param_remainders and not apart
    return RemainderStorage if remainders else CopyStorage


def steps_16_bits(config: OptimizerConfig, dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device) -> bool:
    """Return ``True`` if torch's fused Adam can step parameters, gradients and moments of one 16-bit dtype in place.

    Its CPU kernel computes in fp32 and rounds once, as a step through scratch does.
    """
    kept = {grad_dtype, config.main_params_dtype, config.exp_avg_dtype, config.exp_avg_sq_dtype}
    if dtype not in LOW_PRECISION or kept != {dtype} or device.type != "cpu":
        return False
    return choose("adam", [(device, dtype)], config.optimizer_backend)[0] == "fused"


class BucketMasters:
    """Master weights of one bucket's owned range, and the gradients that update them.

    Args:
        group_of: Returns the index of a parameter's param group.
        scratch_numel: Longest segment that a device steps through scratch, in elements. Defaults to any length.
        needs_shape: Returns True if a param group's algorithm needs unsplit parameters in their shape.
        only_adam: True if Adam steps every param group.
    """

    def __init__(
        self,
        bucket: Bucket,
        group_of: Callable[[nn.Parameter], int],
        config: OptimizerConfig,
        *,
        scratch_numel: Callable[[torch.device], int] | None = None,
        needs_shape: Callable[[int], bool] = lambda group: False,
        only_adam: bool = False,
    ) -> None:
        self.bucket = bucket
        self.needs_shape = needs_shape
        self.tier = bucket.memory.state_tier if isinstance(bucket.memory.state_tier, FileTier) else None
        self.grad = (
            bucket.memory.owned_grad
        )  # on the stepping device: a copy of the reduced gradients if that is the host
        self.copied: torch.Event | None = None  # recorded after that copy
        if isinstance(bucket.memory.state_tier, HostTier) and not bucket.memory.owned_grad.is_cpu:
            self.grad = bucket.memory.state_tier.zeros(self.grad.numel(), self.grad.dtype)
        self.is_apart = bucket.memory.state_tier is not None  # stepped separately, because its state is in other memory
        # True if gradients are copied to the host while other buckets are stepped.
        self.sends_ahead = config.overlap_cpu_optimizer_d2h_h2d or not config.optimizer_cpu_offload
        self.shards = owned_shards(bucket.layout, bucket.shard_range, bucket.params, bucket.contracts, group_of)
        self.live = [True] * len(bucket.params)  # for each parameter: True if it is updated in this step
        dtype = bucket.params[0].dtype
        self.dtype = torch.promote_types(dtype, torch.float32)  # dtype of a step's arithmetic
        self.flat = FlatParameters.of(bucket) if bucket.memory.param_shard is None else None
        if self.flat is not None:
            self.param_data: torch.Tensor | None = self.flat.data
        else:
            self.param_data = bucket.memory.param_shard
        contiguous = bucket.memory.param_shard is not None or all(param.is_contiguous() for param in bucket.params)
        together, apart = self.param_data is not None, bucket.steps_apart
        self.storage = storage_of(config, dtype, contiguous=contiguous, together=together, apart=apart)
        numel = self.grad.numel() if self.storage in (CopyStorage, RemainderStorage) else 0
        kept_dtype = torch.int16 if self.storage is RemainderStorage else self.dtype
        self.offloaded: dict[tuple[str, torch.dtype], torch.Tensor] = {}  # [owned] each: moments in the tier
        self.kept = self._zeros(numel, kept_dtype)
        moments = {config.exp_avg_dtype, config.exp_avg_sq_dtype}
        in_place = self.storage in (None, CopyStorage)
        self.in_scratch = not in_place or self.grad.dtype != self.dtype or moments != {torch.float32}
        in_16_bits = only_adam and self.storage is ParameterStorage and together and not apart
        if in_16_bits and steps_16_bits(config, dtype, self.grad.dtype, self.grad.device):
            self.storage, self.in_scratch = None, False
        one_a_param = self.storage is None and self.param_data is None
        self.segments: list[Segment] = []
        for shards in join_shards(self.shards, lambda group: one_a_param or needs_shape(group)):
            if self.in_scratch and scratch_numel is not None and not needs_shape(shards[0].group):
                longest = scratch_numel(self.grad.device)
                self.segments += [self._segment(*stretch) for stretch in cut_shards(shards, longest)]
            else:
                self.segments.append(self._segment(shards, shards[-1].end))
        self.load_parameters()

    def _zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory for masters or moments, in the bucket's memory tier if it has one."""
        tier = self.bucket.memory.state_tier
        return huge_pages.zeros(numel, dtype, self.grad.device) if tier is None else tier.masters(numel, dtype)

    def send_grads(self) -> None:
        """Start copying reduced gradients to the host, if they are stepped there."""
        reduced = self.bucket.memory.owned_grad
        if self.grad is not reduced and self.copied is None:
            self.copied = copy_to_host(self.grad, reduced)

    def await_grads(self) -> None:
        """Wait until the gradients are on the device that steps them."""
        self.send_grads()
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None

    def keep_moments(self, state: dict[Any, dict[str, Any]]) -> None:
        """Move moments that an optimizer or a checkpoint has created to the memory tier, if they are offloaded.

        The tensors in ``state``, the inner optimizer's state by master, are replaced.
        """
        known = len(self.offloaded)
        for segment in self.segments:
            of_master = state.get(segment.master, {})
            own = {
                key: value
                for key, value in of_master.items()
                if key not in segment.moments and is_per_element(key, value, segment.master)
            }
            for moments, made in ((segment.moments, dict(segment.moments)), (of_master, own)):
                for key, value in made.items():
                    name = key, value.dtype
                    if name not in self.offloaded:
                        self.offloaded[name] = self._zeros(self.grad.numel(), value.dtype)
                    place = self.offloaded[name][segment.start : segment.start + segment.numel].view(value.shape)
                    if place.data_ptr() != value.data_ptr():
                        moments[key] = place.copy_(value)
        if len(self.offloaded) > known:
            huge_pages.give_back()

    def _segment(self, shards: list[ParamShard], end: int) -> Segment:
        first, here = shards[0], slice(shards[0].start, end)
        segment = Segment(tuple(shards), self.grad[here], in_scratch=self.in_scratch)
        memory = None if self.param_data is None else self.param_data[here]
        if self.storage is not None:
            segment.storage = self.storage(segment.shards, memory, self.kept[here])
            memory = segment.storage.kept
        if self.storage in (None, CopyStorage):  # else the master is in scratch
            if memory is not None:
                segment.master = nn.Parameter(memory.view(self.shape_of(segment)))
            else:
                segment.master = first.param if first.numel == first.param.numel() else nn.Parameter(first.data)
        if not segment.in_scratch:
            segment.grad = segment.reduced.view(segment.master.shape)
        return segment

    def shape_of(self, segment: Segment) -> tuple[int, ...]:
        """Return the shape in which the inner optimizer sees a segment.

        Raises ValueError if its algorithm needs the unsplit parameter and this rank owns only a part of it.
        """
        shard = segment.shards[0]
        if not self.needs_shape(shard.group):
            return (segment.numel,)
        if shard.numel != shard.param.numel():
            raise ValueError(
                f"parameter {shard.contract.name!r} is updated by an algorithm that needs all of its elements, but "
                f"this rank owns {shard.numel} of {shard.param.numel()}; wrap the model with keep_params_whole=True"
            )
        return shard.shape

    @property
    def waves(self) -> list[list[Segment]]:
        """Segments that are stepped through scratch, grouped by wave."""
        scratched = (segment for segment in self.segments if segment.in_scratch)
        return [list(segments) for _, segments in itertools.groupby(scratched, key=lambda segment: segment.wave)]

    # -- parameters -------------------------------------------------------------------------------------------------

    def load_parameters(self) -> None:
        """Set the masters to the current parameters."""
        if self.flat is not None:
            self.flat.reattach()
        for segment in self.segments:
            if segment.storage is not None:
                segment.storage.copy_parameters()

    def copy_user_edits(self) -> None:
        """Update masters of parameters that user code has written since the last step by a load, pruning or a clamp.

        Afterwards masters and parameters are consistent, and parameters of a flat tensor are views of it again.
        """
        if self.flat is not None:
            self.flat.reattach()
        for segment in self.segments:
            if segment.storage is not None:
                segment.storage.copy_edits()

    def record_spent(self, factors: Mapping[str | None, float], loss_scale: float) -> None:
        """Record that a step has used the bucket's gradients, and the factors that it applied to them in memory.

        Gradients that are stepped in place are multiplied in memory by the step, others are not. If the user keeps the
        gradients and a later backward adds to them, the remaining factors and the new loss scale must be applied first.
        """
        in_place, segments = self.grad is self.bucket.memory.owned_grad, self.segments

        def owed(grad: torch.Tensor) -> list[tuple[torch.Tensor, float]]:  # must not refer to the bucket
            done = [in_place and segment.live and not segment.in_scratch for segment in segments]
            return [
                (
                    grad[segment.start : segment.start + segment.numel],
                    loss_scale * (1.0 if is_done else factors[segment.norm_group]),
                )
                for segment, is_done in zip(segments, done, strict=True)
            ]

        self.bucket.step.owed, self.bucket.step.pending_scale = owed, 1.0

    def record_written(self) -> None:
        if self.flat is not None:
            self.flat.record_written()

    # -- cutting segments -------------------------------------------------------------------------------------------

    def follow_freezing(self, optimizer: torch.optim.Optimizer) -> None:
        """Remove parameters that are frozen, or unused on all ranks, from their segments, so that no step moves
        them.
        """
        trains = map(_REQUIRES_GRAD, self.bucket.params)  # each step: 0.1 ms for 2005 parameters
        live = list(map(operator.and_, trains, map(bool, self.bucket.used)))
        if live == self.live:
            return
        self.live = live
        of_param = dict(zip(map(id, self.bucket.params), live, strict=True))
        for segment in list(self.segments):
            flags = [of_param[id(shard.param)] for shard in segment.shards]
            counts = [len(list(equal)) for _, equal in itertools.groupby(flags)]
            for part in self.split(segment, counts, optimizer):
                part.live = of_param[id(part.shards[0].param)]

    def split(self, segment: Segment, counts: list[int], optimizer: torch.optim.Optimizer) -> list[Segment]:
        """Split a segment, with its master and optimizer state, into segments with ``counts`` shards each.

        Padding stays with the shard before it, so that all parts but the last fill complete vectors.
        """
        if len(counts) == 1:
            return [segment]
        whole = optimizer.state.pop(segment.master, None)
        parts: list[Segment] = []
        first = 0
        for count in counts:
            shards = segment.shards[first : first + count]
            first += count
            low = shards[0].start - segment.start
            high = segment.shards[first].start - segment.start if first < len(segment.shards) else segment.numel
            part = replace(
                segment,
                shards=shards,
                reduced=segment.reduced[low:high],
                master=nn.Parameter(segment.master.data[low:high]),
                grad=segment.grad[low:high],
                at=segment.at + low,
                storage=None if segment.storage is None else segment.storage.part(low, high, shards),
                moments={key: kept[low:high] for key, kept in segment.moments.items()},
            )
            if whole is not None:
                state = {key: cut_state(key, value, segment.master, low, high) for key, value in whole.items()}
                optimizer.state[part.master] = state
            parts.append(part)
        self.segments = _replaced(self.segments, segment, parts)
        params = optimizer.param_groups[segment.group]["params"]
        params[:] = _replaced(params, segment.master, [part.master for part in parts])
        return parts


def _replaced(items: Sequence[Any], old: Any, new: Sequence[Any]) -> list[Any]:
    index = next(i for i, item in enumerate(items) if item is old)
    return [*items[:index], *new, *items[index + 1 :]]


def is_per_element(key: str, value: Any, param: torch.Tensor) -> bool:
    """Return ``True`` if a state value has one number for each element, as moments do and step counts do not.

    Call it only on values in an optimizer's own format or in torch's state format. Entries carry the result with them
    (optimizer_state.py), because their tensors are flat and have lost the shape.
    """
    if not isinstance(value, torch.Tensor) or key == "step" or value.shape != param.shape:
        return False
    return value.dim() > 0 or key not in NUMBERS


def cut_state(key: str, value: Any, master: torch.Tensor, low: int, high: int) -> Any:
    """Return elements [low, high) of a state value of a flat master. A value that is not per element is copied."""
    if is_per_element(key, value, master):
        return value[low:high]
    return value.clone() if isinstance(value, torch.Tensor) else value
