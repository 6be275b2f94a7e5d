"""Gradients that say where they come from: rank r's gradient is 10**r, so a sum's digits count each rank's part.

1011 is ranks 0, 1 and 3 once each; 2000 is rank 3 twice. Each element also carries its own place in the parameter,
so that a slice that lands elsewhere is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.distributed.buffer.bucket import Bucket
from core.distributed.wire.collectives import Collectives, Handle, InFlight, Op, scale_now
from tests.unit_tests.reference import whole_grads

ODD = (19, 17)  # shards cut through it, and none of them evenly


def digits(*ranks: int) -> float:
    """The sum of these ranks' codes: digits(0, 2) is 101."""
    return float(sum(10**rank for rank in ranks))


def ramp(param: torch.Tensor) -> torch.Tensor:
    """1, 2, 3, ... in the shape of the parameter."""
    return torch.arange(1, param.numel() + 1, dtype=param.dtype).view(param.shape)


class Bag(nn.Module):
    """Parameters by name; the loss whose gradient is `code` in each of them."""

    def __init__(self, dtype: torch.dtype = torch.float64, **shapes: Sequence[int]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(tuple(shape), dtype=dtype)))

    def tag(self, name: str, **attributes: Any) -> Bag:
        """Set Megatron's attributes on one parameter."""
        for attribute, value in attributes.items():
            setattr(getattr(self, name), attribute, value)
        return self

    def forward(self, code: float) -> torch.Tensor:
        return torch.stack([(p * ramp(p)).sum() * code for p in self.parameters()]).sum()


def backward(chunks: Sequence[DistributedDataParallel], code: float | None = None) -> None:
    """A new step: this rank's coded gradients in every chunk; chunk c's are c + 1 times the rank's code."""
    code = 10.0 ** dist.get_rank() if code is None else code
    for chunk in chunks:
        chunk.zero_grad_buffer()
    for number, chunk in enumerate(chunks):
        chunk(code * (number + 1)).backward()


def step(
    chunks: Sequence[DistributedDataParallel], code: float | None = None, **arguments: Any
) -> list[dict[str, float]]:
    """backward and finalize_model_grads; what each parameter got, by name, for each chunk. Collective."""
    backward(chunks, code)
    finalize_model_grads(list(chunks), **arguments)
    return [contributions(chunk) for chunk in chunks]


def contributions(ddp: DistributedDataParallel) -> dict[str, float]:
    """The code that every element of a parameter's whole gradient carries; nan where elements disagree."""
    found = {}
    for name, grad in whole_grads(ddp).items():
        codes = grad.double() / ramp(grad.double())
        same = codes.numel() > 0 and torch.allclose(codes, codes.view(-1)[0], rtol=1e-12, atol=0)
        found[name] = float(codes.view(-1)[0]) if same else float("nan")
    return found


def wrong(found: Mapping[str, float], expected: Mapping[str, float]) -> list[str]:
    """A line for each parameter that did not get what it should; empty when all is right."""
    lines = [
        f"{name}: got {found.get(name)}, expected {want}"
        for name, want in expected.items()
        if not abs(found.get(name, float("nan")) - want) <= 1e-9 * abs(want)
    ]
    return lines + [f"{name}: not expected at all" for name in found.keys() - expected.keys()]


def check(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """The checking function of the tests; the mutation tests show that it turns red."""
    assert not wrong(found, expected), f"rank {dist.get_rank()}: {wrong(found, expected)}"


# --- mutations -----------------------------------------------------------------------------------------------------

MUTATIONS = ("drop", "double", "rescale")


@contextmanager
def mutate_reductions(group_name: str, mutation: str) -> Iterator[list[str]]:
    """Every reduction over a group is dropped, done twice, or divided once too often, on all ranks.

    Yields a list that gets an entry for each call that was spoilt, so that a test can tell that one was.
    """
    group = getattr(parallel_state.get_process_groups(), group_name)
    hits: list[str] = []
    inside: list[str] = []  # a reduce-scatter may be made of an all-reduce, which must not be spoilt once more
    all_reduce, reduce_scatter = Collectives.start_all_reduce, Collectives.start_reduce_scatter

    def spoilt(
        launch: Any, self: Collectives, tensor: torch.Tensor, over: dist.ProcessGroup, op: Op, scale: float
    ) -> InFlight:
        is_count = tensor.dim() == 0 or not tensor.dtype.is_floating_point  # of tokens: no gradient
        if over is not group or is_count or inside:
            return launch(self, tensor, over, op, scale)
        hits.append(mutation)
        if mutation == "drop":
            scale_now(tensor, scale)
            return Handle()
        inside.append(mutation)
        handle = launch(self, tensor, over, op, scale)
        inside.clear()
        factor = 2.0 if mutation == "double" else 1.0 / dist.get_world_size(group)
        return Handle(finish=lambda: (handle.wait(), tensor.mul_(factor))[0])

    def spoilt_all_reduce(self: Collectives, tensor: torch.Tensor, over: Any, op: Op, scale: float) -> InFlight:
        return spoilt(all_reduce, self, tensor, over, op, scale)

    def spoilt_reduce_scatter(self: Collectives, tensor: torch.Tensor, over: Any, op: Op, scale: float) -> InFlight:
        return spoilt(reduce_scatter, self, tensor, over, op, scale)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Collectives, "start_all_reduce", spoilt_all_reduce))
        stack.enter_context(mock.patch.object(Collectives, "start_reduce_scatter", spoilt_reduce_scatter))
        yield hits


@contextmanager
def mutate_scale(factor: float) -> Iterator[None]:
    """Every bucket is multiplied by another factor than its contract's divisor gives."""
    launch = Bucket.launch

    def spoilt(self: Bucket, collectives: Collectives, **options: Any) -> None:
        self.scale, right = self.scale * factor, self.scale
        try:
            launch(self, collectives, **options)
        finally:
            self.scale = right

    with mock.patch.object(Bucket, "launch", spoilt):
        yield


def red_somewhere(found: Sequence[Mapping[str, float]], expected: Sequence[Mapping[str, float]]) -> bool:
    """Did the check fail on any rank? Collective over the world."""
    return somewhere(any(wrong(got, want) for got, want in zip(found, expected, strict=True)))


def somewhere(flag: bool) -> bool:
    """Is it true on any rank? Collective over the world."""
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)
