"""The kernels that step Adam and SGD: the choice, its reasons, and that the numbers agree within a bound."""

from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.algorithms import backends
from core.optimizer.algorithms.backends import choose, make_with_backend
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import make_net, wrap

CPU = torch.device("cpu")
# Largest difference of two backends' fp32 weights after 50 steps, as a part of the way that the weights have gone.
BOUND = 1e-5


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
    assert optimizer.backend_report.endswith(f": {name}")  # type: ignore[attr-defined]
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


def test_auto_takes_fused_where_torch_has_it_for_every_device_and_foreach_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Part of the state may be on the host, which lacks a GPU's kernels."""
    assert choose("adam", [(CPU, torch.float32)]) == ("fused", "adam on cpu: fused")
    if not torch.cuda.is_available():
        assert backends.report() == "adam on cpu: fused"
    places = [(torch.device("meta"), torch.float32), (CPU, torch.float32)]
    monkeypatch.setattr(backends, "_fused_problem", lambda _, device, __: "no kernel" if device == CPU else None)
    assert choose("sgd", places) == ("foreach", "sgd on meta, cpu: foreach (not fused: no kernel)")
    assert choose("adam", places, "single") == ("single", "adam on meta, cpu: single")
    with pytest.raises(ValueError, match="optimizer_backend='fused' cannot be used: no kernel"):
        choose("adam", places, "fused")
    with pytest.raises(ValueError, match="optimizer_backend is 'apex'; it must be one of auto, fused, foreach, single"):
        OptimizerConfig(optimizer_backend="apex")


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


@pytest.mark.gpu
@gpu_only
@pytest.mark.parametrize("name", ["fused", "foreach"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_backend_agrees_within_the_bound_on_a_device(name: str, decoupled: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    expected = by_backend("single", "adam", decoupled, device)
    assert_within_bound(by_backend(name, "adam", decoupled, device), expected)
