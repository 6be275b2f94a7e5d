"""Tokenizers: text to numbers. Bytes need nothing; the others come from the ``tokenizers`` package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core.extras import require

END_OF_TEXT = "<|endoftext|>"


class ByteTokenizer:
    """Every byte is its own token; a document ends with byte 0."""

    vocab_size = 256
    identity = "bytes"  # differs between tokenizers that number a text differently
    end: int | None = 0  # the token that ends a document

    def encode(self, document: bytes) -> np.ndarray:
        """[bytes + 1] of uint8."""
        return np.frombuffer(document + b"\0", dtype=np.uint8)

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end mark."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer of the ``tokenizers`` package, from its JSON."""

    def __init__(self, serialized: str) -> None:
        tokenizers = require("tokenizers", "a tokenizer other than 'bytes'")
        self.tokenizer: Any = tokenizers.Tokenizer.from_str(serialized)
        self.vocab_size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.identity = hashlib.sha256(serialized.encode()).hexdigest()
        self.end: int | None = self.tokenizer.token_to_id(END_OF_TEXT)

    def encode(self, document: bytes) -> np.ndarray:
        """[tokens] of uint32; bytes that are not UTF-8 become U+FFFD."""
        tokens = self.tokenizer.encode(document.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return np.array(tokens if self.end is None else [*tokens, self.end], dtype=np.uint32)

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end mark."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(list(tokens)))


Tokenizer = ByteTokenizer | FileTokenizer


def train_bpe(documents: Iterable[bytes], vocab_size: int) -> FileTokenizer:
    """A byte-level BPE tokenizer of ``vocab_size`` tokens learned from the documents. Deterministic."""
    tokenizers = require("tokenizers", "training a BPE tokenizer")
    if vocab_size < 257:
        raise ValueError(f"--data.bpe-vocab-size is {vocab_size}; 256 bytes and the end mark need at least 257")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for document in documents:
            yield document.decode("utf-8", errors="replace")

    tokenizer.train_from_iterator(texts(), trainer)
    return FileTokenizer(tokenizer.to_str())


def read_tokenizer(path: Path) -> FileTokenizer:
    """The tokenizer of a ``tokenizer.json``."""
    if not path.is_file():
        raise FileNotFoundError(f"--data.tokenizer is {str(path)!r}: not 'bytes', not 'bpe', and no such file")
    from core.checkpoint.bounded_read import read_bytes  # loads torch's checkpoints, for a second

    try:
        return FileTokenizer(read_bytes(path).decode())
    except ImportError:
        raise
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(f"--data.tokenizer {path} is no tokenizer of the package 'tokenizers': {error}") from None
