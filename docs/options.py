"""Options as tables: name, default, what it does, when to change it. conf.py shows them, and a test compares them.

What an option does is read where the code says it: in the docstring of its class, or in the comment at its field. When
to change it is in options.toml, by class or under `common`; where the code has no text, `[what, when]` is there.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import math
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HINTS = Path(__file__).parent / "options.toml"
# Where the classes are whose options are shown as a table.
CLASSES = (
    "core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig",
    "core.distributed.contract.placement.Placement",
    "core.optimizer.optimizer_config.OptimizerConfig",
    "core.model_parallel_config.ModelParallelConfig",
    "core.transformer.transformer_config.TransformerConfig",
    *(f"core.booster.plugin.{name}Plugin" for name in ("TorchDDP", "TorchFSDP", "LowLevelZero", "Gemini")),
    *(f"core.booster.plugin.{name}Plugin" for name in ("HybridParallel", "MoeHybridParallel")),
    *(f"core_plan.job.config.{name}Options" for name in ("Run", "Model", "Parallel", "Optimizer")),
    *(f"core_plan.job.config.{name}Options" for name in ("Data", "Checkpoint", "Logging")),
)
FLAGS = "core_plan.job.config"  # the sections of this module are given as flags
# `name: meaning`, `name, name: meaning`, `first .. last: meaning`, at the start of a sentence or of a section.
ARGUMENT = re.compile(r"(?:^(?:Args: |Attributes: )?|(?<=[.;] ))(\*?\w+(?:, \*?\w+)*| ?\w+ \.\. \w+): ")


class Option(NamedTuple):
    """One row. flag: what a user types, where it is an option of a command."""

    name: str
    shown: str
    default: str
    what: str
    when: str


def names_in(found: str, names: Sequence[str]) -> list[str] | None:
    """The arguments that the words before a colon name; None where one of them is no argument."""
    first, dots, last = found.strip().partition(" .. ")
    if dots:
        known = first in names and last in names
        return list(names[names.index(first) : names.index(last) + 1]) if known else None
    said = found.split(", ")
    return said if all(name in names or name.startswith("*") for name in said) else None


def explained(paragraph: str, names: Sequence[str]) -> tuple[str, list[tuple[list[str], str]]]:
    """A paragraph as what stands before the first argument, and the arguments with their texts."""
    cuts = [found for found in ARGUMENT.finditer(paragraph) if names_in(found[1], names)]
    if not cuts:
        return paragraph, []
    ends = [found.start() for found in cuts[1:]] + [len(paragraph)]
    texts = [
        (names_in(found[1], names) or [], paragraph[found.end() : end].strip())
        for found, end in zip(cuts, ends, strict=True)
    ]
    return paragraph[: cuts[0].start()].strip(), texts


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a docstring, each on one line."""
    for block in re.split(r"\n\s*\n", text):
        yield " ".join(block.split())


def field_comments(cls: type) -> dict[str, str]:
    """The comment behind each field, or the comments above it."""
    source = inspect.cleandoc("\n" + inspect.getsource(cls))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in comments and source.splitlines()[first - 2].lstrip().startswith("#"):
                first -= 1
            lines = [*range(first, node.lineno), node.end_lineno or node.lineno]
            found[node.target.id] = " ".join(comments[line] for line in lines if line in comments)
    return found


def shown_default(value: Any) -> str:
    """A default as a user would write it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 2**16 <= value < math.inf:
        power = math.log2(value)
        return f"2**{power:.0f}" if power.is_integer() else f"{value:,}".replace(",", "_")
    if isinstance(value, Path):
        return str(value)
    return repr(value)


def defaults_of(cls: type) -> dict[str, str]:
    """The options that a class takes itself, and their defaults; a parent's stand in its own table."""
    if not dataclasses.is_dataclass(cls):
        given = inspect.signature(cls).parameters.values()
        known = [parameter for parameter in given if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
        return {p.name: "required" if p.default is p.empty else shown_default(p.default) for p in known}
    other = [parent for parent in cls.__mro__[1:] if path_of(parent) in CLASSES]
    inherited = {field.name for parent in other for field in dataclasses.fields(parent)}
    found = {}
    for field in dataclasses.fields(cls):
        if field.name in inherited:
            continue
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found[field.name] = "required" if made is dataclasses.MISSING else shown_default(made)
    return found


def path_of(cls: type) -> str:
    """The place of a class, as CLASSES has it."""
    path = f"{cls.__module__}.{cls.__name__}"
    return re.sub(r"^(core\.booster\.plugin)\.\w+", r"\1", path)


def class_at(path: str) -> type:
    """The class of a place in CLASSES."""
    module, _, name = path.rpartition(".")
    found: type = getattr(import_module(module), name)
    return found


def texts_from_code(cls: type, names: Sequence[str]) -> dict[str, str]:
    """What the docstring, or else the comments, of a class and its parents say of its options."""
    found: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        if parent.__module__.startswith(("core.", "core_plan.")):
            if dataclasses.is_dataclass(parent):
                found |= {name: text for name, text in field_comments(parent).items() if text and name in names}
            for paragraph in paragraphs(inspect.cleandoc(parent.__dict__.get("__doc__") or "")):
                for said, text in explained(paragraph, names)[1]:
                    found |= dict.fromkeys(said, text)
    return found


def hints() -> dict[str, dict[str, Any]]:
    """options.toml."""
    return tomllib.loads(HINTS.read_text())


def table_of(cls: type) -> list[Option]:
    """A row for each option. KeyError, with the name, for one that has no text, or no word on when to change it."""
    defaults = defaults_of(cls)
    told = texts_from_code(cls, list(defaults))
    texts = hints()
    known = {**texts["common"], **texts.get(cls.__name__, {})}
    rows = []
    for name, default in defaults.items():
        if name not in known:
            raise KeyError(f"{cls.__name__}.{name}: docs/options.toml does not say when to change it")
        what, when = known[name] if isinstance(known[name], list) else (told.get(name, ""), known[name])
        if not what:
            raise KeyError(f"{cls.__name__}.{name}: neither its docstring nor docs/options.toml says what it does")
        rows.append(Option(name, flag_of(cls, name), default, sentence(what), sentence(when)))
    return rows


def flag_of(cls: type, name: str) -> str:
    """`--section.option` for the main job's, and the name for others."""
    if cls.__module__ != FLAGS:
        return name
    return f"--{cls.__name__.removesuffix('Options').lower()}.{name.replace('_', '-')}"


def sentence(text: str) -> str:
    """Begins with a capital letter, if it begins with a plain word, and ends with a full stop."""
    if re.match(r"[a-z][a-z]+([ ,]|\.(?!\w)|$)|a ", text):
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "?", ")")) else f"{text}."
