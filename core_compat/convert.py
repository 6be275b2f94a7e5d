"""``python -m core_compat.convert``: conversion to and from files of other programs. One process, no ranks.

convert runs/checkpoints weights.pt                     the newest step as a plain state_dict
convert runs/checkpoints hf --to safetensors            safetensors with an index, 5 GB a file
convert weights.pt runs/start                           a checkpoint that every layout loads (step 0)
convert megatrons/iter_100 runs/start                   weights of a GPT that Megatron has written (torch_dist)
convert saved_by_dcp runs/start --trust-foreign-files   a directory of torch.distributed.checkpoint, whose index is code
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from core.checkpoint.directory import find_intact
from core.checkpoint.errors import CheckpointError
from core.checkpoint.manifest import METADATA_NAME
from core.checkpoint.pieces import MODEL, OPTIMIZER, Piece
from core.checkpoint.plain_files import (
    PLAIN_SUFFIXES,
    Lazy,
    WholeTensors,
    open_safetensors_files,
    open_state_dict,
    parse_size,
    write_safetensors,
    write_state_dict,
)
from core.checkpoint.planners import PieceLoadPlanner, PieceSavePlanner, tensor_records
from core.checkpoint.root_directory import list_committed
from core.checkpoint.save import CONTENT_FORMAT, versions
from core.checkpoint.saver import CheckpointSaver
from core_compat.megatron.torch_dist import MegatronReader, is_megatrons, weights_in

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class IndexedFiles:
    """Files with an index of torch.distributed.checkpoint. ``records`` has the tensors by their stored names."""

    def __init__(self, reader: StorageReader) -> None:
        self.reader = reader
        self.metadata: Metadata = reader.read_metadata()
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self.records = tensor_records(self.metadata)

    def tensors(self, parts: Mapping[str, Sequence[tuple[str, int | None]]]) -> WholeTensors:
        """Define lazy tensors as concatenations of stored tensors or of single layers of them.

        ``parts`` maps each tensor name to the parts to concatenate along dimension 0: (stored name, layer index), or
        (stored name, None) for the complete stored tensor.
        """
        return WholeTensors(
            (k, Lazy(partial(self._nbytes, found), partial(self._read, found))) for k, found in parts.items()
        )

    def _nbytes(self, parts: Sequence[tuple[str, int | None]]) -> int:
        records = [(self.records[stored], layer) for stored, layer in parts]
        return sum(
            r.size.numel() * r.properties.dtype.itemsize // (1 if layer is None else r.size[0]) for r, layer in records
        )

    def _read(self, parts: Sequence[tuple[str, int | None]]) -> Tensor:
        """Assemble a full tensor from its parts, such as one layer of stacked layers, or a gate and its value."""
        whole = []
        for stored, layer in parts:
            record = self.records[stored]
            begin = [0] * len(record.size) if layer is None else [layer, *[0] * (len(record.size) - 1)]
            size = tuple(record.size) if layer is None else (1, *record.size[1:])
            box = torch.zeros(size, dtype=record.properties.dtype, device="cpu")
            planner = PieceLoadPlanner([Piece(stored, tuple(record.size), tuple(begin), box)], [])
            planner.set_up_planner({}, self.metadata, is_coordinator=True)
            self.reader.read_data(self.reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
            whole.append(box if layer is None else box[0])
        return whole[0] if len(whole) == 1 else torch.cat(whole)


def open_checkpoint(root: Path, step: int | None = None, *, masters: bool = False) -> WholeTensors:
    """Open the tensors of a checkpoint at ``step``, by default the newest intact one.

    ``masters`` selects master weights instead of parameters if the checkpoint has them.
    """
    directory = find_intact(root, step)
    files = IndexedFiles(directory.reader())
    stored = {key: key for key in files.records}
    if masters:
        of_masters = {k: k.replace(f"{MODEL}.", f"{OPTIMIZER}.master.", 1) for k in stored if k.startswith(f"{MODEL}.")}
        stored |= {key: master for key, master in of_masters.items() if master in files.records}
    found = files.tensors({key: [(name, None)] for key, name in stored.items()})
    found.tied = directory.meta.get("tied", {})
    return found


def open_foreign(path: Path) -> WholeTensors:
    """Open the weights of a directory written by torch.distributed.checkpoint. Reading its index runs code from it.

    A state_dict that is not part of a larger one is treated as the model's.
    """
    try:
        files = IndexedFiles(FileSystemReader(path))
    except Exception as error:  # a broken pickle can raise any exception
        raise CheckpointError(f"{path} has no index of torch.distributed.checkpoint: {error}") from None
    inside = [key for key in files.records if key.startswith(f"{MODEL}.")]
    names = {key if inside else f"{MODEL}.{key}": key for key in inside or files.records}
    return files.tensors({key: [(name, None)] for key, name in names.items()})


def open_megatrons(path: Path) -> WholeTensors:
    """Open the weights of a directory written by Megatron, under this package's names. Its pickles run no code."""
    files = IndexedFiles(MegatronReader(str(path)))
    return files.tensors(weights_in(files.records))


def in_dtype(source: WholeTensors, dtype: torch.dtype) -> WholeTensors:
    """Cast the floating point weights to another dtype when they are read."""

    def read(lazy: Lazy) -> Tensor:
        tensor = lazy.read()
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    cast = WholeTensors(source)
    for key, lazy in source.items():
        if key.startswith(f"{MODEL}."):
            cast[key] = Lazy(partial(lambda lazy: read(lazy).nbytes, lazy), partial(read, lazy))
    cast.tied = source.tied
    return cast


def write_checkpoint(root: Path, source: WholeTensors, *, step: int, origin: str) -> Path:
    """Commit a checkpoint of full tensors that any layout can load. Needs memory for all tensors."""
    pieces = [Piece(key, tuple(t.shape), (0,) * t.dim(), t) for key, lazy in source.items() for t in [lazy.read()]]
    meta = {"content_format": CONTENT_FORMAT, "step": step, "layout": {}, "converted_from": origin} | versions()
    with CheckpointSaver(root) as saver:  # rejects a step that already exists
        report = saver.save(step, partial(saver.ranks.write, PieceSavePlanner(pieces, {})), meta=meta)
    assert report.directory is not None, "a synchronous save has ended, or raised"
    return report.directory


def kind_of(path: Path) -> str | None:
    """Detect the format of a path from its contents or its name, or return ``None`` if it is unknown.

    The formats are 'checkpoint', 'state_dict', 'safetensors', 'megatron' and 'foreign' (torch's dcp).
    """
    if path.suffix in PLAIN_SUFFIXES:
        return "state_dict"
    if path.suffix == ".safetensors" or (path.is_dir() and any(path.glob("*.safetensors"))):
        return "safetensors"
    if path.is_dir() and (list_committed(path) or (path / "commit.json").exists()):
        return "checkpoint"
    if (path / METADATA_NAME).exists():
        return "megatron" if is_megatrons(path) else "foreign"
    return None


def open_source(
    path: Path, step: int | None = None, *, masters: bool = False, trust_foreign_files: bool = False
) -> WholeTensors:
    """Open the tensors at a path, in any supported format.

    ``step`` and ``masters`` are for checkpoints, as in ``open_checkpoint``. ``trust_foreign_files`` allows formats that
    can execute code while they are read. Raises CheckpointError if the path has nothing readable, or an option does not
    apply to its format.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    kind = kind_of(path)
    if kind is None:
        raise CheckpointError(
            f"{path} is no checkpoint directory, no safetensors file or directory, and no file ending in "
            f"{', '.join(PLAIN_SUFFIXES)}"
        )
    if kind != "checkpoint" and (masters or step is not None):
        raise CheckpointError(f"{path} is a {kind} file; --step and --masters are for checkpoints")
    if kind == "state_dict":
        return open_state_dict(path, trust=trust_foreign_files)
    if kind == "foreign":
        if not trust_foreign_files:
            raise CheckpointError(
                f"{path} is a directory of torch.distributed.checkpoint, whose index is a pickle and can run code; if "
                "you trust those who made it, add --trust-foreign-files"
            )
        return open_foreign(path)
    if kind in ("safetensors", "megatron"):
        return open_safetensors_files(path) if kind == "safetensors" else open_megatrons(path)
    if (path / "commit.json").exists():  # one step's directory
        number = re.fullmatch(r"step_(\d+)\..*", path.name)
        if number is None or (step is not None and step != int(number.group(1))):
            raise CheckpointError(f"{path} is one step's directory; leave --step out, or give the directory above it")
        newest = [found for found in list_committed(path.parent) if found.step == int(number.group(1))]
        if newest and newest[-1].path.name != path.name:
            raise CheckpointError(f"{path} was replaced by {newest[-1].path.name}, a later commit of the same step")
        path, step = path.parent, int(number.group(1))
    return open_checkpoint(path, step, masters=masters)


def parser() -> argparse.ArgumentParser:
    """Return a parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="python -m core_compat.convert",
        description="Turn a checkpoint into files that other programs read, or such files into a checkpoint.",
    )
    parser.add_argument("source", type=Path, help="checkpoint root or step, Megatron's, .pt/.pth/.bin, or safetensors")
    parser.add_argument("target", type=Path, help="a file ending in .pt/.pth/.bin, or a directory")
    parser.add_argument("--to", choices=("checkpoint", "state_dict", "safetensors"), help="what to write at the target")
    parser.add_argument("--step", type=int, help="of a source checkpoint: this step instead of the newest intact one")
    parser.add_argument("--as-step", type=int, default=0, help="of a target checkpoint (default 0)")
    parser.add_argument("--masters", action="store_true", help="fp32 master weights in place of 16-bit parameters")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="cast weights")
    parser.add_argument("--optimizer", action="store_true", help="state_dict: also the optimizer's state, by name")
    parser.add_argument("--trust-foreign-files", action="store_true", help="read files that can run code: pickles")
    parser.add_argument("--max-shard-size", default="5GB", help="of a safetensors file (default 5GB)")
    return parser


def convert(options: argparse.Namespace) -> str:
    """Convert according to the options, and return one sentence that describes the written files.

    Raises CheckpointError if the source cannot be read, ValueError if the options contradict each other or the target
    exists, and OSError if a file cannot be read or written.
    """
    source_path, target = options.source, options.target
    kind = options.to or ("state_dict" if target.suffix in PLAIN_SUFFIXES else None)
    if kind is None:
        from_checkpoint = source_path.exists() and kind_of(source_path) == "checkpoint"
        if from_checkpoint:
            raise ValueError(
                f"the format to write to {target} is unknown; add --to safetensors, or give a file name ending in .pt"
            )
        kind = "checkpoint"
    if kind == "state_dict" and target.suffix not in PLAIN_SUFFIXES:
        raise ValueError(f"{target}: name a state_dict file with one of {', '.join(PLAIN_SUFFIXES)}")
    if options.optimizer and kind == "safetensors":
        raise ValueError("safetensors files hold weights alone; --optimizer is for a state_dict")
    occupied = target.exists() and (target.is_file() or any(target.iterdir()))
    if occupied and kind != "checkpoint":
        raise ValueError(f"{target} exists; move it away, or choose another target")
    limit = parse_size(options.max_shard_size)
    source = open_source(
        source_path, options.step, masters=options.masters, trust_foreign_files=options.trust_foreign_files
    )
    count = sum(key.startswith(f"{MODEL}.") for key in source)
    if not count:
        raise CheckpointError(f"{source_path} holds no weights")
    if options.dtype is not None:
        source = in_dtype(source, DTYPES[options.dtype])
    if kind == "state_dict":
        target.parent.mkdir(parents=True, exist_ok=True)
        write_state_dict(target, source, optimizer=options.optimizer)
        return f"{target}: {count} tensors"
    if kind == "safetensors":
        files = write_safetensors(target, source, max_shard_bytes=limit)
        return f"{target}: {count} tensors in {len(files)} file{'s' * (len(files) > 1)}"
    directory = write_checkpoint(target, source, step=options.as_step, origin=source_path.name)
    return f"{directory}: {count} tensors, step {options.as_step}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert according to the command line. Return 0, or 1 after printing one line to stderr."""
    options = parser().parse_args(arguments)
    try:
        print(convert(options))
    except (CheckpointError, ValueError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
