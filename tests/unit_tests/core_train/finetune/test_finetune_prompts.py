"""`python -m core generate` continues a prompt after the tokens that a completion is trained after."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")

from core_train.commands.model_directory import prompt_ids
from tests.unit_tests.core_train.finetune.tiny_tokenizers import END, KINDS, with_end_mark


def with_begin_and_end(tokenizer: Any) -> Any:
    """As Llama's with add_bos_token and add_eos_token."""
    from tokenizers import processors

    tokenizer.bos_token = "<|user|>"
    marks = [(END, tokenizer.eos_token_id), ("<|user|>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<|user|> $A {END}", pair=f"<|user|> $A $B {END}", special_tokens=marks
    )
    return tokenizer


def trained_after(tokenizer: Any, prompt: str, completion: str) -> list[int]:
    """The tokens before the first learned one, as TRL prepares the record."""
    from trl.data_utils import _tokenize, common_prefix_length

    before = _tokenize(tokenizer, prompt)["input_ids"]
    both = _tokenize(tokenizer, prompt + completion)["input_ids"]
    return list(both[: common_prefix_length(before, both)])


@pytest.mark.parametrize("marks", [lambda given: given, with_end_mark, with_begin_and_end])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_what_a_completion_was_trained_after(kind: str, marks: Any) -> None:
    tokenizer = marks(KINDS[kind]())
    found = prompt_ids(tokenizer, "2 + 2 =")
    assert found == trained_after(tokenizer, "2 + 2 =", " 4")
    assert len(found) > 3 and found[-1] != tokenizer.eos_token_id


def test_a_begin_mark_does_not_stand_twice() -> None:
    tokenizer = with_begin_and_end(KINDS["metaspace"]())
    assert prompt_ids(tokenizer, "<|user|>") == [tokenizer.bos_token_id]
    assert prompt_ids(tokenizer, "<|user|>2")[:2].count(tokenizer.bos_token_id) == 1
    assert prompt_ids(tokenizer, f"2{END}")[-1] == tokenizer.eos_token_id  # which the user wrote
