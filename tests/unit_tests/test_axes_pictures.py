"""The pictures of the axes come from the rules, say what the engine does, and are those that lie in the docs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.distributed.contract.gradient_contract import DEFAULT_RULES, ContractError
from core.pipeline_parallel import PipelineLayout, build_gpt_stages
from core.transformer import TransformerConfig
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT

SCRIPT = ROOT / "docs" / "draw_axes.py"
PAGE = ROOT / "docs" / "source" / "axes.md"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_axes", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["draw_axes"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


draw_axes = load_script()
LANES = [
    pytest.param(picture, lane, id=f"{picture.file}-{lane.name}") for picture in draw_axes.ALL for lane in picture.lanes
]


@pytest.mark.parametrize("picture", draw_axes.ALL, ids=lambda picture: picture.file)
def test_the_committed_picture_is_the_one_that_the_rules_draw_today(picture: object) -> None:
    assert f"{{picture}} axes/{picture.file}.svg\n" in PAGE.read_text()  # type: ignore[attr-defined]
    for palette in draw_axes.PALETTES:
        path = draw_axes.PICTURES / f"{picture.file}_{palette}.svg"  # type: ignore[attr-defined]
        assert path.read_text(encoding="utf-8") == draw_axes.draw(picture, palette=palette), (
            "run python docs/draw_axes.py"
        )


@pytest.mark.parametrize(("picture", "lane"), LANES)
def test_every_rank_ends_with_every_contribution_once_and_not_before_the_last_reduction(picture, lane) -> None:  # type: ignore[no-untyped-def]
    stages, divisor = draw_axes.stages_of(picture, lane)
    assert all(draw_axes.is_whole(held, lane.cells) for held in stages[-1].held.values())
    for stage in stages[:-1]:
        assert not any(draw_axes.is_whole(held, lane.cells) for held in stage.held.values())
    assert divisor == picture.grid.dp * picture.grid.cp


def test_another_table_of_rules_draws_another_picture_or_none() -> None:
    without_tp = [rule for rule in DEFAULT_RULES if rule.group != "tp"]
    with pytest.raises(ContractError, match="no sync rule reduces it there"):
        draw_axes.draw(draw_axes.TP, without_tp)
    twice = [
        *DEFAULT_RULES,
        *(replace(rule, name="again") for rule in DEFAULT_RULES if rule.name == "tensor-parallel sum"),
    ]
    assert draw_axes.draw(draw_axes.TP, twice) != draw_axes.draw(draw_axes.TP)
    lane = draw_axes.TP.lanes[1]
    stages, _ = draw_axes.stages_of(draw_axes.TP, lane, twice)
    assert not draw_axes.is_whole(stages[-1].held[0], lane.cells), "added twice is not whole"


def test_the_page_names_every_rule_of_the_table() -> None:
    text = PAGE.read_text()
    means = {"tensor-parallel mean", "expert tensor-parallel mean"}  # named in words
    missing = [rule.name for rule in DEFAULT_RULES if rule.name not in text and rule.name not in means]
    assert not missing


def compare_with_a_wrapped_gpt(picture, of_the_gpt: dict[str, str], rank: int) -> None:  # type: ignore[no-untyped-def]
    """The contract of each lane is that of the GPT's parameter whose name ends so, in the picture's layout."""
    grid = picture.grid
    layout = PipelineLayout.even(2, grid.pp)
    parallel_state.initialize_model_parallel(
        grid.tp,
        grid.pp,
        context_parallel_size=grid.cp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.expt_tp,
        get_embedding_ranks=layout.embedding_ranks,
        order=grid.order,
    )
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        vocab_size=32,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        context_parallel_size=grid.cp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.expt_tp,
        sequence_parallel=picture.sequence_parallel,
        num_moe_experts=2 if grid.ep > 1 else None,
        position_embedding_type="rope",
    )
    (stage,) = build_gpt_stages(config, layout)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), stage)
    contracts = {contract.name: contract for bucket in ddp.reducer.buckets for contract in bucket.contracts}
    checked = 0
    for lane in picture.lanes:
        if lane.piece(draw_axes.GridGroups(grid, rank), rank) is None:
            continue
        drawn = draw_axes.contract_of(picture, lane, rank, DEFAULT_RULES)
        ends = of_the_gpt[lane.name].split("|")
        named = [contract for name, contract in contracts.items() if name.endswith(tuple(ends))]
        assert named, f"{lane.name}: none of {ends} among {list(contracts)}"
        for contract in named:
            assert contract._replace(name=lane.name) == drawn
            checked += 1
    assert checked


@ranks(4)
@pytest.mark.parametrize(
    ("file", "of_the_gpt"),
    [
        ("dp", {"any weight": "weight"}),
        ("tp", {"mlp.linear_fc1.weight": "linear_fc1.weight", "input_layernorm.weight": "input_layernorm.weight"}),
        (
            "pp",
            {
                "word_embeddings.weight": "word_embeddings.weight|output_layer.weight",
                "layers.0, any weight": "linear_fc1.weight",
            },
        ),
        ("cp", {"any weight": "weight"}),
    ],
)
def test_the_pictures_contracts_are_those_of_a_wrapped_gpt(
    rank: int, world: int, file: str, of_the_gpt: dict[str, str]
) -> None:
    picture = next(picture for picture in draw_axes.ALL if picture.file == file)
    compare_with_a_wrapped_gpt(picture, of_the_gpt, rank)


@ranks(8)
def test_the_contracts_of_the_picture_of_experts_are_those_of_a_wrapped_gpt(rank: int, world: int) -> None:
    lanes = {"experts.weight1": "experts.weight1", "router.weight": "router.weight"}
    compare_with_a_wrapped_gpt(draw_axes.EP, lanes, rank)
