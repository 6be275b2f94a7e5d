"""dist_checkpointing over core.checkpoint: trees of sharded tensors come back whole, at another layout too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import core_compat.megatron as mcore
from core import parallel_state
from core.checkpoint import CheckpointError
from core_compat.megatron.faces.checkpoint import StrictHandling
from core_compat.megatron.tree import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    add_prefix_for_sharding,
    apply_prefix_mapping,
    replace_prefix_for_sharding,
)
from tests.unit_tests.core_compat.megatron_like import built
from tests.unit_tests.ranks import ranks

VOCABULARY = 31  # which tp 2 pads


def trained(tensor_parallel: int, pipeline_parallel: int = 1) -> tuple[Any, Any]:
    """A wrapped GPT with SwiGLU, whose split weight is two boxes, and its optimizer, over new groups."""
    parallel_state.destroy_model_parallel()
    mcore.parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel)
    model = built(tensor_parallel, pipeline_parallel, vocabulary=VOCABULARY, length=8, activation="swiglu")
    model.config.finalize_model_grads_func = mcore.distributed.finalize_model_grads
    options = mcore.distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = mcore.DistributedDataParallel(model.config, options, model)
    settings = mcore.optimizer.OptimizerConfig(lr=0.02, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=True)
    return wrapped, mcore.optimizer.get_megatron_optimizer(settings, [wrapped])


def forward_step(data_iterator: Any, model: Any) -> Any:
    tokens = next(data_iterator)
    losses = model(tokens, torch.arange(8).expand_as(tokens), None, labels=tokens)
    return losses, lambda losses: (losses.mean(), losses.mean().detach())


def steps(model: Any, optimizer: Any, begin: int, end: int) -> list[float]:
    """Losses of steps whose batches depend on the data rank and the step alone; [] before the last stage."""
    losses = []
    data, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for step in range(begin, end):
        seeds = range(10 * step + rank, 10 * step + 2, data)
        batches = [torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        optimizer.zero_grad()
        reports = mcore.pipeline_parallel.get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(batches), model=[model], num_microbatches=len(batches),
            seq_length=8, micro_batch_size=2,
        )  # fmt: skip
        optimizer.step()
        if reports:
            total = torch.stack(reports).mean()
            torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
            losses.append(float(total) / data)
    return losses


@ranks(2)
@pytest.mark.parametrize(("saved_at", "loaded_at"), [((2, 1), (1, 2)), ((1, 2), (1, 1))])
def test_training_goes_on_at_another_layout(
    rank: int, world: int, tmp_path: Path, saved_at: tuple[int, int], loaded_at: tuple[int, int]
) -> None:
    (tmp_path / "iter_2").mkdir(exist_ok=True)
    model, optimizer = trained(*saved_at)
    first = steps(model, optimizer, 0, 2)
    tree = {"model": model.sharded_state_dict(), "iteration": 2}
    tree["optimizer"] = optimizer.sharded_state_dict(tree["model"])
    mcore.dist_checkpointing.save(tree, tmp_path / "iter_2", content_metadata={"kind": "test"})
    expected = steps(model, optimizer, 2, 5)

    model, optimizer = trained(*loaded_at)
    tree = {"model": model.sharded_state_dict(), "optimizer": optimizer.sharded_state_dict({}, is_loading=True)}
    with pytest.raises(ValueError, match="this optimizer state was not loaded"):
        optimizer.load_state_dict(tree["optimizer"])
    loaded = mcore.dist_checkpointing.load(tree, tmp_path / "iter_2", strict=StrictHandling.RAISE_ALL)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert loaded["iteration"] == 2
    assert mcore.dist_checkpointing.load_content_metadata(tmp_path / "iter_2") == {"kind": "test"}
    resumed, fresh = steps(model, optimizer, 2, 5), steps(*trained(*loaded_at), 2, 5)
    if rank == 1:  # of the last stage in each layout
        assert resumed == pytest.approx(expected, abs=1e-4)
        assert first[0] - expected[-1] > 0.1, "it trains by far more than that"
        assert abs(fresh[0] - expected[0]) > 0.01, "what was saved matters"


@ranks(2)
def test_weights_that_are_several_boxes_or_padded_come_back(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir(exist_ok=True)
    model, _ = trained(2)
    tree = model.sharded_state_dict()
    factories = [name for name, leaf in tree.items() if isinstance(leaf, ShardedTensorFactory)]
    gated = ["decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc1.bias"]
    padded = ["embedding.word_embeddings.weight"] if rank == 1 else []
    assert set(gated + padded) <= set(factories)
    before = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    assert all(len(torch.unique(before[name])) > 1 for name in factories if name.endswith("weight"))
    mcore.dist_checkpointing.save(tree, tmp_path / "weights")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(mcore.dist_checkpointing.load(model.sharded_state_dict(), tmp_path / "weights"))
    for name, param in model.module.named_parameters():
        assert torch.equal(param, before[name]), name


@ranks(2)
def test_a_tree_of_every_kind_of_leaf_comes_back(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir(exist_ok=True)
    whole = torch.arange(24.0).view(4, 6)

    def tree(filled: bool) -> dict[str, Any]:
        part = whole[:, 3 * rank : 3 * rank + 3].contiguous() if filled else torch.zeros(4, 3)

        def build(key: str, data: torch.Tensor, *_: Any) -> list[ShardedTensor]:
            rows = data.view(2, 2, 3)
            return [ShardedTensor.from_rank_offsets(f"{key}.{n}", rows[n], (1, rank, 2)) for n in range(2)]

        return {
            "columns": ShardedTensor.from_rank_offsets("columns", part, (1, rank, 2)),
            "layers": {"stacked": ShardedTensor.from_rank_offsets("layers", part[0], (0, rank, 2), prepend_axis_num=1)},
            "replica": ShardedTensor.from_rank_offsets("replica", whole if filled else whole * 0, replica_id=(0, rank)),
            "factory": ShardedTensorFactory("made", part, build, torch.cat),
            "seen": [ShardedObject("seen", {"rank": rank} if filled else None, (2,), (rank,))],
            "here": LocalNonpersistentObject(f"rank {rank}"),
            "common": {"step": 7, "name": "run"} if filled else {},
        }

    mcore.dist_checkpointing.save(tree(True), tmp_path / "tree")
    assert mcore.dist_checkpointing.check_is_distributed_checkpoint(tmp_path / "tree")
    mine = whole[:, 3 * rank : 3 * rank + 3]
    found = mcore.dist_checkpointing.load(tree(False), tmp_path / "tree")
    assert torch.equal(found["columns"], mine) and torch.equal(found["layers"]["stacked"], mine[0])
    assert torch.equal(found["replica"], whole) and torch.equal(found["factory"], mine)
    assert found["seen"] == [{"rank": rank}] and found["here"] == f"rank {rank}"
    assert found["common"] == {"step": 7, "name": "run"}
    assert mcore.dist_checkpointing.load_common_state_dict(tmp_path / "tree")["common"]["step"] == 7
    assert torch.equal(mcore.dist_checkpointing.load_plain_tensors(tmp_path / "tree")["columns"], whole)

    more = {"new": ShardedTensor.from_rank_offsets("new", torch.zeros(2))}
    with pytest.raises(CheckpointError, match="does not have 'new'"):
        mcore.dist_checkpointing.load(more, tmp_path / "tree")
    with pytest.raises(CheckpointError, match="no leaf of the tree reads 'columns'"):
        mcore.dist_checkpointing.load({}, tmp_path / "tree", strict="raise_all")
    state, missing, unexpected = mcore.dist_checkpointing.load(more, tmp_path / "tree", strict="return_all")
    assert "new" not in state and "columns" in missing and unexpected == {"new"}
    other = {"columns": ShardedTensor.from_rank_offsets("columns", torch.zeros(4, 5), (1, rank, 2))}
    with pytest.raises(CheckpointError, match=r"'columns' is \[4, 6\] in it and \[4, 10\] here"):
        mcore.dist_checkpointing.load(other, tmp_path / "tree")
    with pytest.raises(CheckpointError, match="'half' has 12 elements"):  # rank 1's part is no one's
        half = ShardedTensor.from_rank_offsets("half", torch.zeros(6), (0, 0, 2), replica_id=rank)
        (tmp_path / "half").mkdir(exist_ok=True)
        mcore.dist_checkpointing.save({"half": half}, tmp_path / "half")


def test_saved_plain_values_win_over_those_of_the_tree(tmp_path: Path) -> None:
    """As Megatron Core 0.16.1 gives them, and values that only the tree has stay."""

    def tree(value: float, **more: Any) -> dict[str, Any]:
        whole = ShardedTensor.from_rank_offsets("x", torch.full((2,), value))
        groups = [{"lr": value, "exp": ShardedObject("exp", value, (1,), (0,))}, value]
        return {"x": whole, "iteration": int(value), "args": {"lr": value}, "l": [value] * 2, "groups": groups} | more

    mcore.dist_checkpointing.save(tree(20.0, saved={"a": [1]}), tmp_path)
    found = mcore.dist_checkpointing.load(tree(0.0, given=3, here=LocalNonpersistentObject(4)), tmp_path)
    assert found.pop("x").tolist() == [20.0, 20.0]
    expected = {"iteration": 20, "args": {"lr": 20.0}, "l": [20.0, 20.0], "saved": {"a": [1]}, "given": 3, "here": 4}
    assert found == {**expected, "groups": [{"lr": 20.0, "exp": 20.0}, 20.0]}


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no directory"):
        mcore.dist_checkpointing.save({}, tmp_path / "nowhere")
    assert not mcore.dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"async_sharded_save=True\) is not supported"):
        mcore.dist_checkpointing.save({}, tmp_path, async_sharded_save=True)


def test_objects_of_other_types_are_not_unpickled(tmp_path: Path) -> None:
    mcore.dist_checkpointing.save({"path": tmp_path}, tmp_path)
    with pytest.raises(CheckpointError, match="holds more than tensors, numbers"):
        mcore.dist_checkpointing.load({}, tmp_path)


def test_keys_are_renamed_in_place() -> None:
    def tree() -> dict[str, Any]:
        return {"a": ShardedTensor.from_rank_offsets("old.a", torch.zeros(2)), "b": 3}

    one, two, three = tree(), tree(), tree()
    replace_prefix_for_sharding(one, "old.", "new.")
    add_prefix_for_sharding(two, "model.")
    apply_prefix_mapping(three, {"old.a": "renamed"})
    assert [part["a"].key for part in (one, two, three)] == ["new.a", "model.old.a", "renamed"]
    with pytest.raises(ValueError, match="does not begin with 'new.x'"):
        replace_prefix_for_sharding(one, "new.x", "")
