"""What is learned of a record: every token that has a character of an answer, and the mark that ends it."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from core.finetune.config import TunedData
from core.finetune.records import encode
from core.finetune.windows import open_windows, prepare_windows
from tests.unit_tests.finetune.tiny_tokenizers import KINDS, byte_level, metaspace, with_end_mark, word_pieces

SPACE = {"byte level": "Ġ", "byte level, trimmed": "Ġ", "metaspace": "▁", "word pieces": ""}
ASKED = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "blue"}]
TWICE = [*ASKED, {"role": "user", "content": "2"}, {"role": "assistant", "content": "4"}]
# The generation prompt ends with a space.
SPACED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}\n{% else %}Answer: {{ m.content }}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)
# An end mark stands before the next message alone.
BETWEEN = (
    "{% for m in messages %}{% if not loop.first %}</s>{% endif %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
    "{% else %}Answer: {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}</s>Answer:{% endif %}"
)


def learned(record: dict[str, Any], tokenizer: Any, *stops: str) -> list[str]:
    example = encode(record, tokenizer, "line 1", stops)
    return list(tokenizer.convert_ids_to_tokens(example.ids[example.learned]))


# A newline, or a line and a newline, follow the end mark. Transformers masks what is in the blocks `generation`.
LINES = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}\n{% else %}Answer:"
    "{% generation %} {{ m.content }}END{% endgeneration %}AFTER{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
@pytest.mark.parametrize(("end", "after"), [("</s>", "\n"), ("<|end|>", "\n\n"), ("<|end|></s>", "\nreturn\n")])
def test_what_a_template_writes_after_an_end_mark_is_not_learned(kind: str, end: str, after: str) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = LINES.replace("END", end).replace("AFTER", after)
    marks = ["<|end|>", "</s>"] if end == "<|end|></s>" else [end]
    expected = [f"{SPACE[kind]}blue", *marks, f"{SPACE[kind]}4", *marks]
    assert learned({"messages": TWICE}, tokenizer, "<|end|>") == expected
    masked = tokenizer.apply_chat_template(TWICE, return_dict=True, return_assistant_tokens_mask=True)
    example = encode({"messages": TWICE}, tokenizer, "line 1", ["<|end|>"])
    assert example.ids.tolist() == masked["input_ids"] and example.ends
    assert example.learned.tolist() == [bool(each) for each in masked["assistant_masks"]]
    if after.isspace():  # a special token that is no stop of the model's ends an answer too
        assert learned({"messages": TWICE}, tokenizer) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prompt", "completion"), [("2 + 2 = ", "4"), ("Answer: ", "blue"), ("Answer:", " blue"), ("Answer: 2 ", "blue")]
)
def test_a_token_that_begins_in_the_prompt_and_ends_in_the_answer_is_learned(
    kind: str, prompt: str, completion: str
) -> None:
    expected = [f"{SPACE[kind]}{completion.strip()}", "</s>"]
    assert learned({"prompt": prompt, "completion": completion}, KINDS[kind]()) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_after_a_generation_prompt_that_ends_with_a_space_is_learned(kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = SPACED
    assert learned({"messages": ASKED}, tokenizer) == [f"{SPACE[kind]}blue", "</s>"]
    assert learned({"messages": TWICE}, tokenizer) == [f"{SPACE[kind]}blue", "</s>", f"{SPACE[kind]}4", "</s>"]


def test_spaces_that_a_tokenizer_gives_no_place_are_learned_in_answers_alone() -> None:
    """Offsets of GPT-2's kind leave spaces out, so that a token of spaces has none."""
    tokenizer = byte_level(trims=True)
    record = {"prompt": "x    y", "completion": "x    y\n    return"}
    assert learned(record, tokenizer) == learned(record, byte_level(trims=False))
    assert "ĠĠĠ" in learned(record, tokenizer)
    assert learned({"prompt": "x    y", "completion": "x"}, tokenizer) == ["x", "</s>"]


@pytest.mark.parametrize("kind", ["byte level", "byte level, trimmed", "metaspace"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 20))])
def test_tokens_that_cross_a_border_anywhere_are_learned(kind: str, seed: int) -> None:
    """The reference adds up the lengths of the tokens: in bytes, or in characters after the space put in front."""
    tokenizer, draw = KINDS[kind](), random.Random(seed)
    letters = [
        " ",
        " ",
        "    ",
        "\n",
        "x",
        "y",
        "2 + 2",
        " = 4",
        "Answer: blue",
        "return",
        *("é😀" if "byte" in kind else ""),
    ]
    for _ in range(60):
        prompt, completion = ("".join(draw.choices(letters, k=draw.randint(1, 6))) for _ in range(2))
        example = encode({"prompt": prompt, "completion": completion}, tokenizer, "")
        sizes = [len(token) for token in tokenizer.convert_ids_to_tokens(example.ids[:-1])]
        border = len(prompt.encode()) if "byte" in kind else sum(sizes) - len(completion)
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        assert example.learned.tolist() == [*(end > border for end in ends), True], (prompt, completion)


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_mark_that_a_post_processor_writes_is_learned_once(kind: str) -> None:
    tokenizer = with_end_mark(KINDS[kind]())
    assert learned({"prompt": "2 + 2 =", "completion": " 4"}, tokenizer) == [f"{SPACE[kind]}4", "</s>"]
    assert encode({"prompt": "2 + 2 =", "completion": " 4"}, tokenizer, "").ends
    tokenizer.eos_token = "<|end|>"  # what stands between the answer and the end is learned too
    assert learned({"prompt": "2 + 2 =", "completion": " 4"}, tokenizer) == [f"{SPACE[kind]}4", "</s>", "<|end|>"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_mark_that_stands_before_the_next_message_alone_ends_each_answer(kind: str) -> None:
    tokenizer = KINDS[kind]()
    tokenizer.chat_template = BETWEEN
    one, two = (encode({"messages": messages}, tokenizer, "") for messages in (ASKED, TWICE))
    assert tokenizer.convert_ids_to_tokens(one.ids)[-2:] == [f"{SPACE[kind]}blue", "</s>"] and one.ends
    assert learned({"messages": TWICE}, tokenizer) == [f"{SPACE[kind]}blue", "</s>", f"{SPACE[kind]}4", "</s>"]
    assert tokenizer.convert_ids_to_tokens(two.ids).count("</s>") == 4 and two.ends


def test_a_mark_of_the_generation_config_ends_an_answer_and_its_absence_is_seen() -> None:
    tokenizer = metaspace()
    tokenizer.chat_template = BETWEEN.replace("</s>", "")
    assert not encode({"messages": TWICE}, tokenizer, "").ends
    assert learned({"messages": TWICE}, tokenizer) == ["▁blue", "▁4"]
    assert encode({"messages": TWICE}, tokenizer, "", ["<|user|>"]).ends
    assert learned({"messages": TWICE}, tokenizer, "<|user|>") == ["▁blue", "<|user|>", "▁4", "<|user|>"]


def test_a_chat_that_begins_with_an_answer_is_learned() -> None:
    tokenizer = byte_level(trims=False)
    tokenizer.chat_template = SPACED
    record = {"messages": [{"role": "assistant", "content": "2"}, *ASKED]}
    assert learned(record, tokenizer) == ["Ġ2", "</s>", "Ġblue", "</s>"]


def test_an_answer_of_weight_0_is_not_learned() -> None:
    tokenizer = word_pieces()
    tokenizer.chat_template = SPACED + "{% for m in messages %}{% if m.weight is defined %}y{% endif %}{% endfor %}"
    messages = [{**message, "weight": 0} if message["content"] == "blue" else message for message in TWICE]
    assert learned({"messages": messages}, tokenizer) == ["4", "</s>"]
    messages[-1] = {**messages[-1], "weight": 1}
    assert learned({"messages": messages}, tokenizer) == ["4", "</s>"]


@pytest.mark.parametrize(("template", "unended"), [(SPACED, 0), (BETWEEN, 0), (BETWEEN.replace("</s>", ""), 1)])
def test_the_data_line_shows_what_is_learned(template: str, unended: int, tmp_path: Path) -> None:
    tokenizer = metaspace()
    tokenizer.chat_template = template
    file = tmp_path / "data.jsonl"
    records: list[dict[str, Any]] = [
        {"prompt": "2 + 2 = ", "completion": "4", "id": 7, "score": None},
        {"messages": [{**ASKED[0], "mood": 1}, ASKED[1]], "id": 8, "prompt": "2 + 2"},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = TunedData(file=(file,), cache=tmp_path / "cache", validation_fraction=0)
    header = open_windows(options.cache / prepare_windows(options, 60, tokenizer)).header
    said = header.describe()
    assert "the first, learned in [[ ]]: 2 + 2 =[[ 4</s>]]" in said and "\n" not in said
    assert "fields that are not used: '.mood', 'id', 'prompt'" in said and "score" not in said
    assert header.unended == unended
    assert ("in 1 no mark ends an answer, so the model does not learn to stop there" in said) == bool(unended)
