"""Reduction of loose gradients (in ``.grad``) over their groups: in place, coalesced by dtype and group.

The engine keeps gradients in buckets whose layout all ranks know. Loose gradients may be missing, strided or of another
dtype on some ranks. So before any reduction the ranks of a group exchange this information: one small maximum per group
and step. A difference raises an error on all of them instead of a hang.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.buffer.grad_attribute import dense
from core.distributed.buffer.grad_placeholder import GradPlaceholder
from core.distributed.guard.replicas import first_unequal
from core.distributed.reduce.sync_rules import IN_PLACE_NUMEL, PACK_NUMEL, PendingSync
from core.distributed.wire.collectives import Collectives
from core.distributed.wire.packs import pack
from core.groups import agree
from core.groups.agree import control_device

IN_FLIGHT = 2  # collectives at a time, and so packed copies of gradients at a time
GRAD_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)
MISSING = 0  # the code of "no gradient here"; dtype i of GRAD_DTYPES has code i + 1
FROZEN = len(GRAD_DTYPES) + 1  # the code of a frozen parameter: above all others


class GradientHandlerError(RuntimeError):
    """Error raised on all ranks of a group if their gradients cannot be reduced together."""


@dataclass(frozen=True, slots=True)
class LooseGradient:
    """Parameter whose ``.grad`` is scaled and then summed over a group."""

    name: str
    param: nn.Parameter
    group: dist.ProcessGroup
    scale: float = 1.0


class Wrapper(NamedTuple):
    """Wrapper that reduces parameters.

    Attributes:
        name: Name for messages.
        group: Ranks that it averages over.
        may_be_local: True if its gradients may differ between ranks after backward, as under torch's ``no_sync``.
    """

    name: str
    group: dist.ProcessGroup
    may_be_local: bool


def gradient_of(param: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient to reduce: from a sharded parameter's ``colo_attr`` if it has one, else ``param.grad``."""
    sharded: Any = getattr(param, "colo_attr", None)
    if sharded is not None and not sharded.saved_grad.is_null():
        payload: torch.Tensor = sharded.grad_payload
        return payload
    return param.grad


class LooseReduction:
    """Reduction of one handler's gradients, planned once. Construction is collective over all groups of the gradients.

    ``same_names`` means that a group's parameters have equal names on its ranks. Copies of a parameter on several
    pipeline stages do not, and are matched by their order. ``failure`` is this rank's own error; all ranks of its
    groups raise then.
    """

    def __init__(
        self,
        gradients: Sequence[LooseGradient],
        collectives: Collectives,
        *,
        bucket_cap_mb: float | None = None,
        same_names: bool = True,
        failure: Exception | None = None,
    ) -> None:
        self.collectives = collectives
        self.cap_bytes = None if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
        self.alone = [g for g in gradients if dist.get_world_size(g.group) == 1]
        self.shared = _by_group([g for g in gradients if dist.get_world_size(g.group) > 1])
        facts = (
            ("a gradient handler", group, [_fact(number, g, same_names) for number, g in enumerate(served)])
            for group, served in self.shared.items()
        )
        agree.same(facts, failure)

    @torch.no_grad()
    def run(self, wrappers: Mapping[int, Wrapper], failure: Exception | None = None) -> None:
        """Reduce the gradients that no wrapper has reduced. Collective over the groups of all gradients.

        ``wrappers`` has the wrapper that reduces a parameter, by the parameter's id. A parameter that only has a
        gradient on another rank contributes zeros and gets the sum; one without a gradient on any rank stays without.
        With this rank's own error as ``failure``, all ranks of its groups raise.

        Raises:
            GradientHandlerError: On all ranks of a group, if their gradients cannot be reduced together.
        """
        agreed = []
        for group, served in self.shared.items():
            try:
                codes = _agree(served, group, wrappers, failure)
                agreed.append(_without_reduced(served, codes, group, wrappers))
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
        for gradient in self.alone:
            grad = gradient_of(gradient.param)
            is_wrapped = id(gradient.param) in wrappers
            if grad is not None and gradient.param.requires_grad and gradient.scale != 1.0 and not is_wrapped:
                grad.mul_(gradient.scale)
        for (group, served), codes in zip(self.shared.items(), agreed, strict=True):
            for dtype in dict.fromkeys(code for code in codes if code not in (MISSING, FROZEN)):
                same_dtype = [g for g, code in zip(served, codes, strict=True) if code == dtype]
                self._reduce(same_dtype, GRAD_DTYPES[dtype - 1], group)

    def _reduce(self, gradients: Sequence[LooseGradient], dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        parts = [_flat(gradient, dtype) for gradient in gradients]
        for part, gradient in zip(parts, gradients, strict=True):
            if gradient.scale != 1.0:
                part.mul_(gradient.scale)  # before the sum, as in the engine's buckets: fp16 does not overflow
        flying: deque[PendingSync] = deque()
        limit = PACK_NUMEL if self.cap_bytes is None else max(1, self.cap_bytes // dtype.itemsize)
        for together in pack(parts, limit, IN_PLACE_NUMEL):
            if len(flying) == IN_FLIGHT:
                flying.popleft().wait()
            flat = _on_wire(together[0] if len(together) == 1 else torch.cat(together), group)
            handle = self.collectives.all_reduce(flat, group, "gradients of a loose parameter")
            flying.append(PendingSync(handle, together, None if flat is together[0] else flat))
        for sync in flying:
            sync.wait()
        for part, gradient in zip(parts, gradients, strict=True):
            _put_back(gradient.param, part)


def _flat(gradient: LooseGradient, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient as [numel]: a view if it is contiguous, else a copy, or zeros if it is missing."""
    grad = gradient_of(gradient.param)
    if grad is None:
        return torch.zeros(gradient.param.numel(), dtype=dtype, device=gradient.param.device)
    return dense(grad.detach()).contiguous().view(-1)


def _on_wire(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensor, or a GPU copy if the group's backend cannot send CPU tensors."""
    return flat.to(control_device(group)) if flat.device.type == "cpu" else flat


def _put_back(param: nn.Parameter, reduced: torch.Tensor) -> None:
    """Store a reduced row in ``param.grad``, keeping its memory and strides. Create the gradient if it is missing."""
    grad = gradient_of(param)
    if grad is None:
        if reduced.dtype != param.dtype:
            param.grad_dtype = reduced.dtype
        param.grad = reduced.view(param.shape)
    elif grad.data_ptr() != reduced.data_ptr():
        grad.copy_(reduced.view(grad.shape))


def _by_group(gradients: Sequence[LooseGradient]) -> dict[dist.ProcessGroup, list[LooseGradient]]:
    """Group the gradients, small groups first, then by ranks. All ranks share this order, so no deadlock is possible.

    An error in a small group (experts) is then known in the larger group around it before anything is sent there.
    """
    ranks = {gradient.group: sorted(dist.get_process_group_ranks(gradient.group)) for gradient in gradients}
    in_order = sorted(ranks, key=lambda group: (len(ranks[group]), ranks[group]))
    return {group: [gradient for gradient in gradients if gradient.group is group] for group in in_order}


def _fact(number: int, gradient: LooseGradient, same_names: bool) -> str:
    name = f"parameter {gradient.name!r}" if same_names else f"shared parameter {number}"
    return f"{name}: shape {list(gradient.param.shape)}, {gradient.param.dtype}, times {gradient.scale:.9g}"


# -- agreement ------------------------------------------------------------------------------------------------------


def _without_reduced(
    served: Sequence[LooseGradient], codes: list[int], group: dist.ProcessGroup, wrappers: Mapping[int, Wrapper]
) -> list[int]:
    """Return the codes, with MISSING for gradients that a wrapper has made the same on all ranks. Collective.

    Averaging is linear and leaves equal values unchanged. So the mean of gradients that some ranks have already
    averaged is the mean of all of them, and gradients that torch's wrapper has left local are averaged like loose ones.
    """
    compared = []
    for place, (gradient, code) in enumerate(zip(served, codes, strict=True)):
        wrapper = wrappers.get(id(gradient.param))
        if wrapper is not None and code not in (MISSING, FROZEN):
            compared.append((place, gradient, wrapper))
    flat = [_flat(gradient, GRAD_DTYPES[codes[place] - 1]) for place, gradient, _ in compared]
    named = [(f"the gradient of {g.name}", values) for (_, g, _), values in zip(compared, flat, strict=True)]
    difference = first_unequal(named, group, "of a handler") if named else None
    if difference is None:
        done = {place for place, *_ in compared}
        return [MISSING if place in done else code for place, code in enumerate(codes)]
    for _, gradient, wrapper in compared:
        grad = gradient_of(gradient.param)
        wider = dist.get_world_size(wrapper.group) > dist.get_world_size(group)
        if wider or (grad is not None and grad.layout is not torch.strided):
            raise GradientHandlerError(
                f"{difference}, and {wrapper.name} has left it so. This handler cannot average {gradient.name!r}, "
                f"which {'is averaged over more ranks' if wider else 'is sparse'}; run the last microbatch of a step "
                "outside of no_sync"
            )
    return codes


def _agree(
    served: Sequence[LooseGradient],
    group: dist.ProcessGroup,
    wrappers: Mapping[int, Wrapper],
    failure: Exception | None,
) -> list[int]:
    """Return the code of every gradient, MISSING if no rank has one. Raises on all ranks of the group together."""
    names = [None if (wrapper := wrappers.get(id(g.param))) is None else wrapper.name for g in served]
    digest = zlib.crc32(repr(names).encode())
    codes = [MISSING] * len(served)
    if failure is None:
        try:
            codes = [_code(g, wrappers.get(id(g.param))) for g in served]
        except GradientHandlerError as error:
            failure = error
    present = [FROZEN if code == MISSING else code for code in codes]  # so that the least is of a gradient
    what, count = "the gradients of a handler", len(served)
    least, largest = agree.bounds([*codes, *present, digest, failure is not None], group, what)
    if largest[-1]:
        agree.refuse(failure, group, what, GradientHandlerError)
    ranks = dist.get_process_group_ranks(group)
    if least[-2] != largest[-2]:
        answers = agree.gather(names, group, what)
        place = next(i for i, theirs in enumerate(zip(*answers.values(), strict=True)) if len(set(theirs)) > 1)
        found = {rank: theirs[place] or "nothing" for rank, theirs in answers.items()}
        raise GradientHandlerError(
            f"the gradient of {served[place].name!r} is reduced by other wrappers on other ranks: {found}. Wrap the "
            "model, or delete its wrapper, on all of them"
        )
    for gradient, any_low, high, low in zip(served, least, largest, least[count:], strict=False):
        if high == FROZEN != any_low:
            raise GradientHandlerError(
                f"parameter {gradient.name!r} is frozen on some ranks of {ranks} and trained on others (here "
                f"requires_grad is {gradient.param.requires_grad}); freeze it on all of them or on none"
            )
        if high != MISSING and high != low:
            raise GradientHandlerError(
                f"the gradient of {gradient.name!r} is {GRAD_DTYPES[high - 1]} on one rank of {ranks} and "
                f"{GRAD_DTYPES[low - 1]} on another; give the ranks the same precision"
            )
    return largest[:count]


def _code(gradient: LooseGradient, wrapper: Wrapper | None) -> int:
    """Return this rank's code for a gradient. Raises GradientHandlerError if it cannot be sent."""
    grad = gradient_of(gradient.param)
    if wrapper is not None and not wrapper.may_be_local:
        return MISSING
    if not gradient.param.requires_grad:
        return FROZEN
    if isinstance(grad, GradPlaceholder):
        raise GradientHandlerError(grad.refusal("a reduction by a handler"))
    if grad is None:
        return MISSING
    if hasattr(grad, "device_mesh"):
        raise GradientHandlerError(
            f"the gradient of {gradient.name!r} is a DTensor, which its own code reduces; leave the handler out"
        )
    if grad.layout is not torch.strided and wrapper is None:
        raise GradientHandlerError(
            f"the gradient of {gradient.name!r} is {grad.layout}; handlers reduce dense gradients in place. Make the "
            "embedding with sparse=False, or wrap the model in core.distributed.DistributedDataParallel, which makes "
            "gradients dense"
        )
    if grad.dtype not in GRAD_DTYPES:
        raise GradientHandlerError(f"the gradient of {gradient.name!r} is {grad.dtype}, which cannot be reduced")
    return GRAD_DTYPES.index(grad.dtype) + 1
