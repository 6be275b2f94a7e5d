"""`Args:` sections name arguments that exist, and those of names in public_api.txt describe every argument."""

from __future__ import annotations

import ast
import fnmatch
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.unit_tests.test_public_api import is_ours, public_things

ROOT = Path(__file__).parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function, str]]:
    """Yield the name, the node and the docstring of each documented public function, and of classes' constructors."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, f"{prefix}{node.name}.")
            created = [each for each in node.body if isinstance(each, Function) and each.name == "__init__"]
            if created and (text := ast.get_docstring(node)):
                yield f"{prefix}{node.name}", created[0], text
        elif isinstance(node, Function) and not node.name.startswith("_") and (text := ast.get_docstring(node)):
            yield f"{prefix}{node.name}", node, text


def arguments_of(node: Function) -> set[str]:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {arg.arg for arg in named if arg.arg not in ("self", "cls", "ctx") and not arg.arg.startswith("_")}


def described_in(text: str) -> set[str]:
    """Return the names in a docstring's `Args:` section, of which `*_size` stands for several."""
    found = re.search(r"^Args:\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
    heads = re.findall(r"^    (?! )([\w*, ]+?)(?: \([^)]*\))?:", found[1], re.MULTILINE) if found else []
    return {name.strip() for head in heads for name in head.split(",")}


def unknown_in(text: str) -> Iterator[str]:
    for name, node, docstring in public_functions(ast.parse(text).body):
        known = arguments_of(node) | {arg.arg for arg in (node.args.vararg, node.args.kwarg) if arg}
        for each in sorted(described_in(docstring)) if node.args.kwarg is None else ():
            if not fnmatch.filter(known, each) and not fnmatch.filter(known, each.strip("*")):
                yield f"{name} has no argument {each!r}"


def undescribed(thing: Any) -> list[str]:
    """Return the arguments of a function or class of several that neither its docstring nor a base class describes."""
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:  # an exception or an alias of a type
        return []
    named = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    arguments = [name for name in named if name not in ("self", "cls") and not name.startswith("_")]
    described = set(getattr(thing, "without_effect", ()))  # options of a plugin that warn
    for each in inspect.getmro(thing) if inspect.isclass(thing) else [thing]:
        for text in (each.__doc__, each.__init__.__doc__ if inspect.isclass(each) else None):
            described |= described_in(inspect.cleandoc(text or "").replace("Attributes:", "Args:"))
    missing = [each for each in arguments if not any(fnmatch.fnmatch(each, known) for known in described)]
    return missing if len(arguments) > 1 else []


def test_args_sections_name_arguments_that_exist() -> None:
    programs = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "core").rglob("*.py")}
    unknown = [f"{path}: {each}" for path, text in programs.items() for each in unknown_in(text)]
    assert not unknown, "\n".join(unknown)


def test_args_sections_of_public_names_describe_all_arguments() -> None:
    found = {name: undescribed(thing) for name, thing in public_things() if callable(thing) and is_ours(thing)}
    missing = [f"{name} does not describe {', '.join(names)}" for name, names in found.items() if names]
    assert not missing, "\n".join(missing)


def test_a_wrong_section_is_found() -> None:
    text = 'def f(a, *, b_size=1, b_time=2):\n    """Do.\n\n    Args:\n        a: One:\n            d: None.\n    """\n'
    assert not list(unknown_in(text))
    assert list(unknown_in(text.replace("a: One", "c: One"))) == ["f has no argument 'c'"]
    for changed, missing in ((text, ["b_size", "b_time"]), (text.replace("a: One:", "a: One.\n        b_*: Two:"), [])):
        space: dict[str, Any] = {}
        exec(changed, space)
        assert undescribed(space["f"]) == missing
