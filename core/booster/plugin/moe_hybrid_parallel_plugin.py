"""MoeHybridParallelPlugin: HybridParallelPlugin for models whose experts are distributed over data-parallel ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from core.booster.plugin.hybrid_parallel_plugin import HybridParallelPlugin


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """Plugin for a transformers model with experts.

    The model is split over tp_size x pp_size ranks, and each stage's experts are distributed over ep_size data ranks.
    Over tp_size, experts are split like other layers.

    Args:
        tp_size: Number of tensor-parallel ranks.
        pp_size: Number of pipeline ranks.
        ep_size: Number of ranks that share the experts of one stage. It divides the data and sequence ranks, world /
            (tp_size * pp_size).
        sp_size: As in HybridParallelPlugin.
        precision: As in HybridParallelPlugin.
        zero_stage: As in HybridParallelPlugin.
        overlap_communication: Reduce buckets during backward. Off by default here.
        moe_dp_outside: True if ranks of one replica are neighbors, False if ranks of one stage are. By default True if
            possible, which is without stages.
        **options: Other options of HybridParallelPlugin.

    Raises:
        TypeError: If a keyword is unknown.
        ValueError: If options cannot be combined.
    """

    _outside = "moe_dp_outside"

    def __init__(
        self,
        tp_size: int,
        pp_size: int,
        ep_size: int,
        sp_size: int | None = None,
        precision: str = "fp16",
        zero_stage: int = 0,
        *,
        overlap_communication: bool = False,
        moe_dp_outside: bool | None = None,
        **options: Any,
    ) -> None:
        if "dp_outside" in options:
            raise TypeError("MoeHybridParallelPlugin has no dp_outside; its name is moe_dp_outside")
        if isinstance(ep_size, bool) or not isinstance(ep_size, int) or ep_size < 1:
            raise ValueError(f"MoeHybridParallelPlugin: ep_size is {ep_size!r}; it is a number of ranks, at least 1")
        if moe_dp_outside and pp_size > 1 and ep_size > 1:
            raise ValueError(
                "moe_dp_outside=True would put stages between the ranks that share experts; with pp_size and ep_size "
                "above 1 leave it out, or give moe_dp_outside=False"
            )
        outside = (pp_size == 1 or ep_size == 1) if moe_dp_outside is None else moe_dp_outside
        super().__init__(
            *(tp_size, pp_size, sp_size, precision, zero_stage),
            overlap_communication=overlap_communication,
            dp_outside=outside,
            **options,
        )
        replicas = self.world_size // (tp_size * pp_size)
        if replicas % ep_size:
            raise ValueError(
                f"ep_size {ep_size} does not divide the {replicas} data and sequence ranks (world {self.world_size} / "
                f"tp_size {tp_size} / pp_size {pp_size})"
            )
        self.ep_size = ep_size
        self.cutting = dataclasses.replace(self.cutting, ep_size=ep_size)
