"""Muon: momentum, orthogonalized matrix by matrix.

With 'duplicated', a matrix that is split over tensor-parallel ranks is gathered first: every rank orthogonalizes the
full matrix and keeps its part, so training does not depend on the layout. With 'blockwise', each rank orthogonalizes
only its part, which needs no communication but depends on the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from core.distributed.wire.collectives import Collectives, Handle, InFlight
from core.optimizer.algorithms.newton_schulz import (
    Triple,
    coefficients_of,
    matmul_precision,
    orthogonalize,
    shape_factor,
)

if TYPE_CHECKING:
    from core.groups.process_groups import ProcessGroups

QKV_ROWS = "qkv_split_rows"  # attribute of a fused weight: number of rows of (queries, key, value) in a query group


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Position of a rank's parameter within a matrix that is split over ranks.

    Attributes:
        group: Ranks that hold the other parts, or None if the matrix is not split.
        dim: Dimension that is split.
        stride: Number of sections of ``dim``, each split separately.
        length: Size of ``dim`` in the full matrix if the parts include padding.
        qkv_rows: Rows of (queries, key, value) in a query group, if they are orthogonalized separately.
    """

    group: dist.ProcessGroup | None = None
    dim: int = 0
    stride: int = 1
    length: int | None = None
    qkv_rows: tuple[int, int, int] | None = None

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


WHOLE = MatrixLayout()


def layout_of(param: torch.Tensor, groups: ProcessGroups | None, *, split_qkv: bool, blockwise: bool) -> MatrixLayout:
    """Return a parameter's layout, from the attributes that tensor-parallel layers set.

    ``blockwise`` orthogonalizes each rank's part separately, so the matrix does not count as split.
    """
    qkv_rows = getattr(param, QKV_ROWS, None) if split_qkv else None
    group = None
    is_split = getattr(param, "tensor_model_parallel", False) and not blockwise
    if is_split and groups is not None:
        axis = "tp" if getattr(param, "allreduce", True) else "expt_tp"
        group = getattr(groups, axis) if groups.size(axis) > 1 else None
    if group is None:
        return MatrixLayout(qkv_rows=qkv_rows)
    return MatrixLayout(
        group,
        int(param.partition_dim),
        getattr(param, "partition_stride", 1),
        getattr(param, "partition_length", None),
        qkv_rows,
    )


LayoutOf = Callable[[torch.Tensor], MatrixLayout]


class Muon(torch.optim.Optimizer):
    """Muon with decoupled weight decay (Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024).

        m = momentum * m + (1 - momentum) * g
        u = m, or with nesterov: (1 - momentum) * g + momentum * m
        p = p - lr * weight_decay * p - lr * extra_scale * shape_factor * orthogonalize(u)

    The state 'momentum_buffer' is m in the parameter's dtype and shape. It is normalized before the Newton-Schulz
    iteration, so an update does not depend on the gradient scale. Stepping is collective over the groups that
    ``layout_of`` returns, whose ranks must hold the same matrices in the same order.

    Args:
        params: Matrices [rows, columns], or stacks [n, rows, columns] whose matrices are orthogonalized separately.
        coefficient_type: Key of newton_schulz.COEFFICIENTS.
        scale_mode: Mode of ``shape_factor``.
        layout_of: Returns a parameter's layout within a larger matrix. By default no matrix is split.

    Raises:
        ValueError: If a parameter is neither a matrix nor a stack of matrices.
    """

    needs_shapes = True
    state_keys = ("momentum_buffer",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        coefficient_type: str = "quintic",
        ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        fp32_matmul_prec: str = "medium",
        layout_of: LayoutOf | None = None,
    ) -> None:
        coefficients_of(coefficient_type, ns_steps)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "coefficient_type": coefficient_type,
            "ns_steps": ns_steps,
            "scale_mode": scale_mode,
            "extra_scale_factor": extra_scale_factor,
        }
        super().__init__(params, defaults)
        self.fp32_matmul_prec = fp32_matmul_prec
        self.layout_of: LayoutOf = layout_of or (lambda master: WHOLE)
        self.collectives = Collectives()
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() not in (2, 3):
                    raise ValueError(
                        f"Muon updates matrices, and stacks of them, and got a parameter of shape {list(param.shape)}; "
                        "give it another optimizer: ParamKey(...): {'optimizer': 'adam'}"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Collective over the groups of split matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        with matmul_precision(self.fp32_matmul_prec):
            pending = self._start(*work[0]) if work else None
            for index, (param, group) in enumerate(work):
                assert pending is not None, "started a round before"
                current, pending = pending, self._start(*work[index + 1]) if index + 1 < len(work) else None
                self._finish(param, group, current)
        return loss

    def _start(self, param: torch.Tensor, group: dict[str, Any]) -> Gathering:
        """Update the momentum, and start gathering the matrix to orthogonalize."""
        state, momentum = self.state[param], group["momentum"]
        assert param.grad is not None, "step takes parameters with a gradient only"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        buffer = state["momentum_buffer"].lerp_(param.grad, 1 - momentum)
        update = param.grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        return Gathering(update, self.layout_of(param), self.collectives)

    def _finish(self, param: torch.Tensor, group: dict[str, Any], gathering: Gathering) -> None:
        layout, whole = gathering.layout, gathering.wait()
        triples = coefficients_of(group["coefficient_type"], group["ns_steps"])
        if layout.qkv_rows is None:
            rows, columns = full_shape(whole, layout)
            update = orthogonalize(whole, triples) * shape_factor(group["scale_mode"], rows, columns)
        else:
            update = orthogonalize_qkv(whole, layout.qkv_rows, triples, group["scale_mode"])
        if group["weight_decay"] != 0:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(part_of(update, layout), alpha=-group["lr"] * group["extra_scale_factor"])


class Gathering:
    """All-gather of a split matrix."""

    def __init__(self, part: torch.Tensor, layout: MatrixLayout, collectives: Collectives) -> None:
        self.layout = layout
        self.part = part
        self.handle: InFlight = Handle()
        if layout.group is not None:
            rank = dist.get_rank(layout.group)
            self.parts = torch.empty((layout.ranks, *part.shape), dtype=part.dtype, device=part.device)
            self.parts[rank].copy_(part)
            self.handle = collectives.all_gather(self.parts.view(-1), layout.group, "a whole matrix")

    def wait(self) -> torch.Tensor:
        """Wait for the parts, and return the full matrix with rows and columns in their unsplit order."""
        if self.layout.group is None:
            return self.part
        self.handle.wait()
        return joined(self.parts, self.layout.dim, self.layout.stride)


def joined(parts: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """Join each rank's part, [ranks, ...], into the full tensor. ``stride`` sections of ``dim`` were split
    separately.
    """
    ranks, shape = parts.shape[0], list(parts.shape[1:])
    sections = parts.reshape(ranks, *shape[:dim], stride, shape[dim] // stride, *shape[dim + 1 :])
    ordered = sections.movedim(0, dim + 1)
    shape[dim] *= ranks
    return ordered.reshape(shape)


def part_of(whole: torch.Tensor, layout: MatrixLayout) -> torch.Tensor:
    """Return this rank's part of a full tensor. The inverse of ``joined``."""
    if layout.group is None:
        return whole
    dim, stride, ranks, rank = layout.dim, layout.stride, layout.ranks, dist.get_rank(layout.group)
    shape = list(whole.shape)
    length = shape[dim] // (stride * ranks)
    sections = whole.reshape(*shape[:dim], stride, ranks, length, *shape[dim + 1 :])
    shape[dim] = stride * length
    return sections.select(dim + 1, rank).reshape(shape)


def full_shape(whole: torch.Tensor, layout: MatrixLayout) -> tuple[int, int]:
    """Return (rows, columns) of a matrix without padding, which has no gradient and does not affect the update."""
    shape = list(whole.shape)
    if layout.length is not None:
        shape[layout.dim] = layout.length
    return shape[-2], shape[-1]


def orthogonalize_qkv(
    whole: torch.Tensor, qkv_rows: tuple[int, int, int], triples: tuple[Triple, ...], scale_mode: str
) -> torch.Tensor:
    """Orthogonalize queries, keys and values of a fused weight, [query groups * sum(qkv_rows), columns], separately.

    ``qkv_rows`` are the rows of (queries, key, value) in a query group. Return the scaled update in the weight's shape.
    """
    columns = whole.shape[-1]
    grouped = whole.view(-1, sum(qkv_rows), columns)
    updates = []
    for rows in grouped.split(list(qkv_rows), dim=1):
        matrix = rows.reshape(-1, columns)
        update = orthogonalize(matrix, triples) * shape_factor(scale_mode, matrix.shape[0], columns)
        updates.append(update.view(rows.shape))
    return torch.cat(updates, dim=1).view(whole.shape)
