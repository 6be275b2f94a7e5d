"""Read a JobConfig from defaults, TOML files and flags; a later source wins.

tyro reads the flags over one default object. Files are merged into it here, so that a wrong key is named with its file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import json
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from core.distributed.distributed_data_parallel_config import RESIDENCIES, DistributedDataParallelConfig
from core.extras import require
from core_plan.job.config import AXIS_OPTIONS, JobConfig, RunConfig
from core_plan.job.errors import ConfigError
from core_plan.job.limits import flag

LONGEST_TOML = 1 << 20  # bytes

Config = TypeVar("Config")
HINT = "Perhaps you meant"  # the words of tyro
# Flags that stand for another one, by the names every user of parallel training knows.
SHORT_FLAGS = {f"--{axis}": f"--parallel.{axis}" for axis in (*AXIS_OPTIONS, "vpp", "schedule")}
OTHER_NAMES = {
    **SHORT_FLAGS,
    "--profile": "--logging.profile",
    "--record": "--logging.record-every",
    "--checkpoint.async": "--checkpoint.asynchronous",
}  # Python keeps `async` for itself
ABOUT = (
    "Train a GPT. Flags win over --config FILE.toml (may be repeated), files over the defaults. "
    f"{', '.join(SHORT_FLAGS)} are short for --parallel.dp and so on. --dry-run prints the plan of the job and starts "
    "nothing; --dry-run --device h100 plans for another device, with the time of a step."
)


def load_config(argv: Sequence[str]) -> JobConfig:
    """Read ``[--config FILE.toml ...] [--section.option value ...]`` over the defaults.

    Raises:
        ConfigError: If something cannot be read; one line.
    """
    files, flags = split_config_files(argv)
    flags = spell_out(flags)
    tables = [read_toml(file) for file in files]
    config = JobConfig(ddp=ddp_defaults(given_options(tables, flags)))
    for file, table in zip(files, tables, strict=True):
        config = merge(config, table, str(file))
    tyro = require("tyro", "reading the command line")
    script = Path(sys.argv[0]).name
    refusal = io.StringIO()
    try:
        with contextlib.redirect_stderr(refusal):
            read: JobConfig = tyro.cli(
                JobConfig,
                args=flags,
                default=config,
                prog=script if script == "pretrain_gpt.py" else "python -m core train",
                description=ABOUT,
                config=(tyro.conf.AvoidSubcommands,),
            )
    except SystemExit as error:
        if error.code:
            raise ConfigError(one_line(refusal.getvalue())) from None
        raise
    return read


def saved_options(kind: type[Config], saved: Mapping[str, Any]) -> Config:
    """Return the options of a checkpoint, without those that this version lacks. Pure."""
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in saved.items() if name in known})


def one_line(box: str) -> str:
    """Return the error in tyro's box, and the names of the options that tyro suggests."""
    lines = [line.strip(" │|") for line in box.splitlines() if line.strip()]
    rule = re.compile(r"[╭╰]|.*[─-]{3,}\W*$")
    if len(lines) > 1 and rule.match(lines[1]):  # a title, underlined if the output is no terminal
        del lines[0]
    text = " ".join(line for line in lines if not rule.match(line))
    text, _, suggested = re.split(r"Got errors:|Argument helptext:|For full helptext", text)[0].partition(HINT)
    names = dict.fromkeys(re.findall(r"--[\w-]+\.[\w-]+", suggested))
    text = text.strip() + (f". {HINT} {', '.join(names)}" if names else "")
    if not text.startswith("Error parsing ddp: "):
        return text
    fields = "|".join(field.name for field in dataclasses.fields(DistributedDataParallelConfig))
    return re.sub(rf"\b({fields})\b", lambda match: flag("ddp", match[1]), text.removeprefix("Error parsing ddp: "))


def given_options(tables: Sequence[Mapping[str, Any]], flags: Sequence[str]) -> dict[str, Any]:
    """Return values from files and flags by 'section.option'. A later source wins; flags are text or bools."""
    given: dict[str, Any] = {}
    for table in tables:
        for section, options in table.items():
            if isinstance(options, Mapping):
                given |= {f"{section}.{option}": value for option, value in options.items()}
    for position, word in enumerate(flags):
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            continue
        after = "".join(flags[position + 1 : position + 2])
        section, _, option = name.removeprefix("--").replace("-", "_").partition(".")
        negated = option.startswith("no_")
        alone = not after or after.startswith("--")
        given[f"{section}.{option.removeprefix('no_')}"] = value if equals else not negated if alone else after
    return given


def ddp_defaults(given: Mapping[str, Any]) -> DistributedDataParallelConfig:
    """Return defaults of the section ddp that agree with the options given by the user.

    Raises:
        ConfigError: If two given options contradict each other.
    """
    defaults = JobConfig().ddp
    strategy = given.get("ddp.data_parallel_sharding_strategy")
    sharded = given.get("ddp.use_distributed_optimizer")
    if isinstance(sharded, bool) and strategy is not None and sharded != (strategy != "no_shard"):
        raise ConfigError(
            f"--ddp.data-parallel-sharding-strategy {strategy} and --ddp.{'' if sharded else 'no-'}use-distributed-"
            f"optimizer contradict each other: one shards the optimizer's state, the other does not; leave one out"
        )
    if sharded is False or strategy == "no_shard":
        defaults = dataclasses.replace(defaults, use_distributed_optimizer=False, overlap_param_gather=False)
    if strategy in RESIDENCIES and not RESIDENCIES[strategy].keeps_params:
        defaults = dataclasses.replace(defaults, overlap_param_gather=False)  # the step gathers nothing
    if "ddp.num_buckets" in given:
        defaults = dataclasses.replace(defaults, bucket_size=None)
    return defaults


def split_config_files(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the files given with --config, and all other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", type=Path, default=[])
    try:
        found, flags = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        raise ConfigError("--config needs the path of a TOML file after it") from None
    return found.config, flags


def spell_out(flags: Sequence[str], names: Mapping[str, str] = OTHER_NAMES) -> list[str]:
    """Replace short flags: ``--pp 2`` and ``--pp=2`` become ``--parallel.pp 2`` and ``--parallel.pp=2``.

    Raises ConfigError for an empty value, which often comes from an unset shell variable.
    """
    spelled: list[str] = []
    for word in flags:
        name, equals, value = word.partition("=")
        if not (value if equals else name).strip():
            option = name.strip() or next(word for word in [*reversed(spelled), "a flag"] if word[:2] in ("--", "a "))
            raise ConfigError(f"{option} was given an empty value; give one, or leave it out")
        spelled.append(names.get(name, name) + equals + value)
    return spelled


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file."""
    from core.checkpoint.bounded_read import read_bytes  # loads torch's checkpoints, for a second

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        tomllib = require("tomli", "reading TOML on Python 3.10")
    try:
        return tomllib.loads(read_bytes(path, LONGEST_TOML).decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path} (working directory {Path.cwd()})") from None
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # raised by TOML, or by text that is not UTF-8
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def merge(config: Config, values: Mapping[str, Any], source: str, prefix: str = "") -> Config:
    """Override ``config`` with a TOML table; nested tables override nested dataclasses.

    Raises ConfigError, with ``source`` and the option, for an unknown name or a value of another type.
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
    """Convert a TOML value to int, float, bool, str, Path, a Literal, a tuple of these, or a union."""
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
    if origin is tuple:  # one value alone is a list of one
        return tuple(convert(item, arguments[0], where) for item in (value if isinstance(value, list) else [value]))
    if kind is float and type(value) is int:
        return float(value)
    if kind in (Path, str) and isinstance(value, str) and not value.strip():
        raise ConfigError(f"{where} is empty; give a value, or leave it out")
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} is {value!r}; expected {getattr(kind, '__name__', kind)}")
    return value


def to_json(config: RunConfig) -> str:
    """Return the full configuration as indented JSON, for the run's directory."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=str)
