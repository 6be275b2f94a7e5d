"""The public names of the packages, and what they can be called with, are those of public_api.txt.

    python -m tests.unit_tests.test_public_api      writes the list again

That command adds what is new. A name or an argument that goes needs a new version first: raise `__version__` in
core/__init__.py, and say in CHANGELOG.md what to write instead.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import core

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("public_api.txt")
MODULES = (
    *("parallel_state", "distributed", "optimizer", "checkpoint", "pipeline_parallel", "tensor_parallel"),
    *("context_parallel", "moe", "transformer", "models", "model_parallel_config", "groups.process_groups", "verify"),
    "verify.record",
    *("optimizer.algorithms.layerwise", "booster.launch", "booster.rank_logger"),
    *("booster", "booster.plugin", "booster.mixed_precision", "booster.checkpoint_io", "interface"),
    *("gradient_accumulation", "gradient_handler", "integrations"),
)
OF_APPLICATIONS = (
    *("core_plan", "core_compat.install", "core_compat.megatron", "core_compat.colossalai"),
    *("core_compat.megatron.tree", "core_compat.megatron.tree_files"),
    *(f"core_compat.megatron.faces.{name}" for name in ("hyper_comm_grid", "timers", "microbatches")),
)
# Objects that a loop holds. Their methods are public as far as a page of the docs calls them.
HELD = ("distributed.DistributedDataParallel", "optimizer.MegatronOptimizer", "optimizer.OptimizerParamScheduler")
HELD += ("booster.Booster", "interface.ModelWrapper", "interface.OptimizerWrapper", "checkpoint.CheckpointSaver")


def public_names(module: Any) -> list[str]:
    """`__all__`, or what the module defines without an underscore."""
    own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", None) == module.__name__]
    return sorted(getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")])


def call_of(thing: Any) -> str:
    """'(model, optimizer=, *, step=)': the arguments' names, a sign behind those that have a default."""
    words, keywords = [], False
    for name, parameter in inspect.signature(thing).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keywords:
            words.append("*")
        keywords = keywords or parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        words.append(f"{stars}{name}{'' if parameter.default is inspect.Parameter.empty else '='}")
    return f"({', '.join(word for word in words if word != 'self')})"


def public_things() -> Iterator[tuple[str, Any]]:
    """Yield every public name and its object; of a class in HELD also its methods, those that it inherits too."""
    for path in (*(f"core.{part}" for part in MODULES), *OF_APPLICATIONS):
        module = importlib.import_module(path)
        for name in public_names(module):
            thing = getattr(module, name)
            yield f"{path}.{name}", thing
            for member in dir(thing) if f"{path}.{name}".removeprefix("core.") in HELD else ():
                function = inspect.getattr_static(thing, member)
                if inspect.isfunction(function) and is_ours(function) and not member.startswith("_"):
                    yield f"{path}.{name}.{member}", function


def is_ours(thing: Any) -> bool:
    """True if the object is defined in one of the packages."""
    return (getattr(thing, "__module__", None) or "").startswith("core")


def current() -> list[str]:
    """Every line of the list, of the code as it is."""
    lines = []
    for name, thing in public_things():
        try:
            lines.append(name + (call_of(thing) if callable(thing) else ""))
        except ValueError:  # an enumeration or a type alias
            lines.append(name)
    return lines


def to_record() -> list[str]:
    """The lines of the list, without the methods that no page calls."""
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs" / "source").rglob("*.md")])
    called = set(re.findall(r"\.(\w+)\(", pages))
    held = tuple(f"core.{name}." for name in HELD)
    return [line for line in current() if not line.startswith(held) or line.partition("(")[0].split(".")[-1] in called]


def recorded() -> tuple[str, list[str]]:
    """(version, lines) of the list."""
    first, *lines = LIST.read_text().splitlines()
    return first.removeprefix("# version "), lines


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def broken(before: list[str], now: list[str]) -> list[str]:
    """The lines before that a call written for them could not use any more."""
    calls = {line.partition("(")[0]: line for line in now}
    wrong = []
    for line in before:
        name, _, arguments = line.rstrip(")").partition("(")
        if name not in calls:
            wrong.append(f"{name} is gone")
        elif not still_takes(arguments.split(", "), calls[name].rstrip(")").partition("(")[2].split(", ")):
            wrong.append(f"{line} has become {calls[name]}")
    return wrong


def still_takes(before: list[str], now: list[str]) -> bool:
    """True if the old arguments can be given as before: each by its place or its name; new ones have a default."""

    def parts(arguments: list[str]) -> tuple[list[str], list[str]]:
        cut = next((place for place, word in enumerate(arguments) if word.startswith("*")), len(arguments))
        return [word for word in arguments[:cut] if word], [word for word in arguments[cut:] if word != "*"]

    (placed, named), (placed_now, named_now) = parts(before), parts(now)
    names = [word.rstrip("=") for word in placed]
    keeps_places = [word.rstrip("=") for word in placed_now[: len(names)]] == names
    keeps_names = {word.rstrip("=") for word in named} <= {word.rstrip("=") for word in placed_now + named_now}
    optional = {word.rstrip("=") for word in placed_now + named_now if word.endswith("=") or word.startswith("*")}
    may_be_left_out = {word.rstrip("=") for word in placed + named if word.endswith("=")} <= optional
    new = {word.rstrip("=") for word in placed_now + named_now} - {word.rstrip("=") for word in placed + named}
    return keeps_places and keeps_names and may_be_left_out and new <= optional


def test_no_public_name_or_argument_has_gone_within_a_version() -> None:
    version, before = recorded()
    assert minor(version) == minor(core.__version__), "run python -m tests.unit_tests.test_public_api"
    wrong = broken(before, current())
    assert not wrong, "\n".join([*wrong, f"see the first lines of {Path(__file__).name}"])


def test_new_public_names_and_arguments_are_in_the_list() -> None:
    new = sorted(set(to_record()) - set(recorded()[1]))
    assert not new, "\n".join([*new, "run python -m tests.unit_tests.test_public_api, and read what it adds"])


def test_a_change_that_breaks_a_callers_line_is_distinguished_from_one_that_does_not() -> None:
    def changed(before: str, now: str) -> bool:
        return bool(broken([f"core.f({before})"], [f"core.f({now})", "core.g()"]))

    fine = [("a, b=", "a, b=, c="), ("a", "a="), ("a, *, b=", "a, *, c=, b="), ("a, *, b", "a, b"), ("", "**more")]
    worse = [
        ("a, b=", "a"), ("a, b=", "b=, a="), ("a", "x"), ("a", "a, b"), ("a=", "a"), ("a, *, b=", "a"), ("a", "*, a"),
    ]  # fmt: skip
    assert not [pair for pair in fine if changed(*pair)]
    assert not [pair for pair in worse if not changed(*pair)]
    assert broken(["core.f()"], ["core.g()"]) == ["core.f is gone"]


def test_the_change_log_and_the_citation_know_the_version() -> None:
    assert re.search(rf"^## {re.escape(core.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert f"\nversion: {core.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def write() -> int:
    """Write the list again; refuse where something has gone and the version has not changed, and every argument."""
    if sys.argv[1:]:
        print(
            f"usage: python -m tests.unit_tests.test_public_api\n\nIt takes no arguments, and writes {LIST.name} again."
        )
        return 0 if sys.argv[1] in ("-h", "--help") else 2
    version, before = recorded() if LIST.exists() else (core.__version__, [])
    wrong = broken(before, current()) if minor(version) == minor(core.__version__) else []
    if wrong:
        print("\n".join([*wrong, "raise core.__version__ first, and add the change to CHANGELOG.md"]), file=sys.stderr)
        return 1
    LIST.write_text("\n".join([f"# version {core.__version__}", *to_record()]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(write())
