"""Windows: documents packed into sequences of one length, made once, memory mapped by every rank.

A window holds token ids, labels (-100 where nothing is learned) and positions. Positions begin at 0 in each document:
that is how a model is told where one ends, so that no document sees another.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.finetune.config import TunedData
from core.finetune.records import Example, encode, read_records
from core.training.errors import ConfigError

FORMAT = 1  # changes whenever the same data would give other windows
UNLEARNED = -100  # the label of a token that has no loss
IDS, LABELS, POSITIONS = range(3)


@dataclass(frozen=True)
class WindowsHeader:
    """What the windows hold; lies beside them as JSON."""

    text: str
    documents: int
    tokens: int
    learned: int
    length: int
    train_windows: int
    validation_windows: int
    cut: int  # answers longer than a window
    dropped: int  # documents of which nothing is learned in the first window
    digest: str

    def describe(self) -> str:
        """One line for the log."""
        windows = self.train_windows + self.validation_windows
        share = 100 * self.tokens / max(1, windows * self.length)
        rest = [f"{self.cut} cut at {self.length} tokens"] if self.cut else []
        rest += [f"{self.dropped} left out (nothing to learn in the first {self.length})"] if self.dropped else []
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


def digest_of(options: TunedData, length: int, tokenizer: Any) -> str:
    """The name of the windows of this data: its content, the tokenizer and how it is packed decide it."""
    digest = hashlib.sha256(f"{FORMAT}\0{length}\0{options.packing}\0{options.validation_fraction}".encode())
    digest.update(f"{tokenizer.backend_tokenizer.to_str()}\0{tokenizer.chat_template}".encode())
    for _, record in read_records(options.file, options.limit):
        digest.update(json.dumps(record, sort_keys=True).encode())
    return digest.hexdigest()


def prepare_windows(options: TunedData, length: int, tokenizer: Any) -> str:
    """Make the windows unless they are there; the name of their folder in the cache. Safe from several processes."""
    digest = digest_of(options, length, tokenizer)
    folder = options.cache / f"windows-{digest[:16]}"
    if folder.is_dir():
        return folder.name
    records = read_records(options.file, options.limit)
    examples = [encode(record, tokenizer, where) for where, record in records]
    every = round(1 / options.validation_fraction) if options.validation_fraction else 0
    held_out = [every > 0 and number % every == every - 1 for number in range(len(examples))]
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    parts, told = {}, {"cut": 0, "dropped": 0}
    for name, wanted in (("train", False), ("validation", True)):
        chosen = (example for example, held in zip(examples, held_out, strict=True) if held == wanted)
        fitting, cut, dropped = fit(chosen, length)
        told = {"cut": told["cut"] + cut, "dropped": told["dropped"] + dropped}
        parts[name] = fitting, pack(fitting, length, padding, packing=options.packing)
    documents = [example for fitting, _ in parts.values() for example in fitting]
    header = WindowsHeader(
        text="Python standard library" if options.file is None else str(options.file),
        documents=len(examples) - told["dropped"],
        tokens=sum(len(example.ids) for example in documents),
        learned=sum(int(example.learned[1:].sum()) for example in documents),
        length=length,
        train_windows=len(parts["train"][1]),
        validation_windows=len(parts["validation"][1]),
        digest=digest,
        **told,
    )
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        for name, (_, windows) in parts.items():
            np.save(partial / f"{name}.npy", windows)
        (partial / "header.json").write_text(json.dumps(asdict(header), indent=2))
        partial.rename(folder)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if not folder.is_dir():  # else another process was first
            raise
    return folder.name


def open_windows(folder: Path) -> Windows:
    """Map the windows of a folder. ConfigError where there is none to train on."""
    header = WindowsHeader(**json.loads((folder / "header.json").read_text()))
    train, validation = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "validation"))
    if len(train) == 0:
        why = (
            f"{header.dropped} of its documents have nothing to learn in their first {header.length} tokens; use a "
            "larger --model.sequence-length"
            if header.dropped
            else "no text of it has two tokens; give more text"
        )
        raise ConfigError(f"{header.text} gives no window to train on: {why}")
    return Windows(header, train, validation)
