"""Records of classification, of reward models and of DPO: their fields, and the rows of tokens that they become.

A pair becomes two records with "prompt" and "completion", which are read as those of a causal model are. No model and
no processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from core.finetune.config import SCORED, Task
from core.finetune.fields import checked
from core.finetune.records import Example, encode
from core.training.errors import ConfigError

REQUIRED: dict[Task, tuple[str, ...]] = {
    "classification": ("text", "label"),
    "reward": ("chosen", "rejected"),
    "dpo": ("chosen", "rejected"),
}
MORE = ("prompt",)  # of a pair; without it, what its two texts or chats begin with alike
CHAT = ("tools", "chat_template_kwargs")
UNITS: dict[Task, str] = {"classification": "nats per text", "reward": "nats per pair", "dpo": "nats per pair"}
LABEL = tuple[str, Any, bool]  # (where it stands, the label, True if it may name a new class)


def checked_task(task: Task, record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a record that are used, without nulls. ConfigError for one that is missing, or cannot be used."""
    given = {name: value for name, value in record.items() if value is not None}
    for name in REQUIRED[task]:
        if name not in given:
            fields = ", ".join(map(repr, given)) or "none"
            expected = " and ".join(f'"{each}"' for each in REQUIRED[task])
            raise ConfigError(f"{where} has the fields {fields}; --task {task} expects {expected}")
    if task == "classification":
        if not isinstance(given["text"], str) or not given["text"]:
            raise ConfigError(f"{where}: 'text' is {given['text']!r}; expected text")
        if isinstance(given["label"], bool) or not isinstance(given["label"], (int, str)):
            raise ConfigError(f"{where}: 'label' is {given['label']!r}; expected a whole number, or a name as text")
        return {name: given[name] for name in REQUIRED[task]}
    pair = given["chosen"], given["rejected"]
    if pair[0] == pair[1]:
        raise ConfigError(f"{where}: 'chosen' and 'rejected' are equal, so neither is preferred; take the record out")
    for kind in (str, list):
        texts = [given[name] for name in (*MORE, *REQUIRED[task]) if name in given]
        if all(isinstance(text, kind) for text in texts):
            break
    else:
        raise ConfigError(f"{where}: {', '.join(map(repr, given))} must be all text, or all lists of messages")
    if "prompt" not in given:
        alike = itertools.takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False))
        size = sum(1 for _ in alike)
        size -= isinstance(pair[0], str) and pair[0][:size].endswith(" ")  # a word is one token with its space
        given["prompt"] = pair[0][:size]
        given |= {name: given[name][size:] for name in REQUIRED[task]}
    for completed in completions(given):
        checked(completed, where)
    return {name: given[name] for name in (*MORE, *REQUIRED[task], *CHAT) if name in given}


def check_padding(task: Task, tokenizer: Any) -> None:
    """ConfigError for a tokenizer without the mark that a head reads the end of a row by."""
    if task in SCORED and tokenizer.pad_token_id is None:
        raise ConfigError(
            f"--task {task} pads rows to one length, and the model's tokenizer has no pad_token; name one in its "
            f"tokenizer_config.json, {tokenizer.eos_token!r} for example"
        )


def completions(pair: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chosen and the rejected side of a pair, as records with a prompt and its completion."""
    shared = {name: pair[name] for name in ("prompt", *CHAT) if name in pair}
    return [{**shared, "completion": pair[name]} for name in ("chosen", "rejected")]


def unread_of(task: Task, record: Mapping[str, Any]) -> set[str]:
    """Names of fields that are given and change nothing."""
    used = REQUIRED[task] if task == "classification" else (*MORE, *REQUIRED[task], *CHAT)
    return {name for name, value in record.items() if value is not None} - {*used}


def encode_task(
    task: Task,
    record: Mapping[str, Any],
    tokenizer: Any,
    where: str,
    stops: Sequence[str],
    length: int,
    classes: Sequence[str],
) -> list[Example]:
    """The rows of a record. A text that is classified is cut to `length` tokens, its marks kept; a pair is not.

    The tokenizer adds its own marks alone to a text, and an end mark to the answers of a pair.
    """
    record = checked_task(task, record, where)
    if task != "classification":
        return [encode(completed, tokenizer, where, stops) for completed in completions(record)]
    ids = tokenizer(record["text"], truncation=True, max_length=length + 1, verbose=False)["input_ids"]
    is_cut = len(ids) > length
    if is_cut:
        ids = tokenizer(record["text"], truncation=True, max_length=length)["input_ids"]
    label = class_of(record["label"], classes)
    assert label is not None, f"{where}: class_names has refused the label {record['label']!r}"
    nothing = np.zeros(len(ids), dtype=bool)
    return [Example(np.array(ids, dtype=np.int64), nothing, is_text=False, label=label, is_cut=is_cut)]


def fit_rows(task: Task, records: Iterable[list[Example]], length: int) -> tuple[list[list[Example]], int, int]:
    """(records of at most `length` tokens a row, how many were cut, how many left out).

    DPO's answers are cut at their ends, and a pair without an answer in one of its rows is left out. A reward model
    reads the end of an answer, so that a pair with a row that is longer is left out.
    """
    fitting: list[list[Example]] = []
    cut = dropped = 0
    for rows in records:
        is_long = any(row.is_cut or len(row.ids) > length for row in rows)
        whole = [replace(row, ids=row.ids[:length], learned=row.learned[:length]) for row in rows]
        if (task == "reward" and is_long) or (task == "dpo" and not all(row.learned[1:].any() for row in whole)):
            dropped += 1
            continue
        cut += is_long
        fitting.append(whole)
    return fitting, cut, dropped


def class_names(labels: Sequence[LABEL], known: Sequence[str]) -> list[str]:
    """Names of the classes, in the order of their numbers.

    known: of a model that classifies already. Otherwise names are sorted, and numbers are to be 0, 1, ... without a
    gap. ConfigError for a label that is no class, and for one class alone.
    """
    if not labels:  # by the weights of the files, which is refused later
        return list(known)
    where_first, first, _ = labels[0]
    for where, label, _ in labels:
        if type(label) is not type(first):
            raise ConfigError(
                f"{where}: 'label' is {label!r}, and that of {where_first} is {first!r}; give numbers or names alone"
            )
    named = {label: where for where, label, names_a_class in reversed(labels) if names_a_class}
    if known:
        names = list(known)
    elif isinstance(first, str):
        names = sorted(named)
    else:
        numbers = sorted(number for number in named if number >= 0)
        gap = next((place for place, number in enumerate(numbers) if place != number), None)
        if gap is not None:
            raise ConfigError(
                f"{named[numbers[gap]]}: 'label' {numbers[gap]} is out of range: no record has the label {gap}, and "
                "classes are numbered 0, 1, ... without a gap"
            )
        names = [f"LABEL_{number}" for number in numbers]
    for where, label, _ in labels:
        if class_of(label, names) is None:
            listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
            source = "the model has" if known else "the records that are trained on have"
            raise ConfigError(f"{where}: 'label' {label!r} is out of range; {source} the {len(names)} classes {listed}")
    if len(names) < 2:
        raise ConfigError(f"all labels are {first!r}; a classifier needs two classes")
    return names


def class_of(label: int | str, names: Sequence[str]) -> int | None:
    """The number of a label; None if it is no class."""
    if isinstance(label, int):
        return label if 0 <= label < len(names) else None
    return names.index(label) if label in names else None
