"""Directories of transformers and peft: judged by the headers of their files, loaded, and the ids of a prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core.checkpoint.errors import CheckpointError
from core.checkpoint.transformers_files import is_of_transformers
from core.checkpoint.weights.index import weight_files
from core.checkpoint.weights.one_file import SAFE_SUFFIX, Description, describe, is_kind_with_point
from core.extras import require_installed
from core.hugging_face.read.directory import check_files, look_at, read_configuration
from core.hugging_face.read.transformers_plans import peft_by_old_names, transformers_package
from core_plan.job.errors import ConfigError
from core_plan.job.hub import cached_model, how_to_download

ADAPTER = "adapter_config.json"
# Auto classes of a causal model, and of one with a head of classes or a score; the end of such a class's name.
AUTO_CLASS = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
CLASSIFIER = "ForSequenceClassification"


class Tuned(NamedTuple):
    """A model of transformers in evaluation mode, or a peft.PeftModel around one, and its tokenizer."""

    model: Any
    tokenizer: Any

    def merged(self) -> Any:
        """Return the model with its adapters added to its weights, and without them."""
        return self.model.merge_and_unload() if hasattr(self.model, "peft_config") else self.model


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens that a model continues: those after which TRL trains a completion.

    A post-processor may write an end mark behind every text, which is behind the completion in training. A text that
    begins with the begin mark gets no second one.
    """
    begin = tokenizer.bos_token
    encoded = tokenizer(text, return_special_tokens_mask=True)
    ids, special = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    without = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    if begin is not None and text.startswith(begin) and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids, special = ids[1:], special[1:]
    while len(ids) > without and special[-1] and ids[-1] != tokenizer.bos_token_id:
        ids, special = ids[:-1], special[:-1]
    return ids


def model_directory(place: Path, step: int | None = None) -> Path | None:
    """Return the directory of a model or an adapter: a place, or the checkpoint of a step in it, or the newest there.

    None for the runs and the checkpoints of the main job.
    """

    def holds(path: Path) -> bool:
        return (path / ADAPTER).is_file() or is_of_transformers(path)

    steps = {int(path.name.rpartition("-")[2]): path for path in place.glob("checkpoint-[0-9]*") if holds(path)}
    if step is not None:
        if step not in steps and (steps or holds(place)):
            raise ConfigError(f"--step {step}: {place} has the checkpoints of steps {sorted(steps) or 'none'}")
        return steps.get(step)
    return place if holds(place) else steps[max(steps)] if steps else None


def load_directory(directory: Path, dtype: torch.dtype | str = "auto") -> Tuned:
    """Load the model of a directory, with its adapter if it has one.

    Raises:
        ConfigError: If the base model of an adapter is not in the place that the adapter's configuration names.
    """
    transformers = transformers_package()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if not (directory / ADAPTER).is_file():
        return Tuned(_loaded(directory, dtype).eval(), tokenizer)
    require_installed("peft", "an adapter", "peft")
    import peft

    settings = json.loads((directory / ADAPTER).read_text())
    base = settings.get("base_model_name_or_path")
    found = cached_model(str(base or ""))
    if not is_of_transformers(Path(found)):
        raise ConfigError(
            f"{directory / ADAPTER} names the base model {base!r}, which is not a model's directory (relative to "
            f"{Path.cwd()}); start in the directory of the training run, or correct the path in the "
            f"file{how_to_download(found, 'model')}"
        )
    scored = settings.get("task_type") == "SEQ_CLS"
    heads = (lambda model: {name for name, _ in model.named_parameters() if "score" in name}) if scored else None
    model = _loaded(Path(found), dtype, AUTO_CLASS[1] if scored else None, heads)
    with peft_by_old_names():
        return Tuned(peft.PeftModel.from_pretrained(model, directory).eval(), tokenizer)


def _loaded(
    directory: Path,
    dtype: torch.dtype | str,
    auto: str | None = None,
    drawn: Callable[[Any], set[str]] | None = None,
) -> Any:
    """Load the model of a directory and check that it uses every saved file."""
    look_at(directory)
    check_files(directory)
    configuration = read_configuration(directory)
    kind = getattr(transformers_package(), auto or AUTO_CLASS[classifies(configuration)])
    model = model_of_files(kind, directory, drawn or (lambda model: set()), dtype=dtype, trust_remote_code=False)
    if not hasattr(configuration, "quantization_config"):  # transformers makes full numbers of it
        check_weights(str(directory), directory, model, drawn(model) if drawn else ())
    return model


def classifies(configuration: Any) -> bool:
    """True for the configuration of a directory whose model has a head of classes or a score."""
    return (configuration.architectures or [""])[0].endswith(CLASSIFIER)


def one_line(error: BaseException) -> str:
    """Return an error's text in one line of at most 500 characters."""
    return " ".join(str(error).split())[:500] or repr(error)


def check_weights(where: str, directory: Path, model: Any, drawn: Collection[str] = ()) -> None:
    """Check the weights of a directory against its configuration's model.

    Transformers renames and fuses some tensors. So a tensor is compared only if it has a parameter's name, and is known
    to be missing only if every name in the files is a parameter's. Parameters in ``drawn`` may be missing.

    Raises:
        ConfigError: If files are missing, broken, or of another model.
    """
    try:
        files = weight_files(directory)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error
    stored: dict[str, Description] = {}
    for file in files:
        try:
            stored |= describe(file)
        except (OSError, CheckpointError) as error:
            reason = one_line(error)
            if file.suffix == SAFE_SUFFIX:
                size = f"{file.stat().st_size:,} bytes"
                reason = f"{file.name} has {size} and is no whole safetensors file ({reason}); copy it again"
            raise ConfigError(f"{where}: {reason}") from error
    params = dict(model.named_parameters())
    for name, found in ((name, stored[name]) for name in params if name in stored):
        if params[name].numel() != math.prod(found.shape):
            raise ConfigError(
                f"{where}: {name!r} has shape {found.shape} in its file, and "
                f"{list(params[name].shape)} by config.json; one of the two belongs to another model"
            )
        if not is_kind_with_point(found.kind):
            raise ConfigError(
                f"{where}: {name!r} is {found.kind} in its file, and only numbers with a point "
                "are read; give the model without its quantization"
            )
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    lacking = sorted(params.keys() - set(drawn) - stored.keys() - tied.keys() - set(tied.values()))
    if lacking and stored and stored.keys() <= model.state_dict().keys():
        refuse_missing(where, lacking)


def refuse_missing(where: str, names: list[str]) -> None:
    """ConfigError: transformers would draw these weights at random."""
    raise ConfigError(
        f"{where}: its files lack {len(names)} of the model's weights, the first {names[0]!r}; they are of a model "
        "with other sizes than config.json, or not all there"
    )


def model_of_files(
    kind: Any, directory: Path, drawn: Callable[[Any], set[str]] = lambda model: set(), **options: Any
) -> Any:
    """Return the model that ``kind.from_pretrained`` loads. Raise ConfigError if it draws weights not in ``drawn``."""
    log = transformers_package().utils.logging
    said = log.get_verbosity()
    log.set_verbosity_error()  # transformers lists what is missing
    try:
        model, loading = kind.from_pretrained(directory, output_loading_info=True, **options)
    finally:
        log.set_verbosity(said)
    missing = sorted(set(loading["missing_keys"]) - drawn(model))
    if missing:
        refuse_missing(str(directory), missing)
    return model
