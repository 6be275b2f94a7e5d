"""Windows: documents packed into sequences of one length, made once, memory mapped by every rank.

A window holds token ids, labels (-100 where nothing is learned) and positions. Positions begin at 0 in each document:
so the model sees where one ends, and no document sees another. Rows of the other tasks are not packed: a window holds
one or two, each with its ids, its labels and 1 at each token that is no padding.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from core.checkpoint.bounded_read import CHUNK_BYTES, open_regular, parse_json, read_bytes
from core.finetune.config import Task, TunedData
from core.finetune.fields import checked, unread
from core.finetune.records import Example, encode, marked, read_records
from core.finetune.task_records import checked_task, class_names, encode_task, fit_rows, unread_of
from core.training.errors import ConfigError

FORMAT = 5  # changes whenever the same data would give other windows
MOST_NAMES = 8  # of fields, on one line
UNLEARNED = -100  # the label of a token that has no loss
IDS, LABELS, POSITIONS = range(3)
MASK = POSITIONS  # in a row of a task that is not packed
HEADER, PARTS = "header.json", ("train", "validation")


@dataclass(frozen=True)
class WindowsHeader:
    """Header of the windows; a JSON file next to them."""

    text: str
    documents: int
    tokens: int
    learned: int
    length: int
    train_windows: int
    validation_windows: int
    cut: int  # answers longer than a window
    dropped: int  # documents of which nothing is learned in the first window
    unended: int  # documents with an answer whose end has no mark
    unread: list[str]  # names of fields that change nothing
    largest_id: int  # of all windows
    largest_in: str  # where in the data it stands
    sample: str  # the first document, with what is learned marked
    digest: str
    task: Task = "causal"
    classes: Sequence[str] = ()  # names of the classes of a classifier, in the order of their numbers

    def describe(self) -> str:
        """One line for the log."""
        windows = self.train_windows + self.validation_windows
        share = 100 * self.tokens / max(1, windows * self.length)
        rest = [f"the classes {', '.join(map(repr, self.classes))}"] if self.classes else []
        rest += [f"{self.cut} cut at {self.length} tokens"] if self.cut else []
        why = "longer than" if self.task == "reward" else "nothing to learn in the first"
        rest += [f"{self.dropped} left out ({why} {self.length})"] if self.dropped else []
        if self.unended:
            rest.append(f"in {self.unended} no mark ends an answer, so the model does not learn to stop there")
        names = ", ".join(map(repr, self.unread[:MOST_NAMES])) + (", ..." if len(self.unread) > MOST_NAMES else "")
        rest += [f"fields that are not used: {names}"] if names else []
        marks = "" if self.classes else ", learned in [[ ]]"
        rest += [f"the first{marks}: {self.sample}"] if self.sample else []
        if self.task != "causal":
            kind = "texts" if self.classes else "pairs"
            return (
                f"data: {self.text}, {self.documents:,} {kind}, {self.tokens:,} tokens; "
                f"{self.train_windows:,} to train on and {self.validation_windows:,} to validate on"
                + "".join(f"; {words}" for words in rest)
            )
        return (
            f"data: {self.text}, {self.documents:,} documents, {self.tokens:,} tokens, {self.learned:,} of them "
            f"learned; {self.train_windows:,} windows and {self.validation_windows:,} to validate on, {share:.0f}% full"
            + "".join(f"; {words}" for words in rest)
        )


@dataclass(frozen=True)
class Windows:
    """Memory-mapped windows [windows, 3, length] of int32: ids, labels, positions."""

    header: WindowsHeader
    train: np.ndarray
    validation: np.ndarray


def fit(examples: Iterable[Example], length: int) -> tuple[list[Example], int, int]:
    """(documents of at most `length` tokens, how many were cut, how many left out). A text is cut into several."""
    fitting: list[Example] = []
    cut = dropped = 0
    for example in examples:
        if example.is_text:
            for start in range(0, len(example.ids), length):
                part = slice(start, start + length)
                if len(example.ids[part]) > 1:
                    fitting.append(Example(example.ids[part], example.learned[part], is_text=True))
            continue
        cut += len(example.ids) > length
        if example.learned[1:length].any():
            fitting.append(Example(example.ids[:length], example.learned[:length], is_text=False))
        else:
            dropped += 1
    return fitting, cut, dropped


def pack(examples: Iterable[Example], length: int, padding: int, *, packing: bool) -> np.ndarray:
    """[windows, 3, length] of int32. A document goes to the first window that has room for it, or each has its own.

    The first token of a document is never a label: it is the answer to nothing.
    """
    windows: list[list[Example]] = []
    rooms: list[tuple[int, int]] = []  # (room, window) of those that may take more
    for example in examples:
        size = len(example.ids)
        place = next((index for index, (room, _) in enumerate(rooms) if room >= size), None) if packing else None
        if place is None:
            windows.append([example])
            rooms = [*rooms, (length - size, len(windows) - 1)][-64:]  # the oldest are full enough
        else:
            room, number = rooms[place]
            windows[number].append(example)
            rooms[place] = room - size, number
    arrays = np.empty((len(windows), 3, length), dtype=np.int32)
    arrays[:, IDS], arrays[:, LABELS] = padding, UNLEARNED
    for array, documents in zip(arrays, windows, strict=True):
        start = 0
        for document in documents:
            end = start + len(document.ids)
            array[IDS, start:end] = document.ids
            array[LABELS, start:end] = np.where(document.learned, document.ids, UNLEARNED)
            array[LABELS, start] = UNLEARNED
            array[POSITIONS, start:end] = np.arange(end - start)
            start = end
        array[POSITIONS, start:] = np.arange(length - start)  # padding is a document of its own
    return arrays


def stack(records: Sequence[Sequence[Example]], length: int, padding: int) -> np.ndarray:
    """[records, 3 * rows, length] of int32: the rows of each record, padded; of a text the first label is its class."""
    arrays = np.zeros((len(records), 3 * (len(records[0]) if records else 1), length), dtype=np.int32)
    for array, rows in zip(arrays, records, strict=True):
        for row, into in zip(rows, array.reshape(len(rows), 3, length), strict=True):
            padded = (0, length - len(row.ids))
            into[IDS] = np.pad(row.ids, padded, constant_values=padding)
            into[LABELS] = np.pad(np.where(row.learned, row.ids, UNLEARNED), padded, constant_values=UNLEARNED)
            into[LABELS, 0] = UNLEARNED if row.label is None else row.label
            into[MASK, : len(row.ids)] = 1
    return arrays


def read_documents(options: TunedData) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """(where it stands, record, True if it is validated on and not trained on) of each document.

    A document that is trained on comes as often as the weight of its file says; one of half a weight every second time.
    """
    own, fraction = options.eval_file, options.validation_fraction
    check = checked if options.task == "causal" else partial(checked_task, options.task)
    every = round(1 / fraction) if fraction and own is None else 0
    number = 0
    for file, weight in zip(options.file or (None,), options.weights or itertools.repeat(1.0), strict=False):
        share, due = Fraction(repr(weight)), Fraction(0)
        for where, record in read_records(file, options.limit, check=check):
            number += 1
            if every > 0 and number % every == 0:
                yield where, record, True
                continue
            due += share
            while due >= 1:
                due -= 1
                yield where, record, False
    if own is not None:
        for where, record in read_records(own, None, "--data.eval-file", "validation", check):
            yield where, record, True


def _sources(options: TunedData) -> str:
    """The names of the data, for the log."""
    weights = options.weights or (1.0,) * len(options.file)
    names = [
        f"{file}{'' if weight == 1 else f' x {weight:g}'}" for file, weight in zip(options.file, weights, strict=True)
    ]
    with_own = "" if options.eval_file is None else f", with {options.eval_file} to validate on"
    return (", ".join(names) or "Python standard library") + with_own


def classes_of(options: TunedData, known: Sequence[str]) -> list[str]:
    """Names of the classes of records of classification; none of another task. ConfigError as `class_names` raises it.

    Of the data those with the labels of `--data` alone are classes. known: of a model that classifies already.
    """
    if options.task != "classification":
        return []
    return class_names(
        [
            (where, record["label"], not (held_out and options.eval_file is not None))
            for where, record, held_out in read_documents(options)
        ],
        known,
    )


def digest_of(options: TunedData, length: int, tokenizer: Any, stops: Sequence[str], known: Sequence[str] = ()) -> str:
    """The name of the windows of this data. All that encoding and packing read decides it.

    That is the data, how it is packed, and of the tokenizer its words, its marks and its chat template.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # encoding uses neither, and its first call would change the text of the backend
    backend.no_padding()
    marks = {
        "special": tokenizer.special_tokens_map,  # a chat template reads these by name
        "end": tokenizer.eos_token_id,
        "padding": tokenizer.pad_token_id,
        "added": {number: repr(token) for number, token in tokenizer.added_tokens_decoder.items()},
        "stops": list(stops),
        "template": tokenizer.chat_template,
    }
    packed = (FORMAT, length, options.packing, options.task, list(known))
    digest = hashlib.sha256(json.dumps([packed, marks], sort_keys=True, default=str).encode())
    digest.update(backend.to_str().encode())
    for _, record, held_out in read_documents(options):
        digest.update(json.dumps([held_out, record], default=str).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def prepare_windows(
    options: TunedData, length: int, tokenizer: Any, stops: Sequence[str] = (), known: Sequence[str] = ()
) -> str:
    """Make the windows unless they are there, whole; the name of their folder in the cache.

    Safe from several processes. stops: marks at which the model stops, besides the tokenizer's end mark. known: as in
    `classes_of`.
    """
    digest = digest_of(options, length, tokenizer, stops, known)
    folder = options.cache / f"windows-{digest[:16]}"
    if os.path.lexists(folder):
        damage = damage_of(folder)
        if damage is None:
            return folder.name
        print(f"{folder} is damaged ({damage}), so its windows are made again", flush=True)
    template = str(tokenizer.chat_template or "")
    classes, task = classes_of(options, known), options.task
    records: list[list[Example]] = []
    places, held_out, unused = [], [], set()
    for where, record, is_held_out in read_documents(options):
        if task == "causal":
            records.append([encode(record, tokenizer, where, stops)])
            unused |= unread(record, template)
        else:
            records.append(encode_task(task, record, tokenizer, where, stops, length, classes))
            unused |= unread_of(task, record)
        places.append(where)
        held_out.append(is_held_out)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    parts, left_out = {}, {"cut": 0, "dropped": 0}
    for name, wanted in zip(PARTS, (False, True), strict=True):
        chosen = [rows for rows, held in zip(records, held_out, strict=True) if held == wanted]
        if task == "causal":
            fitting, cut, dropped = fit(itertools.chain(*chosen), length)
            parts[name] = fitting, pack(fitting, length, padding, packing=options.packing)
        else:
            kept, cut, dropped = fit_rows(task, chosen, length)
            parts[name] = list(itertools.chain(*kept)), stack(kept, length, padding)
        left_out = {"cut": left_out["cut"] + cut, "dropped": left_out["dropped"] + dropped}
    own = options.eval_file
    if own is not None and len(parts["validation"][1]) == 0:
        raise ConfigError(
            f"--data.eval-file {own} gives no window to validate on: its documents have nothing to learn in their "
            f"first {length} tokens; use a larger --model.sequence-length"
        )
    documents = [example for fitting, _ in parts.values() for example in fitting]
    largest = max((int(windows[:, IDS::3].max()) for _, windows in parts.values() if len(windows)), default=0)
    sample = marked(documents[0], tokenizer) if documents else ""
    if classes and documents and documents[0].label is not None:
        sample += f" -> {classes[documents[0].label]!r}"
    header = WindowsHeader(
        text=_sources(options),
        documents=len(records) - left_out["dropped"],
        tokens=sum(len(example.ids) for example in documents),
        learned=sum(int(example.learned[1:].sum()) for example in documents),
        length=length,
        train_windows=len(parts["train"][1]),
        validation_windows=len(parts["validation"][1]),
        unended=sum(not example.ends for example in itertools.chain(*records)),
        unread=sorted(unused),
        largest_id=largest,
        largest_in=next(
            (where for where, rows in zip(places, records, strict=True) if any(largest in row.ids for row in rows)),
            "the padding",
        ),
        sample=sample,
        digest=digest,
        task=task,
        classes=classes,
        **left_out,
    )
    _write_whole(folder, header, {name: windows for name, (_, windows) in parts.items()})
    return folder.name


def _write_whole(folder: Path, header: WindowsHeader, parts: Mapping[str, np.ndarray]) -> None:
    """Write the windows, and let them appear by one rename, in the place of what is damaged."""
    partial, old = (folder.with_name(f"{folder.name}.{os.getpid()}.{word}") for word in ("partial", "damaged"))
    partial.mkdir(parents=True, exist_ok=True)
    try:
        for name, windows in parts.items():
            np.save(partial / f"{name}.npy", windows)
        body = json.dumps(asdict(header))
        sums = {name: _sha256(partial / f"{name}.npy") for name in parts}
        sums["header"] = hashlib.sha256(body.encode()).hexdigest()
        (partial / HEADER).write_text(json.dumps({"header": body, "sha256": sums}, indent=2))
        if os.path.lexists(folder) and damage_of(folder) is not None:
            folder.rename(old)
        partial.rename(folder)
    except OSError:
        if damage_of(folder) is not None:  # else another process was first
            raise
    finally:
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)


def damage_of(folder: Path) -> str | None:
    """Return what is wrong with the windows in a folder; None if all files are unchanged."""
    try:
        header, sums = _read_header(folder)
        for name in PARTS:
            if _sha256(folder / f"{name}.npy") != sums[name]:
                return f"{name}.npy has other content than was written"
    except (OSError, ValueError, TypeError, KeyError) as error:
        return " ".join(str(error).split())[:200] or repr(error)
    return None if folder.name == f"windows-{header.digest[:16]}" else "it has the windows of other data"


def _read_header(folder: Path) -> tuple[WindowsHeader, dict[str, str]]:
    """(the header, SHA-256 of each part). ValueError where the header is not as it was written."""
    content = parse_json(read_bytes(folder / HEADER))
    if not isinstance(content, dict) or content.keys() != {"header", "sha256"}:
        raise ValueError(f"{HEADER} is no header of windows")
    body, sums = str(content["header"]), dict(content["sha256"])
    if hashlib.sha256(body.encode()).hexdigest() != sums["header"]:
        raise ValueError(f"{HEADER} has other content than was written")
    return WindowsHeader(**json.loads(body)), sums


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


def check_rows(header: WindowsHeader, rows: int, tokenizer: Any) -> None:
    """ConfigError if the windows hold a token that the model has no embedding of. rows: of the embedding."""
    if header.largest_id >= rows:
        token = tokenizer.convert_ids_to_tokens(header.largest_id)
        raise ConfigError(
            f"{header.largest_in}: the token {token!r} has the id {header.largest_id}, and the model's embedding has "
            f"{rows} rows, for ids 0 to {rows - 1}; give the model that the tokenizer is of, or resize it "
            "(resize_token_embeddings) where tokens were added"
        )


def open_windows(folder: Path) -> Windows:
    """Map the windows of a folder. ConfigError where there is none to train on."""
    header, _ = _read_header(folder)
    train, validation = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in PARTS)
    if len(train) == 0:
        why = (
            f"{header.dropped} of its documents have nothing to learn in their first {header.length} tokens; use a "
            "larger --model.sequence-length"
            if header.dropped
            else "no text of it has two tokens; give more text"
        )
        raise ConfigError(f"{header.text} gives no window to train on: {why}")
    return Windows(header, train, validation)
