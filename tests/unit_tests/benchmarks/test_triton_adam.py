"""benchmarks/triton_adam.py: one pass for factor, Adam and the parameters, against fp64.

The kernel runs here in Triton's interpreter, where the package is installed (the extra `triton`); the tests marked
`gpu` compile it. The benchmark's arm around the kernel needs no Triton: there a STAND-IN takes the kernel's place, the
formulas of the paper in numpy.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import benchmarks
from benchmarks import gpu
from benchmarks.gpu_optimizer import NAMES, TRITON, checked, makers, problem_of
from benchmarks.gpu_steps import MODELS
from benchmarks.optimizer_arms import AdamNumbers, WrongWeights

BF16, FP16, FP32, INT16 = torch.bfloat16, torch.float16, torch.float32, torch.int16
CPU = torch.device("cpu")
MODULE = "benchmarks.triton_adam"
NUMBERS = AdamNumbers(0.01, 0.9, 0.99, 1e-8, 0.1, True, 3, (0.25, 1.0))


# -- the kernel -------------------------------------------------------------------------------------------------------

GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
INTERPRETED = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed: pip install 'gradient-core[triton]'",
    ),
)


@pytest.fixture(params=[INTERPRETED, GPU])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[torch.device, Any]]:
    """(device, the kernel): interpreted on the CPU, compiled on a GPU. Its module settles which when it is imported."""
    forget()
    monkeypatch.setenv("TRITON_INTERPRET", "1" if request.param == "cpu" else "0")
    from benchmarks.triton_adam import adam, is_interpreted

    assert is_interpreted() is (request.param == "cpu")
    yield torch.device(request.param), adam
    forget()


def forget() -> None:
    sys.modules.pop(MODULE, None)
    if hasattr(benchmarks, "triton_adam"):
        del benchmarks.triton_adam


def adam_in_fp64(grad: Any, weight: Any, first: Any, second: Any, numbers: AdamNumbers) -> tuple[Any, Any, Any]:
    """Kingma and Ba, algorithm 1, and Loshchilov and Hutter's decay, in numpy."""
    grad, weight, first, second = (each.cpu().double().numpy() for each in (grad, weight, first, second))
    grad = grad * numbers.factors[0] * numbers.factors[1]
    if not numbers.decoupled:
        grad = grad + numbers.weight_decay * weight
    first = numbers.beta1 * first + (1 - numbers.beta1) * grad
    second = numbers.beta2 * second + (1 - numbers.beta2) * grad**2
    update = first / (1 - numbers.beta1**numbers.step)
    update = update / (np.sqrt(second / (1 - numbers.beta2**numbers.step)) + numbers.eps)
    if numbers.decoupled:
        update = update + numbers.weight_decay * weight
    return weight - numbers.lr * update, first, second


def numbers_of_many_sizes(numel: int, dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = 2.0 ** (-10 * torch.rand(numel, generator=generator))
    return (torch.randn(numel, generator=generator) * size).to(dtype).to(device)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A bf16 parameter and the 16 bits that it lacks, one number at a time in Python's integers."""
    upper, lower = [], []
    for bits in master.cpu().view(torch.int32).tolist():
        low = (bits & 0xFFFF) - (0x10000 if bits & 0x8000 else 0)
        lower.append(low)
        upper.append(((bits - low) >> 16 & 0xFFFF) - (0x10000 if (bits - low) >> 16 & 0x8000 else 0))
    to = {"dtype": INT16, "device": master.device}
    return torch.tensor(upper, **to).view(BF16), torch.tensor(lower, **to)


def whole_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    bits = [(h << 16) + low for h, low in zip(param.cpu().view(INT16).tolist(), remainder.cpu().tolist(), strict=True)]
    return torch.from_numpy(np.array(bits, dtype=np.int64).astype(np.int32)).view(FP32)


def assert_rounded(kept: torch.Tensor, exact: Any, slack: float = 1e-9) -> None:
    """`kept` is `exact` rounded to nearest in its dtype, but for the rounding of fp32 arithmetic before that.

    slack: of numbers near 0 that are a difference of larger ones.
    """
    exact = torch.from_numpy(exact)
    kept, dtype = kept.cpu(), kept.dtype
    half_a_step = torch.finfo(dtype).eps / 2 if dtype != FP32 else 0.0
    smallest = torch.finfo(dtype).smallest_normal
    allowed = (half_a_step + 3e-6) * exact.abs() + (smallest if dtype == FP16 else slack)
    off = (kept.double() - exact).abs()
    assert bool((off <= allowed).all()), f"{(off / allowed).max():.3g} times what {dtype} allows"


# (parameter, gradient, first moment, second moment): with fp32 masters, masters in bf16, remainders and none
PLAIN_FORMS = [(FP32, FP32, FP32, FP32), (FP32, BF16, BF16, FP32), (BF16, BF16, FP32, FP32), (BF16, FP32, BF16, BF16)]
COPIED_FORMS = [(BF16, FP32, FP32), (BF16, BF16, FP32), (FP16, FP16, FP32), (FP16, FP32, BF16)]


@pytest.mark.parametrize("numel", [1, 1024, 2500])
@pytest.mark.parametrize(("param_dtype", "grad_dtype", "first_dtype", "second_dtype"), PLAIN_FORMS)
def test_a_parameter_that_is_its_own_master_is_stepped_as_in_fp64(
    on: Any, numel: int, param_dtype: torch.dtype, grad_dtype: torch.dtype, first_dtype: Any, second_dtype: Any
) -> None:
    device, kernel = on
    for numbers in (NUMBERS, AdamNumbers(0.02, 0.8, 0.95, 0.1, 0.3, False, 1, (3.0, 1.0))):
        grad = numbers_of_many_sizes(numel, grad_dtype, 1, device)
        param = numbers_of_many_sizes(numel, param_dtype, 2, device)
        first = 0.1 * numbers_of_many_sizes(numel, first_dtype, 3, device)
        second = 0.01 * numbers_of_many_sizes(numel, second_dtype, 4, device).square()
        weight, m, v = adam_in_fp64(grad, param, first, second, numbers)
        before, grad_before = param.clone(), grad.clone()
        kernel(grad, param, None, first, second, numbers)
        assert_rounded(param, weight, 1e-7)
        assert_rounded(first, m, 1e-7)
        assert_rounded(second, v, 1e-8)
        assert torch.equal(grad, grad_before), "gradients are only read"
        assert numel == 1 or (param != before).float().mean() > 0.8


@pytest.mark.parametrize(("param_dtype", "grad_dtype", "master_dtype"), COPIED_FORMS)
def test_a_copied_master_is_stepped_as_in_fp64_and_the_parameter_is_what_was_kept_rounded(
    on: Any, param_dtype: torch.dtype, grad_dtype: torch.dtype, master_dtype: torch.dtype
) -> None:
    device, kernel = on
    grad = numbers_of_many_sizes(1500, grad_dtype, 1, device)
    master = numbers_of_many_sizes(1500, master_dtype, 2, device)
    param = torch.zeros(1500, dtype=param_dtype, device=device)
    first, second = torch.zeros(1500, device=device), torch.zeros(1500, device=device)
    weight, m, v = adam_in_fp64(grad, master, first, second, NUMBERS)
    kernel(grad, param, master, first, second, NUMBERS)
    assert_rounded(master, weight, 1e-7)
    assert_rounded(first, m, 1e-7)
    assert_rounded(second, v, 1e-8)
    assert torch.equal(param, master.float().to(param_dtype))


@pytest.mark.parametrize("grad_dtype", [FP32, BF16])
def test_a_remainder_makes_the_step_of_an_fp32_copy_bit_for_bit(on: Any, grad_dtype: torch.dtype) -> None:
    device, kernel = on
    grad = numbers_of_many_sizes(1500, grad_dtype, 1, device)
    copy = numbers_of_many_sizes(1500, FP32, 2, device)
    param, remainder = split_master(copy)
    assert torch.equal(whole_master(param, remainder), copy.cpu())
    states = [[torch.zeros(1500, device=device) for _ in range(2)] for _ in range(2)]
    for step in (1, 2, 3):
        numbers = AdamNumbers(0.01, 0.9, 0.99, 1e-8, 0.1, True, step)
        kernel(grad, torch.zeros_like(param), copy, *states[0], numbers)
        kernel(grad, param, remainder, *states[1], numbers)
    assert torch.equal(whole_master(param, remainder), copy.cpu())
    nearest, lacking = split_master(copy)
    assert torch.equal(param.view(INT16), nearest.view(INT16)) and torch.equal(remainder, lacking)


def test_bf16_is_rounded_to_nearest_with_ties_to_even_and_infinity_and_nan_stay(on: Any) -> None:
    device, kernel = on
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, torch.inf, -torch.inf, torch.nan])
    master, param = values.to(device), torch.zeros(7, dtype=BF16, device=device)
    zeros = [torch.zeros(7, device=device) for _ in range(3)]
    kernel(zeros[0], param, master, *zeros[1:], AdamNumbers(0.0, 0.9, 0.99, 1e-8, 0.0, True, 1))
    assert torch.equal(
        param[:6].cpu(), torch.tensor([1.0, 1 + 2**-6, 1 + 2**-7, -1.0, torch.inf, -torch.inf]).bfloat16()
    )
    assert bool(param[6].isnan())


def test_a_tensor_of_another_length_is_refused(on: Any) -> None:
    device, kernel = on
    a, b = torch.zeros(4, device=device), torch.zeros(5, device=device)
    with pytest.raises(ValueError, match=r"exp_avg is \[5\] .* expected contiguous \[4\]"):
        kernel(a, a.clone(), None, b, a.clone(), NUMBERS)


FORMS = {  # grad, param, master, first and second moment; is it a copy, a remainder?
    "fp32": (("*fp32", "*fp32", "*fp32", "*fp32", "*fp32"), False, False),
    "bf16 beside fp32": (("*fp32", "*bf16", "*fp32", "*fp32", "*fp32"), True, False),
    "bf16 and remainder": (("*bf16", "*bf16", "*i16", "*bf16", "*bf16"), False, True),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_for_gpus_that_are_not_there(
    form: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To a binary for A100 and H100: loads and stores of 16 bytes a thread, IEEE division and root, nothing fused."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    forget()
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from benchmarks.triton_adam import BLOCK, _adam

    forget()
    pointers, copy, remainder = FORMS[form]
    constants = {"DECOUPLED": True, "COPY": copy, "REMAINDER": remainder, "BLOCK": BLOCK}
    names = _adam.arg_names
    signature = dict.fromkeys(names, "fp32") | dict(zip(names[:5], pointers, strict=True)) | {"numel": "i32"}
    source = ASTSource(
        fn=_adam,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in range(6)},
    )
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    assert len(compiled.asm["cubin"]) > 1000
    found = set(re.findall(r"(?:[ls][dt]\.global|sqrt|div|fma)\.[\w.]+", compiled.asm["ptx"]))
    assert found == {"ld.global.v4.b32", "st.global.v4.b32", "sqrt.rn.f32", "div.rn.f32"}


# -- around the kernel ------------------------------------------------------------------------------------------------


def stand_in(
    grad: torch.Tensor,
    param: torch.Tensor,
    master: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    numbers: AdamNumbers,
) -> None:
    """A STAND-IN for triton_adam.adam: the reference above, on every form."""
    assert grad.shape == param.shape == first.shape == second.shape and param.dim() == 1
    if master is None:
        weight = param
    elif master.dtype == INT16:
        weight = whole_master(param, master)
    else:
        weight = master
    new, m, v = (torch.from_numpy(each).float() for each in adam_in_fp64(grad, weight, first, second, numbers))
    first.copy_(m)
    second.copy_(v)
    if master is None:
        param.copy_(new)
    elif master.dtype == INT16:
        upper, lower = split_master(new)
        param.copy_(upper)
        master.copy_(lower)
    else:
        param.copy_(master.copy_(new))


@pytest.mark.parametrize("precision", NAMES)
def test_the_arm_makes_torchs_steps_and_a_wrong_kernel_is_caught(precision: str) -> None:
    problem = problem_of(MODELS["test"], precision, CPU)
    with gpu.one_rank(CPU):
        arms = makers(stand_in)
        checked(problem, {TRITON: arms[TRITON]})

        def without_factor(*tensors: Any) -> None:
            stand_in(*tensors[:-1], replace(tensors[-1], factors=(1.0, 1.0), eps=0.1))

        with pytest.raises(WrongWeights, match=TRITON):
            checked(problem, {TRITON: makers(without_factor)[TRITON]})
