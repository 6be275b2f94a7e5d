"""Records as Alpaca, ShareGPT and TRL write them are the chats that they mean."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from core.finetune.fields import checked, unread
from core.finetune.model import byte_tokenizer
from core.finetune.records import encode, read_records
from core.training.errors import ConfigError
from tests.unit_tests.test_docs import ROOT

SYSTEM = {"role": "system", "content": "Be short."}
ASKED, ANSWERED = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
AGAIN, LAST = {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes"}
TALK = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
MORE = [{"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "Yes"}]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"instruction": "2+2?", "input": "", "output": "4"}, [ASKED, ANSWERED]),
        ({"instruction": "2+2?", "output": "4", "input": None}, [ASKED, ANSWERED]),
        (
            {"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be short."},
            [SYSTEM, {"role": "user", "content": "Add.\n\n2, 2"}, ANSWERED],
        ),
        ({"conversations": TALK}, [ASKED, ANSWERED]),
        ({"conversations": [{"from": "system", "value": "Be short."}, *TALK]}, [SYSTEM, ASKED, ANSWERED]),
        ({"conversations": [*TALK, *MORE], "system": "Be short."}, [SYSTEM, ASKED, ANSWERED, AGAIN, LAST]),
        ({"conversations": [ASKED, ANSWERED], "prompt": "2+2?"}, [ASKED, ANSWERED]),
        ({"prompt": [SYSTEM, ASKED], "completion": [ANSWERED]}, [SYSTEM, ASKED, ANSWERED]),
        ({"prompt": [ASKED], "completion": [ANSWERED, AGAIN, LAST]}, [ASKED, ANSWERED, AGAIN, LAST]),
        ({"prompt": [ASKED, ANSWERED, AGAIN], "completion": [LAST]}, [ASKED, {**ANSWERED, "weight": 0}, AGAIN, LAST]),
        (
            {"conversations": [TALK[0], {**TALK[1], "weight": 0}, *MORE]},
            [ASKED, {**ANSWERED, "weight": 0}, AGAIN, LAST],
        ),
    ],
)
def test_a_record_of_another_program_is_the_chat_that_it_means(
    record: dict[str, Any], messages: list[dict[str, Any]], tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(record))
    ((where, found),) = read_records(file, None)
    expected, example = encode({"messages": messages}, tokenizer, ""), encode(found, tokenizer, where)
    assert example.ids.tolist() == expected.ids.tolist()
    assert example.learned.tolist() == expected.learned.tolist() and example.learned.any()
    assert unread(record, tokenizer.chat_template) == ({"prompt"} if record.get("prompt") == "2+2?" else set())


def test_each_record_on_the_page_learns_its_answer_and_an_end_mark() -> None:
    page = (ROOT / "docs" / "source" / "finetune.md").read_text()
    lines = "".join(re.findall(r"```json\n(.*?)```", page, re.DOTALL)).splitlines()
    tokenizer = byte_tokenizer()
    examples = [encode(json.loads(line), tokenizer, line) for line in lines]
    learned = [tokenizer.decode(example.ids[example.learned]) for example in examples]
    assert learned == ["4<|im_end|>", "4<|im_end|>", "Two and two make four.<|im_end|>", *["4<|im_end|>"] * 3]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "x"}, "line 1 has no 'output'; expected text"),
        ({"instruction": "x", "output": None}, "line 1 has no 'output'; expected text"),
        ({"completion": "x"}, "line 1 has no 'prompt'; expected text"),
        ({"prompt": [ASKED]}, "'prompt' is a list of messages, and there is no 'completion'; expected one too"),
        ({"output": "x"}, "line 1 has an 'output' and neither 'instruction' nor 'input'"),
        ({"instruction": 1, "output": "x"}, "'instruction' is 1; expected text"),
        ({"instruction": "x", "input": ["y"], "output": "x"}, "'input' is ['y']; expected text"),
        ({"instruction": "x", "output": "x", "text": "xx"}, "has the fields 'text', 'instruction', 'output' at once"),
        ({"conversations": "x"}, '"conversations" must be a list of objects with "from" and "value"'),
        ({"conversations": [{"from": "moon", "value": "x"}]}, "message 1 is from 'moon'; expected 'system', 'human'"),
        ({"conversations": [{"from": "gpt"}]}, "line 1: message 1 has no 'value'; expected text"),
        ({"conversations": TALK[:1]}, "no message has the role 'assistant', so there is no answer to learn"),
        ({"conversations": TALK, "system": 1}, "'system' is 1; expected text"),
        ({"conversations": TALK, "messages": [ANSWERED]}, "has the fields 'messages', 'conversations' at once"),
        ({"prompt": [ASKED], "completion": "4"}, "'prompt' is a list of messages, and 'completion' is '4'; expected"),
        ({"prompt": "2+2?", "completion": [ANSWERED]}, "'completion' is [{'role': 'assistant', 'content': '4'}]; exp"),
        ({"prompt": [ASKED, ANSWERED], "completion": [AGAIN]}, "all answers have the weight 0, so there is no answer"),
        ({"prompt": ["2+2?"], "completion": [ANSWERED]}, '"messages" must be a list of objects with "role" and'),
    ],
)
def test_a_record_of_another_program_that_cannot_be_read_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        checked(record, "line 1")
