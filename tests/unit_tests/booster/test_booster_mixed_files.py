"""Shards that are not of one save: a file twice, or one of another save, is refused by its name on every rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytest.importorskip("safetensors")
pytest.importorskip("transformers")

from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin
from tests.unit_tests.hugging_face.models import small
from tests.unit_tests.ranks import ranks

SHARD_MIB = 0.02
PLUGINS = {
    "LowLevelZero": lambda: LowLevelZeroPlugin(stage=1, precision="fp32"),
    "Hybrid": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"),
}


def boosted(plugin: str) -> tuple[Booster, Any, Any]:
    """A small llama after one step, so that the optimizer has states."""
    torch.manual_seed(3)
    model = small("llama")
    booster = Booster(plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    step(booster, model, optimizer)
    return booster, model, optimizer


def step(booster: Booster, model: Any, optimizer: Any) -> None:
    tokens = torch.arange(12).view(2, 6) % 8
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def put(source: Path, target: Path, rank: int) -> None:
    """Copy a file on one rank, and wait for it on all."""
    dist.barrier()
    if rank == 0:
        shutil.copyfile(source, target)
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("use_safetensors", [False, True])
def test_a_shard_that_is_there_twice_or_of_another_save_is_refused_by_its_name(
    rank: int, world: int, plugin: str, use_safetensors: bool, tmp_path: Path
) -> None:
    booster, model, optimizer = boosted(plugin)
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        booster.save_model(
            model, folder / "model", shard=True, size_per_shard=SHARD_MIB, use_safetensors=use_safetensors
        )
        booster.save_optimizer(optimizer, folder / "optimizer", shard=True, size_per_shard=SHARD_MIB)
        step(booster, model, optimizer)
    for what, load, of in (("model", booster.load_model, model), ("optimizer", booster.load_optimizer, optimizer)):
        first, second = (sorted((folder / what).glob("*-0*")) for folder in folders)
        assert len(first) > 2 and [file.name for file in first] == [file.name for file in second]
        intact = tmp_path / f"{what}.intact"
        put(first[1], intact, rank)
        for other in (first[0], second[1]):
            put(other, first[1], rank)
            with pytest.raises(Exception, match=f"{first[1].name} is not the file that .* was saved with"):
                load(of, folders[0] / what)
        put(intact, first[1], rank)
        load(of, folders[0] / what)
    groups = sorted((folders[0] / "optimizer").glob("*group*"))
    put(sorted((folders[1] / "optimizer").glob("*group*"))[0], groups[0], rank)  # of equal bytes: of both saves
    booster.load_optimizer(optimizer, folders[0] / "optimizer")


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_files_of_transformers_hold_the_tensors_that_their_index_names(
    rank: int, world: int, plugin: str, tmp_path: Path
) -> None:
    """Such files have no checksums. Names are what there is to compare."""
    torch.manual_seed(3)
    folder = tmp_path / "model"
    if rank == 0:
        whole: nn.Module = small("llama")
        whole.save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    dist.barrier()
    booster, model, _ = boosted(plugin)
    booster.load_model(model, folder)
    shards = sorted(folder.glob("*-of-*"))
    assert len(shards) > 2
    put(shards[0], shards[1], rank)
    with pytest.raises(Exception, match=rf"{shards[1].name} lacks \d+ tensors that the index names in it"):
        booster.load_model(model, folder)
