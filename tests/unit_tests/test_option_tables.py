"""The tables of options in the reference: a row for each option, with its text, its default, and when to change it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from typing import Any

import pytest

from core.booster.plugin.hybrid_parallel_options import WITHOUT_EFFECT
from core.transformer import TransformerConfig
from tests.unit_tests.test_config_fields import WITHOUT_EFFECT as IDLE
from tests.unit_tests.test_docs import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import options  # docs/options.py

CLASSES: list[type[Any]] = [options.class_at(path) for path in options.CLASSES]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: f"{cls.__module__.split('.')[1]}-{cls.__name__}")
def test_a_table_has_a_row_with_all_four_columns_for_each_option(cls: type[Any]) -> None:
    rows = {row.name: row for row in options.table_of(cls)}
    if dataclasses.is_dataclass(cls):
        own = {name for parent in cls.__mro__[1:] if parent in CLASSES for name in parent.__dataclass_fields__}
        expected = {field.name: field.default for field in dataclasses.fields(cls) if field.name not in own}
    else:
        given = inspect.signature(cls.__init__).parameters
        expected = {name: p.default for name, p in given.items() if name not in ("self", "options")}
    assert list(rows) == list(expected)
    for name, default in expected.items():
        row = rows[name]
        assert len(row.what) > 5 and len(row.when) > 5 and row.what != row.when, row
        if isinstance(default, (int, float, str)):
            assert eval(row.default, {"inf": float("inf")}) == default
    stale = set(options.hints().get(cls.__name__, {})) - set(rows)
    assert not stale, f"docs/options.toml: {cls.__name__} has no {stale}"


def test_what_the_tables_say_of_options_that_nothing_obeys_is_what_the_code_does() -> None:
    def rows(cls: type[Any], words: str) -> set[str]:
        return {row.name for row in options.table_of(cls) if re.match(words, row.what)}

    of_plugin = options.class_at("core.booster.plugin.HybridParallelPlugin")
    assert rows(of_plugin, "Changes nothing: ") == set(WITHOUT_EFFECT)
    for known, words in ((IDLE, ".*; a warning (?:if|where) True"),):
        for cls in (cls for cls in CLASSES if cls in {owner for owner, _ in known} and cls is not TransformerConfig):
            assert rows(cls, words) == {name for owner, name in known if owner is cls}


def test_no_word_in_the_file_of_hints_is_about_nothing() -> None:
    known, names = options.hints(), {cls.__name__ for cls in CLASSES}
    assert set(known) - {"common"} <= names
    used = {name for cls in CLASSES for name in options.defaults_of(cls) if name not in known.get(cls.__name__, {})}
    assert set(known["common"]) <= used, set(known["common"]) - used


def test_an_option_without_a_text_is_named() -> None:
    @dataclasses.dataclass(frozen=True)
    class Widened(options.class_at("core_plan.job.config.LoggingOptions")):  # type: ignore[misc]
        colour: str = "red"  # of the bicycle shed

    with pytest.raises(KeyError, match=r"Widened\.(colour|print_every): docs/options\.toml"):
        options.table_of(Widened)


def test_texts_are_read_from_comments_docstrings_and_ranges_of_names() -> None:
    rows = {row.shown: row for row in options.table_of(options.class_at("core_plan.job.config.RunOptions"))}
    assert rows["--run.global-batch-size"].default == "16"
    assert rows["--run.global-batch-size"].what == "Windows in one optimizer step, in any layout."
    before, texts = options.explained("Sizes. a .. c: of the scale. d, e: of none. f: is no name.", list("abcde"))
    assert before == "Sizes."
    assert texts == [(["a", "b", "c"], "of the scale."), (["d", "e"], "of none. f: is no name.")]


def code_lines() -> list[tuple[str, str]]:
    """Programs and commands on the pages, without what they print."""
    found = []
    for page in sorted((ROOT / "docs" / "source").glob("*.md")):
        fence = None
        for line in page.read_text().splitlines():
            if line.startswith("```"):
                fence = line[3:] if fence is None else None
            elif fence in ("python", "py", "sh", "toml") or (fence is None and line.startswith("    python ")):
                found.append((page.name, line.removeprefix("    ") if fence is None else line))
    return found


def example_lines() -> list[tuple[str, str]]:
    """Programs in the docstrings of functions and classes, which the reference shows."""
    found = []
    for file in sorted([*(ROOT / "core").rglob("*.py"), *ROOT.glob("core_*/**/*.py")]):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                for block in re.findall(r"\n\n((?:    .*\n)+)", f"{ast.get_docstring(node)}\n"):
                    found += [(f"{file.name} {node.name}", line[4:]) for line in block.splitlines()]
    return found


def test_programs_and_commands_fit_the_box_of_88_columns() -> None:
    assert len(code_lines()) > 1000 and len(example_lines()) > 100
    wide = [f"{place}: {line}" for place, line in [*code_lines(), *example_lines()] if len(line) > 88]
    assert not wide, wide


def test_every_flag_on_a_page_is_an_option() -> None:
    pytest.importorskip("tyro")
    from core_plan.job.config import JobConfig

    known = {"checkpoint.async"}  # another word for --checkpoint.asynchronous
    for config in [JobConfig()]:
        for section in dataclasses.fields(config):
            of_section = getattr(config, section.name)
            if dataclasses.is_dataclass(of_section):
                known |= {f"{section.name}.{field.name.replace('_', '-')}" for field in dataclasses.fields(of_section)}
    unknown = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs" / "source").glob("*.md"))]:
        for flag in re.findall(r"--([a-z]+\.[a-z][\w-]*\w)\b(?!-)", page.read_text()):
            if flag not in known and flag.replace(".no-", ".") not in known and not flag.startswith("model.moe"):
                unknown.append(f"{page.name}: --{flag}")
    assert not unknown, unknown
