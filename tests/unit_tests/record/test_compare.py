"""`python -m core compare` names the first difference of two runs, and is silent about what rounding explains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.verify.record import compare_recordings, record_with
from tests.layouts.gpt import DTYPES, global_batch, groups_of, job_of, wrapper_config
from tests.layouts.layouts import Layout
from tests.unit_tests.ranks import ranks

LAYERS = 4  # in every layout
WHOLE = Layout(dp=2)

Fault = Callable[[int, nn.Module], None]  # called before each step with its number and the last chunk


def record(
    path: Path,
    layout: Layout = WHOLE,
    *,
    dtype: str = "fp32",
    steps: int = 3,
    lr: float = 1e-3,
    data: Callable[[int], int] = lambda step: step,
    fault: Fault = lambda step, model: None,
    **options: Any,
) -> None:
    """Train our GPT in a layout, on the same data in every layout, and record it."""
    with (
        mock.patch.object(Layout, "num_layers", LAYERS),
        mock.patch.dict(DTYPES, bf16=torch.bfloat16),
        groups_of(layout) as groups,
    ):
        job: Any = job_of(layout, dtype, groups, wrapper_config(layout))
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=lr), job.model.chunks)
        with record_with(getattr(job, "runner", job.model.chunks), optimizer, path, **options):
            for step in range(1, steps + 1):
                fault(step, job.model.chunks[-1].module)
                job.clear()
                job.step(global_batch(layout, data(step)))
                optimizer.step()


@ranks(2)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (Layout(tp=2), "fp32"),
        (Layout(tp=2, sp=True, recompute=True), "fp32"),
        (Layout(pp=2, schedule="1F1B", microbatches=2), "fp32"),
        (Layout(pp=2, vpp=2, schedule="ZBVZeroBubble", microbatches=4), "fp32"),
        (Layout(cp=2, cp_comm="p2p"), "fp32"),
        (Layout(dp=2, strategy="optim", microbatches=3), "fp32"),
        (Layout(dp=2, strategy="optim_grads_params"), "fp32"),
        (WHOLE, "bf16"),
        (Layout(tp=2, sp=True), "bf16"),
        (Layout(tp=2), "fp64"),
    ],
    ids=str,
)
def test_rounding_explains_the_difference_of_layouts_and_dtypes(
    rank: int, tmp_path: Path, layout: Layout, dtype: str
) -> None:
    record(tmp_path / "whole", dtype="fp64" if dtype == "fp64" else "fp32")
    record(tmp_path / "other", layout, dtype=dtype)
    if rank == 0:
        found = compare_recordings(tmp_path / "whole", tmp_path / "other")
        assert found.ok, f"{found}\n{found.where and found.where.table()}"
        first, last = (json.loads((tmp_path / "other").read_text().splitlines()[number]) for number in (1, -1))
        assert "rounding" in str(found).lower()
        assert len(first["gradients"]) > 4 * LAYERS and len(first["grads"]) > 4 * LAYERS, "much is compared"
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        assert first["before"][name] != last["after"][name], "and it is trained"


@ranks(2)
def test_experts_have_one_sketch_in_every_layout(rank: int, tmp_path: Path) -> None:
    record(tmp_path / "whole", Layout(dp=2, experts="alltoall"))
    record(tmp_path / "ep", Layout(dp=2, ep=2, experts="alltoall"))
    record(tmp_path / "tp", Layout(tp=2, sp=True, ep=2, etp=1, experts="allgather"))
    if rank == 0:
        for other in ("ep", "tp"):
            found = compare_recordings(tmp_path / "whole", tmp_path / other)
            assert found.ok, str(found)


class Scaled(torch.autograd.Function):
    """The identity, with a backward that is off by 1 %."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.01


def wrong_backward(step: int, model: nn.Module) -> None:
    mlp: Any = model.get_submodule("decoder.layers.2.mlp")
    if step == 1:
        forward = mlp.forward
        mlp.forward = lambda x: forward(Scaled.apply(x) if mlp.is_wrong else x)
    mlp.is_wrong = step == 7


def wrong_output(step: int, model: nn.Module) -> None:
    if step == 2:
        norm = model.get_submodule("decoder.layers.1.pre_mlp_layernorm")
        norm.register_forward_hook(lambda _, __, output: output * 1.1, prepend=True)


def wrong_weight_gradient(step: int, model: nn.Module) -> None:
    if step == 3:
        weight = model.get_parameter("decoder.layers.1.mlp.linear_fc2.weight")
        weight.register_hook(lambda grad: grad * 1.01)


FC1 = "decoder.layers.2.mlp.linear_fc1"
CASES: dict[str, tuple[dict[str, Any], tuple[int, str, str], str]] = {
    "backward": ({"fault": wrong_backward}, (7, "gradient", FC1), "different at that of `decoder.layers.2.pre_mlp_l"),
    "output": (
        {"fault": wrong_output},
        (2, "output", "decoder.layers.1.pre_mlp_layernorm"),
        "the output of `decoder.layers.1.pre_mlp_layernorm` differs",
    ),
    "weight": (
        {"fault": wrong_weight_gradient},
        (3, "gradient", "decoder.layers.1.mlp.linear_fc2"),
        "right at the out",
    ),
    "data": ({"data": lambda step: step if step < 3 else 100 + step}, (3, "data", ""), "were given other batches"),
    "rate": ({"lr": 1.1e-3}, (1, "update", "embedding.position_embeddings.weight"), "rates are [0.001] and [0.0011]"),
}


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_the_first_difference_is_named(rank: int, tmp_path: Path, case: str) -> None:
    options, (step, kind, module), words = CASES[case]
    record(tmp_path / "right", steps=step)
    record(tmp_path / "wrong", **{"layout": Layout(tp=2, sp=True), "steps": step, **options})
    if rank == 0:
        found = compare_recordings(tmp_path / "right", tmp_path / "wrong")
        assert (found.step, found.kind, found.module) == (step, kind, module), str(found)
        assert words in str(found)
