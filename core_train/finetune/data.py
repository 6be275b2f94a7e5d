"""Read a job's records with `datasets`, in the forms that TRL takes, and show which tokens are learned."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core_plan.job.errors import ConfigError
from core_plan.job.hub import cached_data, how_to_download
from core_train.commands.model_directory import one_line
from core_train.finetune.config import TuneOptions

KINDS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
CHAT = ("tools", "chat_template_kwargs")  # columns of message records; templates read them
PAIRS = (("prompt", "chosen", "rejected"), ("chosen", "rejected"))
# Task -> the columns of each kind of record, the first that is there counts.
COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sft": (("messages",), ("prompt", "completion"), ("text",), ("input_ids", "labels")),
    "dpo": PAIRS,
    "reward": (("prompt", "chosen", "rejected", "margin"), ("chosen", "rejected", "margin"), *PAIRS),
    "classification": (("text", "label"),),
}
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}


class Data(NamedTuple):
    """Records of a job.

    Attributes:
        train: The datasets.Dataset to train on.
        held: The datasets.Dataset to evaluate on; None without one.
        unused: Names of columns that the task does not use.
        classes: Names of the classes; empty for tasks other than classification.
    """

    train: Any
    held: Any
    unused: list[str]
    classes: list[str]


def read_data(options: TuneOptions, seed: int, known: Sequence[str] = ()) -> Data:
    """Read the records of a job.

    Args:
        options: Of the job.
        seed: Decides which records are held out.
        known: Classes of a model that classifies already.

    Raises:
        ConfigError: If a file is missing, empty, broken, or has no records of the task.
    """
    import datasets

    datasets.disable_progress_bars()
    train, unused = _read(options.data, options.task, "--data")
    held = _read(options.eval_data, options.task, "--eval_data")[0] if options.eval_data else None
    classes: list[str] = []
    try:
        if held is None and options.validation_fraction:
            parts = train.train_test_split(test_size=options.validation_fraction, seed=seed)
            train, held = parts["train"], parts["test"]
        if options.task == "classification":
            labels = sorted(set(train["label"]))
            are_numbers = isinstance(labels[0], int)
            if are_numbers and (labels[0] < 0 or not (known or labels == [*range(len(labels))])):
                raise ValueError(f"labels that are numbers are 0, 1, ... without a gap, and the data has {labels[:9]}")
            classes = [*known] or [f"LABEL_{each}" if are_numbers else str(each) for each in labels]
            kind = datasets.ClassLabel(names=classes)
            train, held = (part and part.cast_column("label", kind) for part in (train, held))
    except Exception as error:  # datasets and pyarrow have many
        raise ConfigError(f"--task {options.task}: {one_line(error)}") from error
    return Data(train, held, unused, classes)


def _read(names: Sequence[str], task: str, flag: str) -> tuple[Any, list[str]]:
    """Return the records of several sources, and the names of columns that are not used."""
    import datasets

    parts, unused = [], set()
    for name in names:
        rows = _open(name, flag)
        there = set(rows.column_names)
        kind = next((kind for kind in COLUMNS[task] if there.issuperset(kind)), None)
        if kind is None:
            wanted = " or ".join(", ".join(map(repr, kind)) for kind in COLUMNS[task])
            raise ConfigError(f"{flag} {name} has the fields {', '.join(sorted(there))}; --task {task} needs {wanted}")
        for column in kind:
            if rows.data.column(column).null_count:
                raise ConfigError(f"{flag} {name}: record {rows[column].index(None) + 1} has no {column!r}")
        kept = [column for column in rows.column_names if column in (*kind, *CHAT)]
        unused |= there - set(kept)
        parts.append(rows.select_columns(kept))
    try:
        return datasets.concatenate_datasets(parts), sorted(unused)
    except Exception as error:  # columns whose types differ
        raise ConfigError(f"{flag}: the files do not go together: {one_line(error)}") from error


def _open(name: str, flag: str) -> Any:
    """Return the rows of a file, a directory or a data set in the cache of huggingface_hub, as TRL reads them."""
    import datasets

    path = Path(cached_data(name))
    if not path.exists():
        raise ConfigError(f"{flag} {name} is not there (from {Path.cwd()}){how_to_download(name, 'dataset')}")
    if path.is_file() and not path.stat().st_size:
        raise ConfigError(f"{flag} {name} is empty")
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(str(path))
            rows = rows["train"] if hasattr(rows, "keys") else rows
        elif path.is_file():
            rows = datasets.load_dataset(KINDS[path.suffix], data_files=str(path.resolve()), split="train")
        else:
            rows = datasets.load_dataset(str(path.resolve()), split="train")
        there = set(rows.column_names)
        if {"instruction", "output"} <= there:
            return rows.map(_from_alpaca, remove_columns=sorted({"instruction", "input", "output", "system"} & there))
        if "conversations" in there and "messages" not in there:
            return rows.map(_from_sharegpt, remove_columns=["conversations", *({"system"} & there)])
        return rows
    except Exception as error:  # pyarrow and datasets have many, and the first cause says most
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ConfigError(f"{flag} {name} cannot be read: {one_line(cause)}") from error


def _system(row: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _from_alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    question = "\n\n".join(row[name] for name in ("instruction", "input") if row.get(name))
    answer = [{"role": "assistant", "content": row["output"]}]
    return {"prompt": [*_system(row), {"role": "user", "content": question}], "completion": answer}


def _from_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    messages = _system(row)
    for part in row["conversations"]:
        speaker = part.get("from") or part.get("role")
        text = part.get("value") or part.get("content") or ""
        messages.append({"role": SPEAKERS.get(speaker, speaker), "content": text})
    return {"messages": messages}


def describe(row: Mapping[str, Any], tokenizer: Any, classes: Sequence[str]) -> str:
    """Return a prepared record in one line, with the learned tokens in [[ ]]."""
    if "chosen_ids" in row:
        prompt = row.get("prompt_ids") or []
        sides = [(name, row[f"{name}_ids"]) for name in ("chosen", "rejected")]
        return "; ".join(f"{name}: {_marked([*prompt, *ids], len(prompt), tokenizer)}" for name, ids in sides)
    ids = row["input_ids"]
    if classes:
        return f"{_marked(ids, len(ids), tokenizer)} -> {classes[row['labels']]!r}"
    return _marked(ids, [label != -100 for label in row.get("labels") or ids], tokenizer)


def _marked(ids: Sequence[int], learned: Sequence[bool] | int, tokenizer: Any, width: int = 60) -> str:
    """Return tokens as text in one line. Parts longer than `width` are shortened.

    Args:
        ids: The tokens.
        learned: Whether each is learned, or the number of tokens before those that are.
    """
    if isinstance(learned, int):
        learned = [place >= learned for place in range(len(ids))]
    shown, place = [], 0
    for is_learned, run in itertools.groupby(learned):
        end = place + len(list(run))
        before, upto = (tokenizer.decode(ids[:to], clean_up_tokenization_spaces=False) for to in (place, end))
        part = json.dumps(upto[len(before) :], ensure_ascii=False)[1:-1]
        part = part if len(part) <= width else f"{part[: width // 2]} ... {part[-width // 2 :]}"
        shown.append(f"[[{part}]]" if is_learned else part)
        place = end
    return "".join(shown[:7]) + (" ..." if len(shown) > 7 else "")
