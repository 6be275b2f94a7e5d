"""Kernels that run the inner step of Adam and SGD, and why others do not.

In this order: TransformerEngine's and apex's `multi_tensor_adam` where the package is installed, has that symbol and
agrees with torch on a small vector; torch's fused kernels; torch's foreach ones, which run on every device and dtype.

    print(core.optimizer.algorithms.backends.report())           # what Adam would use on this machine
    print(core.optimizer.algorithms.backends.report(optimizer))  # what an optimizer uses
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

# package to load first, module with the kernel, its name there
KERNELS = {
    "transformer_engine": ("transformer_engine.pytorch", "transformer_engine_torch", "multi_tensor_adam"),
    "apex": ("apex", "amp_C", "multi_tensor_adam"),
}
ORDER = (*KERNELS, "fused", "foreach", "single")
# A kernel is taken if after three steps its fp32 weights differ from torch's by no more than this part of the way they
# have gone. The same formula in another order of rounding stays some 50 times below.
AGREEMENT = 1e-4
CHUNK_ELEMENTS = 2048 * 32  # what one block of threads takes; the value both packages' optimizers pass

# (chunk size, overflow flag, [gradients, parameters, first moments, second moments], lr, beta1, beta2, eps, step,
#  1 for decoupled weight decay, 1 for bias correction, weight decay)
MultiTensorAdam = Callable[..., None]


def report(optimizer: Any = None) -> str:
    """Name the kernels of an optimizer of ours, one paragraph per algorithm; without one, those of Adam here."""
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
    """(backend, its kernel where that is not torch's, a report of a line a backend) for 'adam' or 'sgd'.

    wanted: OptimizerConfig.optimizer_backend. Raises ValueError where a backend that was named cannot be used.
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
    """(kernel, why not): an empty reason means that it can be used."""
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
    """Describe a difference of a kernel's AdamW from torch's single-tensor one beyond AGREEMENT; '' if none."""
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
    """torch's error for a fused step of this kind; '' if none."""
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
    """Adam, AdamW (`decoupled`) or SGD over these groups, by the best backend; it carries its `backend_report`."""
    samples = {param.device: param for group in groups for param in group["params"]}
    samples = samples or {torch.device("cpu"): torch.empty(0, device="cpu")}
    if len(samples) > 1 and wanted == "auto":  # some are stepped on the host, where a GPU's kernels are not
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
    """Adam and AdamW with torch's state and formulas; the arithmetic is a `multi_tensor_adam` kernel's.

    The packages' own optimizer classes keep one step count a param group. Here every parameter has its own, as in
    torch, because runs may be frozen and thawed apart from each other, and because checkpoints hold it by parameter.
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
        """Update every parameter that has a gradient; one kernel call a group, device and step count."""
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
