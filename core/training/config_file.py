"""From defaults, TOML files and flags to one JobConfig: a later source wins over an earlier one."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from core.training.config import JobConfig
from core.training.errors import ConfigError
from core.training.extras import require

Config = TypeVar("Config")

# Flags that stand for another one, by the names every user of parallel training knows.
SHORT_FLAGS = {f"--{axis}": f"--parallel.{axis}" for axis in ("dp", "tp", "pp", "vpp", "cp", "ep", "etp", "schedule")}
OTHER_NAMES = {**SHORT_FLAGS, "--checkpoint.async": "--checkpoint.asynchronous"}  # Python keeps `async` for itself


def load_config(argv: Sequence[str], prog: str = "pretrain_gpt.py") -> JobConfig:
    """Read `[--config FILE.toml ...] [--section.option value ...]` over the defaults.

    Raises ConfigError for files; wrong flags end the process with tyro's message and status 2.
    """
    files, flags = split_config_files(argv)
    config = JobConfig()
    for file in files:
        config = merge(config, read_toml(file), str(file))
    tyro = require("tyro", "reading the command line")
    return tyro.cli(
        JobConfig,
        args=spell_out(flags),
        default=config,
        prog=prog,
        description="Train a GPT. Flags win over --config FILE.toml (may be repeated), files over the defaults below. "
        f"{', '.join(SHORT_FLAGS)} are short for --parallel.dp and so on.",
        config=(tyro.conf.AvoidSubcommands,),
    )


def split_config_files(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """(files given with --config, all other arguments)."""
    files: list[Path] = []
    flags: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            file = next(arguments, None)
            if file is None:
                raise ConfigError("--config needs the path of a TOML file after it")
            files.append(Path(file))
        elif argument.startswith("--config="):
            files.append(Path(argument.removeprefix("--config=")))
        else:
            flags.append(argument)
    return files, flags


def spell_out(flags: Sequence[str]) -> list[str]:
    """Flags with the short ones replaced: `--pp 2` and `--pp=2` become `--parallel.pp 2` and `--parallel.pp=2`."""
    spelled = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        spelled.append(OTHER_NAMES.get(name, name) + equals + value)
    return spelled


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        tomllib = require("tomli", "reading TOML on Python 3.10")
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path} (working directory {Path.cwd()})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def merge(config: Config, values: Mapping[str, Any], source: str, prefix: str = "") -> Config:
    """`config` with the values of a TOML table over it; nested tables go to nested dataclasses.

    An unknown name, or a value of another type than the option's, is a ConfigError that names `source` and the option.
    """
    kinds = typing.get_type_hints(type(config))
    changes: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{source}: {prefix}{name}"
        if name not in kinds:
            nearest = difflib.get_close_matches(name, kinds, n=1)
            hint = f"did you mean {prefix}{nearest[0]}?" if nearest else f"known here: {', '.join(kinds)}"
            raise ConfigError(f"{where} is not an option; {hint}")
        current = getattr(config, name)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where} is a section, and was given the value {value!r}; write it as a table")
            changes[name] = merge(current, value, source, f"{prefix}{name}.")
        else:
            changes[name] = convert(value, kinds[name], where)
    try:
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def convert(value: Any, kind: Any, where: str) -> Any:
    """A TOML value as an option's type: int, float, bool, str, Path, Literal, tuple of these, or one of them | None."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        parts = [part for part in arguments if part is not type(None)]
        for part in parts[:-1]:
            with contextlib.suppress(ConfigError):
                return convert(value, part, where)
        return convert(value, parts[-1], where)
    if origin is Literal:
        if value in arguments:
            return value
        raise ConfigError(f"{where} is {value!r}; it must be one of {', '.join(map(repr, arguments))}")
    if origin is tuple and isinstance(value, list):
        return tuple(convert(item, arguments[0], where) for item in value)
    if kind is float and type(value) is int:
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} is {value!r}; expected {getattr(kind, '__name__', kind)}")
    return value


def to_json(config: JobConfig) -> str:
    """The whole configuration as indented JSON, for the run's directory."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=str)
