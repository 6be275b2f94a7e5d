"""The tables of docs/source/api/megatron_fields.md, which the build of the docs adds to the page."""

from __future__ import annotations

from pathlib import Path

from core_compat.megatron.faces import configs

PAGE = Path(__file__).parents[3] / "docs" / "source" / "coming_from_megatron.md"
FIELDS = PAGE.parent / "api" / "megatron_fields.md"
MARK = "<!-- fields -->"
KINDS = (
    configs.DistributedDataParallelConfig,
    configs.OptimizerConfig,
    configs.ModelParallelConfig,
)


def megatrons_fields() -> dict[str, list[str]]:
    """Configuration -> the fields that it has in versions 0.16 and 0.19 (and two of 0.20), from a list of names."""
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("megatron_fields.txt").read_text().splitlines():
        if line.endswith(":"):
            found[line[:-1]] = names = []
        else:
            names += line.split()
    return found


def table() -> str:
    """A table for each configuration of the fields that are refused or without effect, with the reason."""
    lines: list[str] = []
    for kind in KINDS:
        fields = megatrons_fields()[kind.__name__]
        obeyed = sum(name not in kind.rules for name in fields)
        refused = [name for name in fields if name in kind.rules and kind.rules[name].refused]
        hints = [name for name in fields if name in kind.rules and not kind.rules[name].refused]
        lines += [f"## {kind.__name__}", ""]
        lines += [
            f"{len(refused)} fields are refused, {len(hints)} change nothing, and the {obeyed} others are obeyed.",
            "",
        ]
        lines += ["| | fields | why |", "|---|---|---|"]
        for what, names in (("refused", refused), ("no effect", hints)):
            for sentence in dict.fromkeys(kind.rules[name].sentence for name in names):
                group = [name for name in names if kind.rules[name].sentence == sentence]
                lines.append(f"| {what} | {_words(group)} | {sentence} |")
        lines.append("")
    return "\n".join(lines)


def _words(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
