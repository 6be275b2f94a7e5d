"""NormPass: norms of long gradient tensors in one pass, as exact as fp64 addition and as fast as reading memory.

On the CPU a tensor is viewed as rows. torch computes the norms of all rows in one call, in fp32 over a few thousand
elements each, and the row norms are added in fp64. The result is 1e-6 off for 10 million equal numbers. One call over
the full tensor is 0.4 percent off, and ``dtype=float64`` takes thirty times as long. Elements that do not fill a row,
and tiny tensors, are added separately. A GPU's kernels add in a tree, so a GPU tensor is one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ROW_ELEMENTS = 4096
# 16-bit gradients are converted this many rows at a time: 1 MiB stays in cache, and fewer rows would mean more calls.
CONVERTED_ROWS = 64


class NormPass:
    """Computes norms of flat, contiguous tensors, cut into blocks. Some tensors may be on the host.

    ``device`` is the device on which the norms are collected, and ``tensor_of`` has the index of each block's tensor.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.device = device
        self.rows: list[torch.Tensor] = []  # [rows, ROW_ELEMENTS] each, one block
        self.rest: list[torch.Tensor] = []  # flat, one block each
        self.tensor_of: list[int] = []
        rest_of: list[int] = []
        for index, tensor in enumerate(tensors):
            filled = tensor.numel() // ROW_ELEMENTS * ROW_ELEMENTS if tensor.is_cpu else 0
            if filled:
                self.rows.append(tensor[:filled].view(-1, ROW_ELEMENTS))
                self.tensor_of.append(index)
            if filled < tensor.numel():
                self.rest.append(tensor[filled:] if filled else tensor)
                rest_of.append(index)
        self.tensor_of += rest_of

    def norms(self, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
        """Return the norm of each block, [blocks] in fp64. ``dtype`` is used for the powers and their sum within a
        row.
        """
        parts = [torch.zeros(0, dtype=torch.float64, device=self.device)]
        parts += [_norm_of_rows(rows, norm_type, dtype).view(1).to(self.device) for rows in self.rows]
        if self.rest:
            norms = [torch.linalg.vector_norm(tensor, norm_type, dtype=dtype).to(self.device) for tensor in self.rest]
            parts.append(torch.stack(norms).to(torch.float64))
        return torch.cat(parts)


def _norm_of_rows(rows: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm of all rows as one fp64 number."""
    if rows.dtype.itemsize >= dtype.itemsize or dtype is torch.float64:
        norms = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=dtype)
    else:
        cached = torch.empty(min(len(rows), CONVERTED_ROWS), ROW_ELEMENTS, dtype=dtype, device=rows.device)
        parts = (cached[: len(part)].copy_(part) for part in rows.split(CONVERTED_ROWS))
        norms = torch.cat([torch.linalg.vector_norm(part, norm_type, dim=1) for part in parts])
    return torch.linalg.vector_norm(norms, norm_type, dtype=torch.float64)
