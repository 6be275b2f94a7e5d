"""NormPass: norms of long stretches of gradient memory in one pass, as exact as adding in fp64 and as fast as reading.

On the CPU a stretch is seen as rows. torch makes the norms of all rows in one call, each added in fp32 over a few
thousand elements only, and the rows are added in fp64: 1e-6 off for 10 million equal numbers, where one call over the
whole stretch is 0.4 percent off, and `dtype=float64` costs thirty times the time. What does not fill a row, and tiny
stretches, share one foreach call. A GPU's kernels add in a tree: there a stretch is one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ROW_ELEMENTS = 4096
# 16-bit gradients are converted so many at a time, in memory that stays in cache: 1 MiB, below which the calls would
# cost more than the cache gives.
CONVERTED_ROWS = 64


class NormPass:
    """The norms of some stretches of memory, cut into pieces.

    stretches: flat, contiguous, all on `device`. stretch_of: for each piece the index of its stretch.
    spare: flat memory that a pass may write over, to convert 16-bit gradients in.
    """

    def __init__(
        self, stretches: Sequence[torch.Tensor], device: torch.device, spare: torch.Tensor | None = None
    ) -> None:
        self.device = device
        self.spare = spare
        self.rows: list[torch.Tensor] = []  # [rows, ROW_ELEMENTS] each, one piece
        self.rest: list[torch.Tensor] = []  # flat, one piece each
        self.stretch_of: list[int] = []
        rest_of: list[int] = []
        on_cpu = device.type == "cpu"
        for index, stretch in enumerate(stretches):
            numel = stretch.numel()
            filled = numel // ROW_ELEMENTS * ROW_ELEMENTS if on_cpu else 0
            if filled:
                self.rows.append(stretch[:filled].view(-1, ROW_ELEMENTS))
                self.stretch_of.append(index)
            if filled < numel:
                self.rest.append(stretch[filled:] if filled else stretch)
                rest_of.append(index)
        self.stretch_of += rest_of
        self._converted: torch.Tensor | None = None  # [CONVERTED_ROWS, ROW_ELEMENTS], during a pass

    def norms(self, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
        """The norm of each piece, [pieces] in fp64. dtype: what powers are made and, within a row, added in."""
        parts: list[torch.Tensor] = []
        if self.rows:
            parts.append(torch.stack([self._of_rows(rows, norm_type, dtype) for rows in self.rows]))
        if self.rest:
            parts.append(torch.stack(torch._foreach_norm(self.rest, norm_type, dtype=dtype)).to(torch.float64))
        self._converted = None
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=self.device)

    def _of_rows(self, rows: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
        if rows.dtype.itemsize >= dtype.itemsize or dtype is torch.float64:
            norms = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=dtype)
        else:
            norms = torch.cat([self._converting(part, norm_type, dtype) for part in rows.split(CONVERTED_ROWS)])
        return torch.linalg.vector_norm(norms, norm_type, dtype=torch.float64)

    def _converting(self, rows: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
        if self._converted is None:
            spare, numel = self.spare, CONVERTED_ROWS * ROW_ELEMENTS
            if spare is None or spare.dtype != dtype or spare.numel() < numel:
                spare = torch.empty(numel, dtype=dtype)
            self._converted = spare[:numel].view(CONVERTED_ROWS, ROW_ELEMENTS)
        return torch.linalg.vector_norm(self._converted[: len(rows)].copy_(rows), norm_type, dim=1)
