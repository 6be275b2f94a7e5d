"""From lines of JSON to windows: what is learned, where documents lie, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from core.finetune.config import TunedData
from core.finetune.model import byte_tokenizer
from core.finetune.records import Example, encode, read_records
from core.finetune.windows import IDS, LABELS, POSITIONS, UNLEARNED, fit, open_windows, pack, prepare_windows
from core.training.errors import ConfigError

CHAT = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "und 3+3?"},
    {"role": "assistant", "content": "sechs é"},
]


def learned_text(example: Example, tokenizer: Any) -> str:
    return str(tokenizer.decode(example.ids[example.learned]))


def test_of_a_chat_the_answers_alone_are_learned() -> None:
    tokenizer = byte_tokenizer()
    example = encode({"messages": CHAT}, tokenizer, "line 1")
    assert tokenizer.decode(example.ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert learned_text(example, tokenizer) == "4<|im_end|>\nsechs é<|im_end|>\n"


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
        ('{"prompt": "x"}', "line 2: 'completion' is None; expected text"),
        ('{"messages": []}', 'line 2: "messages" must be a list of objects with "role" and "content"'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2: no message has the role 'assistant'"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n')
    assert len(list(read_records(file, 1))) == 1
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        list(read_records(file, None))


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


def test_windows_are_made_once_and_again_for_other_data(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(40)))
    options = TunedData(file=file, cache=tmp_path / "cache", validation_fraction=0.1)
    tokenizer = byte_tokenizer()
    name = prepare_windows(options, 20, tokenizer)
    written = (options.cache / name / "train.npy").stat().st_mtime_ns
    assert prepare_windows(options, 20, tokenizer) == name
    assert (options.cache / name / "train.npy").stat().st_mtime_ns == written
    windows = open_windows(options.cache / name)
    assert (len(windows.train), len(windows.validation)) == (36, 4)  # of 11 or 12 tokens: two do not fit
    assert tokenizer.decode(windows.validation[0, IDS]).startswith("document 9<|im_end|>")
    assert windows.header.documents == 40 and windows.header.cut == windows.header.dropped == 0
    tokenizer.chat_template = "another"
    assert prepare_windows(options, 20, tokenizer) != name
    with pytest.raises(ConfigError, match=r"gives no window to train on: .* use a larger --model.sequence-length"):
        chat = tmp_path / "chat.jsonl"
        chat.write_text(json.dumps({"prompt": "x" * 50, "completion": "y"}) + "\n")
        options = TunedData(file=chat, cache=tmp_path / "cache")
        open_windows(options.cache / prepare_windows(options, 20, tokenizer))
