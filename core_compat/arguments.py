"""Foreign signatures, written as a row of words, for functions that take fewer arguments or other names here.

    @arguments("self size bias=True * !fused=False -verbose=False old_name>name=None", {"fused": "torch fuses it"})

A word is an argument and its default. '*': the following arguments are keyword-only. '!': rejected unless it has its
default (for several, '0|None', any of them). '-': ignored. 'old>new': passed on under the new name.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any


@dataclass(frozen=True)
class ForeignArguments:
    """Treatment of a wrapper's arguments: ``refused`` ones with (accepted values, advice), and ``dropped`` ones."""

    refused: Mapping[str, tuple[tuple[Any, ...], str]]
    dropped: frozenset[str]


PLAIN = (bool, int, float, str, tuple, list, dict)


def is_one_of(value: Any, defaults: tuple[Any, ...]) -> bool:
    """Return ``True`` if a value equals one of the defaults. Tensors and modules are only compared by identity."""
    return any(value is default or (isinstance(value, PLAIN) and value == default) for default in defaults)


def defaults_of(text: str) -> tuple[Any, ...]:
    """Parse the values of a text such as '0|None', with the default first."""
    return tuple(ast.literal_eval(part) for part in text.split("|"))


def arguments(row: str, advice: Mapping[str, str] | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function to take the arguments of a row, and to be called by keyword with the used ones.

    ``advice`` for a rejected argument is in the ValueError, which names the function.
    """
    parameters, dropped, names = [], set(), {}
    refused: dict[str, tuple[tuple[Any, ...], str]] = {}
    kind: Any = Parameter.POSITIONAL_OR_KEYWORD
    for word in row.split():
        if word == "*":
            kind = Parameter.KEYWORD_ONLY
            continue
        given, _, text = word.partition("=")
        name, _, ours = given.lstrip("!-").partition(">")
        values = defaults_of(text) if text else (Parameter.empty,)
        parameters.append(Parameter(name, kind, default=values[0]))
        names[name] = ours or name
        refused |= {name: (values, (advice or {})[name])} if given.startswith("!") else {}
        dropped |= {name} if given.startswith("-") else set()
    signature = inspect.Signature(parameters)

    def decorate(function: Callable[..., Any]) -> Any:
        where = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def face(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, (values, sentence) in refused.items():
                value = bound.arguments.pop(name)
                if not is_one_of(value, values):
                    shown = value if isinstance(value, PLAIN) else "..."
                    raise ValueError(f"{where}({name}={shown}) is not supported; leave it at {values[0]!r}: {sentence}")
            return function(**{names[name]: value for name, value in bound.arguments.items() if name not in dropped})

        face.__signature__ = signature  # type: ignore[attr-defined]
        face.foreign_arguments = ForeignArguments(refused, frozenset(dropped))  # type: ignore[attr-defined]
        return face

    return decorate
