"""What ColossalAI's examples read from a plugin: groups, sizes, mesh, stage manager and shard config."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, HybridParallelPlugin, MoeHybridParallelPlugin
from tests.unit_tests.ranks import ranks

Members = dict[str, list[list[int]]]
# Options, dp_size, the groups of all ranks, by hand.
LAYOUTS: list[tuple[dict[str, Any], int, Members]] = [
    (
        {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
        1,
        {"dp": [[0], [1], [2], [3]], "pp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]], "sp": [[0], [1], [2], [3]]},
    ),
    (
        {"tp_size": 1, "pp_size": 2, "num_microbatches": 2},
        2,
        {"dp": [[0, 2], [1, 3]], "pp": [[0, 1], [2, 3]], "tp": [[0], [1], [2], [3]], "sp": [[0], [1], [2], [3]]},
    ),
    (
        {"tp_size": 1, "pp_size": 2, "num_microbatches": 2, "dp_outside": False},
        2,
        {"dp": [[0, 1], [2, 3]], "pp": [[0, 2], [1, 3]], "tp": [[0], [1], [2], [3]], "sp": [[0], [1], [2], [3]]},
    ),
    (
        {
            **{"tp_size": 2, "pp_size": 1, "sp_size": 2},
            **{"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
        },
        1,
        {"dp": [[0], [1], [2], [3]], "pp": [[0], [1], [2], [3]], "tp": [[0, 1], [2, 3]], "sp": [[0, 2], [1, 3]]},
    ),
    (
        {"tp_size": 2, "pp_size": 1, "enable_sequence_parallelism": True},
        2,
        {"dp": [[0, 2], [1, 3]], "pp": [[0], [1], [2], [3]], "tp": [[0, 1], [2, 3]], "sp": [[0, 1], [2, 3]]},
    ),
]


@ranks(4)
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.in_suite(5)
def test_groups_sizes_and_mesh_are_those_of_the_layout(rank: int, world: int, layout: int, experts: bool) -> None:
    options, dp_size, members = LAYOUTS[layout]
    plugin: Any = HybridParallelPlugin(**options)
    if experts:
        rest = {("moe_dp_outside" if name == "dp_outside" else name): value for name, value in options.items()}
        plugin = MoeHybridParallelPlugin(ep_size=1, **rest)
    assert plugin.dp_size == dp_size == plugin.data_size()
    groups = {"dp": plugin.dp_group, "pp": plugin.pp_group, "tp": plugin.tp_group, "sp": plugin.sp_group}
    mesh = plugin.pg_mesh
    for name, group in groups.items():
        (expected,) = [row for row in members[name] if rank in row]
        assert mesh.get_ranks_in_group(group) == expected, name
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        assert float(total) == sum(expected)
        if name != "sp" or plugin.sp_size > 1:
            axis = getattr(plugin, f"{name}_axis")
            assert mesh.get_group_along_axis(axis) is group
            assert mesh.size(axis) == len(expected) and mesh.coordinate(axis) == expected.index(rank)
    assert plugin.pg_mesh is mesh
    mesh.destroy_mesh_process_groups()
    dist.all_reduce(torch.zeros(1), group=plugin.tp_group)  # it is not the mesh's to destroy

    config = plugin.shard_config
    assert config.tensor_parallel_process_group is plugin.tp_group and config.tensor_parallel_size == plugin.tp_size
    assert config.sequence_parallel_process_group is plugin.sp_group
    assert config.enable_tensor_parallelism == (plugin.tp_size > 1) and config.parallel_output
    assert config.enable_sequence_parallelism == ("enable_sequence_parallelism" in options)
    modes = {3: "ring_attn", 4: "split_gather"}
    assert config.sequence_parallelism_mode == modes.get(layout)
    assert config.pipeline_stage_manager == plugin.stage_manager
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.parallel_output = False


@ranks(4)
@pytest.mark.parametrize("style", ["1f1b", "interleaved", "zbv"])
@pytest.mark.in_suite(3)
def test_the_stage_manager_knows_first_and_last(rank: int, world: int, style: str) -> None:
    chunks = {"1f1b": 1, "interleaved": 2, "zbv": 2}[style]
    plugin = HybridParallelPlugin(1, 4, num_microbatches=4, pp_style=style, num_model_chunks=chunks)
    manager = plugin.stage_manager
    assert manager is not None
    assert (manager.stage, manager.num_stages) == (rank, 4)
    assert manager.is_first_stage() == manager.is_first_stage(ignore_chunk=True) == manager.is_first_device()
    assert manager.is_first_stage() == (rank == 0)
    assert manager.is_last_stage() == (rank == (0 if style == "zbv" else 3))
    assert manager.is_last_stage(ignore_chunk=True) == manager.is_last_device() == (rank == 3)
    parallel_state.destroy_model_parallel()
    assert HybridParallelPlugin(1, 1).stage_manager is None


@ranks(2)
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.in_suite(2)
def test_gemini_says_its_groups_and_sizes(rank: int, world: int, tp_size: int) -> None:
    plugin = GeminiPlugin(tp_size=tp_size, precision="fp32", enable_flash_attention=tp_size > 1)
    assert plugin.dp_size == 2 // tp_size
    assert dist.get_process_group_ranks(plugin.dp_group) == ([0, 1] if tp_size == 1 else [rank])
    assert (plugin.tp_group is None) == (tp_size == 1)
    assert plugin.tp_group is None or dist.get_process_group_ranks(plugin.tp_group) == [0, 1]
    config = plugin.shard_config
    assert config.tensor_parallel_process_group is plugin.tp_group and config.tensor_parallel_size == tp_size
    assert config.enable_flash_attention == (tp_size > 1) and config.sequence_parallel_process_group is None


STEPS, ROWS, WIDTH, LABELS = 3, 8, 6, 3


def classifier() -> Any:
    import transformers

    torch.manual_seed(3)
    config = transformers.BertConfig(
        **{"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_labels": LABELS},
        **{"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    )
    return transformers.BertForSequenceClassification(config)


def rows_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(50 + step)
    draw = [
        torch.randint(0, high, size, generator=generator) for high, size in ((40, (ROWS, WIDTH)), (LABELS, (ROWS,)))
    ]
    return {"input_ids": draw[0], "labels": draw[1], "attention_mask": torch.ones(ROWS, WIDTH, dtype=torch.int64)}


@ranks(2)
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.in_suite(2)
def test_a_classifier_is_tuned_by_a_loop_that_asks_the_plugin_where_it_stands(
    rank: int, world: int, pp_size: int
) -> None:
    """The loop of a program for ColossalAI, with all the options that such programs set."""
    with pytest.warns(UserWarning, match="change nothing here"):
        plugin = HybridParallelPlugin(
            **{"tp_size": 1, "pp_size": pp_size, "num_microbatches": None, "microbatch_size": 2, "zero_stage": 1},
            **{"precision": "fp32", "initial_scale": 1, "enable_all_optimization": True, "overlap_p2p": False},
            **{"sp_size": 1, "sequence_parallelism_mode": "all_to_all", "enable_metadata_cache": False},
        )
    booster = Booster(plugin=plugin)
    reference, model = classifier(), classifier()
    expected_optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, lambda outputs, inputs: outputs.loss)

    uses_pipeline = plugin.pp_size > 1
    speaks = uses_pipeline and plugin.stage_manager is not None and plugin.stage_manager.is_last_stage()
    assert speaks == (pp_size == 2 and rank == 1)
    assert dist.get_rank(plugin.dp_group) == (0 if uses_pipeline else rank)
    for step in range(STEPS):
        batch = rows_of(step)
        half = ROWS // plugin.dp_size
        place = dist.get_rank(plugin.dp_group)
        own = {name: value[place * half : (place + 1) * half] for name, value in batch.items()}
        if uses_pipeline:
            loss = booster.execute_pipeline(iter([own]), model, criterion, optimizer, return_loss=True)["loss"]
        else:
            loss = criterion(model(**own), own)
            booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=plugin.dp_group)
        mean.div_(plugin.dp_size)
        expected_optimizer.zero_grad()
        expected = reference(**batch).loss
        expected.backward()
        expected_optimizer.step()
        assert float(mean) == pytest.approx(float(expected.detach()), abs=2e-6)

    wanted = reference(**rows_of(9)).logits
    assert float((wanted - classifier()(**rows_of(9)).logits).abs().max()) > 0.02, "training has changed nothing"
    with torch.no_grad():
        if not uses_pipeline:
            found = model(**rows_of(9)).logits
        else:
            last = plugin.pg_mesh.get_ranks_in_group(plugin.pp_group)[-1]
            result = booster.execute_pipeline(iter([rows_of(9)]), model, criterion, return_outputs=True)
            box = [result["outputs"]["logits"] if speaks else None]
            dist.broadcast_object_list(box, src=last, group=plugin.pp_group)
            (found,) = box
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)
