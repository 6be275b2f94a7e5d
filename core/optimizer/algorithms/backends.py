"""Kernels for the inner step of Adam and SGD: fused if torch has it for the device and dtype, else foreach.

print(core.optimizer.algorithms.backends.report())           # kernels of Adam on this machine
print(core.optimizer.algorithms.backends.report(optimizer))  # kernels of an optimizer
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

Place = tuple[torch.device, torch.dtype]  # of weights


def report(optimizer: Any = None) -> str:
    """Return the names of the kernels that an optimizer uses, one line per algorithm.

    Without an optimizer, return the kernels that Adam would use on this machine.
    """
    if optimizer is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return choose("adam", [(device, torch.float32)])[1]
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return "\n".join(dict.fromkeys(map(report, chained)))
    inner = getattr(optimizer, "optimizer", optimizer)
    members = getattr(inner, "members", None)
    if members is not None:
        return "\n".join(map(report, members))
    found: str | None = getattr(inner, "backend_report", None)
    if found is None:
        devices = sorted({param.device.type for group in inner.param_groups for param in group["params"]})
        found = f"{type(inner).__name__} on {', '.join(devices) or 'no parameters'}: its own code"
    return found


def choose(algorithm: str, places: Collection[Place], wanted: str = "auto") -> tuple[str, str]:
    """Choose the kernels of Adam or SGD.

    ``places`` are the devices and dtypes of the weights, since part of the state may be on the host, which lacks a
    GPU's kernels. Return 'fused', 'foreach' or 'single' and a line for ``report``. Raises ValueError if 'fused' is
    wanted and torch has no fused kernel for a place.
    """
    problems = (_fused_problem(algorithm, *place) for place in places if wanted in ("auto", "fused"))
    problem = next(filter(None, problems), None)
    if problem is not None and wanted == "fused":
        raise ValueError(f"optimizer_backend='fused' cannot be used: {problem}")
    backend = wanted if wanted != "auto" else "fused" if problem is None else "foreach"
    devices = ", ".join(dict.fromkeys(str(device) for device, _ in places))
    return backend, f"{algorithm} on {devices}: {backend}" + (f" (not fused: {problem})" if problem else "")


def _fused_problem(algorithm: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return torch's error text for a fused step of this algorithm, device and dtype, or ``None`` if it works."""
    make: Any = torch.optim.SGD if algorithm == "sgd" else torch.optim.AdamW
    probe = torch.nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    try:
        make([probe], lr=0.0, fused=True).step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def make_with_backend(
    algorithm: str, groups: list[dict[str, Any]], *, wanted: str, lr: float, decoupled: bool, **options: Any
) -> torch.optim.Optimizer:
    """Create Adam, AdamW (``decoupled``) or SGD with the chosen kernels, and set its ``backend_report``.

    Raises ValueError if 'fused' is wanted and torch has no fused kernel for a parameter.
    """
    places = {(param.device, param.dtype): None for group in groups for param in group["params"]}
    backend, text = choose(algorithm, places or [(torch.device("cpu"), torch.float32)], wanted)
    make: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW if decoupled else torch.optim.Adam}[algorithm]
    # foreach=False without fused is torch's way to ask for one tensor at a time
    kernels = {"fused": True} if backend == "fused" else {"foreach": backend == "foreach"}
    optimizer: Any = make(groups, lr=lr, **kernels, **options)
    optimizer.backend_report = text
    made: torch.optim.Optimizer = optimizer
    return made
