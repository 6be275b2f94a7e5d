"""Kernels for the inner step of Adam and SGD, and the reasons why other kernels are not used.

Candidates, in this order: the `multi_tensor_adam` of TransformerEngine and of apex, if the package is installed, has
that symbol and agrees with torch on a small vector; torch's fused kernels; torch's foreach kernels, which run on every
device and dtype.

    print(core.optimizer.algorithms.backends.report())           # what Adam would use on this machine
    print(core.optimizer.algorithms.backends.report(optimizer))  # what an optimizer uses
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

# package to import first, module with the kernel, name of the kernel
KERNELS = {
    "transformer_engine": ("transformer_engine.pytorch", "transformer_engine_torch", "multi_tensor_adam"),
    "apex": ("apex", "amp_C", "multi_tensor_adam"),
}
ORDER = (*KERNELS, "fused", "foreach", "single")
# A kernel is used if, after three steps, its fp32 weights differ from torch's by at most this fraction of the distance
# moved. The same formula with another order of rounding stays about 50 times below it.
AGREEMENT = 1e-4
CHUNK_ELEMENTS = 2048 * 32  # elements per block of threads, as in both packages' optimizers

# (chunk size, overflow flag, [gradients, parameters, first moments, second moments], lr, beta1, beta2, eps, step,
#  1 for decoupled weight decay, 1 for bias correction, weight decay)
MultiTensorAdam = Callable[..., None]


def report(optimizer: Any = None) -> str:
    """Return the names of the kernels that an optimizer uses, one paragraph per algorithm, with the reasons against
    others.

    Args:
        optimizer: An optimizer of this package; None for the kernels that Adam would use on this machine.
    """
    if optimizer is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return choose("adam", device, torch.float32)[2]
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


def choose(
    algorithm: str, device: torch.device, dtype: torch.dtype, wanted: str = "auto"
) -> tuple[str, MultiTensorAdam | None, str]:
    """Choose the backend of Adam or SGD.

    Args:
        algorithm: 'adam' or 'sgd'.
        device: Device of the weights.
        dtype: Dtype of the weights.
        wanted: OptimizerConfig.optimizer_backend; 'auto' for the fastest usable one.

    Returns:
        (backend, its kernel or None if the kernel is torch's, a report with one line per backend).

    Raises:
        ValueError: If `wanted` names a backend that cannot be used.
    """
    others: dict[str, str] = {}
    for name in ORDER if wanted == "auto" else (wanted,):
        kernel, others[name] = _usable(name, algorithm, device, dtype)
        if not others[name]:
            why_not = "is slower" if wanted == "auto" else f"optimizer_backend={wanted!r} was asked for"
            lines = [f"  not {other}: {others.get(other, why_not)}" for other in ORDER if other != name]
            return name, kernel, "\n".join([f"{algorithm} on {device}: {name}", *lines])
    raise ValueError(f"optimizer_backend={wanted!r} cannot be used: {others[wanted]}")


def _usable(name: str, algorithm: str, device: torch.device, dtype: torch.dtype) -> tuple[MultiTensorAdam | None, str]:
    """Return (kernel, reason why the backend cannot be used); the reason is empty if it can."""
    if name not in KERNELS:
        return None, _torch_fused_problem(algorithm, device, dtype) if name == "fused" else ""
    if algorithm != "adam":
        return None, f"is used for Adam only, not for {algorithm}"
    kernel, why_not = find_kernel(name)
    if kernel is None:
        return None, why_not
    if device.type != "cuda":
        return None, f"has no kernel for {device.type}"
    if dtype != torch.float32:
        return None, f"steps fp32 weights, and these are {dtype}"
    return kernel, disagreement(kernel, device)


def find_kernel(name: str) -> tuple[MultiTensorAdam | None, str]:
    """Import a package's kernel.

    Args:
        name: A key of KERNELS.

    Returns:
        (kernel, ''), or (None, the reason why it is not available).
    """
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
    """Describe the difference between a kernel's AdamW and torch's single-tensor AdamW, if it is above AGREEMENT.

    Args:
        kernel: A `multi_tensor_adam`.
        device: Device to compare on.

    Returns:
        The difference, or the kernel's error, as text; '' if the kernel agrees.
    """
    start = torch.linspace(-1.0, 1.0, 1027, device=device)
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    ours, torchs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    reference = torch.optim.AdamW([torchs], foreach=False, **options)
    try:
        optimizer = KernelAdam([ours], kernel=kernel, decoupled_weight_decay=True, **options)
        for count in range(1, 4):
            ours.grad = torchs.grad = torch.sin(37.0 * start) * count
            optimizer.step()
            reference.step()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"its kernel does not take the arguments that apex 0.1 defined: {str(error).splitlines()[0]}"
    relative = float((ours - torchs).detach().norm() / (torchs - start).detach().norm())
    return "" if relative <= AGREEMENT else f"its AdamW differs from torch's by {relative:.2g} of the update"


def _torch_fused_problem(algorithm: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return torch's error text for a fused step of this algorithm, device and dtype; '' if it works."""
    make: Any = torch.optim.SGD if algorithm == "sgd" else torch.optim.AdamW
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
    """Create Adam, AdamW or SGD with the best backend, and set its `backend_report`.

    Args:
        algorithm: 'adam' or 'sgd'.
        groups: torch param groups.
        wanted: OptimizerConfig.optimizer_backend.
        lr: Default learning rate.
        decoupled: True for AdamW.
        **options: Further options of the torch class.

    Raises:
        ValueError: If `wanted` names a backend that cannot be used.
    """
    samples = {param.device: param for group in groups for param in group["params"]}
    samples = samples or {torch.device("cpu"): torch.empty(0, device="cpu")}
    if len(samples) > 1 and wanted == "auto":  # some are stepped on the host, which lacks a GPU's kernels
        kinds = [(algorithm, device, sample.dtype) for device, sample in samples.items()]
        wanted = next(name for name in ORDER if not any(_usable(name, *kind)[1] for kind in kinds))
    chosen = [choose(algorithm, device, sample.dtype, wanted) for device, sample in samples.items()]
    backend, kernel, _ = chosen[0]
    make: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW if decoupled else torch.optim.Adam}[algorithm]
    optimizer: Any
    if kernel is not None:
        optimizer = KernelAdam(groups, lr, kernel=kernel, decoupled_weight_decay=decoupled, **options)
    elif backend == "fused":
        optimizer = make(groups, lr=lr, fused=True, **options)
    else:  # foreach=False without fused is torch's way to ask for one tensor at a time
        optimizer = make(groups, lr=lr, foreach=backend == "foreach", **options)
    optimizer.backend_report = "\n".join(report for _, _, report in chosen)
    return optimizer


class KernelAdam(torch.optim.Optimizer):
    """Adam and AdamW with torch's state and formulas, computed by a `multi_tensor_adam` kernel.

    The packages' own optimizer classes keep one step count per param group. This class keeps one per parameter, as
    torch does, because parameters may be frozen and unfrozen separately, and because checkpoints store it by parameter.

    Args:
        params: Parameters or param groups, in fp32 on a GPU.
        lr: Learning rate.
        kernel: The kernel.
        betas: Coefficients of the averages of gradients and of their squares.
        eps: Added to the root of the squares.
        decoupled_weight_decay: True for AdamW.
        weight_decay: Weight decay.
    """

    state_keys = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        kernel: MultiTensorAdam,
        betas: tuple[float, float],
        eps: float,
        decoupled_weight_decay: bool,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.kernel = kernel
        self.decoupled_weight_decay = decoupled_weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient, with one kernel call per group, device, dtype and step count.

        Args:
            closure: Ignored.
        """
        for group in self.param_groups:
            together: dict[tuple[torch.device, torch.dtype, int], list[list[torch.Tensor]]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "step" not in state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["step"] += 1
                lists = together.setdefault((param.device, param.grad.dtype, int(state["step"])), [[], [], [], []])
                tensors = (param.grad, param.detach(), state["exp_avg"], state["exp_avg_sq"])
                for listed, tensor in zip(lists, tensors, strict=True):
                    listed.append(tensor)
            for (device, _, count), lists in together.items():
                no_overflow = torch.zeros(1, dtype=torch.int32, device=device)
                numbers = (group["lr"], *group["betas"], group["eps"], count)
                modes = (int(self.decoupled_weight_decay), 1, group["weight_decay"])
                self.kernel(CHUNK_ELEMENTS, no_overflow, lists, *numbers, *modes)
