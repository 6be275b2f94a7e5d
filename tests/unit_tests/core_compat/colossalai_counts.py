"""How many of the names that ColossalAI's examples import are at their path here.

    python -m tests.unit_tests.core_compat.colossalai_counts

What is counted is a pair of a file and a group of names that it imports: nine groups, with the number of the 151 files
of ColossalAI's examples and applications that import each of them. How many files find ALL of their names cannot be
counted from this: the list does not say which names stand in one file, nor what a file imports next to them.
"""

from __future__ import annotations

from pathlib import Path

import core_compat.colossalai as colossalai

NAMES = Path(__file__).with_name("colossalai_names.txt")


def is_here(dotted: str) -> bool:
    """True if the name is found at ColossalAI's path."""
    path, _, name = dotted.rpartition(".")
    try:
        colossalai.SURFACE.resolve(path, name)
    except AttributeError:
        return False
    return True


def count() -> tuple[dict[str, bool], int, int]:
    """({name: True if it is here}, pairs of a file and a group, those of them whose group's names are all here)."""
    names: dict[str, bool] = {}
    imports = served = 0
    for line in NAMES.read_text().splitlines():
        if not line.startswith("#"):
            files, *words = line.split()
            here = {word: is_here(word) for word in words}
            names |= here
            imports += int(files)
            served += int(files) * all(here.values())
    return names, imports, served


if __name__ == "__main__":
    found, total, here = count()
    print(f"{sum(found.values())} of {len(found)} names; {here} of {total} pairs of a file and a group of names")
    print("not here:", ", ".join(name for name, is_found in found.items() if not is_found))
