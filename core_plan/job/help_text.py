"""Text of `--help`: an overview by groups, one group, or everything; every option with a text and its default."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from core_plan.job.errors import ConfigError

EVERYTHING = "all"
# What a first run changes.
COMMON = (
    *("run.name", "run.steps", "run.global-batch-size", "run.ranks", "model.num-layers", "model.hidden-size"),
    *("model.path", "data.text", "data.file", "optimizer.lr", "checkpoint.dir", "checkpoint.resume", "lora.r"),
)


def asks_for_help(flags: Sequence[str]) -> str | None:
    """Return the group that help is requested for, '' for the overview, None without a request."""
    for place, word in enumerate(flags):
        if word in ("-h", "--help"):
            after = "".join(flags[place + 1 : place + 2])
            return "" if after.startswith("-") else after
    return None


def help_text(whole: str, config: Any, prog: str, about: str, group: str) -> str:
    """Return the help text to show.

    Args:
        whole: tyro's help of all options.
        config: The configuration.
        prog: Name of the command.
        about: Its description.
        group: Result of `asks_for_help`.

    Raises:
        ConfigError: If there is no such group.
    """
    groups = {
        field.name: _entries(whole, field.name, getattr(config, field.name)) for field in dataclasses.fields(config)
    }
    if group == "":
        return _overview(groups, config, prog, about)
    if group != EVERYTHING and group not in groups:
        raise ConfigError(f"--help {group}: no such group; there are {', '.join(groups)}, and {EVERYTHING}")
    shown = groups if group == EVERYTHING else {group: groups[group]}
    parts = [f"{name}: {_title(getattr(config, name))}\n" + "\n".join(entries) for name, entries in shown.items()]
    return "\n\n".join(parts)


def _overview(groups: Mapping[str, Sequence[str]], config: Any, prog: str, about: str) -> str:
    lines = [
        f"usage: {prog} [--config FILE.toml ...] [--group.option VALUE ...]",
        "",
        textwrap.fill(about, 100),
        "",
        *("Groups of options, and how many there are in each:", ""),
        *(f"  --help {name:<12}{len(entries):>4}  {_title(getattr(config, name))}" for name, entries in groups.items()),
        f"  --help {EVERYTHING:<12}{sum(map(len, groups.values())):>4}  every option",
        *("", "--dry-run prints the plan of the job on this machine, and starts nothing; for another device, with"),
        "the time of a step, --dry-run --device h100.",
        *("", "Those that a first run changes:", ""),
    ]
    names = [f"--{name}" for name in COMMON]
    lines += [
        entry for entries in groups.values() for entry in entries if re.split(r"[ ,\n]", entry.strip())[0] in names
    ]
    return "\n".join(lines)


def _title(section: Any) -> str:
    """The first sentence of a section's docstring."""
    return inspect.cleandoc(type(section).__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _entries(whole: str, group: str, section: Any) -> list[str]:
    """Return one text per option from tyro's help, or else from the docstring of the section's class."""
    texts_of = argument_texts(type(section))
    entries: list[list[str]] = []
    for line in whole.splitlines():
        inside = line[1:].rstrip("│| ")  # without the sides of a box, or the blanks in their place
        if inside.startswith(f" --{group}.") and not (entries and entries[-1][-1].endswith(",")):
            entries.append([inside])
        elif entries and not inside.startswith(" "):  # the next group
            break
        elif entries:
            entries[-1].append(inside)
    texts = []
    for lines in entries:
        if "{fixed}" in "".join(lines):  # a value that no flag can give
            continue
        option = lines[0].split()[0].rstrip(",").partition(".")[2].replace("-", "_")
        at = next((place for place, line in enumerate(lines) if line.startswith("  ")), len(lines))
        if option in texts_of and "".join(lines[at:]).strip().startswith("(default:"):
            lines[at:at] = textwrap.wrap(texts_of[option], 88, initial_indent=" " * 7, subsequent_indent=" " * 7)
        texts.append("\n".join(lines))
    return texts


def argument_texts(cls: type) -> dict[str, str]:
    """The texts of a class's docstring that read 'name: text' or 'name, name: text', with their indented lines."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        begin = re.match(r"(\w+(?:, \w+)*): (.+)", line)
        if begin is not None:
            names = begin[1].split(", ")
            found |= dict.fromkeys(names, begin[2])
        elif line.startswith("    ") and names:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        else:
            names = []
    return found
