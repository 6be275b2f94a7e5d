"""The page on failures quotes messages that the code really has."""

from __future__ import annotations

import ast
import re

from tests.unit_tests.test_docs import ROOT

PAGE = ROOT / "docs" / "source" / "when_something_fails.md"
VARIABLE = re.compile(r"<[^>]*>|\[[^\]]*\]|\([^)]*\.\.\.\)|\.\.\.")  # what stands for a name, a number or more text
SHORT = 12  # a shorter fragment could be found anywhere


def texts_of_core() -> str:
    """Every string in core, with the parts that are filled in left out."""
    found = []
    for path in sorted((ROOT / "core").rglob("*.py")):
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
