"""Records as other programs write them: Alpaca's, ShareGPT's, and TRL's prompts and completions of messages.

Each becomes a chat, which the model's own template writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.training.errors import ConfigError

SPEAKERS = {
    **{"system": "system", "human": "user", "user": "user"},
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


def from_alpaca(given: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Messages of an instruction, its input, if any, and the output."""
    texts = {name: text_of({name: "", **given}, name, where) for name in ("instruction", "input", "system")}
    texts["output"] = text_of(given, "output", where)
    question = "\n\n".join(texts[name] for name in ("instruction", "input") if texts[name])
    if not question:
        raise ConfigError(f"{where} has an 'output' and neither 'instruction' nor 'input'")
    return [*_system(texts["system"]), _says("user", question), _says("assistant", texts["output"])]


def from_sharegpt(given: Mapping[str, Any], where: str) -> Any:
    """Messages of a conversation. One that has roles and contents already is returned unchanged."""
    conversation, system = given["conversations"], text_of({"system": "", **given}, "system", where)
    if not isinstance(conversation, list) or not all(isinstance(part, dict) for part in conversation):
        raise ConfigError(f'{where}: "conversations" must be a list of objects with "from" and "value"')
    return [*_system(system), *(_spoken(part, number, where) for number, part in enumerate(conversation, start=1))]


def text_of(given: Mapping[str, Any], name: str, where: str) -> str:
    """The text of a field. ConfigError for another value, and where the record has none."""
    text = given.get(name)
    if text is None:
        raise ConfigError(f"{where} has no {name!r}; expected text")
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {name!r} is {text!r}; expected text")
    return text


def _spoken(part: Mapping[str, Any], number: int, where: str) -> dict[str, Any]:
    if "from" not in part and "role" in part:
        return dict(part)
    speaker = part.get("from")
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise ConfigError(f"{where}: message {number} is from {speaker!r}; expected {', '.join(map(repr, SPEAKERS))}")
    if part.get("value") is None and not part.get("tool_calls"):
        raise ConfigError(f"{where}: message {number} has no 'value'; expected text")
    others = {name: value for name, value in part.items() if name not in ("from", "value")}
    return {**others, "role": SPEAKERS[speaker], "content": part.get("value")}


def from_prompt_and_completion(given: Mapping[str, Any], where: str) -> list[Any]:
    """Messages of a prompt and its completion. Answers of the prompt have no loss."""
    prompt, completion = given["prompt"], given.get("completion")
    if not isinstance(completion, list):
        found = "there is no 'completion'" if completion is None else f"'completion' is {completion!r}"
        raise ConfigError(f"{where}: 'prompt' is a list of messages, and {found}; expected one too")
    shown = [
        {**message, "weight": 0} if isinstance(message, dict) and message.get("role") == "assistant" else message
        for message in prompt
    ]
    return [*shown, *completion]


def _system(text: str) -> Sequence[dict[str, Any]]:
    return [_says("system", text)] if text else []


def _says(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}
