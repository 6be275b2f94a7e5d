"""Draws docs/source/axes/*.svg: on which ranks a gradient is partial, and which reductions make it whole.

    python docs/draw_axes.py

Each picture is there twice, for light and for dark pages, on a transparent ground.

Nothing in the pictures is drawn by hand: the groups come from RankGrid, the reductions and the divisor from the
contract that `read_contracts` reads off a parameter tagged as our layers tag it, and what a box holds from carrying
these out on sets of contributions. A test draws the pictures anew, and compares the contracts with a wrapped GPT's.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.distributed.contract.gradient_contract import DEFAULT_RULES, GradientContract, GradSyncRule, read_contracts
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import RankGrid, group_ranks
from core.model_parallel_config import ModelParallelConfig

PICTURES = Path(__file__).parent / "source" / "axes"
Held = Counter[int]  # which contributions a rank's gradient is the sum of, and how often


class GridGroups(ProcessGroups):
    """The groups of one rank of a grid, without processes: what reading a contract asks of groups."""

    def __init__(self, grid: RankGrid, rank: int) -> None:
        super().__init__()
        object.__setattr__(self, "members", group_ranks(grid, rank))
        object.__setattr__(self, "me", rank)

    def require(self, name: str) -> Any:
        """The group's ranks; KeyError where this rank is in no such group."""
        return self.ranks(name)

    def ranks(self, name: str) -> list[int]:
        """The global ranks of a group."""
        members: Mapping[str, list[int]] = self.__dict__["members"]
        return members[name]

    def size(self, name: str) -> int:
        """How many ranks a group has; 1 where this rank is in no such group."""
        members: Mapping[str, list[int]] = self.__dict__["members"]
        return len(members.get(name, [0]))

    def rank(self, name: str) -> int:
        """This rank's place in a group."""
        members: Mapping[str, list[int]] = self.__dict__["members"]
        return members[name].index(self.__dict__["me"]) if name in members else 0


@dataclass(frozen=True)
class Lane:
    """One parameter in a picture.

    piece: what of it a rank holds, None where it holds nothing. seen: the contributions that backward leaves on a rank.
    cells: how many contributions make a whole gradient, and what the n-th of them is. tags: the parameter's attributes.
    """

    name: str
    note: str
    piece: Callable[[GridGroups, int], str | None]
    seen: Callable[[GridGroups, int], Sequence[int]]
    cells: int
    cell_is: str
    tags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Picture:
    """One axis: the grid of the example, and the parameters that tell its story."""

    file: str
    title: str
    grid: RankGrid
    ranks_are: Callable[[GridGroups], str]
    lanes: tuple[Lane, ...]
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Stage:
    """What the ranks hold after one reduction; `groups` are those it went over."""

    words: str
    groups: list[list[int]]
    held: dict[int, Held]


def contract_of(picture: Picture, lane: Lane, rank: int, rules: Sequence[GradSyncRule]) -> GradientContract:
    """The contract that the lane's parameter has on a rank."""
    parameter = nn.Parameter(torch.empty(1))
    for name, value in lane.tags.items():
        setattr(parameter, name, value)
    grid = picture.grid
    config = ModelParallelConfig(
        tensor_model_parallel_size=grid.tp,
        sequence_parallel=picture.sequence_parallel,
        context_parallel_size=grid.cp,
        pipeline_model_parallel_size=grid.pp,
        expert_model_parallel_size=grid.ep,
    )
    return read_contracts([(lane.name, parameter)], [], GridGroups(grid, rank), config, rules)[lane.name]


def stages_of(picture: Picture, lane: Lane, rules: Sequence[GradSyncRule] = DEFAULT_RULES) -> tuple[list[Stage], int]:
    """After backward and after each reduction, what every rank that has the parameter holds; and the divisor."""
    groups = {rank: GridGroups(picture.grid, rank) for rank in range(picture.grid.world_size)}
    ranks = [rank for rank in groups if lane.piece(groups[rank], rank) is not None]
    contracts = {rank: contract_of(picture, lane, rank, rules) for rank in ranks}
    first = contracts[ranks[0]]
    stages = [Stage("after backward", [], {rank: Counter(lane.seen(groups[rank], rank)) for rank in ranks})]
    over = [(f"sum over {first.data_group}, ÷ {first.divisor}", first.data_group)]
    by_words = {f"{rule.op} over {rule.group} ({rule.name})": rule for rule in rules}
    over += [(f"{by_words[words].op} over {by_words[words].group}", by_words[words].group) for words in first.rules]
    for words, name in over:
        before = stages[-1].held
        added = {rank: sum((before[member] for member in groups[rank].ranks(name)), Counter()) for rank in ranks}
        several = sorted({tuple(groups[rank].ranks(name)) for rank in ranks})
        stages.append(Stage(words, [list(group) for group in several], added))
    return stages, first.divisor


def is_whole(held: Held, cells: int) -> bool:
    """Is every contribution there, once?"""
    return held == Counter(range(cells))


# -- the five pictures -----------------------------------------------------------------------------------------------


def _replica(groups: GridGroups, rank: int) -> list[int]:
    return [groups.rank("dp")]


def _own(groups: GridGroups, rank: int) -> list[int]:
    return [rank]


def _whole(groups: GridGroups, rank: int) -> str:
    return "whole"


DP = Picture(
    "dp",
    "Data parallelism: dp 4",
    RankGrid(4),
    lambda groups: f"data replica {groups.rank('dp')}",
    (
        Lane(
            "any weight",
            "every rank has all of it, and tokens of its own",
            _whole,
            _replica,
            4,
            "what the tokens of data replica n add",
        ),
    ),
)

TP = Picture(
    "tp",
    "Tensor and sequence parallelism: tp 2, dp 2",
    RankGrid(4, tp=2),
    lambda groups: f"tp {groups.rank('tp')}, replica {groups.rank('dp')}",
    (
        Lane(
            "mlp.linear_fc1.weight",
            "each tensor rank has a slice, and the gathered sequence: nothing to add over tp",
            lambda groups, rank: f"slice {groups.rank('tp')}",
            _replica,
            2,
            "what the tokens of data replica n add",
            {"tensor_model_parallel": True, "sequence_parallel": False},
        ),
        Lane(
            "input_layernorm.weight",
            "each tensor rank has all of it, and sees its part of the sequence: partial over tp",
            _whole,
            _own,
            4,
            "what the tokens that lie on rank n add",
            {"sequence_parallel": True},
        ),
    ),
    sequence_parallel=True,
)

PP = Picture(
    "pp",
    "Pipeline with a tied embedding: pp 2, dp 2",
    RankGrid(4, pp=2),
    lambda groups: f"stage {groups.rank('pp')}, replica {groups.rank('dp')}",
    (
        Lane(
            "word_embeddings.weight",
            "a copy on the first stage, used for input, and one on the last, used for output: partial over embd",
            lambda groups, rank: "as input" if groups.rank("pp") == 0 else "as output",
            _own,
            4,
            "what the tokens on rank n add, as input or as output",
            {"shared_embedding": True},
        ),
        Lane(
            "layers.0, any weight",
            "lies on one stage alone: the other stages have no part of its gradient",
            lambda groups, rank: "whole" if groups.rank("pp") == 0 else None,
            _replica,
            2,
            "what the tokens of data replica n add",
        ),
    ),
)

EP = Picture(
    "ep",
    "Experts: ep 2, etp 2, tp 2, dp 4",
    RankGrid(8, tp=2, ep=2, expt_tp=2),
    lambda groups: f"tp {groups.rank('tp')}, replica {groups.rank('dp')}",
    (
        Lane(
            "experts.weight1",
            "a slice of some experts; the tokens of all ranks of tp_ep have come to it",
            lambda groups, rank: f"experts {groups.rank('ep')}, slice {groups.rank('expt_tp')}",
            lambda groups, rank: groups.ranks("tp_ep"),
            8,
            "what the tokens that lie on rank n add",
            {"allreduce": False, "tensor_model_parallel": True},
        ),
        Lane(
            "router.weight",
            "each rank has all of it, and routes the tokens that lie on it: partial over tp",
            _whole,
            _own,
            8,
            "what the tokens that lie on rank n add",
            {"sequence_parallel": True},
        ),
    ),
    sequence_parallel=True,
)

CP = Picture(
    "cp",
    "Context parallelism: cp 2, dp 2",
    RankGrid(4, cp=2),
    lambda groups: f"cp {groups.rank('cp')}, replica {groups.rank('dp')}",
    (
        Lane(
            "any weight",
            "every rank has all of it, and sees its chunks of its replica's sequences",
            _whole,
            _own,
            4,
            "what the chunks of a sequence on rank n add",
        ),
    ),
)

ALL = (DP, TP, PP, EP, CP)

# -- drawing ---------------------------------------------------------------------------------------------------------

LEFT, BOX_HEIGHT, CELL, LINE = 158, 44, 13, 15
PARTIAL, WHOLE, INK, PALE = "#c0632b", "#2e7d4f", "#222222", "#888888"
PALE_LINE, PALE_EDGE, WHOLE_FILL, PARTIAL_FILL = "#dddddd", "#cccccc", "#eaf5ee", "#fcf2ec"
COLORS = ("#3b6fb6", "#c0632b", "#7a4fa3", "#2e7d4f", "#b0413e", "#4d8f9c", "#8a7a2f", "#666a73")
# A colour of a light page -> the one in its place on a dark page.
DARK = {
    **{INK: "#e6edf3", PALE: "#9aa4af", PALE_LINE: "#30363d", PALE_EDGE: "#484f58"},
    **{WHOLE: "#3f9d68", PARTIAL: "#cf7139", WHOLE_FILL: "#12281b", PARTIAL_FILL: "#2d1c11"},
    **{COLORS[0]: "#6f9fe0", COLORS[2]: "#a883d1", COLORS[4]: "#d9706c", COLORS[5]: "#74b3bf"},
    **{COLORS[6]: "#b8a654", COLORS[7]: "#9297a1"},
}
PALETTES: dict[str, Mapping[str, str]] = {"light": {}, "dark": DARK}


class Svg:
    """Elements of a picture, top down."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, *, size: int = 12, color: str = INK, **style: str) -> None:
        """One line of text; y is its base line."""
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        words = html.escape(words, quote=False)
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}"{extra}>{words}</text>')

    def box(self, x: float, y: float, width: float, height: float, *, fill: str, line: str, dashed: bool) -> None:
        """A rectangle."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {place} rx="3" fill="{fill}" stroke="{line}" stroke-width="1.3"{dash}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str) -> None:
        """A straight line."""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" stroke-width="1.6"/>'
        )

    def dot(self, x: float, y: float, color: str) -> None:
        """A filled circle."""
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="{color}"/>')

    def done(self, height: int) -> str:
        """The file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{height}" '
            f'viewBox="0 0 {self.width} {height}" font-family="Helvetica, Arial, sans-serif">'
        )
        return "\n".join([head, *self.parts, "</svg>"]) + "\n"


def draw(picture: Picture, rules: Sequence[GradSyncRule] = DEFAULT_RULES, palette: str = "light") -> str:
    """The picture as SVG on a transparent ground, for light or for dark pages."""
    world = picture.grid.world_size
    column = 132 if world <= 4 else 110
    svg = Svg(LEFT + world * column + 10)
    svg.text(12, 24, picture.title, size=16, font_weight="bold")
    for rank in range(world):
        middle = LEFT + (rank + 0.5) * column - 4
        svg.text(middle, 48, f"rank {rank}", text_anchor="middle", font_weight="bold")
        svg.text(middle, 62, picture.ranks_are(GridGroups(picture.grid, rank)), size=11, text_anchor="middle")
    y = 76
    for lane in picture.lanes:
        y = _draw_lane(svg, picture, lane, rules, column, y)
    colours = PALETTES[palette]
    return re.sub(r"#[0-9a-f]{6}", lambda found: colours.get(found[0], found[0]), svg.done(y))


def _draw_lane(svg: Svg, picture: Picture, lane: Lane, rules: Sequence[GradSyncRule], column: int, y: int) -> int:
    stages, _ = stages_of(picture, lane, rules)
    svg.line(12, y, svg.width - 12, y, PALE_LINE)
    svg.text(12, y + 20, lane.name, size=13, font_weight="bold", font_family="monospace")
    svg.text(12, y + 36, lane.note, size=11, color=PALE)
    svg.text(12, y + 50, f"cell n: {lane.cell_is}", size=11, color=PALE)
    y += 60
    for number, stage in enumerate(stages):
        svg.text(12, y + 14, stage.words, font_weight="bold" if number else "normal")
        rows = _rows(stage.groups)
        for index, group in enumerate(stage.groups):
            color = COLORS[index % len(COLORS)]
            height = y + 10 + rows[index] * LINE
            places = [LEFT + (rank + 0.5) * column - 4 for rank in group]
            svg.line(places[0], height, places[-1], height, color)
            for place in places:
                svg.dot(place, height, color)
        y += LINE * (1 + max(rows)) + 6 if rows else 0
        last = number == len(stages) - 1
        if last:
            svg.text(12, y + 20, "whole", color=WHOLE, font_weight="bold")
        for rank in range(picture.grid.world_size):
            _draw_box(svg, picture, lane, stage, rank, LEFT + rank * column, y, column - 8)
        y += BOX_HEIGHT + 10
    return y + 4


def _rows(groups: Sequence[Sequence[int]]) -> list[int]:
    """The line each group is drawn on, so that lines do not cross: the first one that is free where it lies."""
    taken: list[list[Sequence[int]]] = []
    rows = []
    for group in groups:
        free = (all(group[0] > other[-1] or group[-1] < other[0] for other in line) for line in taken)
        row = next((number for number, is_free in enumerate(free) if is_free), len(taken))
        if row == len(taken):
            taken.append([])
        taken[row].append(group)
        rows.append(row)
    return rows


def _draw_box(svg: Svg, picture: Picture, lane: Lane, stage: Stage, rank: int, x: int, y: int, width: int) -> None:
    held = stage.held.get(rank)
    piece = lane.piece(GridGroups(picture.grid, rank), rank)
    if held is None or piece is None:
        svg.text(x + width / 2, y + 26, "not here", size=11, color=PALE, text_anchor="middle")
        return
    whole = is_whole(held, lane.cells)
    fill, line = (WHOLE_FILL, WHOLE) if whole else (PARTIAL_FILL, PARTIAL)
    svg.box(x, y, width, BOX_HEIGHT, fill=fill, line=line, dashed=not whole)
    svg.text(x + width / 2, y + 15, piece, size=11, text_anchor="middle")
    step = min(CELL, (width - 6) / lane.cells)
    left = x + (width - lane.cells * step) / 2 + 1
    for cell in range(lane.cells):
        there = held[cell]
        color, edge = (line, line) if there else ("none", PALE_EDGE)
        svg.box(left + cell * step, y + 22, step - 2, CELL, fill=color, line=edge, dashed=False)
        if there:
            svg.text(
                left + cell * step + (step - 2) / 2, y + 32, str(cell), size=9, color="#ffffff", text_anchor="middle"
            )


def main() -> None:
    """Write every picture."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for picture in ALL:
        for palette in PALETTES:
            path = PICTURES / f"{picture.file}_{palette}.svg"
            path.write_text(draw(picture, palette=palette), encoding="utf-8")


if __name__ == "__main__":
    main()
