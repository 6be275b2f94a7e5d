"""Whose kernels run the inner step of Adam and SGD, and why not the others'.

In order: TransformerEngine's and apex's `multi_tensor_adam` where the package is installed, has that symbol and agrees
with torch on a small vector; torch's fused kernels; torch's foreach ones, which run on every device and dtype.

    print(core.optimizer.algorithms.backends.report())           # what Adam would use on this machine
    print(core.optimizer.algorithms.backends.report(optimizer))  # what an optimizer uses
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from core.optimizer.algorithms.kernel_adam import KernelAdam, MultiTensorAdam

# package to load first, module with the kernel, its name there
KERNELS = {
    "transformer_engine": ("transformer_engine.pytorch", "transformer_engine_torch", "multi_tensor_adam"),
    "apex": ("apex", "amp_C", "multi_tensor_adam"),
}
TORCH_KERNELS = ("fused", "foreach", "single")
ORDER = (*KERNELS, *TORCH_KERNELS)
# A kernel is taken if after three steps its fp32 weights differ from torch's by no more than this part of the way they
# have gone. The same formula in another order of rounding stays some 50 times below.
AGREEMENT = 1e-4


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend, and why it is not in use; '' for the one that is."""

    name: str
    why_not: str


@dataclass(frozen=True, slots=True)
class BackendReport:
    """Which kernels step which algorithm; str() is a few lines for a log."""

    algorithm: str
    device: str
    in_use: str
    others: tuple[Candidate, ...]

    def __str__(self) -> str:
        """One line for what is in use, one for each that was passed over."""
        lines = [f"{self.algorithm} on {self.device}: {self.in_use}"]
        return "\n".join([*lines, *(f"  not {other.name}: {other.why_not}" for other in self.others)])


def report(optimizer: Any = None) -> str:
    """Which kernels step an optimizer of ours, one paragraph an algorithm; without one, what Adam would use here."""
    if optimizer is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return str(choose("adam", device, torch.float32)[0])
    inner = getattr(optimizer, "optimizer", optimizer)
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        return "\n".join(dict.fromkeys(report(each) for each in chained))
    return "\n".join(str(each) for each in reports_of(inner))


def reports_of(inner: torch.optim.Optimizer) -> list[BackendReport]:
    """The reports of an inner optimizer and of what it is made of."""
    members = getattr(inner, "members", None)
    if members is not None:
        return [each for member in members for each in reports_of(member)]
    found = getattr(inner, "backend_report", None)
    return [found if found is not None else BackendReport(type(inner).__name__, _devices(inner), "its own code", ())]


def _devices(inner: torch.optim.Optimizer) -> str:
    found = {param.device.type for group in inner.param_groups for param in group["params"]}
    return ", ".join(sorted(found)) or "no parameters"


def choose(
    algorithm: str, device: torch.device, dtype: torch.dtype, wanted: str = "auto"
) -> tuple[BackendReport, MultiTensorAdam | None]:
    """The backend for 'adam' or 'sgd', with its kernel where that is not torch's.

    wanted: OptimizerConfig.optimizer_backend. Raises ValueError where a backend that was named cannot be used.
    """
    passed_over: list[Candidate] = []
    for name in ORDER if wanted == "auto" else (wanted,):
        kernel, why_not = _usable(name, algorithm, device, dtype)
        if not why_not:
            rest = ORDER[ORDER.index(name) + 1 :] if wanted == "auto" else [each for each in ORDER if each != name]
            later = "is slower" if wanted == "auto" else f"optimizer_backend={wanted!r} was asked for"
            passed_over += [Candidate(other, later) for other in rest]
            return BackendReport(algorithm, str(device), name, tuple(passed_over)), kernel
        passed_over.append(Candidate(name, why_not))
    raise ValueError(f"optimizer_backend={wanted!r} cannot be used: {passed_over[-1].why_not}")


def _usable(name: str, algorithm: str, device: torch.device, dtype: torch.dtype) -> tuple[MultiTensorAdam | None, str]:
    """(kernel, why not): an empty reason means that it can be used."""
    if name in KERNELS and algorithm != "adam":
        return None, f"is used for Adam only, not for {algorithm}"
    if name in KERNELS:
        kernel, why_not = find_kernel(name)
        if kernel is None:
            return None, why_not
        if device.type != "cuda":
            return None, f"has no kernel for {device.type}"
        if dtype != torch.float32:
            return None, f"steps fp32 weights, and these are {dtype}"
        return kernel, disagreement(kernel, device)
    if name == "fused":
        return None, _torch_fused_problem(algorithm, device, dtype)
    return None, ""


def find_kernel(name: str) -> tuple[MultiTensorAdam | None, str]:
    """A package's kernel by its symbol, or why there is none."""
    package, module, symbol = KERNELS[name]
    try:
        importlib.import_module(package)  # loads the libraries that the module below is linked to
        found = getattr(importlib.import_module(module), symbol, None)
    except ImportError as error:
        return None, f"not installed ({error})"
    except (OSError, RuntimeError) as error:
        return None, f"does not load: {error}"
    return (None, f"{module} has no {symbol}") if found is None else (found, "")


def disagreement(kernel: MultiTensorAdam, device: torch.device) -> str:
    """How a kernel's AdamW differs from torch's single-tensor one beyond AGREEMENT; '' where it does not."""
    start = torch.linspace(-1.0, 1.0, 1027, device=device)
    gradient = torch.sin(37.0 * start)
    options: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    ours, torchs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW([torchs], lr=0.01, foreach=False, **options)]
    optimizers.append(KernelAdam([ours], lr=0.01, kernel=kernel, decoupled_weight_decay=True, **options))
    try:
        for count in range(3):
            ours.grad = torchs.grad = gradient * (count + 1)
            for optimizer in optimizers:
                optimizer.step()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"its kernel does not take the arguments that apex 0.1 defined: {str(error).splitlines()[0]}"
    relative = float((ours - torchs).detach().norm() / (torchs - start).detach().norm())
    return "" if relative <= AGREEMENT else f"its AdamW differs from torch's by {relative:.2g} of the update"


def _torch_fused_problem(algorithm: str, device: torch.device, dtype: torch.dtype) -> str:
    """What torch says about a fused step of this kind."""
    make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD if algorithm == "sgd" else torch.optim.AdamW
    probe = torch.nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
    probe.grad = torch.zeros_like(probe)
    try:
        make([probe], lr=0.0, fused=True).step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def make_with_backend(
    algorithm: str, groups: list[dict[str, Any]], *, wanted: str, lr: float, decoupled: bool, **options: Any
) -> torch.optim.Optimizer:
    """Adam, AdamW (`decoupled`) or SGD over these groups, by the best backend; it carries its `backend_report`."""
    sample = next((param for group in groups for param in group["params"]), None)
    device = torch.device("cpu") if sample is None else sample.device
    dtype = torch.float32 if sample is None else sample.dtype
    found, kernel = choose(algorithm, device, dtype, wanted)
    optimizer: Any
    if kernel is not None:
        optimizer = KernelAdam(groups, lr, kernel=kernel, decoupled_weight_decay=decoupled, **options)
    else:
        cls: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW if decoupled else torch.optim.Adam}[algorithm]
        fused, foreach = found.in_use == "fused", found.in_use == "foreach"
        # Neither is torch's way to ask for one tensor at a time; both at once are refused.
        optimizer = (
            cls(groups, lr=lr, fused=True, **options) if fused else cls(groups, lr=lr, foreach=foreach, **options)
        )
    optimizer.backend_report = found
    return optimizer
