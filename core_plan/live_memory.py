"""LiveMemory: bytes of live tensors while a model runs on tensors without values.

The model's own forward and backward run under ``WithoutValues``, in which operators return results of the correct shape
without computing them. Every temporary that a real step would allocate is therefore counted, and no formula repeats the
code of a layer. The work of each operator is also recorded: its floating-point operations, and the bytes it reads and
writes.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A public module of torch that has the class; the module that defines it has a private name.
from torch.fx.experimental.proxy_tensor import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from core.distributed.buffer.grad_placeholder import tensors_in

FORWARD, BACKWARD = "forward", "backward"
BEFORE, AFTER = "embedding", "last norm, logits and loss"  # parts before the first layer and after the last one
# Operators that torch's table of floating-point operations lists under the name of their GPU kernel.
SAME_WORK = {
    "aten._scaled_dot_product_flash_attention_for_cpu": "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_mm_v2": "aten.mm",
    "aten.addmm_": "aten.addmm",
}
EIGHT_BITS = torch.float8_e4m3fn  # represents all 8-bit products, which have one speed
FLOPS = {str(operator): count for operator, count in flop_registry.items()}


class Phase(NamedTuple):
    """Position in a step: forward or backward of one part of the model."""

    phase: str
    part: str


class Work(NamedTuple):
    """Work of one operator.

    The dtype of a product or attention is the argument dtype with the fewest bits, EIGHT_BITS for an 8-bit product. For
    other operators it is the dtype of the first result.
    """

    flops: int
    nbytes: int  # read and written
    dtype: torch.dtype
    name: str = ""

    @property
    def key(self) -> str:
        """Name of the operator and its dtype in a device file."""
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}"

    @property
    def size(self) -> int:
        """Floating-point operations, or bytes if it has no operations."""
        return self.flops or self.nbytes

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any, result: Any) -> Work | None:
        """Return the work of an operator on its arguments; None if it creates no tensor, such as a view."""
        made = tensors_in(result)
        if not made or func.is_view:
            return None
        name = str(func.overloadpacket)
        count = FLOPS.get(SAME_WORK.get(name, name))
        attends = "scaled_dot_product" in name
        counted = _with_all_heads(args) if attends else [arg for arg in args if not isinstance(arg, torch.dtype)]
        flops = 0 if count is None else int(count(*counted, **kwargs, out_val=result))
        if attends and name in SAME_WORK and any(value is True for value in args):  # causal: half of it is skipped
            flops //= 2
        read = tensors_in((args, [value for key, value in kwargs.items() if key != "out"]))
        nbytes = sum(tensor.nbytes for tensor in (*read, *made))
        numbers = [tensor.dtype for tensor in read if tensor.is_floating_point()] if flops else []
        dtype = EIGHT_BITS if "scaled_mm" in name else min(numbers, key=lambda one: one.itemsize, default=made[0].dtype)
        return cls(flops, nbytes, dtype, name)


def _with_all_heads(args: Any) -> list[Any]:
    """Return the arguments of an attention with the number of query heads in each shape.

    Shapes are [batch, heads, sequence, width]. torch 2.11 does not count attention with fewer key heads than query
    heads; newer versions count it in this way.
    """
    heads = args[0].shape[1]
    attends = [isinstance(value, Tensor) and value.dim() == 4 for value in args]
    return [(v.shape[0], heads, *v.shape[2:]) if is_one else v for v, is_one in zip(args, attends, strict=True)]


class LiveMemory(TorchDispatchMode):
    """Mode that tracks every storage created by an operator until it is freed.

    Tensors with values are tracked while the mode is active, tensors without values inside
    ``WithoutValues.followed_by``. The memory of ``known`` tensors is not counted.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.place = Phase(FORWARD, "")
        self.live = 0
        self.live_of: defaultdict[str, int] = defaultdict(int)  # key: the part that created it
        self.peak: defaultdict[Phase, int] = defaultdict(int)
        self.work: defaultdict[Phase, Counter[Work]] = defaultdict(Counter)
        self._followed: dict[int, Any] = {}  # key: id of the storage, which is alive as long as the entry
        self._sizes: dict[int, tuple[int, str]] = {}  # bytes, and the part that created them
        for tensor in known:
            self._follow(tensor, counted=False)

    def enter(self, phase: str, part: str) -> None:
        """Record that ``part`` runs from now on."""
        self.place = Phase(phase, part)
        self.peak[self.place] = max(self.peak[self.place], self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(result, Work.of(func, args, kwargs or {}, result))
        return result

    def note(self, result: Any, work: Work | None) -> None:
        """Record the result of an operator in the running part."""
        for tensor in tensors_in(result):
            self._follow(tensor)
        if self.live > self.peak[self.place]:
            self.peak[self.place] = self.live
        if work is not None:
            self.work[self.place][work] += 1

    def _follow(self, tensor: Tensor, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._followed:
            return
        self._sizes[key] = (storage.nbytes(), self.place.part) if counted else (0, "")

        def forget(_: Any) -> None:
            del self._followed[key]
            self._add(key, -self._sizes[key][0])
            del self._sizes[key]

        self._followed[key] = weakref.ref(storage, forget)
        self._add(key, self._sizes[key][0])

    def _add(self, key: int, nbytes: int) -> None:
        self.live += nbytes
        self.live_of[self._sizes[key][1]] += nbytes
