"""Checkpoints of LowLevelZeroPlugin: other plugins, torch and other numbers of ranks read them, and it reads theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin
from tests.unit_tests.booster_reference import (
    BOUNDS,
    assert_same_training,
    mean_loss,
    new_model,
    new_optimizer,
    run_steps,
    train,
    trained_on_one_process,
    whole_weights,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_booster_checkpoint import FORMS, other_start, save, shared
from tests.unit_tests.test_booster_training import new_plugin as new_other_plugin
from tests.unit_tests.test_low_level_zero import TINY_BUCKETS

NAMES = ("torch_ddp", "torch_fsdp", "zero1", "zero2")


def new_plugin(name: str, precision: str = "fp32", **options: Any) -> Any:
    if not name.startswith("zero"):
        return new_other_plugin(name)
    return LowLevelZeroPlugin(int(name[4:]), precision, reduce_bucket_size_in_m=TINY_BUCKETS, **options)


def goes_on(name: str, rank: int, world: int, folder: Path, saved: dict[str, torch.Tensor]) -> None:
    """Load into a new model and optimizer with other values; weights are the saved bits; train the last two steps."""
    booster = Booster(plugin=new_plugin(name))
    model = other_start()
    optimizer = new_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 100.0  # the saved one must come back
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, mean_loss)
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    loaded = whole_weights(model)
    assert all(torch.equal(loaded[key], value) for key, value in saved.items())
    run_steps(booster, model, optimizer, criterion, rank, steps=range(3, 5))
    assert_same_training(model, trained_on_one_process(world, 1, False)[0], BOUNDS["fp32"])


def check_pair(writer: str, reader: str, rank: int, world: int, folder: Path, forms: Any) -> None:
    booster = Booster(plugin=new_plugin(writer))
    model, optimizer, _ = train(booster, rank, steps=range(3))
    for form in forms:
        save(booster, model, optimizer, folder / form, form)
    booster.checkpoint_io.synchronize()
    saved = {name: weight.clone() for name, weight in whole_weights(model).items()}
    for form in forms:
        goes_on(reader, rank, world, folder / form, saved)


@ranks(3)
def test_training_goes_on_under_another_plugin(rank: int, world: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    folder = shared(tmp_path)
    for writer, reader, form in (
        ("zero1", "torch_ddp", "whole"),
        ("zero2", "torch_fsdp", "shards"),
        ("torch_fsdp", "zero1", "shards-safetensors"),
        ("torch_ddp", "zero2", "async"),
        ("zero1", "zero2", "async-shards"),
        ("zero2", "zero2", "whole-safetensors"),
    ):
        check_pair(writer, reader, rank, world, folder / f"{writer}-{reader}", (form,))


@pytest.mark.nightly
@ranks(1, 2, 4)
@pytest.mark.parametrize("reader", NAMES)
@pytest.mark.parametrize("writer", NAMES)
def test_training_goes_on_in_every_form(rank: int, world: int, tmp_path: Path, writer: str, reader: str) -> None:
    pytest.importorskip("safetensors")
    check_pair(writer, reader, rank, world, shared(tmp_path), FORMS)
