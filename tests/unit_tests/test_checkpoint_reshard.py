"""Saved at one layout, loaded at another: parameters, moments and masters bit for bit those of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.checkpoint import load_checkpoint, save_checkpoint
from tests.unit_tests.checkpoint_reference import Layout, assert_planted, build, plant, step_once, whole_shapes
from tests.unit_tests.ranks import run_on_ranks

ADAM = {"exp_avg", "exp_avg_sq", "step"}
LAYOUTS = [
    Layout(1),
    Layout(2, tp=2, strategy="optim"),
]


def save_at(rank: int, layout: Layout, root: str) -> None:
    job = build(layout)
    step_once(job)
    shapes = whole_shapes()
    plant(job, shapes)
    report = save_checkpoint(root, 3, job.chunks, job.optimizer, extra={"samples": 24})
    assert report.committed


def load_at(rank: int, layout: Layout, roots: dict[str, str]) -> None:
    shapes = whole_shapes()
    for seed, root in enumerate(roots.values()):
        job = build(layout)
        report = load_checkpoint(root, job.chunks, job.optimizer)
        assert (report.step, report.extra, report.notes) == (3, {"samples": 24}, ())
        assert_planted(job, shapes, ADAM | ({"master"} if layout.dtype is torch.bfloat16 else set()))
        from core import parallel_state

        parallel_state.destroy_model_parallel()


def test_sweep(tmp_path: Path) -> None:
    roots = {str(layout): str(tmp_path / str(layout)) for layout in LAYOUTS}
    for layout in LAYOUTS:
        run_on_ranks(save_at, layout.world, {"layout": layout, "root": roots[str(layout)]})
    for layout in LAYOUTS:
        run_on_ranks(load_at, layout.world, {"layout": layout, "roots": roots})
