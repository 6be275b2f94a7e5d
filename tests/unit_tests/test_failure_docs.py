"""The page on failures quotes messages that the code really has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.unit_tests.test_docs import ROOT

PACKAGES = ("core", "core_plan", "core_train", "core_compat")
PAGE = ROOT / "docs" / "source" / "when_something_fails.md"
VARIABLE = re.compile(r"<[^>]*>|\[[^\]]*\]|\([^)]*\.\.\.\)|\.\.\.")  # what stands for a name, a number or more text
SHORT = 9  # a shorter fragment could be found anywhere
TOO_SHORT_TO_SEARCH = 12  # for, by a user who meets such a text of core


def texts_of_core() -> str:
    """Every string in the packages, with the parts that are filled in left out."""
    found = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def messages() -> list[str]:
    cells = [line.split(" | ")[0] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [message for cell in cells for message in re.findall("`([^`]*)`", cell)]


def test_every_message_on_the_page_is_one_of_the_code() -> None:
    texts = texts_of_core()
    quoted = messages()
    assert len(quoted) > 20
    missing = []
    for message in quoted:
        fragments = [part.strip(" ,;()") for part in VARIABLE.split(re.sub(r"^[A-Z]\w+: ", "", message))]
        missing += [(message, part) for part in fragments if len(part) >= SHORT and part not in texts]
    assert not missing, f"no text of core has {missing}"
    assert any(len(part) >= SHORT for part in VARIABLE.split(quoted[0]))


# The calls whose texts a user meets when something fails, by file.
PRINTING = {
    "core/checkpoint/damage.py": ("_damage", "Damage"),
    "core/checkpoint/manifest.py": ("ManifestError",),
    "core_train/checkpoints.py": ("ConfigError",),
    "core_train/job.py": ("ConfigError",),
    "core_plan/job/run_directory.py": ("ConfigError", "print"),
    "core_train/output.py": ("print",),
    "core_train/second_interrupt.py": ("print",),
}


def texts_of(name: str, calls: tuple[str, ...]) -> Iterator[str]:
    """The longest fixed piece of each text that the calls of a file are given."""
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in calls:
            pieces = [
                part.value
                for argument in node.args
                for part in ast.walk(argument)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            longest = max(pieces, key=len, default="").strip(" ,;:()\n")
            if len(longest) >= TOO_SHORT_TO_SEARCH:
                yield longest


def test_every_text_of_these_failures_is_on_the_page() -> None:
    page = " ".join(PAGE.read_text().split())
    said = [(name, text) for name, calls in PRINTING.items() for text in texts_of(name, calls)]
    assert len(said) > 20
    # A quotation may end early, or fill in names: the first words of a piece are what a user searches for.
    missing = [(name, text) for name, text in said if text[:30] not in page]
    assert not missing, f"docs/source/when_something_fails.md does not have {missing}"
