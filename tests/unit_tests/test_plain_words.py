"""Plain words, held by a test: marks of an English that sounds translated, as far as a pattern can see them.

Words of MARKS are forbidden. Turns of SENTENCES are counted, because some of them are right: each room and page has a
share that it may hold, and ABOVE lists those that hold more, with a count that may only fall.
"""

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
# Turns of a sentence, and what to write in their place. Some are right, so they are counted.
TURNS_OF = {
    r"\bwhat(?! to | if | happens | else )": "a noun: the state, the shape, the error",
    r"\b(?:whole(?! number)|entirety)\b": "full, unsharded, complete, entire",
    r"\bwhere (?:there|no|nothing|it|they|a|an|one|none|that|this)\b": "if, when",
    r"\b(?:that|those) (?:of|which|that)\b": "repeat the noun",
    r"\b(?:lies|lay|stands?|stood)\b|\blie (?:in|on|at)\b": "is, is stored in",
    r"\bof (?:its|their|one's|your|his|our) own\b|\bof (?:theirs|ours|yours)\b": "its own, a separate",
    r"\bthere is (?:none|one)\b|\bhas none\b": "if any, has no X",
    r"\b(?:is|are|makes?) (?:made )?of (?:a|the|its|two|several)\b": "built from, consists of",
    r"^(?:The|Its|Their|An?|All|Of|In|On|With) [^,:;]{0,80}['’]s?\.$": "a verb and its object",
}
SENTENCES = re.compile("|".join(TURNS_OF), re.MULTILINE)
TURNS = "\n".join(["Rewrite the sentence:", *(f"  {turn}: {plain}" for turn, plain in TURNS_OF.items())])
COMMENT = re.compile(r"(?:^|  )# (?!type: |noqa|fmt: |-- )(.+)$", re.MULTILINE)
# A comment that opens with a clause continues the code in words.
OPENING = re.compile(r"^(?:of|that|which|whose|where|by|behind)\b")
# The share of marked sentences that a room or a page may hold.
SHARES = {"docstring": 0.05, "error": 0.01, "comment": 0.02, "page": 0.04}
# Rooms and pages that hold more: numbers that may only fall.
ABOVE: dict[tuple[str, str], int] = {
    ("benchmarks", "docstring"): 124,
    ("benchmarks", "comment"): 19,
    ("benchmarks", "error"): 4,
    ("core_plan", "error"): 2,
    ("core_train", "error"): 2,
    ("README.md", "page"): 2,
}
ROOMS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *(ROOT / "core").iterdir(),
        *ROOT.glob("core_*"),
        *(ROOT / name for name in ("benchmarks", "examples", "pretrain_gpt.py")),
    ]
    if path.suffix == ".py" or (path / "__init__.py").is_file() or path.name == "examples"
)
PAGES = ("docs/source", "benchmarks", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PROSE = sorted(
    path.relative_to(ROOT).as_posix() for path in [*(ROOT / "docs" / "source").rglob("*.md"), ROOT / "README.md"]
)
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
    for node, docstring in documented(text):
        if docstring:
            first = docstring.partition("\n\n")[0]
            if CLAUSE.match(first) or first.endswith("?"):
                yield f"{node.body[0].lineno}: {first[:60]!r}"


@functools.cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """Walk a program once for all tests."""
    return tuple(ast.walk(ast.parse(text)))


def documented(text: str) -> Iterator[tuple[Any, str]]:
    """Yield each node that may have a docstring, with the docstring."""
    for node in nodes_of(text):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, ast.get_docstring(node) or ""


def sentences_of(text: str) -> Iterator[str]:
    """Split prose into sentences. Examples, section titles and table rows are left out."""
    for paragraph in text.split("\n\n"):
        joined = " ".join(paragraph.split())
        if not joined.startswith((">>>", "Args:", "Returns:", "Raises:", "|", "#")):
            yield from (part for part in re.split(r"(?<=[.!?]) ", joined) if " " in part)


def prose_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each sentence of a program: docstrings, raised errors, comments."""
    for _, docstring in documented(text):
        yield from (("docstring", sentence) for sentence in sentences_of(docstring))
    for node in nodes_of(text):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            pieces = [piece.value for piece in ast.walk(node.exc.args[0]) if isinstance(piece, ast.Constant)]
            message = " ".join(piece for piece in pieces if isinstance(piece, str))
            if message.count(" ") > 3:
                yield "error", message
    yield from (("comment", found[1]) for found in COMMENT.finditer(text))


def share_above(place: str, counts: Mapping[str, list[bool]]) -> Iterator[str]:
    """Yield an advice for each kind of text of a place that has more marks, or fewer, than the tables say."""
    for kind, marked in counts.items():
        found, most = sum(marked), ABOVE.get((place, kind))
        allowed = max(1, int(SHARES[kind] * len(marked)))
        if most is None and found > allowed:
            yield f"{place}: {found} of {len(marked)} {kind} texts have a mark, expected at most {allowed}"
        elif most is not None and found > most:
            yield f"{place}: {found} {kind} texts have a mark, expected at most {most}"
        elif most is not None and found <= allowed:
            yield f"{place}: only {found} {kind} texts have a mark; remove the place from ABOVE"


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in EXCEPTIONS])
def test_sentences_of_a_room_are_plain(room: str) -> None:
    counts: dict[str, list[bool]] = {}
    marked = []
    for path in files_in(room, ".py"):
        for kind, sentence in prose_of(path.read_text()):
            pattern = OPENING if kind == "comment" else SENTENCES
            counts.setdefault(kind, []).append(bool(pattern.search(sentence)))
            if counts[kind][-1]:
                marked.append(f"{path.relative_to(ROOT)}: {sentence}")
    found = list(share_above(room, counts))
    assert not found, "\n".join([*found, TURNS, *marked])


@pytest.mark.parametrize("page", PROSE)
def test_sentences_of_a_page_are_plain(page: str) -> None:
    text = re.sub(r"^ *```.*?^ *```|^ *[|#>!].*?$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    sentences = [sentence for sentence in sentences_of(text) if sentence.count(" ") > 2]
    marked = [sentence for sentence in sentences if SENTENCES.search(sentence)]
    found = list(share_above(page, {"page": [sentence in marked for sentence in sentences]}))
    assert not found, "\n".join([*found, TURNS, *marked])


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


def test_marked_sentences_are_counted_by_kind_and_may_only_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        '"""Hold what ranks own. Read a file.\n\nArgs:\n    a: What it is.\n"""\n'
        'raise ValueError(f"{a} is the whole of it: use less")  # of the bucket\n'
    )
    marked = [
        (kind, sentence)
        for kind, sentence in prose_of(program)
        if (OPENING if kind == "comment" else SENTENCES).search(sentence)
    ]
    assert marked == [
        ("docstring", "Hold what ranks own."),
        ("error", " is the whole of it: use less"),
        ("comment", "of the bucket"),
    ]
    three = {"docstring": [True] * 3 + [False] * 37}
    assert list(share_above("room", three)) == ["room: 3 of 40 docstring texts have a mark, expected at most 2"]
    for most, wrong in ((2, True), (3, False), (4, False)):
        monkeypatch.setitem(ABOVE, ("room", "docstring"), most)
        assert bool(list(share_above("room", three))) == wrong
    assert "remove the place from ABOVE" in next(share_above("room", {"docstring": [True, False]}))
