"""The token file: a text as numbers on disk, made once, memory mapped by every rank."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from core_plan.job.config import DataOptions
from core_plan.job.errors import ConfigError
from core_train.dataset_text import DatasetText, open_dataset
from core_train.text import Text, open_text
from core_train.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer, train_bpe

READ_BYTES = 4 << 20
TOKENIZER = "tokenizer.json"
FORMAT = 2  # changes whenever the same text and tokenizer would give another file


@dataclass(frozen=True)
class TokenFileHeader:
    """Header of a token file; a JSON file next to it."""

    text: str
    files: int  # or documents
    text_bytes: int  # 0 where the text is not known, only its tokens
    tokens: int
    vocab_size: int
    dtype: str
    digest: str  # digest of the tokens

    @property
    def bytes_per_token(self) -> float:
        """Average bytes of text per token: 1 for bytes, apart from end marks, or if the text is unknown."""
        return self.text_bytes / self.tokens if self.text_bytes else 1.0

    @property
    def loss_unit(self) -> str:
        """Unit of a mean loss over `bytes_per_token`."""
        return "nats per byte" if self.text_bytes else "nats per token"

    def describe(self) -> str:
        """One line for the log."""
        if not self.text_bytes:
            return (
                f"tokens: {self.text}, {self.files} documents, {self.tokens:,} tokens of {self.dtype} "
                f"(vocabulary {self.vocab_size})"
            )
        return (
            f"text: {self.text}, {self.files} files, {self.text_bytes:,} bytes -> {self.tokens:,} tokens "
            f"(vocabulary {self.vocab_size}, {self.bytes_per_token:.3f} bytes a token)"
        )


@dataclass(frozen=True)
class TokenFile:
    """Memory-mapped tokens, cut into a training part and a validation part at the end."""

    header: TokenFileHeader
    train: np.ndarray  # [tokens]
    validation: np.ndarray  # [tokens]


def prepare_token_file(options: DataOptions) -> Path:
    """Create the token file of these options unless it exists, and return its path without a suffix.

    Safe to call from several processes: files appear complete, under a name derived from their content.
    """
    text = source_of(options)
    text_digest = text.digest()
    tokenizer = make_tokenizer(options, text, text_digest)
    key = hashlib.sha256(f"{FORMAT}\0{text_digest}\0{tokenizer.identity}".encode()).hexdigest()[:16]
    path = options.cache / key
    if not is_whole(path):
        write_token_file(path, text, tokenizer)
    return path


def source_of(options: DataOptions) -> Text | DatasetText:
    """The documents that the options name."""
    return open_text(options.text) if options.dataset is None else open_dataset(options)


def is_whole(path: Path) -> bool:
    """True if the tokens match the header next to them: same number, same digest."""
    try:
        header = read_header(path.with_suffix(".json"))  # written last
        digest = hashlib.sha256(header.dtype.encode())
        with path.with_suffix(".tokens").open("rb") as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
    except (OSError, ValueError):
        return False
    return digest.hexdigest() == header.digest


def make_tokenizer(options: DataOptions, text: Text | DatasetText, text_digest: str) -> Tokenizer:
    """The tokenizer the options name; a BPE is trained on the text once and kept in the cache."""
    if options.tokenizer == "bytes":
        return ByteTokenizer()
    if options.tokenizer != "bpe":
        return read_tokenizer(Path(options.tokenizer))
    path = _bpe_path(options, text_digest)
    digest = path.with_suffix(".sha256")  # digest of the tokenizer
    if not digest.is_file() or not path.is_file() or _sha256(path) != digest.read_bytes():
        tokenizer = train_bpe(text.documents(), options.bpe_vocab_size)
        write_whole(path, tokenizer.tokenizer.to_str().encode())
        write_whole(digest, _sha256(path))
    return read_tokenizer(path)


def save_tokenizer(options: DataOptions, directory: Path) -> None:
    """Write the tokenizer of these options to `directory`/tokenizer.json, for who reads the model; bytes need none."""
    if options.tokenizer == "bytes":
        return
    path = Path(options.tokenizer)
    if options.tokenizer == "bpe":
        path = _bpe_path(options, source_of(options).digest())
    write_whole(directory / TOKENIZER, path.read_bytes())


def _bpe_path(options: DataOptions, text_digest: str) -> Path:
    return options.cache / f"bpe-{options.bpe_vocab_size}-{text_digest[:16]}.tokenizer"


def _sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def write_token_file(path: Path, text: Text | DatasetText, tokenizer: Tokenizer) -> None:
    """Tokenize `text` into `path`.tokens, and describe it in `path`.json."""
    dtype = next(kind for kind in ("uint8", "uint16", "uint32") if tokenizer.vocab_size <= np.iinfo(kind).max + 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    tokens = text_bytes = documents = 0
    digest = hashlib.sha256(dtype.encode())
    try:
        with partial.open("wb") as file:
            for document in text.documents():
                numbers = tokenizer.encode(document).astype(dtype, copy=False)
                file.write(numbers.data)
                digest.update(numbers.data)
                tokens += len(numbers)
                text_bytes += len(document)
                documents += 1
    except BaseException:
        partial.unlink(missing_ok=True)  # it may be what fills the disk
        raise
    partial.replace(path.with_suffix(".tokens"))
    header = TokenFileHeader(text.name, documents, text_bytes, tokens, tokenizer.vocab_size, dtype, digest.hexdigest())
    write_header(path.with_suffix(".json"), header)


def write_header(path: Path, header: TokenFileHeader) -> None:
    """Write a header as JSON, with its digest."""
    write_whole(path, json.dumps({**asdict(header), "sha256": _digest_of(header)}, indent=2).encode())


def read_header(path: Path) -> TokenFileHeader:
    """Read the header. Raise ValueError if the file has another format."""
    try:
        values = json.loads(path.read_bytes())
        saved = values.pop("sha256")
        header = TokenFileHeader(**values)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is no header of a token file; delete it to make it again") from error
    if saved != _digest_of(header):
        raise ValueError(f"{path} has other content than was written; delete it to make it again")
    return header


def _digest_of(header: TokenFileHeader) -> str:
    return hashlib.sha256(json.dumps(asdict(header)).encode()).hexdigest()


def open_token_file(path: Path, *, validation_fraction: float) -> TokenFile:
    """Map a token file that `prepare_token_file` has made; the last `validation_fraction` of it is held out."""
    header = read_header(path.with_suffix(".json"))
    tokens = np.memmap(path.with_suffix(".tokens"), dtype=header.dtype, mode="r")
    if len(tokens) != header.tokens:
        raise ValueError(
            f"{path.with_suffix('.tokens')} holds {len(tokens)} tokens and its header says {header.tokens}; "
            "delete both files to make them again"
        )
    return TokenFile(header, *cut_off(tokens, validation_fraction))


def cut_off(tokens: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split tokens into (training part, last `fraction`)."""
    cut = round(len(tokens) * (1 - fraction))
    return tokens[:cut], tokens[cut:]


def window(tokens: np.ndarray, index: int, length: int) -> np.ndarray:
    """[length + 1] of int64: window `index`; the last token is only a label. Windows share no input token."""
    start = index * length
    return tokens[start : start + length + 1].astype(np.int64)


def num_windows(tokens: np.ndarray, length: int) -> int:
    """Number of windows of `length` inputs that fit, each followed by one more token."""
    return max(0, (len(tokens) - 1) // length)


def check_windows(tokens: int, length: int) -> None:
    """Raise ConfigError if no window of `length` inputs and a label fits into the tokens to train on."""
    if tokens <= length:
        raise ConfigError(
            f"the text has {tokens} tokens to train on, and one window takes --model.sequence-length {length} and a "
            "label; give more text or a shorter window"
        )


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that other processes see complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)
