"""Newton-Schulz iteration, which orthogonalizes a matrix using only matmuls.

For G = U S V^T an odd polynomial changes only the singular values: X <- a X + b (X X^T) X + c (X X^T)^2 X maps s to a s
+ b s^3 + c s^5. A few iterations approximate U V^T, the nearest (semi-)orthogonal matrix.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

Triple = tuple[float, float, float]

# Amsel, Persson, Musco, Gower: The Polar Express (arXiv:2505.16932), for singular values from 1e-3 on. Each but the
# last is applied to X / 1.01, the margin that the paper takes for rounding in bf16.
_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_MARGIN = 1.01

COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    # Keller Jordan et al.: Muon, an optimizer for hidden layers in neural networks (2024). One triple for every step;
    # it leaves singular values between about 0.7 and 1.2, quickly.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # Jiacheng You (2025), as used by modded-nanogpt and Dion: five triples that belong together.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # All further steps are the classical iteration of degree five, whose singular values converge to one.
    "polar_express": (
        *((a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5) for a, b, c in _POLAR_EXPRESS),
        (1.875, -1.25, 0.375),
    ),
}


def coefficients_of(kind: str, steps: int) -> tuple[Triple, ...]:
    """Return the coefficients (a, b, c) of each iteration. ``kind`` is a key of COEFFICIENTS.

    Raises ValueError if ``steps`` is not a multiple of the number of triples that belong together.
    """
    triples = COEFFICIENTS[kind]
    if kind == "polar_express":
        return tuple(triples[min(step, len(triples) - 1)] for step in range(steps))
    if steps % len(triples):
        raise ValueError(
            f"muon_num_ns_steps is {steps} and the {len(triples)} triples of {kind!r} belong together; take a multiple "
            f"of {len(triples)}, or muon_coefficient_type 'simple' or 'polar_express'"
        )
    return triples * (steps // len(triples))


def orthogonalize(matrix: torch.Tensor, triples: tuple[Triple, ...], eps: float = 1e-7) -> torch.Tensor:
    """Return the matrices [..., rows, columns] with singular values moved close to one. Zero matrices stay zero.

    Each iteration costs two matmuls of the smaller side squared times the larger side, and one of the smaller side
    cubed. ``eps`` is the lower limit of the norm that a matrix is divided by.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    # The Frobenius norm is at least the largest singular value, so all of them are at most one.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)
    for a, b, c in triples:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def shape_factor(mode: str, rows: int, columns: int) -> float:
    """Return the scale factor of an orthogonalized update of a [rows, columns] matrix.

    The modes are 'spectral': sqrt(max(rows, columns)), which gives entries a root mean square of one, as sign updates
    have (Moonshot, arXiv:2502.16982; with an extra factor 0.2, AdamW's); 'shape_scaling': sqrt(max(1, rows / columns))
    (Jordan); 'unit_rms_norm': sqrt(rows / columns) (Bernstein, 2025: deriving Muon); and 'none': 1.
    """
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    if mode == "shape_scaling":
        return math.sqrt(max(1.0, rows / columns))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / columns)
    return 1.0


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set torch's fp32 matmul precision within a block: 'highest', 'high' (tf32) or 'medium' (bf16)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
