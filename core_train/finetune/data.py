"""Read a job's records with ``datasets``, and show which tokens are learned. TRL knows the forms of records."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core_plan.job.errors import ConfigError
from core_plan.job.hub import cached_data, how_to_download
from core_train.commands.model_directory import one_line
from core_train.finetune.arguments import TuneOptions, refusing

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}


def read_data(options: TuneOptions, seed: int, known: Sequence[str] = ()) -> tuple[Any, Any]:
    """Return the records to train on, and those to evaluate on or None. ``known``: classes that a model has already."""
    import datasets

    datasets.disable_progress_bars()
    train, held = (_read(names, flag) for names, flag in ((options.data, "--data"), (options.eval_data, "--eval_data")))
    with refusing(f"--task {options.task} over {', '.join(options.data)}"):
        if held is None and options.validation_fraction:
            train, held = train.train_test_split(test_size=options.validation_fraction, seed=seed).values()
        if options.task == "classification":
            names = datasets.ClassLabel(names=known or [str(label) for label in sorted(train.unique("label"))])
            for kind in (datasets.Value("string"), names):  # a label is a name, or the number of a known class
                train, held = (rows and rows.cast_column("label", kind) for rows in (train, held))
    return train, held


def _read(names: Sequence[str], flag: str) -> Any:
    """Return the rows of several sources; None without one."""
    import datasets

    parts = []
    for name in names:
        path = Path(cached_data(name)).resolve()
        place = {"path": str(path.parent), "data_files": path.name} if path.is_file() else {"path": str(path)}
        try:
            rows = datasets.load_dataset(**place, split="train")
            old = {"instruction", "input", "output", "system", "conversations"} & set(rows.column_names)
            if {"instruction", "output"} <= old or "conversations" in old:
                rows = rows.map(_as_chat, remove_columns=sorted(old))
        except Exception as error:  # datasets and pyarrow have many, and the cause says most
            reason = one_line(error.__cause__ or error) + how_to_download(name, "dataset")
            raise ConfigError(f"{flag} {name} cannot be read: {reason}") from error
        parts.append(rows)
    with refusing(f"{flag} {', '.join(names)}"):
        return datasets.concatenate_datasets(parts) if parts else None


def _as_chat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat of an Alpaca or ShareGPT record, under the role names of templates."""
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    if "conversations" in row:
        said = [
            (part.get("from", part.get("role")), part.get("value", part.get("content")))
            for part in row["conversations"]
        ]
        return {"messages": [*system, *({"role": ROLES.get(who, who), "content": text} for who, text in said)]}
    question = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    prompt = [*system, {"role": "user", "content": question}]
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": row["output"]}]}


def describe(row: Mapping[str, Any], tokenizer: Any, classes: Mapping[int, str]) -> str:
    """Return a record that a trainer has prepared in one line, with the learned tokens in [[ ]]."""
    if "chosen_ids" in row:
        prompt, sides = row.get("prompt_ids") or [], ("chosen", "rejected")
        marked = [_marked([*prompt, *row[f"{side}_ids"]], len(prompt), tokenizer) for side in sides]
        return f"chosen: {marked[0]}; rejected: {marked[1]}"
    ids, labels = row["input_ids"], row.get("labels")
    if isinstance(labels, int):
        return f"{_marked(ids, len(ids), tokenizer)} -> {classes[labels]!r}"
    return _marked(ids, [label != -100 for label in labels or ids], tokenizer)


def _marked(ids: Sequence[int], learned: Sequence[bool] | int, tokenizer: Any, width: int = 60) -> str:
    """Return tokens as text in one line, with parts over ``width`` shortened. A number: learned from this one on."""
    if isinstance(learned, int):
        learned = [place >= learned for place in range(len(ids))]
    shown, start = [], 0
    for is_learned, run in itertools.groupby(learned):
        end = start + len(list(run))
        before, until = (tokenizer.decode(ids[:to], clean_up_tokenization_spaces=False) for to in (start, end))
        part = json.dumps(until[len(before) :], ensure_ascii=False)[1:-1]
        part = part if len(part) <= width else f"{part[: width // 2]} ... {part[-width // 2 :]}"
        shown.append(f"[[{part}]]" if is_learned else part)
        start = end
    return "".join(shown[:7]) + (" ..." if len(shown) > 7 else "")
