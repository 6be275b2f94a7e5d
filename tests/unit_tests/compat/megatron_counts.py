"""How much of what programs take from Megatron Core is here, counted from lists of names, import lines and calls.

    python -m tests.unit_tests.compat.megatron_counts

megatron_names.txt: the most used names of the areas that this package claims, their uses in eleven public projects
(1,262 files), and what can be passed to them in versions 0.16 and 0.19. megatron_imports.txt, megatron_calls.txt:
import lines and the calls of a training loop as such projects write them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.compat.megatron import SURFACE

HERE = Path(__file__).parent


def names() -> Iterator[tuple[str, int, list[str]]]:
    """(dotted name, uses, parameters)."""
    for line in (HERE / "megatron_names.txt").read_text().splitlines():
        name, uses, parameters = line.split()
        yield name, int(uses), [] if parameters == "-" else parameters.split(",")


def found(dotted: str) -> Any:
    """The object at Megatron's path; None where there is none."""
    path, _, name = dotted.rpartition(".")
    try:
        return SURFACE.resolve(path, name)
    except (AttributeError, ImportError):
        return None


def takes(thing: Any, parameters: list[str]) -> list[str]:
    """The parameters that an object cannot be given by name; those of typing's aliases are never asked for."""
    if not callable(thing) or not parameters:
        return []
    try:
        known = inspect.signature(thing).parameters
    except ValueError:
        return []
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return []
    return [name for name in parameters if name not in known]


def count_names() -> tuple[int, int, int, list[str], dict[str, list[str]]]:
    """(uses, uses at the path, those of them that take all parameters, names that are not here, what others lack)."""
    uses = at_path = same = 0
    absent, lacking = [], {}
    for name, count, parameters in names():
        uses += count
        thing = found(name)
        if thing is None:
            absent.append(name)
            continue
        at_path += count
        lacks = takes(thing, parameters)
        if lacks:
            lacking[name] = lacks
        else:
            same += count
    return uses, at_path, same, absent, lacking


def import_lines() -> tuple[list[str], list[str]]:
    """(lines that work with their package's name changed, lines that do not)."""
    works: list[str] = []
    fails: list[str] = []
    for line in (HERE / "megatron_imports.txt").read_text().splitlines():
        try:
            exec(line.replace("megatron.core", "core.compat.megatron"), {})
        except ImportError:
            fails.append(line)
        else:
            works.append(line)
    return works, fails


def calls() -> list[str]:
    """The calls of a loop, in the order in which it makes them."""
    return (HERE / "megatron_calls.txt").read_text().splitlines()


def main() -> None:
    """Print the counts."""
    uses, at_path, same, absent, lacking = count_names()
    print(
        f"names: {at_path} of {uses} uses at Megatron's path ({at_path / uses:.1%}); of them {same} take all parameters"
    )
    print(f"  not here: {', '.join(absent)}")
    for name, lacks in lacking.items():
        print(f"  {name} lacks {', '.join(lacks)}")
    works, fails = import_lines()
    print(f"import lines: {len(works)} of {len(works) + len(fails)}")
    for line in fails:
        print(f"  {line}")


if __name__ == "__main__":
    main()
