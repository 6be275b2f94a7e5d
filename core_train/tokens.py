"""Tokens on disk, memory mapped by every rank: a file made of a text once, or Megatron's NAME.bin and NAME.idx."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from core_plan.job.config import DataOptions
from core_plan.job.errors import ConfigError
from core_train.text import Text, open_source
from core_train.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer, train_bpe

READ_BYTES = 4 << 20
TOKENIZER = "tokenizer.json"
FORMAT = 2  # changes whenever the same text and tokenizer would give another file
INDEX_MAGIC = b"MMIDIDX\0\0"
INDEX_VERSION = 1
# By the code in an .idx; the codes of floating-point numbers are left out.
INDEX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True)
class TokenHeader:
    """Description of tokens, in a JSON file of the cache."""

    text: str
    files: int  # or documents
    text_bytes: int  # 0 if the text is not known, only its tokens
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
        """Unit of a mean loss over ``bytes_per_token``."""
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
class Tokens:
    """Memory-mapped tokens, cut into a training part and a validation part at the end."""

    header: TokenHeader
    train: np.ndarray  # [tokens]
    validation: np.ndarray  # [tokens]


def prepare_tokens(options: DataOptions) -> Path:
    """Create the files in the cache that ``open_tokens`` needs, and return their path without a suffix.

    Safe to call from several processes: files appear complete, under a name derived from their content.
    """
    if options.megatron is not None:
        return describe_pair(options.megatron, options.cache)
    text = open_source(options)
    text_digest = text.digest()
    tokenizer = make_tokenizer(options, text, text_digest)
    key = hashlib.sha256(f"{FORMAT}\0{text_digest}\0{tokenizer.identity}".encode()).hexdigest()[:16]
    path = options.cache / key
    if not is_intact(path):
        write_tokens(path, text, tokenizer)
    return path


def open_tokens(options: DataOptions, path: Path) -> Tokens:
    """Map the tokens that ``prepare_tokens`` has prepared; the last ``validation_fraction`` of them is held out."""
    header = read_header(path.with_suffix(".json"))
    file = path.with_suffix(".tokens") if options.megatron is None else pair_of(options.megatron)[0]
    tokens = np.memmap(file, np.dtype(header.dtype).newbyteorder("<"), "r")
    if len(tokens) != header.tokens:
        raise ValueError(
            f"{file} holds {len(tokens)} tokens and its header says {header.tokens}; delete {path}.* to make them again"
        )
    cut = round(len(tokens) * (1 - options.validation_fraction))
    return Tokens(header, tokens[:cut], tokens[cut:])


def is_intact(path: Path) -> bool:
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


def make_tokenizer(options: DataOptions, text: Text, text_digest: str) -> Tokenizer:
    """Return the tokenizer of these options; a BPE is trained on the text once and kept in the cache."""
    if options.tokenizer == "bytes":
        return ByteTokenizer()
    if options.tokenizer != "bpe":
        return read_tokenizer(Path(options.tokenizer))
    path = _bpe_path(options, text_digest)
    digest = path.with_suffix(".sha256")  # digest of the tokenizer
    if not digest.is_file() or not path.is_file() or _sha256(path) != digest.read_bytes():
        tokenizer = train_bpe(text.documents(), options.bpe_vocab_size)
        write_at_once(path, tokenizer.tokenizer.to_str().encode())
        write_at_once(digest, _sha256(path))
    return read_tokenizer(path)


def save_tokenizer(options: DataOptions, directory: Path) -> None:
    """Write the tokenizer of these options to ``directory``/tokenizer.json for programs that read the model."""
    if options.tokenizer == "bytes":
        return
    path = Path(options.tokenizer)
    if options.tokenizer == "bpe":
        path = _bpe_path(options, open_source(options).digest())
    write_at_once(directory / TOKENIZER, path.read_bytes())


def _bpe_path(options: DataOptions, text_digest: str) -> Path:
    return options.cache / f"bpe-{options.bpe_vocab_size}-{text_digest[:16]}.tokenizer"


def _sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def write_tokens(path: Path, text: Text, tokenizer: Tokenizer) -> None:
    """Tokenize ``text`` into ``path``.tokens, and describe it in ``path``.json."""
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
    header = TokenHeader(text.name, documents, text_bytes, tokens, tokenizer.vocab_size, dtype, digest.hexdigest())
    write_header(path.with_suffix(".json"), header)


def write_header(path: Path, header: TokenHeader) -> None:
    """Write a header as JSON, with its digest."""
    write_at_once(path, json.dumps({**asdict(header), "sha256": _digest_of(header)}, indent=2).encode())


def read_header(path: Path) -> TokenHeader:
    """Read the header. Raise ValueError if the file has another format."""
    try:
        values = json.loads(path.read_bytes())
        saved = values.pop("sha256")
        header = TokenHeader(**values)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} is no header of a token file; delete it to make it again") from error
    if saved != _digest_of(header):
        raise ValueError(f"{path} has other content than was written; delete it to make it again")
    return header


def _digest_of(header: TokenHeader) -> str:
    return hashlib.sha256(json.dumps(asdict(header)).encode()).hexdigest()


def write_at_once(path: Path, content: bytes) -> None:
    """Write a file that other processes see complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def pair_of(prefix: Path) -> tuple[Path, Path]:
    """(NAME.bin, NAME.idx) of NAME with or without a suffix."""
    stem = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else prefix
    return stem.with_name(f"{stem.name}.bin"), stem.with_name(f"{stem.name}.idx")


def read_index(prefix: Path) -> tuple[str, int, int]:
    """Read and check NAME.idx against NAME.bin.

    Returns:
        The dtype of the tokens, how many there are, and how many documents.

    Raises:
        OSError: If a file is missing.
        ValueError: If a file is truncated or has another format; the message names it.
    """
    bin_path, idx_path = pair_of(prefix)
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise FileNotFoundError(f"--data.megatron {prefix}: there is no file {path} (from {Path.cwd()})")
    head = struct.Struct("<9sQBQQ")
    size = idx_path.stat().st_size
    with idx_path.open("rb") as file:
        start = file.read(head.size)
    where = f"--data.megatron {idx_path}"
    if len(start) < head.size or not start.startswith(INDEX_MAGIC):
        raise ValueError(f"{where} is no index of Megatron's: it does not begin with {INDEX_MAGIC!r}")
    _, version, code, sequences, marks = head.unpack(start)
    if version != INDEX_VERSION:
        raise ValueError(f"{where} has version {version} of the format, and {INDEX_VERSION} is known here")
    if code not in INDEX_DTYPES:
        raise ValueError(f"{where}: code {code} is no dtype of tokens; known are {sorted(INDEX_DTYPES)}")
    expected = head.size + 12 * sequences + 8 * marks
    if size != expected:
        known = " (a file with modes, of more than text, is not read)" if size == expected + sequences else ""
        raise ValueError(
            f"{where} has {size:,} bytes, and its {sequences:,} sequences and {marks:,} marks of "
            f"documents take {expected:,}{known}; copy or make the file again"
        )
    dtype = INDEX_DTYPES[code]
    width = np.dtype(dtype).itemsize
    lengths = np.fromfile(idx_path, "<i4", sequences, offset=head.size).astype(np.int64)
    tokens = int(lengths.sum())
    if lengths.min(initial=0) < 0:
        raise ValueError(f"{where} holds a sequence of {int(lengths.min())} tokens")
    if bin_path.stat().st_size != tokens * width:
        raise ValueError(
            f"--data.megatron {bin_path} has {bin_path.stat().st_size:,} bytes, and {idx_path.name} counts {tokens:,} "
            f"tokens of {dtype}, {tokens * width:,} bytes; copy or make the pair again"
        )
    if tokens == 0:
        raise ValueError(f"--data.megatron {bin_path} holds no token")
    pointers = np.fromfile(idx_path, "<i8", sequences, offset=head.size + 4 * sequences)
    if not np.array_equal(pointers, (np.cumsum(lengths) - lengths) * width):
        raise ValueError(
            f"{where}: its sequences are not contiguous in {bin_path.name}, so a window over them would contain other "
            "tokens"
        )
    return dtype, tokens, max(0, marks - 1)  # the first mark is the beginning


def describe_pair(prefix: Path, cache: Path) -> Path:
    """Write a description of the pair to ``cache``, under a name derived from its tokens.

    The tokens are read once, for their digest and maximum. Later starts identify them by the files' times and sizes.

    Returns:
        The path without a suffix.
    """
    dtype, tokens, documents = read_index(prefix)
    bin_path, idx_path = pair_of(prefix)
    times = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in (bin_path, idx_path)]
    stamp = cache / f"indexed-{hashlib.sha256(repr(times).encode()).hexdigest()[:16]}.json"
    try:
        header = read_header(stamp)
    except (OSError, ValueError):
        largest, digest = _scanned(bin_path, dtype)
        header = TokenHeader(bin_path.stem, documents, 0, tokens, largest + 1, dtype, digest)
        write_header(stamp, header)
    path = cache / header.digest[:16]
    write_header(path.with_suffix(".json"), header)
    return path


def _scanned(bin_path: Path, dtype: str) -> tuple[int, str]:
    """Return the largest token, and the digest of all."""
    digest = hashlib.sha256(dtype.encode())
    largest = 0
    tokens = np.memmap(bin_path, np.dtype(dtype).newbyteorder("<"), "r")
    for start in range(0, len(tokens), READ_BYTES):
        part = np.asarray(tokens[start : start + READ_BYTES])
        if int(part.min()) < 0:
            where = start + int(part.argmin())
            raise ValueError(f"--data.megatron {bin_path}: token {where:,} is {int(part.min())}; tokens count from 0")
        largest = max(largest, int(part.max()))
        digest.update(part.data)
    return largest, digest.hexdigest()


def window(tokens: np.ndarray, index: int, length: int) -> np.ndarray:
    """[length + 1] of int64: window ``index``; the last token is only a label. Windows share no input token."""
    start = index * length
    return tokens[start : start + length + 1].astype(np.int64)


def num_windows(tokens: np.ndarray, length: int) -> int:
    """Number of windows of ``length`` inputs that fit, each followed by one more token."""
    return max(0, (len(tokens) - 1) // length)


def check_windows(tokens: int, length: int) -> None:
    """Raise ConfigError if no window of ``length`` inputs and a label fits into the tokens to train on."""
    if tokens <= length:
        raise ConfigError(
            f"the text has {tokens} tokens to train on, and one window takes --model.sequence-length {length} and a "
            "label; give more text or a shorter window"
        )
