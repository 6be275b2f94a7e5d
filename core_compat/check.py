"""``python -m core compat-check train.py``: check a program for Megatron Core or ColossalAI without running it.

Each name, call and argument is served, obeyed otherwise, warned of, absent, or Megatron's own. The verdict is read from
the modules that serve them: their names, their signatures, and their tables of rejected arguments.
"""

from __future__ import annotations

import ast
import difflib
import enum
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from core_compat import colossalai, megatron
from core_compat.arguments import ForeignArguments, is_one_of
from core_compat.install import Surface

USAGE = """usage: python -m core compat-check FILE.py [DIRECTORY ...]

Lists every name, call and argument of megatron.core and colossalai that is served, obeyed otherwise, warned of,
absent, or Megatron's own, with its line and what to write instead. Nothing of the program is run. The status is 1
if something is absent, and 2 if a file cannot be read.
To run a program: python -m core_compat.megatron train.py, or python -m core_compat.colossalai train.py."""
SURFACES: tuple[Surface, ...] = (megatron.SURFACE, colossalai.SURFACE)
SERVED, OTHERWISE, WARNED, ABSENT = "served", "obeyed otherwise", "warned of", "absent"
OWN = "Megatron's own"  # imported from an installed megatron.core
GUARDED = "absent, and guarded"  # a try around its import lets the program continue
CATCHES_IMPORTS = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}
MOST_LISTED = 12  # arguments in one sentence
KEEP = "keep megatron-core installed"
UNKNOWN: Any = object()  # a value that is known only in a run


@dataclass(frozen=True, order=True)
class Finding:
    """Use of a foreign name. ``why`` is the advice or the effect."""

    line: int
    verdict: str
    what: str
    why: str = ""


@dataclass(frozen=True)
class Found:
    """Result of the search for a foreign name: an object of this package, or an error text if it is missing.

    Attributes:
        value: The object; UNKNOWN if it is only known in a run.
        missing: Error text if there is no such object.
        is_own: True if a program keeps importing the name from the foreign package.
    """

    value: Any = UNKNOWN
    missing: str | None = None
    is_own: bool = False


def check_program(text: str | bytes) -> list[Finding]:
    """Return the findings in a program's text, sorted by line. Raises SyntaxError if the text is not Python."""
    program = ast.parse(text)
    reader = _ProgramReader(_kept_in(program))
    reader.visit(program)
    return sorted(set(reader.findings))


def _kept_in(program: ast.AST) -> Surface | None:
    """Return the surface whose foreign names keep their own meaning in a program, because it imports this package
    too.
    """
    nodes = list(ast.walk(program))
    imported = {f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    calls = (ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call))
    if any(call.rpartition(".")[2] == "install" for call in calls):
        return None  # after this call foreign names are ours
    return next((s for s in SURFACES if s.own and any(_is_below(each, s.here) for each in imported)), None)


def _is_below(dotted: str, root: str) -> bool:
    return f"{dotted}.".startswith(f"{root}.")


@functools.cache
def find(dotted: str) -> Found | None:
    """Find the object for a foreign path, or return ``None`` if it does not belong to a served package."""
    for surface in SURFACES:
        for root in (surface.foreign, surface.here):
            inner = dotted[len(root) + 1 :]
            if _is_below(dotted, root):
                found = _inside(surface, inner)
                is_own = root == surface.foreign and any(_is_below(inner, each) for each in surface.own)
                if found.missing is None or not is_own:
                    return found
                return Found(missing=f"{KEEP}: {surface.advice(inner)}", is_own=True)
        parent = surface.foreign.rpartition(".")[0]
        if parent and dotted.startswith(f"{parent}."):
            return Found(missing=surface.missing_outside(dotted[len(parent) + 1 :]))
    return None


def _inside(surface: Surface, inner: str) -> Found:
    found: Any = importlib.import_module(surface.here)
    for part in inner.split(".") if inner else ():
        try:
            found = getattr(found, part)
        except AttributeError:
            if isinstance(found, ModuleType):
                return Found(missing=surface.missing(inner))
            if isinstance(found, enum.EnumMeta):
                return Found(missing=f"{found.__name__} has {', '.join(found.__members__)}")
            return Found()
    return Found(found)


class _ProgramReader(ast.NodeVisitor):
    """Visitor of a program in line order. ``kept`` is the surface whose foreign names keep their own meaning in it."""

    def __init__(self, kept: Surface | None) -> None:
        self.kept = kept
        self.findings: list[Finding] = []
        self.paths: dict[str, str] = {}  # a name in the program -> the path of its import
        self.kinds: dict[str, Any] = {}  # a variable or an attribute of one -> its class
        self.guards = 0

    def add(self, node: ast.AST, verdict: str, what: str, why: str = "") -> None:
        verdict = GUARDED if verdict == ABSENT and self.guards else verdict
        self.findings.append(Finding(getattr(node, "lineno", 0), verdict, what, why))

    def path_of(self, node: ast.AST) -> str | None:
        """Return the import path of ``name.attribute.attribute``, or ``None`` for other expressions."""
        if isinstance(node, ast.Name):
            return self.paths.get(node.id)
        if isinstance(node, ast.Attribute):
            before = self.path_of(node.value)
            return None if before is None else f"{before}.{node.attr}"
        return None

    def find(self, path: str | None) -> Found | None:
        """Find the object for a path. Also return ``None`` for a name that keeps the foreign package's meaning."""
        return None if path is None or self.is_kept(path) else find(path)

    def is_kept(self, path: str) -> bool:
        return self.kept is not None and _is_below(path, self.kept.foreign)

    def visit_Try(self, node: ast.Try) -> None:
        types = [handler.type for handler in node.handlers if handler.type is not None]
        catches = {word.id for kind in types for word in ast.walk(kind) if isinstance(word, ast.Name)}
        guards = any(h.type is None for h in node.handlers) or bool(catches & CATCHES_IMPORTS)
        self.guards += guards
        for statement in node.body:
            self.visit(statement)
        self.guards -= guards
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.name(node, alias.name)
            first = alias.name.partition(".")[0]
            self.paths[alias.asname or first] = alias.name if alias.asname else first

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        for alias in node.names:
            path = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
            self.name(node, path)
            if alias.name != "*":
                self.paths[alias.asname or alias.name] = path

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.path_of(node)
        if path is None:
            self.generic_visit(node)
        else:
            self.name(node, path)

    def name(self, node: ast.AST, path: str) -> None:
        """Record how a foreign path is served. Modules are not recorded."""
        found = find(path)
        if found is None or isinstance(found.value, ModuleType):
            return
        if self.is_kept(path):
            ours = "" if found.missing else "; core_compat.megatron has another of this name"
            self.add(node, OWN, path, KEEP + ours)
            return
        if found.missing is not None:
            self.add(node, OWN if found.is_own else ABSENT, path, found.missing)
            return
        value, last = found.value, path.rpartition(".")[2]
        name = getattr(value, "__name__", last)
        if name != last and inspect.isclass(value):
            self.add(node, OTHERWISE, path, f"{value.__module__}.{name} stands for it")
        else:
            self.add(node, SERVED, path)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self.assign(node.target, node.value)

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        path = self.path_of(target.value) if isinstance(target, ast.Attribute) else None
        owner = self.find(path)
        if isinstance(target, ast.Attribute) and owner is not None and isinstance(owner.value, ModuleType):
            why = "the engine does not read it there; pass the value to the function that uses it"
            self.add(target, ABSENT, f"{path}.{target.attr} = ...", why)
            return
        if isinstance(target, ast.Attribute):
            kind = self.kinds.get(ast.unparse(target.value))
            if kind is not None and hasattr(kind, "rules"):
                self.argument(target, kind, target.attr, value, _fields(kind))
        text = ast.unparse(target)
        self.kinds.pop(text, None)
        made = self.find(self.path_of(value.func)) if isinstance(value, ast.Call) else None
        if made is not None and inspect.isclass(made.value):
            self.kinds[text] = made.value

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        path = self.path_of(node.func)
        found = self.find(path)
        if found is not None and callable(found.value):
            self.call(node, found.value, str(path).rpartition(".")[2], inspect.isclass(found.value))
        elif isinstance(node.func, ast.Attribute):
            kind: Any = self.kinds.get(ast.unparse(node.func.value))
            method = None if kind is None else inspect.getattr_static(kind, node.func.attr, None)
            if inspect.isfunction(method):
                self.call(node, method, f"{kind.__name__}.{node.func.attr}", True)

    def call(self, node: ast.Call, called: Any, name: str, is_bound: bool) -> None:
        """Record how the arguments of a call are served. ``is_bound`` is ``True`` if Python passes the first
        argument.
        """
        refusal = next((each.sentence for each in _makers(called) if hasattr(each, "sentence")), None)
        if refusal is not None:
            self.add(node, ABSENT, f"{name}(...)", refusal)
            return
        try:
            signature = inspect.signature(called)
        except (TypeError, ValueError):
            return
        parameters = list(signature.parameters.values())
        parameters = parameters[1:] if is_bound and not inspect.isclass(called) else parameters
        starred = any(isinstance(value, ast.Starred) for value in node.args)
        places = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        given: dict[str, ast.expr] = {} if starred else dict(zip(places, node.args, strict=False))
        if not starred and len(node.args) > len(places) and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
            self.add(node, ABSENT, f"{name}(...)", f"it takes {len(places)} arguments by position")
        takes_all = any(each.kind == each.VAR_KEYWORD for each in parameters)
        known = {each.name: each for each in parameters}
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            if keyword.arg in known or takes_all:
                given[keyword.arg] = keyword.value
            else:
                self.add(keyword.value, ABSENT, f"{name}({keyword.arg}=...)", _near(keyword.arg, known))
        for argument, value in given.items():
            self.argument(value, called, argument, value, known, name)
        lacking = [
            each.name
            for each in parameters
            if each.default is each.empty
            and each.name not in given
            and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        if lacking and not starred and all(keyword.arg is not None for keyword in node.keywords):
            self.add(node, ABSENT, f"{name}(...)", f"it needs {', '.join(lacking)} too")

    def argument(
        self, node: ast.AST, called: Any, argument: str, value: ast.expr, known: Mapping[str, Any], name: str = ""
    ) -> None:
        """Record how an argument, or an assigned field, is served."""
        what = f"{name or called.__name__}({argument}={_short(value)})"
        if argument not in known:
            self.add(node, ABSENT, what, _near(argument, known)) if not name else None
            return
        for defaults, refused, sentence in _rules_of(called, argument):
            got = self.value_of(value)
            if got is not UNKNOWN and is_one_of(got, defaults):
                continue
            only = f"leave it at {defaults[0]!r}: {sentence}" if refused else f"it changes nothing here: {sentence}"
            if got is UNKNOWN:
                self.add(node, OTHERWISE if refused else WARNED, what, f"unless it is {defaults[0]!r}, {only}")
            else:
                self.add(node, ABSENT if refused else WARNED, what, only)
            return
        if any(argument in foreign.dropped for foreign in _foreign(called)):
            self.add(node, OTHERWISE, what, "it has no part here, and is dropped")
            return
        self.add(node, SERVED, what.partition("=")[0] + ")")

    def value_of(self, node: ast.expr) -> Any:
        """Evaluate an expression that is a literal, an object of this package, or an object of torch."""
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            pass
        path = self.path_of(node) or ""
        if path.startswith("torch."):
            return getattr(torch, path.removeprefix("torch."), UNKNOWN)
        found = self.find(path)
        return UNKNOWN if found is None else found.value


def _makers(called: Any) -> list[Any]:
    return [called.__init__, called.__new__] if inspect.isclass(called) else [called]


def _foreign(called: Any) -> list[ForeignArguments]:
    found = (getattr(each, "foreign_arguments", None) for each in _makers(called))
    return [each for each in found if each is not None]


def _rules_of(called: Any, argument: str) -> Iterator[tuple[tuple[Any, ...], bool, str]]:
    """Yield (values without effect, True if other values are rejected or False if they cause a warning, advice)."""
    for foreign in _foreign(called):
        if argument in foreign.refused:
            defaults, sentence = foreign.refused[argument]
            yield defaults, True, sentence
    rule = getattr(called, "rules", {}).get(argument)
    if rule is not None:
        yield rule.defaults, rule.refused, rule.sentence
    idle = getattr(called, "without_effect", {}).get(argument)
    if idle is not None:
        yield (idle[0],), False, idle[1]


def _fields(kind: Any) -> Mapping[str, Any]:
    return inspect.signature(kind).parameters


def _near(argument: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(argument, known, 3)
    if near:
        return f"there is no such argument; near to it are {', '.join(near)}"
    return "there is no such argument" + (f"; there are {', '.join(known)}" if 0 < len(known) <= MOST_LISTED else "")


def _short(value: ast.expr) -> str:
    text = " ".join(ast.unparse(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def report(file: Path, findings: Sequence[Finding]) -> str:
    """Format the findings in one program: by line the calls that are not served, then the served ones."""
    if not findings:
        names = " and ".join(surface.foreign for surface in SURFACES)
        return f"{file}: nothing of {names} is used"
    lines = [f"{file}:"]
    for finding in findings:
        if finding.verdict != SERVED:
            said = f"{finding.verdict}: {finding.what}" + (f": {finding.why}" if finding.why else "")
            lines.append(
                textwrap.fill(f"line {finding.line}, {said}", 100, initial_indent="  ", subsequent_indent="    ")
            )
    served: dict[str, list[int]] = {}
    for finding in findings:
        if finding.verdict == SERVED:
            served.setdefault(finding.what, []).append(finding.line)
    if served:
        words = ", ".join(f"{what} ({', '.join(map(str, dict.fromkeys(at)))})" for what, at in served.items())
        lines.append(
            textwrap.fill(f"served, with their lines: {words}", 100, initial_indent="  ", subsequent_indent="    ")
        )
    verdicts = (ABSENT, GUARDED, WARNED, OTHERWISE, OWN, SERVED)
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in verdicts}
    lines.append("  " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    return "\n".join(lines)


def programs_in(places: Sequence[Path]) -> list[Path]:
    """Return files, and the Python files below directories.

    Raises FileNotFoundError if a path does not exist, or has no Python file.
    """
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"there is no program {place} (from {Path.cwd()})")
        programs = sorted(each for each in place.rglob("*.py") if not each.is_dir()) if place.is_dir() else [place]
        if not programs:
            raise FileNotFoundError(f"there is no Python file in {place.resolve()} or below it")
        found += programs
    return found


def read_program(program: Path) -> list[Finding] | str:
    """Return the findings in a file, or an error text with file and line if it cannot be read."""
    try:
        return check_program(program.read_bytes())
    except SyntaxError as error:
        return f"{program}{f', line {error.lineno}' if error.lineno else ''}: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{program}: {getattr(error, 'strerror', None) or error}"
    except (RecursionError, MemoryError):  # MemoryError: nested too deeply
        return f"{program}: the program is nested too deeply"


def main(arguments: Sequence[str]) -> int:
    """Check programs and print the findings. Return 2 if a file cannot be read, else 1 if something is absent,
    else 0.
    """
    wants_help = bool({"-h", "--help"} & set(arguments))
    if wants_help or not arguments:
        print(USAGE)
        return 0 if wants_help else 2
    try:
        programs = programs_in([Path(each) for each in arguments])
    except OSError as error:
        print(f"error: {error}")
        return 2
    found: dict[Path, list[Finding]] = {}
    problems: list[str] = []
    for program in programs:
        findings = read_program(program)
        if isinstance(findings, str):
            problems.append(findings)
        else:
            found[program] = findings
    for program, findings in found.items():
        if findings or len(programs) == 1:
            print(report(program, findings))
    if len(programs) > 1 and found and not any(found.values()):
        print(f"{len(found)} programs: nothing of {' and '.join(s.foreign for s in SURFACES)} is used")
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        return 2
    return int(any(finding.verdict == ABSENT for findings in found.values() for finding in findings))
