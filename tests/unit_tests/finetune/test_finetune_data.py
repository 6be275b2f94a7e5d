"""From lines of JSON to windows: what is learned, where documents lie, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
import tokenizers

from core.finetune.config import TunedData
from core.finetune.model import byte_tokenizer
from core.finetune.records import Example, encode, read_records
from core.finetune.windows import (
    IDS,
    LABELS,
    POSITIONS,
    UNLEARNED,
    check_rows,
    fit,
    open_windows,
    pack,
    prepare_windows,
)
from core.training.errors import ConfigError
from tests.unit_tests.finetune.tiny_tokenizers import with_end_mark

CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "und 3+3?"},
    {"role": "assistant", "content": "sechs é"},
]


def chat(**values: Any) -> str:
    """A line of one answer with these fields, of the record or of the message."""
    names = ("tools", "chat_template_kwargs")
    message = {"role": "assistant", "content": "x"} | {name: values[name] for name in values if name not in names}
    return json.dumps({"messages": [message]} | {name: values[name] for name in values if name in names})


def learned_text(example: Example, tokenizer: Any) -> str:
    return str(tokenizer.decode(example.ids[example.learned]))


def test_of_a_chat_the_answers_alone_are_learned() -> None:
    tokenizer = byte_tokenizer()
    example = encode({"messages": CHAT}, tokenizer, "line 1")
    assert tokenizer.decode(example.ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert learned_text(example, tokenizer) == "4<|im_end|>sechs é<|im_end|>"


def test_of_a_prompt_and_its_completion_the_completion_and_the_end_mark_are_learned() -> None:
    tokenizer = byte_tokenizer()
    example = encode({"prompt": "Frage: é? ", "completion": "ja"}, tokenizer, "line 1")
    assert tokenizer.decode(example.ids) == "Frage: é? ja<|im_end|>"
    assert learned_text(example, tokenizer) == "ja<|im_end|>"


def test_of_a_text_all_is_learned() -> None:
    example = encode({"text": "abc"}, byte_tokenizer(), "line 1")
    assert example.learned.all() and len(example.ids) == 4 and example.is_text


def test_a_template_that_writes_answers_in_another_way_later_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if not loop.last and message.role == 'assistant' %}<old>{% endif %}"
        "{{ message.content }}|{% endfor %}"
    )
    with pytest.raises(ConfigError, match="line 7: .* writes message 2 in another way when others follow it"):
        encode({"messages": CHAT}, tokenizer, "line 7")
    assert learned_text(encode({"messages": CHAT[:2]}, tokenizer, "line 8"), tokenizer) == "4|"
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(ConfigError, match="line 9: the model's chat template refuses it: no users here"):
        encode({"messages": CHAT}, tokenizer, "line 9")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="line 10 is a chat, and the model's tokenizer has no chat template"):
        encode({"messages": CHAT}, tokenizer, "line 10")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 is list; expected a JSON object"),
        ('{"messages": [{"role": "assistant", "content": null}]}', "line 2: message 1 has the content null; expected"),
        ('{"body": "x"}', 'line 2 has the fields \'body\'; expected "messages", "prompt" and "completion", or "text"'),
        ('{"text": 3}', "line 2: 'text' is 3; expected text"),
        ('{"prompt": "x"}', "line 2 has no 'completion'; expected text"),
        ('{"messages": []}', 'line 2: "messages" must be a list of objects with "role" and "content"'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2: no message has the role 'assistant'"),
        ('{"text": "a", "text": "b"}', "line 2 is no JSON: an object has the name 'text' twice"),
        ('{"prompt": "a", "completion": "b", "text": "c"}', "line 2 has the fields 'prompt', 'completion', 'text' at"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "text": "c"}', "the fields 'messages', 'text' at once"),
        ('{"text": null, "id": 1}', "line 2 has the fields 'id'; expected"),
        ('{"prompt": "a", "text": "c"}', "line 2 has the fields 'prompt', 'text' at once"),
        ('{"text": "\\ud83d"}', "line 2 has the escape \\ud83d alone, which is half of a character"),
        ('{"prompt": "\\uDE00 \\ud83d\\ude00", "completion": "b"}', "line 2 has the escape \\ude00 alone"),
        ('{"prompt": "a", "completion": "b", "tools": []}', "line 2: 'tools' is read by chat templates; give the"),
        (chat(tools={"a": 1}), "line 2: 'tools' is {'a': 1}; expected a list of objects"),
        (chat(chat_template_kwargs=[1]), "line 2: 'chat_template_kwargs' is [1]; expected an object"),
        (chat(chat_template_kwargs={"tokenize": True}), "line 2: 'chat_template_kwargs' has 'tokenize', which the job"),
        (chat(content=None, tool_calls=[]), "line 2: message 1 has the content null; expected text"),
        (chat(content=3), "line 2: message 1 has the content 3; expected text"),
        (chat(content=["x"]), "line 2: message 1 has a part 'x'; only parts"),
        (chat(content=[{"type": "image_url"}]), "line 2: message 1 has a part of type 'image_url'; only parts"),
        (chat(content=[{"type": "text", "text": 1}]), "line 2: message 1 has a part whose text is 1; expected text"),
        (chat(weight=0), "line 2: all answers have the weight 0, so there is no answer to learn"),
        (chat(weight=0.5), "line 2: message 1 has the weight 0.5; expected 0 (no loss) or 1"),
        (chat(weight="0"), "line 2: message 1 has the weight '0'; expected 0 (no loss) or 1"),
        (chat(tool_calls="x"), "line 2: message 1 has the tool_calls 'x'; expected a list of objects"),
        (
            '{"messages": [{"role": "user", "content": "x", "weight": 1}, {"role": "assistant", "content": "x"}]}',
            "line 2: message 1 has the weight 1 and the role 'user'; only those of 'assistant' have a loss",
        ),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    assert len(list(read_records(file, 1))) == 1
    with pytest.raises(ConfigError, match=re.escape(message)):
        list(read_records(file, None))


def test_a_line_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "fine"}\n\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match="line 3 is no UTF-8 text: .* can't decode byte 0xff"):
        list(read_records(file, None))


def test_a_mark_of_utf_8_in_front_is_left_out_and_one_of_utf_16_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n', encoding="utf-8-sig")  # as Windows' editors write it
    assert [record for _, record in read_records(file, None)] == [{"text": "fine"}]
    file.write_text('{"text": "fine"}\n', encoding="utf-16")
    with pytest.raises(ConfigError, match="data.jsonl, line 1 begins as UTF-16 text does; write the file in UTF-8"):
        list(read_records(file, None))


def test_a_null_is_the_same_as_absent(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "completion": "b", "text": null, "messages": null, "tools": null}\n')
    ((where, record),) = read_records(file, None)
    assert learned_text(encode(record, tokenizer, where), tokenizer) == "b<|im_end|>"
    with_nulls = [{**message, "tool_calls": None, "weight": None} for message in CHAT]
    for other in ({"messages": with_nulls, "text": None, "tools": None},):
        assert encode(other, tokenizer, where).ids.tolist() == encode({"messages": CHAT}, tokenizer, where).ids.tolist()


def test_contents_in_parts_are_joined() -> None:
    tokenizer = byte_tokenizer()
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": " é"}]
    record = {"messages": [CHAT[0], {"role": "assistant", "content": parts}]}
    assert learned_text(encode(record, tokenizer, "line 1"), tokenizer) == "4 é<|im_end|>"


def test_tools_and_options_reach_the_chat_template_or_are_refused() -> None:
    tokenizer = byte_tokenizer()
    plain, tool = tokenizer.chat_template, {"type": "function", "function": {"name": "add"}}
    record = {"messages": CHAT[:2], "tools": [tool], "chat_template_kwargs": {"mood": "calm"}}
    with pytest.raises(ConfigError, match="line 1 has 'tools', which the model's chat template does not read"):
        encode(record, tokenizer, "line 1")
    tokenizer.chat_template = "{{ tools | tojson }}" + plain
    with pytest.raises(ConfigError, match="line 1 has 'mood', which the model's chat template does not read"):
        encode(record, tokenizer, "line 1")
    tokenizer.chat_template = "{{ tools | tojson }}{{ mood }}" + plain
    example = encode(record, tokenizer, "line 1")
    said = tokenizer.decode(example.ids)
    assert json.loads(said.partition("calm")[0]) == [tool] and "calm<|im_start|>user" in said
    assert learned_text(example, tokenizer) == "4<|im_end|>"
    called = {"role": "assistant", "content": None, "tool_calls": [tool]}
    with pytest.raises(ConfigError, match="line 2 has 'tool_calls', which the model's chat template does not read"):
        encode({"messages": [CHAT[0], called]}, tokenizer, "line 2")


def test_a_chat_template_among_several_is_chosen_by_its_name() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"tool_use": tokenizer.chat_template + "{{ tools }}", "other": "x"}
    with pytest.raises(ConfigError, match="line 1: the model's tokenizer does not say how to write a chat"):
        encode({"messages": CHAT}, tokenizer, "line 1")


def example_of(*ids: int, learned: int = 0, text: bool = False) -> Example:
    """A document whose last tokens, from `learned` on, are learned."""
    return Example(np.array(ids), np.arange(len(ids)) >= learned, text)


def test_documents_are_packed_and_know_where_they_begin() -> None:
    documents = [example_of(1, 2, 3, 4, learned=2), example_of(5, 6, 7, 8, 9), example_of(10, 11, learned=1)]
    windows = pack(documents, 7, 99, packing=True)
    assert windows[:, IDS].tolist() == [[1, 2, 3, 4, 10, 11, 99], [5, 6, 7, 8, 9, 99, 99]]
    none = UNLEARNED
    assert windows[:, LABELS].tolist() == [[none, none, 3, 4, none, 11, none], [none, 6, 7, 8, 9, none, none]]
    assert windows[:, POSITIONS].tolist() == [[0, 1, 2, 3, 0, 1, 0], [0, 1, 2, 3, 4, 0, 1]]
    assert pack(documents, 7, 99, packing=False)[:, IDS, 0].tolist() == [1, 5, 10]


def test_texts_are_cut_into_several_and_answers_are_cut_or_left_out() -> None:
    text = example_of(*range(10), text=True)
    long_answer, late_answer = example_of(*range(9), learned=3), example_of(*range(9), learned=6)
    fitting, cut, dropped = fit([text, long_answer, late_answer], 4)
    assert [example.ids.tolist() for example in fitting] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert (cut, dropped) == (2, 1)


def add_prefix(tokenizer: Any) -> None:
    backend = tokenizer.backend_tokenizer
    backend.normalizer = tokenizers.normalizers.Prepend("x")


OTHER_TOKENIZERS: list[Callable[[Any], Any]] = [
    lambda tokenizer: setattr(tokenizer, "chat_template", "another"),
    lambda tokenizer: setattr(tokenizer, "eos_token", "<|endoftext|>"),
    lambda tokenizer: setattr(tokenizer, "pad_token", "<|im_end|>"),
    lambda tokenizer: setattr(tokenizer, "bos_token", "<|im_end|>"),  # templates read it
    lambda tokenizer: tokenizer.add_tokens(["document"]),
    add_prefix,
    with_end_mark,
]


def test_windows_are_made_once_and_again_for_other_data(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(40)))
    options = TunedData(file=(file,), cache=tmp_path / "cache", validation_fraction=0.1)
    tokenizer = byte_tokenizer()
    name = prepare_windows(options, 20, tokenizer)
    written = (options.cache / name / "train.npy").stat().st_mtime_ns
    assert prepare_windows(options, 20, tokenizer) == name
    assert (options.cache / name / "train.npy").stat().st_mtime_ns == written
    windows = open_windows(options.cache / name)
    assert (len(windows.train), len(windows.validation)) == (36, 4)  # of 11 or 12 tokens: two do not fit
    assert tokenizer.decode(windows.validation[0, IDS]).startswith("document 9<|im_end|>")
    assert windows.header.documents == 40 and windows.header.cut == windows.header.dropped == 0
    names = {name}
    for change in OTHER_TOKENIZERS:
        other = byte_tokenizer()
        change(other)
        names.add(prepare_windows(options, 20, other))
    assert len(names) == 1 + len(OTHER_TOKENIZERS)
    assert prepare_windows(options, 20, tokenizer, ["\n"]) not in names
    with pytest.raises(ConfigError, match=r"gives no window to train on: .* use a larger --model.sequence-length"):
        chat = tmp_path / "chat.jsonl"
        chat.write_text(json.dumps({"prompt": "x" * 50, "completion": "y"}) + "\n")
        options = TunedData(file=(chat,), cache=tmp_path / "cache")
        open_windows(options.cache / prepare_windows(options, 20, tokenizer))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: flip(folder / "train.npy"), "train.npy has other content than was written"),
        (lambda folder: flip(folder / "validation.npy"), "validation.npy has other content than was written"),
        (lambda folder: (folder / "train.npy").unlink(), "No such file or directory"),
        (lambda folder: (folder / "header.json").unlink(), "No such file or directory"),
        (lambda folder: (folder / "header.json").write_text("{"), "Expecting property name"),
        (lambda folder: change(folder / "header.json", "document 0", "document 7"), "header.json has other content"),
        (lambda folder: (folder / "header.json").write_text("[]"), "header.json is no header of windows"),
        (lambda folder: shutil.rmtree(folder) or folder.write_text("x"), "Not a directory"),
    ],
)
def test_a_damaged_cache_is_made_again_with_a_line(
    break_it: Callable[[Path], Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(40)))
    options = TunedData(file=(file,), cache=tmp_path / "cache", validation_fraction=0.1)
    tokenizer = byte_tokenizer()
    folder = options.cache / prepare_windows(options, 20, tokenizer)
    before = open_windows(folder)
    expected, header = before.train.copy(), before.header
    break_it(folder)
    assert prepare_windows(options, 20, tokenizer) == folder.name
    said = capsys.readouterr().out
    assert said.startswith(f"{folder} is damaged (") and message in said and said.count("\n") == 1
    again = open_windows(folder)
    assert np.array_equal(again.train, expected) and again.header == header
    assert [path.name for path in options.cache.iterdir() if path.is_dir()] == [folder.name]
    prepare_windows(options, 20, tokenizer)
    assert capsys.readouterr().out == ""


def change(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def test_a_token_that_the_model_has_no_row_for_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "plain"}\n{"text": "plain zebra"}\n')
    options = TunedData(file=(file,), cache=tmp_path / "cache", validation_fraction=0)
    tokenizer = byte_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_tokens(["zebra", "gnu"])
    header = open_windows(options.cache / prepare_windows(options, 20, tokenizer)).header
    assert header.largest_id == rows
    check_rows(header, rows + 1, tokenizer)
    message = rf"data.jsonl, line 2: the token 'zebra' has the id {rows}, and the model's embedding has {rows} rows"
    with pytest.raises(ConfigError, match=message):
        check_rows(header, rows, tokenizer)
    tokenizer.pad_token = "gnu"
    header = open_windows(options.cache / prepare_windows(options, 20, tokenizer)).header
    with pytest.raises(ConfigError, match="the padding: the token 'gnu' has the id"):
        check_rows(header, rows + 1, tokenizer)
