"""fp8: linear layers multiply in 8-bit floats, and other operations run in bf16 autocast. Parameters are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from core.booster.accelerator import default_device
from core.booster.mixed_precision.autocast import BF16MixedPrecision
from core.booster.mixed_precision.mixed_precision_base import Configured, MixedPrecision
from core.interface import ModelWrapper

MULTIPLE = 16  # sizes of an 8-bit product must be multiples of this
FIRST_CAPABILITY = (8, 9)  # the first CUDA generation that multiplies 8-bit floats


class FP8MixedPrecision(MixedPrecision):
    """Runs every nn.Linear whose sizes are multiples of 16 in fp8, with one scale per tensor computed at each call.

    Activations and weights are e4m3, and output gradients are e5m2. Accumulation uses the hardware's native
    precision, and results are bf16.

    Raises:
        RuntimeError: If the hardware does not support matrix products of 8-bit floats.
    """

    def __init__(self) -> None:
        reason = why_not(default_device())
        if reason is not None:
            raise RuntimeError(f"mixed precision 'fp8' cannot run here: {reason}. Use 'bf16'")

    def configure(
        self, model: nn.Module, optimizer: Any = None, criterion: Callable[..., Any] | None = None
    ) -> Configured:
        """Wrap the model and the criterion in bf16 autocast, with linear layers in fp8.

        See ``MixedPrecision.configure`` for the arguments.

        Raises:
            ValueError: If no linear layer has suitable sizes.
        """
        plain = model.unwrap() if isinstance(model, ModelWrapper) else model
        if not use_fp8_linears(plain):
            raise ValueError(
                f"mixed precision 'fp8' would change nothing: the model has no nn.Linear whose sizes are multiples of "
                f"{MULTIPLE}. Use 'bf16'"
            )
        return BF16MixedPrecision().configure(model, optimizer, criterion)


def why_not(device: torch.device) -> str | None:
    """Return the reason why a device cannot multiply 8-bit floats, or ``None`` if it can."""
    if device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < FIRST_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            return f"{name} has compute capability {capability}, and 8-bit products need {FIRST_CAPABILITY} or newer"
    ones = torch.ones(MULTIPLE, MULTIPLE, device=device)
    try:
        _product(ones, torch.float8_e4m3fn, ones, torch.float8_e4m3fn)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return f"torch {torch.__version__} has no 8-bit product for {device.type} ({str(error).splitlines()[0]})"
    return None


def use_fp8_linears(model: nn.Module) -> list[str]:
    """Make a model's linear layers multiply in 8 bits, and return the names of the changed layers.

    Only layers whose sizes are multiples of 16 change, and names and parameters stay the same. Raises ValueError if a
    layer is split over tensor parallelism, or if its instance has another forward.
    """
    changed = []
    for name, module in model.named_modules():
        if type(module).forward is nn.Linear.forward and fits(module.in_features, module.out_features):
            own = vars(module).get("forward")
            if own is not None and getattr(own, "__func__", None) is not _forward:
                raise ValueError(
                    f"forward of module {name!r} was replaced, as for layers split over tensor parallelism, and fp8 "
                    "supports unsplit layers only; use 'bf16'"
                )
            module.forward = MethodType(_forward, module)  # set on the instance, which deepcopy and FSDP respect
            changed.append(name)
    return changed


def fits(*sizes: int) -> bool:
    """Return ``True`` if a product of these sizes can run in 8 bits."""
    return all(size % MULTIPLE == 0 for size in sizes)


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = FP8Linear.apply(x, module.weight)
    return result if module.bias is None else result + module.bias.to(result.dtype)


class FP8Linear(torch.autograd.Function):
    """Linear layer in 8 bits: x [..., in] times weight [out, in] in e4m3, and gradients [..., out] in e5m2."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The weight itself, not its 8-bit copy: a sharding plugin frees it between forward and backward.
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        result = _product(rows, torch.float8_e4m3fn, weight.t(), torch.float8_e4m3fn)
        return result.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(rows, torch.float8_e5m2, weight, torch.float8_e4m3fn).view_as(x).to(x.dtype)
        if ctx.needs_input_grad[1]:
            tokens = x.reshape(-1, x.shape[-1])
            missing = -rows.shape[0] % MULTIPLE  # the number of tokens is the inner size here
            rows, tokens = (nn.functional.pad(tensor, (0, 0, 0, missing)) for tensor in (rows, tokens))
            product = _product(rows.t(), torch.float8_e5m2, tokens, torch.float8_e4m3fn)
            grad_weight = product.to(weight.dtype)
        return grad_x, grad_weight


def _product(
    left: torch.Tensor, left_dtype: torch.dtype, right: torch.Tensor, right_dtype: torch.dtype
) -> torch.Tensor:
    """Multiply left [m, k] and right [k, n] in 8 bits, with a bf16 result.

    The kernel needs a row-major left and a column-major right matrix.
    """
    left, left_scale = _rounded(left.contiguous(), left_dtype)
    right, right_scale = _rounded(right.t().contiguous(), right_dtype)
    whole = nn.functional.ScalingType.TensorWise
    return nn.functional.scaled_mm(left, right.t(), left_scale, whole, right_scale, whole, output_dtype=torch.bfloat16)


def _rounded(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor in 8 bits and its scale. An Inf or NaN makes the entire result NaN."""
    largest = tensor.abs().amax().float() if tensor.numel() else tensor.new_zeros((), dtype=torch.float32)
    scale = torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return (tensor.float() / scale).to(dtype), scale
