"""Chats as text: what a chat template writes, and where the answers lie in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.finetune.fields import ASSISTANT, is_named
from core.training.errors import ConfigError

PROBES = ("0", "1")  # two contents with nothing in common


@dataclass(frozen=True)
class WrittenChat:
    """text: the whole chat. answers: where in the text each learned answer lies, with its end mark.

    ends: True if each of them has an end mark.
    """

    text: str
    answers: list[tuple[int, int]]
    ends: bool


class ChatWriter:
    """Writes chats by the template of a tokenizer, with the tools and options of one record."""

    def __init__(self, record: Mapping[str, Any], tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tools = record.get("tools") or None
        self.options = record.get("chat_template_kwargs", {})

    def write(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
        """The text of some messages. prompt: True to write the beginning of an answer after them."""
        if not messages:
            return ""
        shown = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
        return str(
            self.tokenizer.apply_chat_template(
                shown, tools=self.tools, tokenize=False, add_generation_prompt=prompt, **self.options
            )
        )

    def before_first(self, whole: str) -> str:
        """The template's text before the content of a first message that is an answer."""
        probed = [self.write([{"role": ASSISTANT, "content": probe}]) for probe in PROBES]
        return min((os.path.commonprefix([whole, text]) for text in probed), key=len)

    def after(self, messages: Sequence[Mapping[str, Any]], whole: str) -> str:
        """The template's text after a chat that a user continues; empty if it refuses that."""
        try:
            longer = self.write([*messages, {"role": "user", "content": PROBES[0]}])
        except Exception:  # templates raise what they like
            return ""
        return longer[len(whole) :] if longer.startswith(whole) else ""


def check_template(record: Mapping[str, Any], tokenizer: Any, where: str) -> None:
    """ConfigError unless the tokenizer has a chat template that reads all fields of this chat."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{where} is a chat, and the model's tokenizer has no chat template; give a model that has one, or lines "
            'with "prompt" and "completion"'
        )
    names = [*(["tools"] if record.get("tools") else []), *record.get("chat_template_kwargs", {})]
    names += ["tool_calls"] if any(message.get("tool_calls") for message in record["messages"]) else []
    try:
        template = str(tokenizer.get_chat_template(None, record.get("tools") or None))
    except ValueError as error:  # several templates, and none by default
        raise ConfigError(f"{where}: the model's tokenizer does not say how to write a chat: {error}") from None
    for name in names:
        if not is_named(name, template):
            raise ConfigError(
                f"{where} has {name!r}, which the model's chat template does not read, so it would be lost; take it "
                "out, or give a model whose template reads it"
            )


def written_chat(record: Mapping[str, Any], tokenizer: Any, where: str, stops: Sequence[str] = ()) -> WrittenChat:
    """The whole chat as text, and where the learned answers lie in it, by what the template writes up to each answer.

    Some templates write the end mark of an answer before the next message only. That mark belongs to the answer, and
    the last answer gets one too. What a template writes after the end mark, such as a newline, is no answer: the model
    has stopped. stops: marks at which the model stops, besides the tokenizer's end mark.
    """
    check_template(record, tokenizer, where)
    writer, messages = ChatWriter(record, tokenizer), record["messages"]
    stopping = {mark for mark in (*stops, tokenizer.eos_token) if mark}
    end_mark = re.compile(r"\s*(?:" + "|".join(map(re.escape, sorted(stopping, key=len, reverse=True))) + ")")
    try:
        whole = writer.write(messages)
        answers, ends = [], True
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT or not message.get("weight", 1):
                continue
            before, after = writer.write(messages[:number], prompt=True), writer.write(messages[: number + 1])
            if number == 0:
                before = writer.before_first(whole)
            if not after.startswith(before):
                before = writer.write(messages[:number])  # a prompt that is not written before a given answer
            if not (after.startswith(before) and whole.startswith(after)):
                raise ConfigError(
                    f"{where}: the model's chat template writes message {number + 1} in another way when others follow "
                    "it, so its place in the chat is not known; give each answer in a line of its own"
                )
            last, answer = len(after), after[len(before) :]
            end = _end_of(answer, str(message.get("content", "")).strip(), stopping, tokenizer)
            if end is not None:
                last = len(before) + end
            else:
                is_last = number + 1 == len(messages)
                following = writer.after(messages, whole) if is_last else whole[last:]
                mark = end_mark.match(following) if stopping else None
                ends = ends and mark is not None
                if mark is not None:
                    whole += mark.group() if is_last else ""
                    last += mark.end()
            answers.append((len(before), last))
    except ConfigError:
        raise
    except Exception as error:  # templates raise what they like
        raise ConfigError(f"{where}: the model's chat template refuses it: {error}") from error
    return WrittenChat(whole, answers, ends)


def _end_of(answer: str, content: str, stopping: set[str], tokenizer: Any) -> int | None:
    """Length of an answer up to the last mark that the template writes after its content, or to a special token.

    None where neither ends the answer.
    """
    closing = answer.rpartition(content)[2] if content else answer
    ends = [closing.rfind(mark) + len(mark) for mark in stopping if mark in closing]
    if ends:
        return len(answer) - len(closing) + max(ends)
    special = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return len(answer.rstrip()) if answer.rstrip().endswith(special) else None
