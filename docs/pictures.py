"""Draws the pictures of docs/source/pictures, each for light and for dark pages: `python docs/pictures.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "source" / "pictures"
PALETTES = {
    "light": {
        "text": "#1b1f24",
        "faint": "#6a737d",
        "line": "#8b949e",
        "a": "#bfdbfe",
        "b": "#fed7aa",
        "c": "#bbf7d0",
        "none": "#eef1f4",
    },
    "dark": {
        "text": "#e6edf3",
        "faint": "#9aa4af",
        "line": "#6e7681",
        "a": "#1f4b80",
        "b": "#7a4312",
        "c": "#1d5a34",
        "none": "#22272e",
    },
}
SANS, MONO = "font-family='DejaVu Sans, Verdana, sans-serif'", "font-family='DejaVu Sans Mono, Menlo, monospace'"


class Picture:
    """Shapes on a transparent ground, in the colours of a palette."""

    def __init__(self, width: int, height: int, colours: dict[str, str]) -> None:
        self.size = (width, height)
        self.colours = colours
        self.parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 14,
        anchor: str = "middle",
        colour: str = "text",
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """Words with their baseline at y."""
        weight = " font-weight='bold'" if bold else ""
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{anchor}'{weight} xml:space='preserve' "
            f"fill='{self.colours[colour]}' {MONO if mono else SANS}>{escape(words)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        words: Sequence[str] = (),
        fill: str = "none",
        *,
        size: int = 14,
        round: int = 4,
    ) -> None:
        """A rectangle with lines of words in its middle."""
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='{round}' fill='{self.colours[fill]}' "
            f"stroke='{self.colours['line']}'/>"
        )
        first = y + height / 2 - (len(words) - 1) * (size + 4) / 2 + size * 0.36
        for number, line in enumerate(words):
            self.text(x + width / 2, first + number * (size + 4), line, size=size)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line with a head at its end."""
        self.parts.append(
            f"<line x1='{x:g}' y1='{y:g}' x2='{to_x:g}' y2='{to_y:g}' stroke='{self.colours['line']}' stroke-width='2' "
            "marker-end='url(#head)'/>"
        )

    def svg(self) -> str:
        """The file's text."""
        width, height = self.size
        head = (
            f"<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' "
            f"orient='auto'><path d='M0 0L10 5L0 10z' fill='{self.colours['line']}'/></marker></defs>"
        )
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>"
            f"{head}\n" + "\n".join(self.parts) + "\n</svg>\n"
        )


def buffer(p: Picture) -> None:
    """One gradient's way through the buffer."""
    names = ("embedding", "layer 0 w", "layer 0 b", "layer 1 w", "layer 1 b", "output")
    widths = (130, 110, 50, 110, 50, 130)
    p.text(20, 30, "parameters", anchor="start", bold=True)
    x = 130.0
    for name, width in zip(names, widths, strict=True):
        p.box(x, 12, width, 30, (name,), "a" if name == "layer 1 w" else "none", size=11)
        x += width
    p.text(20, 110, "buffer", anchor="start", bold=True)
    x = 130.0
    for name, width in zip(names, widths, strict=True):
        p.box(x, 92, width, 30, (), "a" if name == "layer 1 w" else "none")
        x += width
    p.arrow(475, 42, 475, 90)
    p.text(484, 70, "1  backward adds into the buffer", size=12, anchor="start")
    p.box(130, 130, 240, 26, ("bucket 1",), size=12)
    p.box(370, 130, 340, 26, ("bucket 0: complete first",), "b", size=12)
    p.arrow(540, 158, 540, 196)
    p.text(549, 181, "2  the bucket leaves, while backward goes on", size=12, anchor="start")
    p.text(20, 220, "reduce-scatter", anchor="start", bold=True)
    p.box(370, 200, 170, 30, ("rank 0 keeps",), "b", size=12)
    p.box(540, 200, 170, 30, ("rank 1 keeps",), "c", size=12)
    p.arrow(455, 232, 455, 268)
    p.text(464, 254, "3  the optimizer reads its shard", size=12, anchor="start")
    p.text(20, 292, "parameters again", anchor="start", bold=True)
    p.box(370, 272, 170, 30, ("updated by rank 0",), "b", size=12)
    p.box(540, 272, 170, 30, ("by rank 1",), "c", size=12)
    p.text(540, 328, "4  all-gather: every rank has both", size=12)


def strategies(p: Picture) -> None:
    """What each strategy keeps on each of 4 ranks."""
    rows = ("parameters", "gradients", "optimizer state")
    kept = {"no_shard": (4, 4, 4), "optim": (4, 4, 1), "optim_grads": (4, 1, 1), "optim_grads_params": (1, 1, 1)}
    zero = {
        "no_shard": "as torch DDP",
        "optim": "ZeRO 1",
        "optim_grads": "ZeRO 2",
        "optim_grads_params": "ZeRO 3, FSDP",
    }
    for column, (name, parts) in enumerate(kept.items()):
        left = 150 + 160 * column
        p.text(left + 68, 22, name, size=12, mono=True, bold=True)
        p.text(left + 68, 40, zero[name], size=11, colour="faint")
        for row, filled in enumerate(parts):
            top = 54 + 62 * row
            for rank in range(4):
                for part in range(4):
                    held = filled == 4 or part == rank
                    p.box(left + 34 * rank, top + 11 * part, 28, 11, (), "abc"[row] if held else "none", round=0)
    for row, name in enumerate(rows):
        p.text(20, 80 + 62 * row, name, size=13, anchor="start", bold=True)
    for column in range(4):
        for rank in range(4):
            p.text(164 + 160 * column + 34 * rank, 246, str(rank), size=11, colour="faint")
    p.text(20, 246, "rank", size=11, anchor="start", colour="faint")


def decisions(p: Picture) -> None:
    """Which way in, and what to shard."""
    p.box(20, 20, 240, 44, ("Is the loop another library's?",), size=13)
    p.arrow(260, 42, 330, 42)
    p.text(294, 34, "yes", size=12, colour="faint")
    p.box(
        332,
        14,
        360,
        56,
        ("accelerate, Trainer, Fabric: core.integrations", "ColossalAI: the Booster; Megatron: core_compat.megatron"),
        "a",
        size=12,
    )
    questions = (
        (
            "Does one layer fit on a rank?",
            "no",
            ("split the layers: tp, or experts over ep", "a long sequence: cp"),
            "c",
        ),
        ("Do parameters, gradients and state fit?", "yes", ("no_shard",), "b"),
        ("... with the state sharded?", "yes", ("optim",), "b"),
        ("... with gradients sharded too?", "yes", ("optim_grads",), "b"),
        ("... with parameters sharded too?", "yes", ("optim_grads_params",), "b"),
    )
    for number, (question, answer, words, fill) in enumerate(questions):
        top = 100 + 76 * number
        p.arrow(140, top - 36 if number == 0 else top - 32, 140, top - 2)
        p.text(150, top - 14, "no" if number != 1 else "yes", size=12, anchor="start", colour="faint")
        p.box(20, top, 240, 44, (question,), size=12)
        p.arrow(260, top + 22, 330, top + 22)
        p.text(294, top + 14, answer, size=12, colour="faint")
        p.box(332, top, 360, 44, words, fill, size=12)
    p.arrow(140, 448, 140, 478)
    p.text(150, 468, "no", size=12, anchor="start", colour="faint")
    p.box(
        20,
        480,
        672,
        44,
        ("stages over pp, or offloaded state and parameters: Placement, GeminiPlugin",),
        "c",
        size=12,
    )


def resharding(p: Picture) -> None:
    """A checkpoint saved in one layout and loaded in others."""
    p.text(110, 24, "saved by 4 ranks", size=13, bold=True)
    p.text(110, 42, "tp 2 x dp 2, optimizer sharded", size=11, colour="faint")
    for rank in range(4):
        p.box(
            20 + 92 * (rank % 2),
            58 + 66 * (rank // 2),
            84,
            56,
            (f"rank {rank}", ("left half" if rank % 2 == 0 else "right half")),
            "ab"[rank % 2],
            size=12,
        )
    p.arrow(206, 118, 262, 118)
    p.text(370, 24, "files on disk", size=13, bold=True)
    p.text(370, 42, "by global name and slice", size=11, colour="faint")
    for row, (words, fill) in enumerate(
        (
            ("layers.0.w  [:, 0:64]", "a"),
            ("layers.0.w  [:, 64:128]", "b"),
            ("moments, the same way", "c"),
            ("checksums, options, position", "none"),
        )
    ):
        p.box(266, 58 + 33 * row, 208, 29, (words,), fill, size=12)
    p.arrow(478, 90, 532, 72)
    p.arrow(478, 140, 532, 158)
    p.text(620, 24, "loaded by others", size=13, bold=True)
    p.text(620, 42, "each reads what it needs", size=11, colour="faint")
    p.box(536, 52, 168, 44, ("1 rank: the whole",), "c", size=12)
    for rank in range(3):
        p.box(536 + 57 * rank, 132, 54, 56, (f"rank {rank}", "1 / 3"), "abc"[rank], size=12)
    p.text(620, 206, "3 ranks, parameters sharded", size=11, colour="faint")


TERMINAL = (
    "$ make train",
    "4 ranks = tp 2 with sequence parallelism x dp 2 (sharded optimizer); global batch 16 ...",
    "410,752 parameters and 1 thread(s) a rank; writing to runs/default/",
    "step 50/150  loss 2.421  validation 2.592  |g| 0.65  8,382 tokens/s  exposed 84.9 ms",
    "step 100/150  loss 2.149  validation 2.328  |g| 0.70  9,656 tokens/s  exposed 20.1 ms",
    "step 150/150  loss 1.990  |g| 0.62  8,553 tokens/s  exposed 27.2 ms",
    "150 steps in 72.1 s; training loss 1.9904 nats per byte, validation loss 2.2427",
    "continue a text: .venv/bin/python -m core generate runs/default",
)


def terminal(p: Picture) -> None:
    """What a run prints, as in the README."""
    width, height = p.size
    p.box(4, 4, width - 8, height - 8, (), "none", round=8)
    for number in range(3):
        p.parts.append(f"<circle cx='{24 + 18 * number}' cy='22' r='5' fill='{p.colours['line']}'/>")
    for number, line in enumerate(TERMINAL):
        p.text(20, 56 + 22 * number, line, size=13, anchor="start", mono=True, bold=number == 0)


def step_times() -> list[tuple[str, str, float]]:
    """(stage, arm, time over torch DDP's) of the first table of the page of figures, for the GPT of 10.5 M."""
    page = (FOLDER.parent / "performance.md").read_text()
    rows, stage = [], ""
    for line in page.split("| stage | arm |")[1].splitlines()[2:]:
        if not line.startswith("|"):
            break
        first, arm, time, *_ = (cell.strip().replace("*", "").replace("`", "") for cell in line.strip("|").split(" | "))
        stage = first.strip("| ") or stage
        rows.append((stage, arm, 1.0 if time.endswith("ms") else float(time)))
    return rows


def steps(p: Picture) -> None:
    """The time of a training step, as the page's first table has it."""
    rows = step_times()
    longest = max(time for _, _, time in rows)
    shown = ""
    for number, (stage, arm, time) in enumerate(rows):
        top = 14 + 30 * number
        if stage != shown:
            p.text(20, top + 15, stage, size=12, anchor="start", bold=True)
            shown = stage
        p.text(392, top + 15, arm, size=12, anchor="end")
        p.box(400, top, 290 * time / longest, 22, (), "a" if arm.startswith("ours") else "none", round=2)
        p.text(406 + 290 * time / longest, top + 15, f"{time:.2f}", size=12, anchor="start")


PICTURES: dict[str, tuple[Callable[[Picture], None], int, int]] = {
    "buffer": (buffer, 830, 344),
    "strategies": (strategies, 800, 260),
    "decisions": (decisions, 712, 540),
    "resharding": (resharding, 724, 220),
    "terminal": (terminal, 750, 236),
    "steps": (steps, 740, 260),
}


def drawn(name: str, palette: str) -> str:
    """The text of one file."""
    draw, width, height = PICTURES[name]
    picture = Picture(width, height, PALETTES[palette])
    draw(picture)
    return picture.svg()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PICTURES:
        for palette in PALETTES:
            (FOLDER / f"{name}_{palette}.svg").write_text(drawn(name, palette))
