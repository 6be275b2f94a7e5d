"""Tokenizers of the kinds that models have, each with a word and the space before it in one token where it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

END = "</s>"
TEXT = ["Answer: blue", "2 + 2 = 4", "x    y\n    return"]


def byte_level(*, trims: bool) -> Any:
    """As GPT-2's and Llama 3's. trims: True if a token's place leaves the space in front out, as GPT-2's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.ByteLevel(trim_offsets=trims)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=[END, "<|end|>", "<|user|>"], show_progress=False
    )
    made.train_from_iterator(TEXT * 9, trainer)
    return wrapped(made)


def metaspace() -> Any:
    """As Llama 2's and Gemma's: a space is a letter of the word that it stands before."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", END, "<|end|>", "<|user|>"]
    made.train_from_iterator(TEXT * 9, trainers.BpeTrainer(vocab_size=90, special_tokens=special, show_progress=False))
    return wrapped(made)


def word_pieces() -> Any:
    """As BERT's: spaces are in no token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["[UNK]", END, "<|end|>", "<|user|>", *"2+=4:xy", "Answer", "blue", "return"]
    made = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens([END, "<|end|>", "<|user|>"])
    return wrapped(made)


def wrapped(made: Any) -> Any:
    """A tokenizer of transformers, with marks."""
    from transformers import PreTrainedTokenizerFast

    marks = {"additional_special_tokens": ["<|end|>", "<|user|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END, **marks)


def with_end_mark(tokenizer: Any) -> Any:
    """The same, whose post-processor writes the end mark, as Llama's with add_eos_token does."""
    from tokenizers import processors

    marks = [(END, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A $B {END}", special_tokens=marks
    )
    return tokenizer


KINDS: dict[str, Callable[[], Any]] = {
    "byte level": lambda: byte_level(trims=False),
    "byte level, trimmed": lambda: byte_level(trims=True),
    "metaspace": metaspace,
    "word pieces": word_pieces,
}
