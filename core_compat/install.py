"""Import system for a foreign package's modules and names: a table makes them importable from here or directly.

    SURFACE = Surface("theirs", "core_compat.theirs", {"optim.adam": {"torch.optim": "Adam FusedAdam=AdamW"}}, {}, {})
    register(SURFACE)                    from core_compat.theirs.optim.adam import FusedAdam
    install(SURFACE)                     from theirs.optim.adam import FusedAdam

Either import returns torch.optim.AdamW.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

Rows = dict[str, dict[str, str]]
REPLACE = "--replace-installed"


@dataclass(frozen=True, eq=False)
class Surface:
    """Part of a foreign package that is served.

    Attributes:
        foreign: Its import name.
        here: Package that replaces it.
        modules: A module's path below the package ('' for the package itself) -> {module with the objects: names}. A
            module that begins with '.' is below ``here``. Names are separated by spaces; ``theirs=here`` if they
            differ; '*' for all public names. Parent packages of a module need no row.
        absent: A dotted name or a prefix of one -> advice.
        aliases: Another path of a module -> its path.
        outside: As ``absent``, for names next to a foreign package that is part of another one.
        own: Absent packages that a program keeps importing from the foreign package, which stays installed.
    """

    foreign: str
    here: str
    modules: Mapping[str, Mapping[str, str]]
    absent: Mapping[str, str]
    aliases: Mapping[str, str]
    outside: Mapping[str, str] = field(default_factory=dict)
    own: frozenset[str] = frozenset()

    @functools.cached_property
    def paths(self) -> dict[str, str]:
        """Every module path, including parent packages and aliases -> the path of its module."""
        own = [".".join(parts[:n]) for path in self.modules for parts in [path.split(".")] for n in range(len(parts))]
        found = {path: path for path in (*own, *self.modules) if path}
        for alias, path in self.aliases.items():
            found |= {alias + inner[len(path) :]: inner for inner in found if f"{inner}.".startswith(f"{path}.")}
        return found

    def names(self, path: str) -> dict[str, tuple[str, str]]:
        """Map the listed names of a module to (module with the object, name in it)."""
        words = [(source, *word.partition("=")[::2]) for source, row in self._rows(path) for word in row.split()]
        return {theirs: (source, ours or theirs) for source, theirs, ours in words if theirs != "*"}

    def _rows(self, path: str) -> Iterator[tuple[str, str]]:
        for source, names in self.modules.get(path, {}).items():
            yield (self.here + source if source.startswith(".") else source), names

    def all_names(self, path: str) -> list[str]:
        """List every public name of a module, including names behind a '*' but no submodules. Imports their modules."""
        behind = (name for module in self._open_modules(path) for name in vars(module) if _is_public(module, name))
        return sorted({*self.names(path), *behind})

    def _open_modules(self, path: str) -> Iterator[ModuleType]:
        yield from (importlib.import_module(source) for source, names in self._rows(path) if "*" in names.split())

    def resolve(self, path: str, name: str) -> Any:
        """Return the object or submodule for a name of a module.

        Args:
            path (str): Module path below the package.
            name (str): Name in the module.

        Raises:
            AttributeError: If there is no such name. The text has the advice.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        listed = self.names(path).get(name)
        if listed is not None:
            return getattr(importlib.import_module(listed[0]), listed[1])
        for module in self._open_modules(path):
            if _is_public(module, name):
                return getattr(module, name)
        inner = f"{path}.{name}".lstrip(".")
        if inner in self.paths:
            return importlib.import_module(f"{self.here}.{inner}")
        raise AttributeError(self.missing(inner))

    def advice(self, dotted: str) -> str | None:
        """Return the advice for an absent name, or ``None`` if the table does not have it."""
        return next((self.absent[end] for end in _ends(dotted) if end in self.absent), None)

    def missing(self, dotted: str) -> str:
        """Return an error text for a missing name."""
        parts = dotted.split(".")
        text = f"{self.foreign}.{dotted} is not in {self.here}"
        known = self.advice(dotted)
        if known is not None:
            return f"{text}: {known}"
        elsewhere = sorted(f"{self.here}.{path}".rstrip(".") for path in self.modules if parts[-1] in self.names(path))
        if elsewhere:
            return f"{text}; the name is at {', '.join(elsewhere)}"
        path = next(end for end in _ends(dotted)[1:] if not end or end in self.paths)
        near = difflib.get_close_matches(parts[-1], self.all_names(self.paths.get(path, path)), 3)
        like = f"; near to it are {', '.join(near)}" if near else ""
        return f"{text}{like}. Write what the program needs of it, or take it out; the module's page lists what is here"

    def missing_outside(self, dotted: str) -> str:
        """Return an error text for a name next to this package."""
        parent = self.foreign.rpartition(".")[0]
        known = next((f": {self.outside[end]}" for end in _ends(dotted) if end in self.outside), "")
        return f"{parent}.{dotted} is not here; {self.here} stands for {self.foreign} alone{known}"


def _ends(dotted: str) -> list[str]:
    """Return a dotted name and its prefixes, longest first, ending with ''."""
    parts = dotted.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def read_rows(text: str, faces: str = "") -> Rows:
    """Parse ``Surface.modules`` from lines: a path ('-' for the package itself), then modules, each with its names.

    A word that begins with '.' (a module below ``faces``) or with 'core.' is a module. '@path' includes the contents of
    another line. 'path,a,b' gives path.a and path.b the same contents. An indented line continues the previous line.

    Args:
        text (str): The lines.
        faces (str, optional): Package of modules that are named by a leading '.'.
    """
    found: Rows = {}
    included: list[tuple[Any, str]] = []
    for line in text.replace("\n    ", " ").splitlines():
        path, *words = line.split() or [""]
        row: dict[str, str] = {}
        source = ""
        first, *below = path.lstrip("-").split(",")
        for own in [first, *(f"{first}.{inner}" for inner in below)] if path else ():
            row = found.setdefault(own, row)
        for word in words:
            if word.startswith("@"):
                included.append((row, word[1:]))
            elif word.startswith((".", "core.", "core_compat.")):
                source = faces + word if word.startswith(".") else word
            else:
                row[source] = f"{row.get(source, '')} {word}"
    for row, other in included:
        for source, names in found[other].items():
            row[source] = row.get(source, "") + names
    return found


def _is_public(module: ModuleType, name: str) -> bool:
    """Return ``True`` for a name in ``__all__``, or without ``__all__`` for a name that the module itself defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return name in listed
    return not name.startswith("_") and getattr(vars(module).get(name), "__module__", None) == module.__name__


class ForeignModule(ModuleType):
    """Module of a surface, whose names are resolved on first use.

    Args:
        surface (Surface): The surface.
        path (str): Path of the module below the surface's package.
    """

    def __init__(self, surface: Surface, path: str) -> None:
        super().__init__(f"{surface.here}.{path}", f"{surface.foreign}.{path}, by the names of {surface.here}.")
        spec = ModuleSpec(self.__name__, None, is_package=True)
        vars(self).update(__surface__=surface, __inner__=path, __path__=[], __spec__=spec)

    def __getattr__(self, name: str) -> Any:
        state = vars(self)
        found = state[name] = state["__surface__"].resolve(state["__inner__"], name)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{self.__name__}.{name} = ... would change nothing: the engine does not read it there. Pass the value "
            "to the function that uses it"
        )

    def __dir__(self) -> list[str]:
        return vars(self)["__surface__"].all_names(vars(self)["__inner__"])

    __all__ = property(dir)


class _Missing(MetaPathFinder):
    """Import hook that raises an error with advice for modules that a surface does not have."""

    def __init__(self, surface: Surface) -> None:
        self.surface, self.roots = surface, [surface.here]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = next((root for root in self.roots if fullname.startswith(f"{root}.")), None)
        parent = self.surface.foreign.rpartition(".")[0]
        is_next_to_ours = root is None and parent != "" and fullname.startswith(f"{parent}.")
        if is_next_to_ours and self.surface.foreign in self.roots and _is_placeholder(parent):
            raise ModuleNotFoundError(self.surface.missing_outside(fullname[len(parent) + 1 :]))
        if root is None or (root == self.surface.here and PathFinder.find_spec(fullname, path)):
            return None
        # Without name=: importlib would replace an error that has it by a less helpful one.
        raise ModuleNotFoundError(self.surface.missing(fullname[len(root) + 1 :]))


def _finder(surface: Surface) -> _Missing | None:
    return next((f for f in sys.meta_path if isinstance(f, _Missing) and f.surface.here == surface.here), None)


def register(surface: Surface) -> None:
    """Make the surface's modules importable below its package. Idempotent."""
    if _finder(surface) is None:
        sys.meta_path.insert(0, _Missing(surface))
        own = {path: ForeignModule(surface, path) for path in surface.paths.values()}
        sys.modules.update({f"{surface.here}.{path}": own[inner] for path, inner in surface.paths.items()})


def install(surface: Surface, *, replace_installed: bool = False) -> None:
    """Make the foreign name resolve to the surface in this process, for code that cannot be edited. Idempotent.

    Args:
        surface (Surface): The surface.
        replace_installed (bool, optional): Also install if the real package is installed, which is then hidden.

    Raises:
        RuntimeError: If the real package is installed and ``replace_installed`` is ``False``, or it is already
            imported.
    """
    register(surface)
    finder, foreign, here = _finder(surface), surface.foreign, surface.here
    assert finder is not None, "it was registered"
    if foreign in finder.roots:
        return
    if foreign in sys.modules:
        raise RuntimeError(
            f"{foreign} has been imported already in this process; install {here} before its first import"
        )
    if not replace_installed and _is_installed(foreign):
        raise RuntimeError(
            f"{foreign} is installed in this environment, and {here} would hide it; import {here} under its own name, "
            f"or call install(replace_installed=True), or its command with {REPLACE}"
        )
    parent, _, name = foreign.rpartition(".")
    if parent:
        try:
            above = importlib.import_module(parent)
        except ModuleNotFoundError:
            above = sys.modules[parent] = ModuleType(parent, f"Holds {foreign} alone.")
            vars(above)["__path__"] = []
        setattr(above, name, importlib.import_module(here))
    sys.modules[foreign] = importlib.import_module(here)
    sys.modules.update({f"{foreign}.{path}": sys.modules[f"{here}.{path}"] for path in surface.paths})
    finder.roots.append(foreign)


def uninstall(surface: Surface) -> None:
    """Undo ``install``. Modules that have imported names keep them."""
    finder = _finder(surface)
    if finder is None or surface.foreign not in finder.roots:
        return
    finder.roots.remove(surface.foreign)
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{surface.foreign}.")]:
        del sys.modules[name]
    parent, _, name = surface.foreign.rpartition(".")
    if parent and _is_placeholder(parent):
        del sys.modules[parent]
    elif parent:
        delattr(sys.modules[parent], name)


def _is_placeholder(parent: str) -> bool:
    """Return ``True`` for a parent package that ``install`` created."""
    return parent in sys.modules and vars(sys.modules[parent]).get("__path__") == []


def _is_installed(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name) is not None
    return False


def run(surface: Surface, arguments: Sequence[str]) -> None:
    """Install the surface, then run a program like python: ``script.py its arguments``, or ``-m module its arguments``.

    ``--replace-installed`` before the program also installs if the real package is installed.

    Args:
        surface (Surface): The surface.
        arguments (Sequence[str]): The command line, without the interpreter's part.
    """
    replace_installed = list(arguments[:1]) == [REPLACE]
    arguments = arguments[replace_installed:]
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2) or arguments[0] in ("-h", "--help"):
        command = f"python -m {surface.here} [{REPLACE}]"
        print(f"usage: {command} script.py [arguments]\n       {command} -m module ...")
        raise SystemExit(0 if arguments and arguments[0] != "-m" else 2)
    try:
        install(surface, replace_installed=replace_installed)
    except RuntimeError as problem:
        raise SystemExit(f"error: {problem}") from None
    is_module = arguments[0] == "-m"
    if not (_is_installed(arguments[1]) if is_module else Path(arguments[0]).exists()):
        what = f"module {arguments[1]}" if is_module else f"program {arguments[0]}"
        raise SystemExit(f"error: there is no {what} (from {Path.cwd()})")
    if is_module:
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
