"""The model card of what fine-tuning writes: README.md, with the run's options, its data and its losses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from core import __version__
from core.finetune.config import SCORED, TuneConfig
from core.finetune.model_files import ADAPTER, AUTO_CLASS, CARD
from core.finetune.task_records import UNITS
from core.finetune.windows import WindowsHeader
from core.hugging_face.transformers_plans import transformers_package
from core.training.hub import is_hub_name
from core.training.job import JobResult
from core.training.step_log import read_records

LOADS = {
    "model": """from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
""",
    "adapter": """from peft import {auto}
from transformers import AutoTokenizer

model = {auto}.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
""",
}


def write_card(config: TuneConfig, description: str, header: WindowsHeader, result: JobResult, directory: Path) -> None:
    """Write the card of a model's or an adapter's directory, in its run's directory.

    description: of the layout and the batch. header: of the data.
    """
    kind = "adapter" if (directory / ADAPTER).is_file() else "model"
    library = {"model": "transformers", "adapter": "peft"}[kind]
    base = config.model.path
    facts = [f"base_model: {base}"] if is_hub_name(base) else []
    scored = config.data.task in SCORED
    pipeline = "text-classification" if scored else "text-generation"
    auto = AUTO_CLASS[scored] if kind == "model" else AUTO_CLASS[scored].replace("Auto", "AutoPeft", 1)
    facts += [f"library_name: {library}", f"pipeline_tag: {pipeline}", "tags:", "- gradient-core"]
    facts += ["- lora"] if kind == "adapter" else []
    parts = [
        "---\n" + "\n".join(facts) + "\n---",
        f"# {directory.parent.name}\n\nThis {kind} was trained from `{base}` by `python -m core.finetune` of "
        f"gradient-core {__version__}, with torch {torch.__version__} and transformers "
        f"{transformers_package().__version__}. The code below is for this directory.",
        f"```python\n{LOADS[kind].format(auto=auto)}```",
        "## Losses\n\n" + _losses(directory.parent, result, UNITS.get(config.data.task, "nats per learned token")),
        "## Data\n\n" + _data(header),
        f"## Options\n\n{description}.\n\nThe options that are not the defaults, as a file for "
        f"`python -m core.finetune --config`:\n\n```toml\n{options_as_toml(config)}```",
    ]
    (directory / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _losses(run: Path, result: JobResult, unit: str) -> str:
    """A table."""
    records = read_records(run / "steps.jsonl")
    rows = [(f"training, step {record.step}", record.loss) for record in (*records[:1], *records[1:][-1:])]
    last = records[-1].step if records else None
    if result.validation_loss is not None and (result.best is None or result.best[0] != last):
        rows.append(("validation" if last is None else f"validation, after step {last}", result.validation_loss))
    if result.best is not None:
        rows.append((f"validation, after step {result.best[0]}, whose weights these are", result.best[1]))
    lines = [f"| loss | {unit} |", "|---|---|", *(f"| {name} | {loss:.4f} |" for name, loss in rows)]
    return "\n".join(lines)


def _data(header: WindowsHeader) -> str:
    if header.task != "causal":
        return f"{header.describe().removeprefix('data: ')}. SHA-256 of the data and the tokenizer: `{header.digest}`."
    return (
        f"{header.text}: {header.documents:,} documents, {header.tokens:,} tokens, {header.learned:,} of them learned, "
        f"in {header.train_windows:,} windows of {header.length} tokens and {header.validation_windows:,} to validate "
        f"on. SHA-256 of the documents, the tokenizer and how they are packed: `{header.digest}`."
    )


def options_as_toml(config: TuneConfig) -> str:
    """The options that are not the defaults. Pure; reading it as a configuration gives the same one."""
    lines = []
    for section in dataclasses.fields(config):
        now, default = (getattr(each, section.name) for each in (config, TuneConfig()))
        changed = {
            option.name: getattr(now, option.name)
            for option in dataclasses.fields(now)
            if getattr(now, option.name) != getattr(default, option.name)
        }
        changed = {name: value for name, value in changed.items() if value is not None}  # which TOML does not have
        if changed:
            lines += [f"[{section.name}]", *(f"{name} = {_as_toml(value)}" for name, value in changed.items()), ""]
    return "\n".join(lines)


def _as_toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_toml, value))}]"
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return json.dumps(str(value), ensure_ascii=False)
