"""Fields of a line of JSON: which kind of record it is, and what its fields may hold. Pure: no model, no tokenizer.

A field is obeyed or refused by its name. Null is the same as absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core.finetune.formats import from_alpaca, from_prompt_and_completion, from_sharegpt, text_of
from core.training.errors import ConfigError

ASSISTANT = "assistant"
# The fields of each kind of record. A line is of one kind.
KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "text": ("text",),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}
MORE: dict[str, tuple[str, ...]] = {"alpaca": ("input", "system"), "sharegpt": ("system",)}  # what else a kind may have
TEXTS = ("completion", "text")
CHAT_FIELDS = ("tools", "chat_template_kwargs")  # go to the chat template, so they are of chats alone
MESSAGE_FIELDS = ("role", "content", "weight")
ONE_OF = (
    'expected "messages", "prompt" and "completion", or "text"; or "instruction" and "output" as Alpaca has them, or '
    '"conversations" as ShareGPT has them'
)
_AS_MESSAGES: dict[str, Callable[[Mapping[str, Any], str], Any]] = {
    "messages": lambda given, where: given["messages"],
    "completion": from_prompt_and_completion,
    "alpaca": from_alpaca,
    "sharegpt": from_sharegpt,
}
# Arguments of `apply_chat_template`, which are no names that a template reads.
RESERVED = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"}
    | {"continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"}
    | {"return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)


def checked(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a record that are used: of text, or of a chat whose contents are text. Nulls are left out.

    where: file and line, for errors. A record that this function returned is returned unchanged. ConfigError for a
    record of no kind, or of several, and for a value that cannot be obeyed.
    """
    given = {name: value for name, value in record.items() if value is not None}
    kind = kind_of(given, where)
    if kind in TEXTS and not isinstance(given.get("prompt"), list):
        texts = {name: text_of(given, name, where) for name in KINDS[kind]}
        for name in CHAT_FIELDS:
            if name in given:
                raise ConfigError(f'{where}: {name!r} is read by chat templates; give the record as "messages"')
        return texts
    _check_chat_fields(given, where)
    options = {name: given[name] for name in CHAT_FIELDS if name in given}
    return {"messages": _messages(_AS_MESSAGES[kind](given, where), where), **options}


def kind_of(given: Mapping[str, Any], where: str) -> str:
    """The kind of a record without nulls. ConfigError for none, and for several.

    A chat that has a field of another kind stays a chat, unless it has all of them: data sets give the prompt twice.
    """
    kinds = [kind for kind, names in KINDS.items() if any(name in given for name in names)]
    if "messages" in kinds or "sharegpt" in kinds:
        kinds = [kind for kind in kinds if all(name in given for name in KINDS[kind])]
    if not kinds:
        fields = ", ".join(map(repr, given)) or "none"
        raise ConfigError(f"{where} has the fields {fields}; {ONE_OF}")
    if len(kinds) > 1:
        fields = ", ".join(repr(name) for kind in kinds for name in KINDS[kind] if name in given)
        raise ConfigError(f"{where} has the fields {fields} at once, of which one kind alone is learned; {ONE_OF}")
    return kinds[0]


def _check_chat_fields(given: Mapping[str, Any], where: str) -> None:
    tools, options = given.get("tools", []), given.get("chat_template_kwargs", {})
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where}: 'tools' is {_short(tools)}; expected a list of objects, each a JSON schema")
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: 'chat_template_kwargs' is {_short(options)}; expected an object")
    for name in options:
        if name in RESERVED:
            raise ConfigError(f"{where}: 'chat_template_kwargs' has {name!r}, which the job sets; leave it out")


def _messages(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ConfigError(f'{where}: "messages" must be a list of objects with "role" and "content"')
    found = [_message(message, f"{where}: message {number}") for number, message in enumerate(messages, start=1)]
    answers = [message for message in found if message["role"] == ASSISTANT]
    if not answers:
        raise ConfigError(f"{where}: no message has the role {ASSISTANT!r}, so there is no answer to learn")
    if not any(message.get("weight", 1) for message in answers):
        raise ConfigError(f"{where}: all answers have the weight 0, so there is no answer to learn")
    return found


def _is_message(message: Any) -> bool:
    has_role = isinstance(message, dict) and isinstance(message.get("role"), str)
    return has_role and bool({"content", "tool_calls"} & message.keys())


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if value is not None}
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = _joined(content, where)
    elif content is None and not found.get("tool_calls"):  # templates would write the word None
        raise ConfigError(f"{where} has the content null; expected text")
    elif content is not None and not isinstance(content, str):
        raise ConfigError(f"{where} has the content {_short(content)}; expected text")
    calls = found.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f"{where} has the tool_calls {_short(calls)}; expected a list of objects")
    weight = found.get("weight", 0)
    if not isinstance(weight, (int, float)) or weight not in (0, 1):
        raise ConfigError(f"{where} has the weight {_short(weight)}; expected 0 (no loss) or 1")
    if weight and found["role"] != ASSISTANT:
        raise ConfigError(
            f"{where} has the weight {weight} and the role {found['role']!r}; only those of {ASSISTANT!r} have a loss"
        )
    return found


def _joined(parts: Sequence[Any], where: str) -> str:
    """Text of a content that is given in parts."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            part_in_words = f"of type {kind!r}" if isinstance(kind, str) else _short(part)
            raise ConfigError(
                f'{where} has a part {part_in_words}; only parts {{"type": "text", "text": ...}} are read'
            )
        if not isinstance(part.get("text"), str):
            raise ConfigError(f"{where} has a part whose text is {_short(part.get('text'))}; expected text")
    return "".join(part["text"] for part in parts)


def unread(record: Mapping[str, Any], template: str | None) -> set[str]:
    """Names of fields that are given and change nothing. template: the chat template's text, which reads what it names.

    Fields of messages have a dot in front. record: one that `checked` takes.
    """
    given = {name: value for name, value in record.items() if value is not None}
    kind = kind_of(given, "")
    found = given.keys() - {*CHAT_FIELDS, *KINDS[kind], *MORE.get(kind, ())}
    for message in checked(given, "").get("messages", ()):
        found |= {f".{name}" for name in message if name not in MESSAGE_FIELDS and not is_named(name, template)}
    return found


def is_named(name: str, template: str | None) -> bool:
    """True if the text of a chat template has this name in it."""
    return template is not None and re.search(rf"\b{re.escape(name)}\b", template) is not None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
