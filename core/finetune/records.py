"""Records: lines of JSON as token ids, and which of them are learned. No model and no processes.

A chat is written by the tokenizer's own template. Learned are the answers: what the template writes for messages of the
role `assistant`. A token is learned if any character of it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from core.finetune.chats import check_template, written_chat
from core.finetune.fields import checked
from core.finetune.sources import Part, read_source
from core.training.errors import ConfigError
from core.training.text import open_text

SPACE = "Ġ"  # as tokenizers of GPT-2's kind spell it
STANDARD_LIBRARY_FILES = 100  # enough to see a loss fall, and tokenized in a second


@dataclass(frozen=True)
class Example:
    """One document. ids: [tokens]. learned: [tokens] of bool. is_text: True if all is learned, so it may be cut.

    ends: True if a mark is learned at the end of each answer, by which the model learns to stop.
    """

    ids: np.ndarray
    learned: np.ndarray
    is_text: bool
    ends: bool = True
    label: int | None = None  # of a text that is classified
    is_cut: bool = False  # True if the tokenizer has left the end of the text out


def read_records(
    file: Path | None,
    limit: int | None,
    flag: str = "--data.file",
    part: Part = "train",
    check: Callable[[Mapping[str, Any], str], object] = checked,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, record) of each record of a source; of files of the standard library where there is none.

    flag: the option that names the source, for errors. part: as in `read_source`. check: of the fields of a record.
    ConfigError, with the line's number, for one that is no JSON object or has fields that cannot be obeyed.
    """
    if file is None:
        for path in open_text(()).files[: STANDARD_LIBRARY_FILES if limit is None else limit]:
            yield str(path), {"text": path.read_text(encoding="utf-8", errors="replace")}
        return
    for where, record in itertools.islice(read_source(file, part, flag), limit):
        check(record, where)
        yield where, record


def encode(record: Mapping[str, Any], tokenizer: Any, where: str, stops: Sequence[str] = ()) -> Example:
    """A record as token ids. stops: marks at which the model stops, besides the tokenizer's end mark.

    ConfigError where the tokenizer has no template for a chat, or one that hides answers or does not read its fields.
    """
    record = checked(record, where)
    if "messages" in record:
        chat = written_chat(record, tokenizer, where, stops)
        example = _tokenized(chat.text, chat.answers, tokenizer, special=False)
        return replace(example, ends=chat.ends)
    if "text" in record:
        example = _tokenized(record["text"], [(0, len(record["text"]))], tokenizer, special=True)
        return replace(example, learned=np.ones(len(example.ids), dtype=bool), is_text=True)
    text = record["prompt"] + record["completion"]
    return _tokenized(text, [(len(record["prompt"]), len(text))], tokenizer, special=True)


def check_record(record: Mapping[str, Any], tokenizer: Any, where: str) -> None:
    """ConfigError for a chat that the tokenizer's template cannot write with all its fields."""
    used = checked(record, where)
    if "messages" in used:
        check_template(used, tokenizer, where)


def check_tokenizer(tokenizer: Any) -> None:
    """ConfigError for a tokenizer without words, or one that does not say where in a text its tokens lie."""
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:  # transformers makes one where no file is
        raise ConfigError(
            f"the model's tokenizer, a {type(tokenizer).__name__}, makes no token of a text; copy the tokenizer's "
            "files (tokenizer.json, tokenizer_config.json) next to config.json"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"the model's tokenizer is a {type(tokenizer).__name__}, which cannot say where in a text a token lies; a "
            "tokenizer with a tokenizer.json is needed"
        )


def _tokenized(text: str, answers: Sequence[tuple[int, int]], tokenizer: Any, *, special: bool) -> Example:
    """Tokens of a text. special: True if the tokenizer adds its marks, and an end mark follows.

    A token has the characters of which it is made, and is learned if one of them lies in an answer: a token may begin
    in the prompt. Marks that the tokenizer adds after the text are learned, because the model ends by them.
    """
    encoded = tokenizer(
        text,
        add_special_tokens=special,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        verbose=False,
    )
    ids, added = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    pieces = tokenizer.convert_ids_to_tokens(ids)
    learned = []
    reached = 0
    for piece, (start, end), is_added in zip(pieces, encoded["offset_mapping"], added, strict=True):
        if is_added:
            learned.append(False)
            continue
        first, reached = _with_spaces(piece, start, end, reached, text)
        learned.append(any(first < high and low < reached for low, high in answers))
    end_mark = tokenizer.eos_token_id
    if special and end_mark is not None and (not ids or ids[-1] != end_mark):
        ids, added, learned = [*ids, end_mark], [*added, 1], [*learned, True]
    place = len(ids)
    while place and added[place - 1]:
        place -= 1
        learned[place] = True
    ends = place < len(ids) or ids[-1:] == [end_mark]
    return Example(np.array(ids, dtype=np.int64), np.array(learned, dtype=bool), is_text=False, ends=ends)


def _with_spaces(piece: str, start: int, end: int, reached: int, text: str) -> tuple[int, int]:
    """(start, end) of a token in its text, with the spaces that a tokenizer of GPT-2's kind leaves out of its place.

    piece: the token as the vocabulary spells it. reached: the end of the token before.
    """
    before = len(piece) - len(piece.lstrip(SPACE))
    after = len(piece) - len(piece.rstrip(SPACE)) if before < len(piece) else 0
    is_trimmed = after > 0 and text[end - 1 : end] != " "
    return min(start, max(reached, start - before)), end + after if is_trimmed else end


def marked(example: Example, tokenizer: Any, width: int = 60) -> str:
    """A document in one line, with what is learned in [[ ]]. Longer parts than `width` characters are shortened."""
    borders = [0, *(np.flatnonzero(np.diff(example.learned)) + 1).tolist(), len(example.ids)]
    parts, before = [], ""
    for start, end in zip(borders[:7], borders[1:7], strict=False):
        upto = tokenizer.decode(example.ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        part = upto[len(before) :]  # alone it would lose the space in front of it
        before = upto
        if len(part) > width:
            part = f"{part[: width // 2]} ... {part[-width // 2 :]}"
        shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in part)
        parts.append(f"[[{shown}]]" if example.learned[start : start + 1].all() else shown)
    return "".join(parts) + (" ..." if len(borders) > 7 else "")
