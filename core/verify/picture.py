"""Draw the report of `locate` as a picture."""

from __future__ import annotations

from html import escape

from core.verify.place import Measured, Where

ROW, CELL, LETTER, TOP = 20, 44, 7.3, 46  # pixels
MOST_LEVELS = 6.0  # decades from the allowed error at which a color is fully saturated
COLOURS = {  # text; right, wrong, and not compared cells; text in cells; the culprit's row
    False: ("#1b1f24", "#2da44e", "#cf222e", "#d0d7de", "#000000", "#fff8c5"),
    True: ("#e6edf3", "#2ea043", "#f85149", "#30363d", "#ffffff", "#4b3a00"),
}


def svg(where: Where, *, dark: bool = False) -> str:
    """Draw an SVG on a transparent background, with one row per module and one cell per rank for output and gradient.

    A cell is log10 of the error over the allowed error: green is right, red is wrong, grey is not compared. The row
    where the fault begins is marked.

        Path("where.svg").write_text(svg(report.where))

    Args:
        where: Result of `locate`.
        dark: True for a dark page.

    Returns:
        The SVG.
    """
    text, right, wrong, nothing, on_cell, here = COLOURS[dark]
    ranks = sorted({rank for row in where.rows for rank in (*row.outputs, *row.gradients)})
    names = max(len(row.module or "the whole model") for row in where.rows) * LETTER + 16 if where.rows else 0
    starts = (names, names + CELL * len(ranks) + 16)
    width, height = starts[1] + CELL * len(ranks) + 60, TOP + ROW * len(where.rows) + 8
    parts = [
        f'<text x="{start}" y="16">{title}, rank</text>'
        + "".join(
            f'<text x="{start + CELL * (n + 0.5)}" y="36" class="m">{rank}</text>' for n, rank in enumerate(ranks)
        )
        for start, title in zip(starts, ("output", "gradient"), strict=True)
    ]
    for number, row in enumerate(where.rows):
        y = TOP + ROW * number
        if row.module in (where.forward, where.backward):
            parts.append(f'<rect x="0" y="{y}" width="{width}" height="{ROW}" fill="{here}"/>')
            parts.append(f'<text x="{width - 54}" y="{y + 14}">&#8592; here</text>')
        parts.append(f'<text x="4" y="{y + 14}">{escape(row.module or "the whole model")}</text>')
        for start, found in zip(starts, (row.outputs, row.gradients), strict=True):
            for n, rank in enumerate(ranks):
                x, measured = start + CELL * n, found.get(rank)
                colour = nothing if measured is None else right if measured.ok else wrong
                box = f'<rect x="{x}" y="{y + 1}" width="{CELL - 2}" height="{ROW - 2}" rx="3" fill="{colour}"'
                parts.append(f'{box} opacity="{_opacity(measured):.2f}"/>')
                if measured is not None:
                    level = "=" if measured.share == 0.0 else f"{measured.level:.1f}"
                    parts.append(f'<text x="{x + CELL / 2 - 1}" y="{y + 14}" class="m c">{level}</text>')
    style = (
        f"text{{font:12px DejaVu Sans Mono,Menlo,monospace;fill:{text}}}.m{{text-anchor:middle}}.c{{fill:{on_cell}}}"
    )
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>\n'


def _opacity(measured: Measured | None) -> float:
    if measured is None or measured.share == 0.0:
        return 0.55
    return 0.35 + 0.65 * min(abs(measured.level) / MOST_LEVELS, 1.0)
