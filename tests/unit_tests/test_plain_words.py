"""Plain words, held by a test: marks of an English that sounds translated, as far as a pattern can see them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A mark, and what to write in its place.
MARKS = {
    r"told|tells|tell(?!\()|telling": "configured, reported, passed, named, distinguished",
    "beside": "next to, in addition to, during, on",
    "somebody|nobody|whoever|whatever|who asks": "the subject: user code, another rank, torch, the caller; no one, any",
    "anew": "again",
    "likewise": "also",
    "meanwhile": "during, while",
    "by itself": "alone, on its own",
    "go(?:es)? on": "continue",
    "as it is": "unchanged",
    "comes to": "gives, becomes",
}
WORDS = re.compile(
    r"(?<![a-z])(?:" + "|".join(MARKS).replace(" ", r"[\s#_]+") + r")(?![a-z])",
    re.IGNORECASE,
)
ADVICE = "\n".join(["Write the plain form:", *(f"  {mark}: {plain}" for mark, plain in MARKS.items())])
# A docstring opens with a noun or a verb, not with a clause.
CLAUSE = re.compile(r"(?:What|Who|Whose|Which|Whether|Where|Why|How)\b")
ROOMS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*(ROOT / "core").iterdir(), *(ROOT / name for name in ("benchmarks", "examples", "pretrain_gpt.py"))]
    if path.suffix == ".py" or (path / "__init__.py").is_file() or path.name == "examples"
)
PAGES = ("docs/source", "benchmarks", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# Rooms and pages that hold marks still.
EXCEPTIONS: frozenset[str] = frozenset()


def files_in(place: str, suffix: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.rglob(f"*{suffix}"))


def marks_in(text: str) -> Iterator[str]:
    """Yield the line and the words of each mark, also where a line breaks or a name joins them."""
    for found in WORDS.finditer(text):
        yield f"{text.count(chr(10), 0, found.start()) + 1}: {found[0]!r}"


def openings_in(text: str) -> Iterator[str]:
    """Yield the line and the first words of each docstring that opens with a clause or asks a question."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            first = docstring.partition("\n\n")[0]
            if CLAUSE.match(first) or first.endswith("?"):
                yield f"{node.body[0].lineno}: {first[:60]!r}"


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in EXCEPTIONS])
def test_a_room_of_the_code_is_in_plain_words(room: str) -> None:
    found = []
    for path in files_in(room, ".py"):
        text = path.read_text()
        found += [f"{path.relative_to(ROOT)}:{mark}" for mark in (*marks_in(text), *openings_in(text))]
    assert not found, f"{ADVICE}\n" + "\n".join(found)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in EXCEPTIONS])
def test_the_pages_are_in_plain_words(page: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{mark}" for path in files_in(page, ".md") for mark in marks_in(path.read_text())
    ]
    assert not found, f"{ADVICE}\n" + "\n".join(found)


def test_a_mark_is_seen_across_lines_and_in_names() -> None:
    assert list(marks_in("a\n# It goes\n    # on. Nothing_told. Retold.\n")) == ["2: 'goes\\n    # on'", "3: 'told'"]
    assert list(openings_in('"""What it is."""\ndef f():\n    """Is it?"""\n')) == ["1: 'What it is.'", "3: 'Is it?'"]
