"""Which kernels step Adam and SGD: the choice, its reasons, and that the numbers agree within a bound.

TransformerEngine and apex are not installed where these tests run: STAND-INS with the same symbols, written here over
torch, test the choice and the calling convention. The tests marked `gpu` at the end take the real ones where they are.
"""

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.algorithms import backends
from core.optimizer.algorithms.backends import (
    AGREEMENT,
    KernelAdam,
    choose,
    disagreement,
    find_kernel,
    make_with_backend,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import make_net, wrap

CPU = torch.device("cpu")
# Largest difference of two backends' fp32 weights after 50 steps, as a part of the way that the weights have gone.
BOUND = 1e-5


def stand_in_kernel(chunk: int, flag: Any, lists: Any, *numbers: Any) -> None:
    """A STAND-IN for multi_tensor_adam: the arguments of apex's kernel, the arithmetic of the paper."""
    lr, beta1, beta2, eps, step, mode, bias_correction, decay = numbers
    assert chunk > 0 and flag.dtype == torch.int32 and bias_correction == 1
    for grad, param, first, second in zip(*lists, strict=True):
        gradient = grad if mode == 1 else grad + decay * param
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + eps)
        if mode == 1:
            update = update + decay * param
        param.sub_(update, alpha=lr)


def install_stand_in(monkeypatch: pytest.MonkeyPatch, package: str, module: str, kernel: Any) -> None:
    for name in (package.split(".")[0], package, module):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    if kernel is not None:
        sys.modules[module].multi_tensor_adam = kernel  # type: ignore[attr-defined]


def trained(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 50) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()
    return [param.detach().clone() for param in params]


def new_params(device: torch.device = CPU) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in (1000, 37, (5, 7), 1)]


def by_backend(name: str, algorithm: str, decoupled: bool, device: torch.device = CPU) -> list[torch.Tensor]:
    params = new_params(device)
    options: dict[str, Any] = {"momentum": 0.9} if algorithm == "sgd" else {"betas": (0.9, 0.99), "eps": 1e-8}
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0, "lr": 0.02}]
    optimizer = make_with_backend(algorithm, groups, wanted=name, lr=0.01, decoupled=decoupled, **options)
    assert optimizer.backend_report.splitlines()[0].endswith(f": {name}")
    return trained(optimizer, params)


def assert_within_bound(found: list[torch.Tensor], expected: list[torch.Tensor], bound: float = BOUND) -> None:
    for got, want, before in zip(found, expected, new_params(), strict=True):
        moved = (want.cpu() - before).norm()
        assert moved > 0.01, "the reference has hardly moved"
        assert (got - want).norm() <= bound * moved


@pytest.mark.parametrize(("algorithm", "decoupled"), [("adam", True), ("adam", False), ("sgd", False)])
def test_torchs_own_backends_agree_within_the_bound(algorithm: str, decoupled: bool) -> None:
    one_at_a_time = by_backend("single", algorithm, decoupled)
    for name in ("fused", "foreach"):
        assert_within_bound(by_backend(name, algorithm, decoupled), one_at_a_time)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_by_a_kernel_has_torchs_state_and_numbers(decoupled: bool) -> None:
    """The kernel is a STAND-IN; what is tested is KernelAdam: arguments, state, groups, a step count each."""
    params = new_params()
    options: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8}
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0, "lr": 0.02}]
    optimizer = KernelAdam(groups, 0.01, kernel=stand_in_kernel, decoupled_weight_decay=decoupled, **options)
    assert_within_bound(trained(optimizer, params), by_backend("single", "adam", decoupled))
    plain = torch.optim.AdamW(new_params(), lr=0.01)
    trained(plain, plain.param_groups[0]["params"], steps=1)
    state, torchs = optimizer.state[params[0]], next(iter(plain.state.values()))
    assert state.keys() == torchs.keys() and float(state["step"]) == 50
    assert [v.shape for v in state.values()] == [v.shape for v in torchs.values()]


def test_a_parameter_that_paused_has_its_own_step_count_under_a_kernel() -> None:
    steady, pausing = new_params()[:2]
    expected_steady, expected_pausing = new_params()[:2]
    options: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8}
    ours = KernelAdam([steady, pausing], 0.01, kernel=stand_in_kernel, decoupled_weight_decay=True, **options)
    torchs = torch.optim.AdamW([expected_steady, expected_pausing], lr=0.01, weight_decay=0.0, foreach=False, **options)
    for step in range(6):
        for one, other in ((steady, pausing), (expected_steady, expected_pausing)):
            one.grad = torch.cos(one.detach() * step)
            other.grad = None if step in (1, 2) else torch.sin(other.detach() + step)
        ours.step()
        torchs.step()
    assert float(ours.state[pausing]["step"]) == 4
    torch.testing.assert_close(pausing, expected_pausing, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(steady, expected_steady, rtol=1e-5, atol=1e-6)


def test_without_the_packages_the_report_says_what_is_in_use_and_why_not_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("transformer_engine", "apex"):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    text = choose("adam", CPU, torch.float32)[2]
    lines = text.splitlines()
    assert lines[0] == "adam on cpu: fused"
    assert lines[1].startswith("  not transformer_engine: not installed")
    assert lines[2].startswith("  not apex: not installed")
    assert lines[3:] == ["  not foreach: is slower", "  not single: is slower"]
    assert "is used for Adam only, not for sgd" in choose("sgd", CPU, torch.float32)[2]
    if not torch.cuda.is_available():
        assert backends.report() == text


def test_a_package_is_found_by_its_symbol_and_one_without_it_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stand_in(monkeypatch, "transformer_engine.pytorch", "transformer_engine_torch", None)
    assert find_kernel("transformer_engine") == (None, "transformer_engine_torch has no multi_tensor_adam")
    install_stand_in(monkeypatch, "apex", "amp_C", stand_in_kernel)
    assert find_kernel("apex") == (stand_in_kernel, "")
    assert "has no kernel for cpu" in choose("adam", CPU, torch.float32)[2]


def test_a_kernel_that_computes_something_else_is_not_taken() -> None:
    def without_decay(*arguments: Any) -> None:
        stand_in_kernel(*arguments[:-1], 0.0)

    def with_other_arguments(chunk: int, flag: Any, lists: Any, lr: float) -> None:
        raise AssertionError("never reached")

    assert disagreement(stand_in_kernel, CPU) == ""
    assert "differs from torch's by" in disagreement(without_decay, CPU)
    assert "does not take the arguments" in disagreement(with_other_arguments, CPU)
    assert 1e-7 < AGREEMENT < 1e-2


def test_the_first_kernel_that_can_be_used_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """STAND-INS for both packages on a machine that is said to have a GPU: the checks of the device are left out."""
    install_stand_in(monkeypatch, "transformer_engine.pytorch", "transformer_engine_torch", stand_in_kernel)
    install_stand_in(monkeypatch, "apex", "amp_C", stand_in_kernel)
    monkeypatch.setattr(backends, "disagreement", lambda kernel, device: "")
    gpu = torch.device("cuda", 0)
    found, kernel, text = choose("adam", gpu, torch.float32)
    assert found == "transformer_engine" and kernel is stand_in_kernel
    assert text.splitlines()[1] == "  not apex: is slower"
    assert choose("adam", gpu, torch.float32, "apex")[0] == "apex"
    found, _, text = choose("adam", gpu, torch.float32, "foreach")
    assert found == "foreach" and "optimizer_backend='foreach' was asked for" in text
    monkeypatch.setattr(backends, "_torch_fused_problem", lambda algorithm, device, dtype: "no such kernel")
    found, _, text = choose("adam", gpu, torch.float64)
    assert found == "foreach" and "steps fp32 weights, and these are torch.float64" in text


def test_a_backend_that_was_named_and_cannot_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)
    with pytest.raises(ValueError, match="optimizer_backend='apex' cannot be used: not installed"):
        choose("adam", CPU, torch.float32, "apex")


@ranks(2)
def test_an_optimizer_names_its_backend(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), use_distributed_optimizer=True)
    for wanted, expected in (("auto", "adam on cpu: fused"), ("single", "adam on cpu: single")):
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, optimizer_backend=wanted), [ddp])
        assert backends.report(optimizer).startswith(expected)
    lion = get_megatron_optimizer(OptimizerConfig(optimizer="lion", lr=0.1), [ddp])
    assert backends.report(lion) == "Lion on cpu: its own code"


# -- on a device ------------------------------------------------------------------------------------------------------

gpu_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")


def test_a_named_backend_must_serve_every_device_that_masters_lie_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the state may lie on the host, which a GPU's kernels do not step."""

    def usable(name: str, algorithm: str, device: torch.device, dtype: torch.dtype) -> tuple[None, str]:
        return None, "has no kernel for cpu" if name == "fused" and device.type == "cpu" else ""

    monkeypatch.setattr(backends, "_usable", usable)
    params = [nn.Parameter(torch.zeros(3, device=device)) for device in ("meta", "cpu")]
    options: dict[str, Any] = {"lr": 0.1, "decoupled": True}
    with pytest.raises(ValueError, match="optimizer_backend='fused' cannot be used: has no kernel for cpu"):
        backends.make_with_backend("adam", [{"params": params}], wanted="fused", **options)
    made: Any = backends.make_with_backend("adam", [{"params": params}], wanted="foreach", **options)
    assert "adam on meta: foreach" in made.backend_report and "adam on cpu: foreach" in made.backend_report


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("name", ["transformer_engine", "apex", "fused", "foreach"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_installed_backend_agrees_within_the_bound_on_a_device(name: str, decoupled: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if name in backends.KERNELS and find_kernel(name)[0] is None:
        pytest.skip(find_kernel(name)[1])
    expected = by_backend("single", "adam", decoupled, device)
    assert_within_bound([each for each in by_backend(name, "adam", decoupled, device)], expected)
