"""Load what fine-tuning leaves, on one process: a run, its model or adapter directory, or its checkpoints.

Any directory of Hugging Face's transformers with a causal language model is loaded the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core.checkpoint import find_intact, load_checkpoint
from core.checkpoint.transformers_files import is_of_transformers
from core.finetune.config import LoraOptions, TuneConfig, TunedData, TunedModel
from core.finetune.model import directory_of, drawn_names, lora_config_of, model_class, train_heads
from core.finetune.model_files import ADAPTER, AUTO_CLASS, check_weights, classifies, model_of_files
from core.hugging_face.directory import check_files, look_at, read_configuration
from core.hugging_face.transformers_plans import transformers_package
from core.training.config import RunOptions
from core.training.config_file import saved_options
from core.training.errors import ConfigError
from core.training.extras import require_installed
from core.training.hub import cached_model, how_to_download
from core.training.model_config import DTYPES

# Folders in the run's directory: what is trained, and the adapter where that is merged into a model.
MODEL, ADAPTER_ALONE = "model", "adapter"


class Tuned(NamedTuple):
    """A model of transformers in evaluation mode, or a peft.PeftModel around one, and its tokenizer."""

    model: Any
    tokenizer: Any

    def merged(self) -> Any:
        """The model with its adapters added to its weights, and without them."""
        return self.model.merge_and_unload() if hasattr(self.model, "peft_config") else self.model


def model_directory(place: Path) -> Path | None:
    """The directory of a model or an adapter that a path means: itself, or the one in a fine-tuning run.

    None for the runs and the checkpoints of the main job.
    """
    found = (path for path in (place, place / MODEL) if (path / ADAPTER).is_file() or is_of_transformers(path))
    return next(found, None)


def is_tuned(configuration: Mapping[str, Any]) -> bool:
    """True for the configuration in a checkpoint of the fine-tuning job."""
    return "path" in configuration.get("model", {})


def load_directory(directory: Path, dtype: torch.dtype | str = "auto") -> Tuned:
    """The model of a directory, with its adapter if it has one.

    dtype: of the weights, or of the base model's; "auto" for the one in its files.
    ConfigError for an adapter whose base model is not where the adapter's configuration says.
    """
    transformers = transformers_package()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if not (directory / ADAPTER).is_file():
        return Tuned(_loaded(directory, dtype).eval(), tokenizer)
    require_installed("peft", "an adapter", "peft")
    import peft

    base = json.loads((directory / ADAPTER).read_text()).get("base_model_name_or_path")
    found = cached_model(str(base or ""))
    if not is_of_transformers(Path(found)):
        raise ConfigError(
            f"{directory / ADAPTER} names the base model {base!r}, which is no model's directory (from {Path.cwd()}); "
            f"start where it was trained, or write the right path there{how_to_download(found, 'model')}"
        )
    adapted = peft.PeftModel.from_pretrained(_loaded(Path(found), dtype), directory)
    return Tuned(adapted.eval(), tokenizer)


def _loaded(directory: Path, dtype: torch.dtype | str) -> Any:
    """The whole model of a directory, whose files are those that were saved."""
    look_at(directory)
    check_files(directory)
    configuration = read_configuration(directory)
    kind = getattr(transformers_package(), AUTO_CLASS[classifies(configuration)])
    model = model_of_files(kind, directory, dtype=dtype, trust_remote_code=False)
    if not hasattr(configuration, "quantization_config"):  # of which transformers makes whole numbers
        check_weights(str(directory), directory, model)
    return model


def load_tuned_checkpoint(root: Path, step: int | None = None) -> Tuned:
    """The model of a fine-tuning job's checkpoints. The base model's directory must still be there.

    step: that one; None for the newest that is intact.
    """
    transformers = transformers_package()
    found = find_intact(root, step)
    saved = found.meta["configuration"]
    config = TuneConfig(
        run=saved_options(RunOptions, {**saved["run"], "directory": Path(saved["run"]["directory"])}),
        model=saved_options(TunedModel, saved["model"]),
        lora=saved_options(LoraOptions, saved["lora"]),
        data=TunedData(task=saved["data"]["task"]),
    )
    base = directory_of(config)
    if not is_of_transformers(base):
        raise ConfigError(f"{found.path} was trained from {base}, which is no model's directory (from {Path.cwd()})")
    dtype = DTYPES[config.model.dtype]
    if config.lora.r is None:
        configuration = read_configuration(base)
        model = model_class(configuration, str(base), config.data.task)(configuration).to(dtype)
    else:
        require_installed("peft", "an adapter", "peft")
        import peft

        model = _loaded(base, dtype)
        heads = drawn_names(config.data.task, model)
        model = peft.get_peft_model(model, lora_config_of(config, heads))
        train_heads(model, heads)
    load_checkpoint(root, [model], step=found.step)
    return Tuned(model.eval(), transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False))
