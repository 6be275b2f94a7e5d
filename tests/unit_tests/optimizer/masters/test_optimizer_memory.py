"""The formula for memory: against numbers worked out by hand, and against every tensor that a step leaves behind."""

from __future__ import annotations

import pytest
import torch

from benchmarks.memory import PRECISIONS, STRATEGIES, formula, measure
from benchmarks.memory_formula import bytes_per_parameter
from core import parallel_state
from core.optimizer import OptimizerConfig
from core.optimizer.masters import scratch
from core.optimizer.masters.memory import scratch_bytes
from tests.unit_tests.ranks import ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def aware(**options: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(use_precision_aware_optimizer=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "param_dtype", "grad_dtype", "strategy", "ranks_", "expected"),
    [
        (OptimizerConfig(), FP32, FP32, "no_shard", 8, (4, 4, 0, 8)),
        (OptimizerConfig(), FP32, FP32, "optim", 8, (4, 4, 0, 1)),
        (OptimizerConfig(), BF16, FP32, "no_shard", 8, (2, 4, 4, 8)),
        (OptimizerConfig(), BF16, FP32, "optim", 8, (2, 4, 0.5, 1)),
        (OptimizerConfig(), BF16, BF16, "optim_grads", 8, (2, 0.25, 0.5, 1)),
        (OptimizerConfig(), torch.float64, torch.float64, "no_shard", 1, (8, 8, 0, 16)),
        (OptimizerConfig(optimizer="sgd"), BF16, BF16, "no_shard", 1, (2, 2, 4, 4)),
        (OptimizerConfig(optimizer="sgd", sgd_momentum=0.0), BF16, BF16, "no_shard", 1, (2, 2, 4, 0)),
        (OptimizerConfig(optimizer="lion"), BF16, BF16, "optim", 4, (2, 2, 1, 1)),
        (aware(), BF16, FP32, "optim", 2, (2, 4, 1, 4)),
        (aware(), FP16, FP32, "optim", 2, (2, 4, 2, 4)),
        (aware(exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16), BF16, BF16, "no_shard", 1, (2, 2, 2, 4)),
        (aware(main_params_dtype=BF16), BF16, BF16, "no_shard", 1, (2, 2, 0, 8)),
    ],
)
def test_the_formula_by_hand(
    config: OptimizerConfig,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    strategy: str,
    ranks_: int,
    expected: tuple[float, ...],
) -> None:
    got = bytes_per_parameter(
        config, param_dtype=param_dtype, grad_dtype=grad_dtype, strategy=strategy, shard_ranks=ranks_
    )
    assert (got.parameters, got.gradients, got.masters, got.moments) == expected
    assert got.total == sum(expected)


@ranks(2, nightly=(1, 3))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_tensor_that_a_step_leaves_is_in_the_formula(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    whole = scratch.CPU_NUMEL
    scratch.CPU_NUMEL = 8192
    try:
        for name, precision in PRECISIONS.items():
            measured, scratch_held = measure(precision, strategy, 400_000)
            assert measured == pytest.approx(formula(precision, strategy, world), rel=0.05), name
            tensors = scratch_bytes(
                precision.config(), param_dtype=precision.param_dtype, grad_dtype=precision.grad_dtype, on_cpu=True
            ) / (4 * whole)
            assert scratch_held == tensors * 4 * 8192, name
    finally:
        scratch.CPU_NUMEL = whole


def test_an_algorithm_whose_moments_are_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="RMSprop"):
        bytes_per_parameter(OptimizerConfig(optimizer="RMSprop"), param_dtype=FP32, grad_dtype=FP32)
