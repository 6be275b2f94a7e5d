"""One step of the inner optimizer, including the pending factors of the gradients.

Data average, tokens, loss scale and clip coefficient are combined in one factor. torch's fused kernels apply it while
they read gradients. For other algorithms one foreach pass applies it, in scratch if the gradients are there. torch's
kernels take the inverse factor in fp32 as ``grad_scale``, which exists for torch's own loss scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from core.optimizer.masters.master_weights import BucketMasters, Segment
from core.optimizer.masters.scratch import Scratch

SMALLEST, LARGEST = 2.0**-120, 2.0**120  # factors outside are applied in two halves, because fp32 cannot represent them

Factors = Mapping[str | None, float]  # norm group -> factor of its gradients in memory, for one bucket


class InnerStep:
    """Step of a torch optimizer, made with one or several calls of its ``step()``, each over some of its parameters.

    An algorithm may count steps in its param groups. Every call therefore begins with the values found by the first
    one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, at_once: bool = False) -> None:
        """Record the values in the optimizer's groups. With ``at_once``, one call must have all parameters."""
        self.optimizer = optimizer
        self.at_once = at_once
        groups = optimizer.param_groups
        self._numbers = [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def step_buckets(self, buckets: Sequence[BucketMasters], factors: Sequence[Factors], scratch: Scratch) -> None:
        """Step the masters of some buckets and store them, beginning with segments that need no scratch memory.

        Those segments are stepped in one call. 16-bit gradients have one call per factor, because multiplying them in
        memory would round them once more.
        """
        pairs = list(zip(buckets, factors, strict=True))
        offloaded = [pair for pair in pairs if pair[0].is_apart]
        if offloaded and len(pairs) > 1 and not self.at_once:
            for masters, _ in offloaded:  # the next bucket's gradients are copied while one is stepped
                if masters.sends_ahead:
                    masters.send_grads()
            others = [pair for pair in pairs if not pair[0].is_apart]  # first, as a device continues on its own
            self.step_buckets([masters for masters, _ in others], [factor for _, factor in others], scratch)
            for masters, factor in offloaded:  # one at a time: new moments are in RAM until they are moved
                self.step_buckets([masters], [factor], scratch)
            return
        for masters, _ in offloaded:
            masters.await_grads()
        here = [
            (segment, factor[segment.norm_group])
            for masters, factor in pairs
            for segment in masters.segments
            if segment.live and (self.at_once or not segment.in_scratch)
        ]
        calls: dict[float | None, list[tuple[Segment, float]]] = {}
        for segment, one in self._in_order(here) if self.at_once else here:
            alone = segment.grad.itemsize == 2 and not self.at_once
            calls.setdefault(one if alone else None, []).append((segment, one))
        for call in calls.values():
            self._step(call, scratch)
        for masters, factor in pairs:
            for wave in () if self.at_once else masters.waves:
                self._step([(segment, factor[segment.norm_group]) for segment in wave if segment.live], scratch)
            masters.record_written()
            if masters.tier is not None:
                masters.keep_moments(self.optimizer.state)

    def _in_order(self, pairs: list[tuple[Segment, float]]) -> list[tuple[Segment, float]]:
        """Sort segments in the optimizer's order of masters, so that sums over parameters round as in one process."""
        place = {id(master): at for group in self.optimizer.param_groups for at, master in enumerate(group["params"])}
        return sorted(pairs, key=lambda pair: place[id(pair[0].master)])

    def _step(self, pairs: Sequence[tuple[Segment, float]], scratch: Scratch) -> None:
        """Step the masters of some segments in one call, through scratch if they are placed there."""
        segments = [segment for segment, _ in pairs]
        in_scratch = [segment for segment in segments if segment.in_scratch]
        if in_scratch:
            scratch.unpack(in_scratch, self.optimizer.state)
        self.step_segments(segments, [factor for _, factor in pairs])
        if in_scratch:
            scratch.pack(in_scratch, self.optimizer.state)
        for segment in segments:
            if segment.storage is not None and not segment.in_scratch:
                segment.storage.write(segment.master.data.view(-1))

    def step_segments(self, segments: Sequence[Segment], factors: Sequence[float]) -> None:
        """Step only the masters of these segments, with gradients multiplied by each segment's factor."""
        if not segments:
            return
        # The kernels' divisor is an fp32 number, so fp64 gradients are multiplied by hand.
        by_kernel = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        by_kernel = by_kernel and all(segment.grad.dtype != torch.float64 for segment in segments)
        common = _apply(segments, factors, by_kernel=by_kernel)
        if common != 1.0:
            grad_scale = torch.full((), 1.0 / common, dtype=torch.float32, device=segments[0].grad.device)
            self.optimizer.grad_scale = grad_scale
        # Segments without state are stepped separately: torch's fused SGD cannot mix present and absent momentum.
        known = [segment for segment in segments if self.optimizer.state.get(segment.master)]
        fresh = [segment for segment in segments if not self.optimizer.state.get(segment.master)]
        try:
            for some in (segments,) if self.at_once else (fresh, known):
                if some:
                    self._call(some)
        finally:
            if common != 1.0:
                self.optimizer.grad_scale = None

    def _call(self, segments: Sequence[Segment]) -> None:
        """Call ``optimizer.step()`` with only the masters of these segments in its groups."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        for group, numbers in zip(groups, self._numbers, strict=True):
            for key in group.keys() - numbers.keys() - {"params"}:
                del group[key]
            group.update(numbers, params=[])
        for segment in segments:
            segment.master.grad = segment.grad
            groups[segment.group]["params"].append(segment.master)
        try:
            self.optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params


def _apply(segments: Sequence[Segment], factors: Sequence[float], *, by_kernel: bool) -> float:
    """Multiply gradients by their factors, except for one common factor that the kernel applies. Return that factor."""
    common = factors[0] if by_kernel and SMALLEST < abs(factors[0]) < LARGEST else 1.0
    for factor in set(factors) - {common}:
        _multiply(
            [segment.grad for segment, other in zip(segments, factors, strict=True) if other == factor], factor / common
        )
    return common


def _multiply(grads: list[torch.Tensor], factor: float) -> None:
    if SMALLEST < abs(factor) < LARGEST or factor == 0:
        torch._foreach_mul_(grads, factor)
        return
    half = math.sqrt(factor)
    torch._foreach_mul_(grads, half)
    torch._foreach_mul_(grads, half)
