"""Records: lines of JSON as token ids, and which of them are learned. No model and no processes.

A chat is written by the tokenizer's own template. Learned are the answers: what the template writes for messages of the
role `assistant`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.training.errors import ConfigError
from core.training.text import open_text

STANDARD_LIBRARY_FILES = 100  # enough to see a loss fall, and tokenized in a second
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Example:
    """One document. ids: [tokens]. learned: [tokens] of bool. is_text: True if all is learned, so it may be cut."""

    ids: np.ndarray
    learned: np.ndarray
    is_text: bool


def read_records(file: Path | None, limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, record) of each line; of files of the standard library where there is no file.

    ConfigError, with the line's number, for one that is no JSON object or has no fields that are known.
    """
    if file is None:
        for path in open_text(()).files[: STANDARD_LIBRARY_FILES if limit is None else limit]:
            yield str(path), {"text": path.read_text(encoding="utf-8", errors="replace")}
        return
    count = 0
    try:
        if not file.is_file():
            raise ConfigError(f"--data.file {file} is no file (from {Path.cwd()}); give lines of JSON")
        lines = file.open(encoding="utf-8")
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise ConfigError(f"--data.file {str(file)[:300]!r} cannot be read: {error}") from error
    with lines:
        try:
            for number, line in enumerate(lines, start=1):
                if limit is not None and count >= limit:
                    return
                if line.strip():
                    count += 1
                    yield f"{file}, line {number}", _record(line, f"{file}, line {number}")
        except UnicodeDecodeError as error:
            raise ConfigError(f"--data.file {file} is no UTF-8 text: {error}") from error
    if count == 0:
        raise ConfigError(f"--data.file {file} holds no line")


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where} is {type(record).__name__}; expected a JSON object")
    if "messages" in record:
        _check_messages(record["messages"], where)
    elif "prompt" in record or "completion" in record:
        _check_texts(record, ("prompt", "completion"), where)
    elif "text" in record:
        _check_texts(record, ("text",), where)
    else:
        fields = ", ".join(map(repr, record)) or "none"
        raise ConfigError(f'{where} has the fields {fields}; expected "messages", "prompt" and "completion", or "text"')
    return record


def _check_texts(record: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        if not isinstance(record.get(name), str):
            raise ConfigError(f"{where}: {name!r} is {record.get(name)!r}; expected text")


def _check_messages(messages: Any, where: str) -> None:
    known = isinstance(messages, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )
    if not known or not messages:
        raise ConfigError(f'{where}: "messages" must be a list of objects with "role" and "content"')
    for number, message in enumerate(messages, start=1):
        if message["content"] is None and "tool_calls" not in message:  # templates would write the word None
            raise ConfigError(f"{where}: message {number} has the content null; expected text")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise ConfigError(f"{where}: no message has the role {ASSISTANT!r}, so there is no answer to learn")


def encode(record: Mapping[str, Any], tokenizer: Any, where: str) -> Example:
    """A record as token ids. ConfigError where the tokenizer has no template for a chat, or one that hides answers."""
    if "messages" in record:
        text, answers = _written_chat(record["messages"], tokenizer, where)
        return _tokenized(text, answers, tokenizer, special=False)
    if "text" in record:
        text = record["text"]
        example = _tokenized(text, [(0, len(text))], tokenizer, special=True)
        return Example(example.ids, np.ones(len(example.ids), dtype=bool), is_text=True)
    text = record["prompt"] + record["completion"]
    return _tokenized(text, [(len(record["prompt"]), len(text))], tokenizer, special=True)


def check_template(tokenizer: Any, where: str) -> None:
    """ConfigError unless chats can be written, and answers found in them."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{where} is a chat, and the model's tokenizer has no chat template; give a model that has one, or lines "
            'with "prompt" and "completion"'
        )


def check_tokenizer(tokenizer: Any) -> None:
    """ConfigError for a tokenizer without words, or one that does not say where in a text its tokens lie."""
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:  # transformers makes one where no file is
        raise ConfigError(
            f"the model's tokenizer, a {type(tokenizer).__name__}, makes no token of a text; copy the tokenizer's "
            "files (tokenizer.json, tokenizer_config.json) beside config.json"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"the model's tokenizer is a {type(tokenizer).__name__}, which cannot say where in a text a token lies; a "
            "tokenizer with a tokenizer.json is needed"
        )


def _written_chat(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> tuple[str, list[tuple[int, int]]]:
    """(the whole chat as text, where the answers lie in it), by what the template writes up to each answer."""
    check_template(tokenizer, where)

    def written(count: int, prompt: bool) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt))

    try:
        whole = written(len(messages), False)
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before, after = written(number, True), written(number + 1, False)
            if not after.startswith(before):
                before = written(number, False)  # a prompt that the template does not write before a given answer
            if not (after.startswith(before) and whole.startswith(after)):
                raise ConfigError(
                    f"{where}: the model's chat template writes message {number + 1} in another way when others follow "
                    "it, so its place in the chat is not known; give each answer in a line of its own"
                )
            answers.append((len(before), len(after)))
    except ConfigError:
        raise
    except Exception as error:  # templates raise what they like
        raise ConfigError(f"{where}: the model's chat template refuses it: {error}") from error
    return whole, answers


def _tokenized(text: str, answers: list[tuple[int, int]], tokenizer: Any, *, special: bool) -> Example:
    """special: True if the tokenizer adds its marks, and an end mark follows; a template has written them itself."""
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    starts = [(start, end) for start, end in encoded["offset_mapping"]]
    learned = [end > start and any(first <= start < last for first, last in answers) for start, end in starts]
    end_mark = tokenizer.eos_token_id
    if special and end_mark is not None and (not ids or ids[-1] != end_mark):
        ids.append(end_mark)
        learned.append(True)
    return Example(np.array(ids, dtype=np.int64), np.array(learned, dtype=bool), is_text=False)
