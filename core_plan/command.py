"""The command: read a model, a layout and a device, and print the plan, or an error if it cannot be built."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from core.distributed.distributed_data_parallel_config import STRATEGIES
from core.extras import MissingExtra
from core.hugging_face.run.sequence import MODES
from core_plan.advice import advise
from core_plan.calibrate import calibrate
from core_plan.choices import NO_MODE
from core_plan.device import Device, known_devices, read_device
from core_plan.job.config import AXIS_OPTIONS, JobConfig
from core_plan.job.config_file import given_options, load_config, read_toml, spell_out
from core_plan.job.errors import ConfigError
from core_plan.job.limits import check_numbers
from core_plan.model_run import MODELS, TINY, ModelRun, known_models
from core_plan.run_plan import plan_run
from core_plan.suggestions import advice

DOES_NOT_FIT, USAGE_ERROR = 1, 2
CALIBRATE = "calibrate"
MOST_RANKS_AT_ALL = 131_072
# Names that the main job's refusals use -> this command's own.
OWN_NAMES = {
    "--model.sequence-length": "--seq",
    "--run.global-batch-size": "--global-batch",
    "--run.micro-batch-size": "--micro-batch",
    "--run.ranks, or the launcher's number": "--ranks",
    "--run.ranks": "--ranks",
    **{f"--parallel.{axis}": f"--{axis}" for axis in AXIS_OPTIONS},
}
NAMES = {"seq": "sequence_length", "global_batch": "global_batch_size", "micro_batch": "micro_batch_size"}
FIXED = (*AXIS_OPTIONS, "micro", "zero", "recompute")  # sizes that advice keeps
# Options of Hugging Face models only; the main job has its own options for them.
OF_MODELS = (
    *("zero", "sequence_parallel", "dtype", "recompute", "documents", "layers_per_stage", "logits_chunk"),
    *("make_vocab_size_divisible_by", "use_fp8"),
)


def main(arguments: Sequence[str]) -> int:
    """Print a plan.

    Returns:
        0 if the run fits, 1 if it does not, 2 after one line on standard error if it cannot be built.
    """
    try:
        if list(arguments[:1]) == [CALIBRATE]:
            return calibrate(arguments[1:])
        return _plan(list(arguments))
    except (ConfigError, MissingExtra) as error:
        print(f"error: {_with_own_names(str(error), arguments)}", file=sys.stderr)
        return USAGE_ERROR


def _with_own_names(words: str, arguments: Sequence[str]) -> str:
    """Replace names of the main job's options that this command has a shorter name for, unless the user gave them."""
    given = {word.partition("=")[0] for word in arguments}
    for name, own in OWN_NAMES.items():
        if name.partition(",")[0] in given:
            continue
        words = re.sub(rf"{re.escape(name)}(?![\w-])", own, words)
    return words


def _plan(arguments: list[str]) -> int:
    parser = _parser()
    options, more = parser.parse_known_args(arguments)
    _refuse_misspelt(more, re.findall(r"--[\w-]+", parser.format_usage()))
    _check_sizes(options)
    if options.advise:
        return _advise(options, more)
    if options.compare is not None:
        raise ConfigError("--compare ranks a layout among the layouts of --advise; add --advise")
    config = model_run(options, more) if is_hugging_face(options.model) else job_config(options, more)
    plan = plan_run(config, options.ranks, _device(options))
    print(json.dumps(plan.as_dict(), indent=2) if options.json else plan.describe())
    if not plan.fits and not options.json:
        print(_with_own_names(advice(config, plan), arguments))
    return 0 if plan.fits else DOES_NOT_FIT


def _advise(options: argparse.Namespace, more: Sequence[str]) -> int:
    """Print the layouts that fit. Sizes given as options are kept."""
    if options.json:
        raise ConfigError("--json is of one layout; give it without --advise")
    config = model_run(options, more) if is_hugging_face(options.model) else job_config(options, more)
    given = {**vars(options), "micro": options.micro_batch, **_long_sizes(config, more)}
    fixed = {name: int(given[name]) for name in FIXED if given[name] is not None}
    compared = None if options.compare is None else _sizes(options.compare)

    def report(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    found = advise(config, options.ranks, _device(options), fixed=fixed, compare=compared, progress=report)
    print(*(config.notes if isinstance(config, ModelRun) else ()), found.describe(), sep="\n")
    return 0 if found.candidates else DOES_NOT_FIT


def _device(options: argparse.Namespace) -> Device:
    """Return the device with the requested headroom."""
    found = read_device(options.device)
    if options.headroom is None:
        return found
    if not 0 <= options.headroom < 1:
        raise ConfigError(f"--headroom is {options.headroom:g}; expected a share of the memory from 0 to below 1")
    return replace(found, headroom=options.headroom)


def _refuse_misspelt(more: Sequence[str], known: Sequence[str]) -> None:
    """Raise ConfigError for an option that is nearly one of this command, and none of the main job."""
    for name in (word.partition("=")[0] for word in spell_out(more) if word.startswith("--") and "." not in word):
        near = difflib.get_close_matches(name, known, 2, 0.75)
        if near:
            raise ConfigError(f"{name} is no option. Perhaps you meant {' or '.join(near)}")


def _sizes(words: str) -> dict[str, int]:
    """Parse 'tp=8,pp=16' to {'tp': 8, 'pp': 16}.

    Raises:
        ConfigError: If a word is not a size of a layout.
    """
    found = {}
    for word in words.split(","):
        name, _, size = word.strip().partition("=")
        if name not in (*FIXED, "vpp") or not size.isdecimal():
            raise ConfigError(f"--compare has {word.strip()!r}; expected NAME=NUMBER of {', '.join(FIXED)}, vpp")
        found[name] = int(size)
    return found


def _long_sizes(config: JobConfig | ModelRun, more: Sequence[str]) -> dict[str, int]:
    """Return the sizes given by full option names of the main job. Options in a file are not kept."""
    if isinstance(config, ModelRun):
        return {}
    given = given_options([], spell_out(more))
    found = {axis: getattr(config.parallel, axis) for axis in AXIS_OPTIONS if f"parallel.{axis}" in given}
    if "run.micro_batch_size" in given:
        found["micro"] = config.run.micro_batch_size
    if given.keys() & {"ddp.data_parallel_sharding_strategy", "ddp.use_distributed_optimizer"}:
        found["zero"] = STRATEGIES.index(config.ddp.strategy)
    if "model.recompute_granularity" in given and config.model.recompute_granularity == "full":
        found["recompute"] = 1
    return {name: size for name, size in found.items() if size is not None}


def _check_sizes(options: argparse.Namespace) -> None:
    """Check the numbers among the options.

    Raises:
        ConfigError: If a count is below one, or another number is out of range.
    """
    for name in ("ranks", *NAMES, *AXIS_OPTIONS, "make_vocab_size_divisible_by"):
        size = getattr(options, name)
        if size is not None and size < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {size}; expected an integer of at least 1")
    if options.zero is not None and options.zero not in range(len(STRATEGIES)):
        raise ConfigError(f"--zero is {options.zero}; expected 0 to {len(STRATEGIES) - 1}")
    if options.logits_chunk is not None and options.logits_chunk < 0:
        raise ConfigError(f"--logits-chunk is {options.logits_chunk}; expected at least 0")
    if options.ranks > MOST_RANKS_AT_ALL:
        raise ConfigError(f"--ranks is {options.ranks:,}; at most {MOST_RANKS_AT_ALL:,} are planned")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core plan",
        description="Plan a run: memory of one rank of each kind, and the time of a step. Options of the main "
        "job (--model.num-layers 32, --ddp.bucket-size ...) may be added, if the model is not Hugging Face's.",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        help="a TOML file of the main job; or of Hugging Face a config.json, a directory with one, "
        f"{', '.join(known_models())}, or {TINY}FAMILY",
    )
    parser.add_argument("--ranks", type=int, required=True, help="of the whole job")
    parser.add_argument("--device", default="h100", help=f"{', '.join(known_devices())}, or a .json file like theirs")
    parser.add_argument("--json", action="store_true", help="print the plan as numbers: bytes, seconds")
    parser.add_argument("--seq", type=int, help="tokens of a sequence")
    parser.add_argument("--global-batch", type=int, help="sequences of a step")
    parser.add_argument("--micro-batch", type=int, help="sequences of a forward")
    parser.add_argument("--headroom", type=float, help="share of the memory that is kept free; else the device's")
    parser.add_argument("--advise", action="store_true", help="look for what is not given; the layouts that fit")
    parser.add_argument(
        "--compare", metavar="tp=8,pp=16", help="with --advise: say where this layout stands, and why it is not first"
    )
    for axis in AXIS_OPTIONS:
        parser.add_argument(f"--{axis}", type=int, help=f"{axis} parallel size")
    of_models = parser.add_argument_group("of Hugging Face models")
    of_models.add_argument("--zero", type=int, help="what is sharded over data ranks, 0 to 3")
    of_models.add_argument("--sequence-parallel", help=f"a mode of split_model: {', '.join(MODES)}; or {NO_MODE}")
    of_models.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the parameters")
    of_models.add_argument("--use-fp8", action="store_true", default=None, help="linear layers multiply in 8 bits")
    of_models.add_argument("--recompute", action="store_true", default=None, help="run each layer again in backward")
    of_models.add_argument("--logits-chunk", type=int, help="tokens whose logits exist at a time; 0 for all at once")
    of_models.add_argument(
        "--make-vocab-size-divisible-by", type=int, metavar="N", help="multiple of a rank's rows of the vocabulary"
    )
    of_models.add_argument("--layers-per-stage", type=int, nargs="+", help="of a pipeline; as many on each by default")
    of_models.add_argument("--documents", action="store_true", default=None, help="pack documents, with position ids")
    return parser


def job_file(name: str) -> Path:
    """Return the TOML file of the main job for a name or path."""
    published = MODELS / f"{name}.toml"
    return published if published.is_file() else Path(name)


def is_job_file(path: Path) -> bool:
    """Return True for the path of a TOML file, existing or not.

    Other paths are Hugging Face models or names on the Hub.
    """
    return path.suffix == ".toml" or (path.is_file() and path.suffix != ".json")


def is_hugging_face(models: Sequence[str]) -> bool:
    """Return True if the options name a Hugging Face model.

    Raises:
        ConfigError: If they name several.
    """
    found = [name for name in models if not is_job_file(job_file(name))]
    if found and len(models) > 1:
        raise ConfigError(f"--model is given as {', '.join(models)}; a Hugging Face model is given alone")
    return bool(found)


def model_run(options: argparse.Namespace, more: Sequence[str]) -> ModelRun:
    """Create the run of a Hugging Face model from options."""
    others = [*more, *[f"--{axis}" for axis in AXIS_OPTIONS if axis not in _FIELDS and getattr(options, axis)]]
    if others:
        raise ConfigError(f"{others[0]} is no option of a Hugging Face model's plan, whose options --help lists")
    given = {NAMES.get(name, name): value for name, value in vars(options).items() if value is not None}
    mode = given.get("sequence_parallel")
    if mode not in (None, NO_MODE, *MODES):
        raise ConfigError(f"--sequence-parallel is {mode!r}; expected one of {', '.join(MODES)}, or {NO_MODE}")
    if "layers_per_stage" in given:
        given["layers_per_stage"] = tuple(given["layers_per_stage"])
    if mode == NO_MODE:
        del given["sequence_parallel"]
    return ModelRun(options.model[0], **{name: given[name] for name in _FIELDS & given.keys() if name != "model"})


_FIELDS = {"model", "tp", "pp", "vpp", "cp", "ep", *NAMES.values(), *OF_MODELS}


def _refuse_contradictions(named: dict[str, Any], more: Sequence[str]) -> None:
    """Check options of the main job against the plan's own options.

    Raises:
        ConfigError: If both are given with different values.
    """
    given = given_options([], spell_out(more))
    for flag, value in named.items():
        other = given.get(flag.removeprefix("--").replace("-", "_"), str(value))
        if other != str(value):
            raise ConfigError(f"{flag} is {other}, and the plan's own option for it is {value}; give one of them")


def job_config(options: argparse.Namespace, more: Sequence[str]) -> JobConfig:
    """Create the main job's configuration from options."""
    for name in OF_MODELS:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is of Hugging Face models; the main job has its own options")
    files = [job_file(name) for name in options.model]
    for file in files:
        if file.is_file() and not read_toml(file):
            raise ConfigError(f"--model {file} is empty, so it is no model; give its sizes, such as [model] num_layers")
    flags = [part for file in files for part in ("--config", str(file))]
    named = {
        "--model.sequence-length": options.seq,
        "--run.global-batch-size": options.global_batch,
        "--run.micro-batch-size": options.micro_batch,
        **{f"--parallel.{axis}": getattr(options, axis) for axis in AXIS_OPTIONS},
    }
    named = {flag: value for flag, value in named.items() if value is not None}
    _refuse_contradictions({**named, "--run.ranks": options.ranks}, more)
    flags += [part for flag, value in named.items() for part in (flag, str(value))]
    config = load_config([*flags, *more])
    check_numbers(config)
    return config
