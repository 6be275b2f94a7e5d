"""Records of a job, as `datasets` reads them and TRL takes them, and a sample that shows which tokens are learned."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from core.finetune.config import TuneOptions
from core.jobs.model_directory import one_line
from core.training.errors import ConfigError
from core.training.hub import cached_data, how_to_download

KINDS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
ON_DISK = ("state.json", "dataset_dict.json")  # of datasets' save_to_disk
CHAT = ("tools", "chat_template_kwargs")  # of any record of messages; templates read them
# Task -> the columns of each kind of record, the first that is there counts.
COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "sft": (("messages",), ("prompt", "completion"), ("text",), ("input_ids", "labels")),
    "dpo": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
    "reward": (("prompt", "chosen", "rejected"), ("chosen", "rejected"), ("chosen", "rejected", "margin")),
    "classification": (("text", "label"),),
}
ALPACA = ("instruction", "input", "output", "system")
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}


class Data(NamedTuple):
    """train, held: of `datasets`; held is None without data to evaluate on. classes: names, of classification."""

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
    if held is None and options.validation_fraction:
        parts = train.train_test_split(test_size=options.validation_fraction, seed=seed)
        train, held = parts["train"], parts["test"]
    classes: list[str] = []
    if options.task == "classification":
        classes = _classes(train["label"], known)
        numbers = {name: number for number, name in enumerate(classes)}
        train, held = (
            None if each is None else each.map(_numbered, fn_kwargs={"numbers": numbers}) for each in (train, held)
        )
    return Data(train, held, unused, classes)


def _read(names: Sequence[str], task: str, flag: str) -> tuple[Any, list[str]]:
    """Return the records of several sources, and the names of columns that are not used."""
    import datasets

    parts, unused = [], set()
    for name in names:
        rows = _as_trl_reads(_open(name, flag))
        there = set(rows.column_names)
        kind = next((kind for kind in COLUMNS[task] if there.issuperset(kind)), None)
        if kind is None:
            wanted = " or ".join(", ".join(map(repr, kind)) for kind in COLUMNS[task])
            raise ConfigError(f"{flag} {name} has the fields {', '.join(sorted(there))}; --task {task} needs {wanted}")
        if not len(rows):
            raise ConfigError(f"{flag} {name} holds no record")
        for column in kind:
            if rows.data.column(column).null_count:
                number = rows[column].index(None) + 1
                raise ConfigError(f"{flag} {name}: record {number} has no {column!r}")
        kept = [column for column in rows.column_names if column in (*kind, *CHAT)]
        unused |= there - set(kept)
        parts.append(rows.select_columns(kept))
    if len({tuple(sorted(part.column_names)) for part in parts}) > 1:
        raise ConfigError(f"{flag}: the files hold records of different kinds; give files with the same fields")
    try:
        return datasets.concatenate_datasets(parts), sorted(unused)
    except Exception as error:  # of columns whose types differ
        raise ConfigError(f"{flag}: the files do not go together: {one_line(error)}") from error


def _open(name: str, flag: str) -> Any:
    """Return the rows of a file, a directory or a data set in the cache of huggingface_hub."""
    import datasets

    path = Path(cached_data(name))
    if not path.exists():
        raise ConfigError(f"{flag} {name} is not there (from {Path.cwd()}){how_to_download(name, 'dataset')}")
    try:
        if path.is_file():
            if path.suffix not in KINDS:
                raise ConfigError(f"{flag} {name}: expected a file that ends with {', '.join(KINDS)}")
            if path.stat().st_size == 0:
                raise ConfigError(f"{flag} {name} is empty")
            return datasets.load_dataset(KINDS[path.suffix], data_files=str(path.resolve()), split="train")
        if any((path / file).is_file() for file in ON_DISK):
            rows = datasets.load_from_disk(str(path))
            return rows["train"] if hasattr(rows, "keys") else rows
        return datasets.load_dataset(str(path.resolve()), split="train")
    except ConfigError:
        raise
    except Exception as error:  # pyarrow and datasets have many, and the first cause says most
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ConfigError(f"{flag} {name} cannot be read: {one_line(cause)}") from error


def _as_trl_reads(rows: Any) -> Any:
    """Return rows of Alpaca as prompts and completions, and those of ShareGPT as messages."""
    there = set(rows.column_names)
    if {"instruction", "output"} <= there:
        return rows.map(_from_alpaca, remove_columns=[name for name in ALPACA if name in there])
    if "conversations" in there and "messages" not in there:
        return rows.map(_from_sharegpt, remove_columns=["conversations", *({"system"} & there)])
    return rows


def _from_alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    question = "\n\n".join(row[name] for name in ("instruction", "input") if row.get(name))
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return {
        "prompt": [*system, {"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": row["output"]}],
    }


def _from_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for part in row["conversations"]:
        speaker = part.get("from") or part.get("role")
        messages.append(
            {"role": SPEAKERS.get(speaker, speaker), "content": part.get("value") or part.get("content") or ""}
        )
    return {"messages": messages}


def _classes(labels: Sequence[Any], known: Sequence[str]) -> list[str]:
    """Return the names of the classes: a model's own, or those of the data in order."""
    found = sorted(set(labels), key=lambda label: (isinstance(label, str), label))
    if all(isinstance(label, int) for label in found):
        if found != list(range(len(found))) and not known:
            raise ConfigError(f"labels that are numbers are 0, 1, ... without a gap, and the data has {found[:9]}")
        names = [f"LABEL_{number}" for number in found] if not known else list(known)
        if found and found[-1] >= len(names):
            raise ConfigError(f"the data has the label {found[-1]}, and the model {len(names)} classes")
        return names
    unknown = [label for label in found if str(label) not in known]
    if known and unknown:
        raise ConfigError(f"the data has the label {unknown[0]!r}, and the model's classes are {', '.join(known)}")
    return list(known) or [str(label) for label in found]


def _numbered(row: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
    label = row["label"]
    if not isinstance(label, int) and str(label) not in numbers:
        raise ConfigError(f"--eval_data has the label {label!r}, which --data has not")
    return {"label": label if isinstance(label, int) else numbers[str(label)]}


def tokenized(rows: Any, tokenizer: Any, length: int) -> Any:
    """Return texts of classification as token ids."""

    def encode(row: Mapping[str, Any]) -> dict[str, Any]:
        return {"input_ids": tokenizer(row["text"], truncation=True, max_length=length)["input_ids"]}

    return rows.map(encode, remove_columns="text").rename_column("label", "labels")


def describe(row: Mapping[str, Any], tokenizer: Any, classes: Sequence[str]) -> str:
    """Return a prepared record in one line, with the learned tokens in [[ ]]."""
    if "labels" in row and not isinstance(row["labels"], list):
        return f"{marked(row['input_ids'], [False] * len(row['input_ids']), tokenizer)} -> {classes[row['labels']]!r}"
    if "input_ids" in row:
        labels = row.get("labels") or row["input_ids"]
        return marked(row["input_ids"], [label != -100 for label in labels], tokenizer)
    sides = []
    for name in ("chosen", "rejected"):
        prompt, answer = row.get("prompt_ids") or [], row[f"{name}_ids"]
        learned = [False] * len(prompt) + [True] * len(answer)
        sides.append(f"{name}: {marked([*prompt, *answer], learned, tokenizer)}")
    return "; ".join(sides)


def marked(ids: Sequence[int], learned: Sequence[bool], tokenizer: Any, width: int = 60) -> str:
    """Return tokens as text in one line, with what is learned in [[ ]]. Longer parts than `width` are shortened."""
    shown, place = [], 0
    for is_learned, run in itertools.groupby(learned):
        end = place + len(list(run))
        upto = [tokenizer.decode(ids[:to], clean_up_tokenization_spaces=False) for to in (place, end)]
        part = json.dumps(upto[1][len(upto[0]) :], ensure_ascii=False)[1:-1]
        if len(part) > width:
            part = f"{part[: width // 2]} ... {part[-width // 2 :]}"
        shown.append(f"[[{part}]]" if is_learned else part)
        place = end
    return "".join(shown[:7]) + (" ..." if len(shown) > 7 else "")
