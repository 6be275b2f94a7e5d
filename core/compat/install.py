"""A foreign package's module paths and names, made importable from a table: below a package of ours, or under its own.

SURFACE = Surface("theirs", "core.compat.theirs", {"optim.adam": {"torch.optim": "Adam FusedAdam=AdamW"}}, {})
register(SURFACE)                    from core.compat.theirs.optim.adam import FusedAdam
install(SURFACE)                     from theirs.optim.adam import FusedAdam
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True, eq=False)
class Surface:
    """What is served of a foreign package.

    foreign: its import name. here: our package that stands for it.
    modules: a module's path below the package ('' for the package itself) -> {module that has the names: the names}.
        A module that begins with '.' lies below `here`. Names are separated by spaces; `theirs=ours` where they differ;
        '*' for all public names. The packages on the way to a module need no row.
    absent: a dotted name, or the beginning of one -> a sentence that says what to do instead.
    aliases: a further path of a module -> its path.
    """

    foreign: str
    here: str
    modules: Mapping[str, Mapping[str, str]]
    absent: Mapping[str, str]
    aliases: Mapping[str, str]

    @functools.cached_property
    def paths(self) -> frozenset[str]:
        """All module paths, with the packages on the way and the aliases."""
        rows = [path.split(".") for path in (*self.modules, *self.aliases) if path]
        for alias, path in self.aliases.items():
            rows += [[*alias.split("."), *row[path.count(".") + 1 :]] for row in rows if _is_below(".".join(row), path)]
        return frozenset(".".join(parts[:length]) for parts in rows for length in range(1, len(parts) + 1))

    def names(self, path: str) -> dict[str, tuple[str, str]]:
        """The listed names of a module -> (module that has it, its name there)."""
        return dict(self._rows(path))

    def _rows(self, path: str) -> Iterator[tuple[str, tuple[str, str]]]:
        for source, words in self.modules.get(path, {}).items():
            for word in words.split():
                theirs, _, ours = word.partition("=")
                if theirs != "*":
                    yield theirs, (self._source(source), ours or theirs)

    def _source(self, source: str) -> str:
        return self.here + source if source.startswith(".") else source

    def all_names(self, path: str) -> list[str]:
        """Every public name of a module, those behind a '*' too; without its submodules. Imports what has them."""
        found = set(self.names(path))
        for module in self._open_modules(path):
            found |= {name for name in vars(module) if _is_public(module, name)}
        return sorted(found)

    def _open_modules(self, path: str) -> Iterator[ModuleType]:
        for source, words in self.modules.get(path, {}).items():
            if "*" in words.split():
                yield importlib.import_module(self._source(source))

    def resolve(self, path: str, name: str) -> Any:
        """The object behind a name of a module, or its submodule. AttributeError, with what to do, for any other."""
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

    def missing(self, dotted: str) -> str:
        """A sentence about a name that is not here."""
        parts = dotted.split(".")
        known = next((k for n in range(len(parts), 0, -1) if (k := ".".join(parts[:n])) in self.absent), None)
        text = f"{self.foreign}.{dotted} is not in {self.here}"
        if known is not None:
            return f"{text}: {self.absent[known]}"
        name = parts[-1]
        elsewhere = sorted(path for path in self.modules if name in self.names(path))
        if elsewhere:
            return f"{text}; the name is at {', '.join(f'{self.here}.{path}'.rstrip('.') for path in elsewhere)}"
        path = next(p for n in range(len(parts) - 1, -1, -1) if not (p := ".".join(parts[:n])) or p in self.paths)
        near = difflib.get_close_matches(name, self.all_names(path), 3)
        like = f"; near to it are {', '.join(near)}" if near else ""
        return f"{text}{like}. Write what the program needs of it, or take it out; the module's page lists what is here"


def _is_below(inner: str, path: str) -> bool:
    """True for a module path and for those of the modules in it."""
    return inner == path or inner.startswith(f"{path}.")


def _is_public(module: ModuleType, name: str) -> bool:
    """True for a name in `__all__`, or where there is none for what the module defines; never for its imports."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return name in listed
    return not name.startswith("_") and getattr(vars(module).get(name), "__module__", None) == module.__name__


class ForeignModule(ModuleType):
    """One module of a surface; looks its names up when they are first used."""

    def __init__(self, surface: Surface, path: str) -> None:
        super().__init__(f"{surface.here}.{path}", f"{surface.foreign}.{path}, by the names of {surface.here}.")
        vars(self).update(__surface__=surface, __inner__=path, __path__=[])

    def __getattr__(self, name: str) -> Any:
        state = vars(self)
        found = state["__surface__"].resolve(state["__inner__"], name)
        state[name] = found
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        state = vars(self)
        if isinstance(value, ModuleType):  # a submodule that was imported; a name that is listed comes before it
            if name not in state["__surface__"].names(state["__inner__"]):
                state[name] = value
        elif not name.startswith("__"):
            raise AttributeError(
                f"{self.__name__}.{name} = ... would change nothing: the engine does not read it there. Pass the value "
                "to the function that uses it"
            )
        elif name not in state or state[name] is None:  # under a second import name the first spec stays
            state[name] = value

    def __dir__(self) -> list[str]:
        return vars(self)["__surface__"].all_names(vars(self)["__inner__"])

    @property
    def __all__(self) -> list[str]:
        return dir(self)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of a surface below its package here and, once installed, below the foreign name."""

    def __init__(self, surface: Surface) -> None:
        self.surface = surface
        self.roots = [surface.here]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        root = next((root for root in self.roots if fullname.startswith(f"{root}.")), None)
        if root is None:
            return None
        inner = fullname[len(root) + 1 :]
        if inner in self.surface.paths:
            return ModuleSpec(fullname, self, is_package=True)
        ours = PathFinder.find_spec(fullname, path) if root == self.surface.here else None
        if ours is None:
            # Without its name: importlib would drop an error that has one, and say less.
            raise ModuleNotFoundError(self.surface.missing(inner))
        return ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        here, foreign = self.surface.here, self.surface.foreign
        below_foreign = not spec.name.startswith(f"{here}.")
        inner = spec.name[len(foreign if below_foreign else here) + 1 :]
        for alias, path in self.surface.aliases.items():
            if _is_below(inner, alias):
                return importlib.import_module(f"{here}.{path}{inner[len(alias) :]}")
        return importlib.import_module(f"{here}.{inner}") if below_foreign else ForeignModule(self.surface, inner)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are looked up when they are used."""


def _finder(surface: Surface) -> _Finder | None:
    return next((f for f in sys.meta_path if isinstance(f, _Finder) and f.surface.here == surface.here), None)


def register(surface: Surface) -> None:
    """Make the surface's modules importable below its package here. May be called again."""
    if _finder(surface) is None:
        sys.meta_path.insert(0, _Finder(surface))


def install(surface: Surface, *, replace_installed: bool = False) -> None:
    """Make the foreign name itself resolve to the surface, in this process, for code that cannot be edited.

    replace_installed: also where the real package is installed. Raises RuntimeError where it is and this is False, or
    where it has been imported already. May be called again.
    """
    register(surface)
    finder = _finder(surface)
    assert finder is not None, "it was registered"
    if surface.foreign in finder.roots:
        return
    if surface.foreign in sys.modules:
        raise RuntimeError(
            f"{surface.foreign} has been imported already in this process; install {surface.here} before its first "
            "import"
        )
    if not replace_installed and _is_installed(surface.foreign):
        raise RuntimeError(
            f"{surface.foreign} is installed in this environment, and {surface.here} would hide it; import "
            f"{surface.here} under its own name, or call install(replace_installed=True)"
        )
    parent, _, name = surface.foreign.rpartition(".")
    if parent:
        try:
            above = importlib.import_module(parent)
        except ModuleNotFoundError:
            above = sys.modules[parent] = ModuleType(parent, f"Holds {surface.foreign} alone.")
            vars(above)["__path__"] = []
        setattr(above, name, importlib.import_module(surface.here))
    sys.modules[surface.foreign] = importlib.import_module(surface.here)
    finder.roots.append(surface.foreign)


def uninstall(surface: Surface) -> None:
    """Undo `install`; modules that have taken names from it keep them."""
    finder = _finder(surface)
    if finder is None or surface.foreign not in finder.roots:
        return
    finder.roots.remove(surface.foreign)
    for name in [name for name in sys.modules if name == surface.foreign or name.startswith(f"{surface.foreign}.")]:
        del sys.modules[name]
    parent, _, name = surface.foreign.rpartition(".")
    if parent and vars(sys.modules[parent]).get("__path__") == []:
        del sys.modules[parent]
    elif parent:
        delattr(sys.modules[parent], name)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def run(surface: Surface, arguments: Sequence[str]) -> None:
    """Install, then run a program as python would: `script.py its arguments`, or `-m module its arguments`."""
    if not arguments or (arguments[0] == "-m" and len(arguments) < 2) or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m {surface.here} script.py [arguments]\n       python -m {surface.here} -m module ...")
        raise SystemExit(0 if arguments and arguments[0] != "-m" else 2)
    install(surface)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")
