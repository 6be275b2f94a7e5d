"""Pipelined forward passes without backward, in an order that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.stage import check_sent
from core.watch.waiting import waiting


def forward_only(
    layout: PipelineLayout,
    runs: Mapping[int, Callable[[int, tuple[Tensor, ...]], Any]],
    microbatches: int,
    received: Callable[[int], Sequence[Tensor]],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Run this rank's stages on every microbatch. Collective over the pipeline.

    Each rank processes its (microbatch, stage) pairs in ascending order. It waits for input from a rank whose own pair
    comes earlier in this order, so no deadlock is possible. ``runs`` maps a stage to its forward function, and
    ``received`` maps it to meta tensors of its inputs.
    """
    for number in range(microbatches):
        local: tuple[Tensor, ...] = ()
        for stage in sorted(runs):
            inputs: tuple[Tensor, ...] = ()
            if stage > 0 and layout.rank_of(stage - 1) == layout.rank_of(stage):
                inputs = local
            elif stage > 0:
                inputs = tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in received(stage))
                source = dist.get_global_rank(group, layout.rank_of(stage - 1))
                for tensor in inputs:
                    with waiting("the activations of a microbatch", group):
                        dist.recv(tensor, src=source, group=group)
            output = runs[stage](number, inputs)
            if stage == layout.num_stages - 1:
                continue
            check_sent(output, received(stage + 1), stage)
            local = tuple(output) if isinstance(output, (tuple, list)) else (output,)
            if layout.rank_of(stage + 1) != layout.rank_of(stage):
                target = dist.get_global_rank(group, layout.rank_of(stage + 1))
                for tensor in local:
                    with waiting("the next stage to take the activations of a microbatch", group):
                        dist.send(tensor.contiguous(), dst=target, group=group)
