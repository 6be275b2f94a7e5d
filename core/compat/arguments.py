"""Foreign signatures, from a row of words, over functions of ours that take fewer arguments or other names.

    @arguments("self size bias=True * !fused=False -verbose=False old_name>name=None", {"fused": "torch fuses it"})

A word is an argument and its default. '*': keywords from here on. '!': refused unless it has its default (of several,
'0|None', any). '-': has no part, and is dropped. 'theirs>ours': passed on under the other name.
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
    """Treatment of a face's arguments. refused: argument -> (values that are taken, what to do instead)."""

    refused: Mapping[str, tuple[tuple[Any, ...], str]]
    dropped: frozenset[str]


PLAIN = (bool, int, float, str, tuple, list, dict)


def is_one_of(value: Any, defaults: tuple[Any, ...]) -> bool:
    """True for a value that is a default; a tensor or a module is compared by identity alone."""
    return any(value is default or (isinstance(value, PLAIN) and value == default) for default in defaults)


def defaults_of(text: str) -> tuple[Any, ...]:
    """The values of '0|None'; the first is the default."""
    return tuple(ast.literal_eval(part) for part in text.split("|"))


def arguments(row: str, advice: Mapping[str, str] | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: the function takes the arguments of a row, and is called by name with those that have a part.

    advice: what to do instead of each refused argument. The ValueError that refuses one names the function.
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
