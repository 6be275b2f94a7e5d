"""Leaves one synchronization out of a module's source, to see that the order check misses it."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

CALLS = ("wait_stream", "wait_event", "record_event", "record_stream", "synchronize")


class Place(NamedTuple):
    """A call in the source of a module."""

    module: str
    function: str  # its qualified name
    line: int
    call: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}:{self.call}"


def places(root: Path, package: str, calls: Sequence[str] = CALLS) -> list[Place]:
    """Every call of these names in a package's functions, torch.cuda's own ones left out."""
    found = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        if not any(f".{name}(" in source for name in calls):
            continue
        module = ".".join((package, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        for owner, function in _functions(ast.parse(source)):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in calls:
                    if ast.unparse(node.func).startswith("torch.cuda"):
                        continue
                    found.append(Place(module, f"{owner}{function.name}", node.lineno, node.func.attr))
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield "", node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.", member


class _Without(ast.NodeTransformer):
    def __init__(self, place: Place) -> None:
        self.place = place

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else None
        if (node.lineno, name) != (self.place.line, self.place.call):
            return node
        # An event that was never recorded keeps nobody waiting.
        return ast.parse("torch.Event(torch.accelerator.current_accelerator())" if self.place.call == "record_event"
                         else "None", mode="eval").body  # fmt: skip


@contextmanager
def left_out(place: Place) -> Iterator[None]:
    """Run with this call left out."""
    module = importlib.import_module(place.module)
    *owners, name = place.function.split(".")
    holder: Any = getattr(module, owners[0]) if owners else module
    function = inspect.unwrap(inspect.getattr_static(holder, name))
    assert isinstance(function, FunctionType), place
    tree = ast.parse(Path(inspect.getfile(module)).read_text())
    definition = next(node for owner, node in _functions(tree) if f"{owner}{node.name}" == place.function)
    definition.decorator_list = []
    mutant = ast.fix_missing_locations(_Without(place).visit(definition))
    future = ast.parse("from __future__ import annotations").body
    made: dict[str, Any] = {}
    exec(compile(ast.Module([*future, mutant], []), str(inspect.getfile(module)), "exec"), vars(module), made)
    right = function.__code__
    function.__code__ = made[name].__code__
    try:
        yield
    finally:
        function.__code__ = right
