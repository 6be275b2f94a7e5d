"""dist_checkpointing over core.checkpoint: a tree of sharded tensors and plain values, durable and for any layout.

A directory holds one checkpoint in the format of core.checkpoint, every byte of it verified when it is loaded. Loading
also reads what Megatron itself has written; see torch_dist.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageWriter

from core.checkpoint import CheckpointError, CheckpointSaver, find_intact, load_checkpoint, save_checkpoint
from core.checkpoint.agreement import Ranks
from core.checkpoint.boxes import Box
from core.checkpoint.global_slices import GlobalSlice, buffer_slices, global_slices
from core.checkpoint.pieces import Piece, box_view, groups_of, module_of
from core.checkpoint.planners import PieceLoadPlanner, PieceSavePlanner, blob_keys, tensor_records
from core.checkpoint.root_directory import list_committed
from core.compat.arguments import arguments
from core.compat.megatron.faces.sharded import (
    DROPPED,
    SHARDED,
    LocalNonpersistentObject,
    OptimizerState,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    StrictHandling,
    is_main_replica,
    leaves_of,
    map_leaves,
    merge,
)
from core.compat.megatron.faces.torch_dist import MegatronReader, is_megatrons, layers_lacking, layers_of, pieces_in
from core.distributed.buffer.sharded_parameter import ShardedParameter

logger = logging.getLogger(__name__)
STEP = 0  # of the one checkpoint in a directory
COMMON, OBJECT, OPTIMIZER = "common", "object", "optimizer"  # the blob of plain values, blobs by key, a directory


# -- a module's tree -------------------------------------------------------------------------------------------------


@arguments("self>chunk prefix='' sharded_offsets=() -metadata=None")
def sharded_state_dict(chunk: Any, prefix: str, sharded_offsets: tuple[Any, ...]) -> StateDict:
    """A module's parameters and buffers: its own name -> the part of the whole model's tensor that it holds. Local.

    Keys in the file are names of the whole model, with `prefix`. sharded_offsets must be empty: a module says by
    `global_names` what it is in the whole model.
    """
    if sharded_offsets:
        raise ValueError("sharded_offsets is not supported: modules say their place by global_names; leave it out")
    module, groups = module_of(chunk), groups_of(chunk)
    slices = {**global_slices(module, groups), **buffer_slices(module, groups)}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found: StateDict = {}
    for name, piece in slices.items():
        if isinstance(tensors[name], ShardedParameter):
            raise ValueError(
                f"parameter {name!r} is sharded over data ranks (optim_grads_params) and has no values of its own; "
                "save with core.checkpoint.save_checkpoint(root, step, [model], optimizer)"
            )
        found[prefix + name] = _leaf(prefix + piece.name, piece, tensors[name].detach())
    return found


def _leaf(key: str, piece: GlobalSlice, data: Tensor) -> Any:
    replica = 1 if piece.is_copy else piece.replica

    def tensor_of(box: Box) -> ShardedTensor:
        part = box_view(data, box)
        return ShardedTensor(key, part, data.dtype, box.size, piece.shape, box.global_offset, replica_id=replica)

    if [box.size for box in piece.boxes] == [tuple(data.shape)]:
        return tensor_of(piece.boxes[0])

    def merge(parts: list[Tensor]) -> Tensor:
        whole = data.clone()
        for box, part in zip(piece.boxes, parts, strict=True):
            box_view(whole, box).copy_(part)
        return whole

    return ShardedTensorFactory(key, data, lambda *_: [tensor_of(box) for box in piece.boxes], merge, replica)


# -- saving ----------------------------------------------------------------------------------------------------------


@arguments(
    "sharded_state_dict checkpoint_dir -sharded_strategy=None -common_strategy=None -validate_access_integrity=True "
    "!async_sharded_save=False -preprocess_common_before_consistancy_check=None content_metadata=None "
    "-async_strategy=None -verify_integrity=False * process_group=None",
    {"async_sharded_save": "core.checkpoint.CheckpointSaver(asynchronous=True) saves behind the program's back"},
)
def save(sharded_state_dict: StateDict, checkpoint_dir: Any, content_metadata: Any, process_group: Any) -> None:
    """Save a tree: sharded tensors from the ranks that hold their main replicas, plain values from rank 0. Collective.

    checkpoint_dir: an existing directory without a checkpoint. Strategies have no part, integrity is always checked: a
    tensor that is not covered exactly once is a CheckpointError on all ranks, before anything is written.
    """
    ranks = Ranks(process_group)
    ranks.agree(None if Path(checkpoint_dir).is_dir() else f"{checkpoint_dir} is no directory; make it on rank 0 first")
    leaves = [part for leaf in leaves_of(sharded_state_dict) for part in _built(leaf)]
    common = map_leaves(sharded_state_dict, lambda leaf: DROPPED if isinstance(leaf, SHARDED) else leaf)
    blobs = {f"{COMMON}": _bytes(common)} if ranks.rank == 0 else {}
    pieces = []
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            assert leaf.data is not None, f"{leaf.key} was given without data"
            pieces.append(leaf.piece(leaf.data.detach()))
        elif isinstance(leaf, ShardedObject) and is_main_replica(leaf.replica_id):
            blobs[f"{OBJECT}/{leaf.unique_key}"] = _bytes(leaf.data)
    for optimizer in _optimizers(leaves):
        save_checkpoint(Path(checkpoint_dir) / OPTIMIZER, STEP, optimizer.model_chunks, optimizer, group=process_group)
    planner = PieceSavePlanner(pieces, blobs)

    def fill(writer: StorageWriter) -> None:
        with _quiet():
            dcp.save({}, storage_writer=writer, planner=planner, process_group=process_group, no_dist=not ranks.started)

    try:
        with CheckpointSaver(checkpoint_dir, process_group) as saver:
            saver.save(STEP, fill, meta={"dist_checkpointing": 1, "content_metadata": content_metadata})
    except CheckpointException as failure:  # what the tree lacks, the same on all ranks
        rank, (reason, _) = min(failure.failures.items())
        raise CheckpointError(f"cannot save {checkpoint_dir}: rank {rank}: {reason}") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():  # torch's, that there is one process only
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _built(leaf: Any) -> Iterable[Any]:
    return leaves_of(leaf.build()) if isinstance(leaf, ShardedTensorFactory) else [leaf]


def _optimizers(leaves: Iterable[Any]) -> list[Any]:
    found = [leaf.optimizer for leaf in leaves if isinstance(leaf, OptimizerState)]
    if len(found) > 1:
        raise ValueError(f"the tree holds the states of {len(found)} optimizers; make one of all model chunks")
    return found


def _bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _value(data: bytes, what: str) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{what} holds more than tensors, numbers, strings and containers, and is not unpickled: {error}"
            ) from None


# -- loading ---------------------------------------------------------------------------------------------------------


def check_is_distributed_checkpoint(checkpoint_dir: Any) -> bool:
    """True if there is a checkpoint that `save`, or Megatron, has written; nothing is verified."""
    return bool(list_committed(Path(checkpoint_dir))) or is_megatrons(Path(checkpoint_dir))


@dataclass
class _Files:
    """What a directory holds: tensors and blobs by key, and where a leaf's values are among them."""

    reader: Any
    records: Mapping[str, Any]
    blobs: set[str]
    pieces_of: Callable[[ShardedTensor, Tensor], list[Piece]]
    objects: str  # before the key of an object
    meta: Mapping[str, Any]

    def common(self, blobs: Mapping[str, bytes]) -> Any:
        """The plain values."""
        return _value(blobs[COMMON], COMMON) if COMMON in blobs else self.reader.common()


def _open(checkpoint_dir: Any, group: dist.ProcessGroup | None = None) -> _Files:
    if Ranks(group).any(is_megatrons(Path(checkpoint_dir)) and not list_committed(Path(checkpoint_dir))):
        reader = MegatronReader(str(checkpoint_dir))
        index = reader.read_metadata()
        records = tensor_records(index)
        return _Files(reader, records, blob_keys(index), lambda leaf, data: pieces_in(leaf, data, records), "", {})
    directory = find_intact(checkpoint_dir, group=group)
    index = directory.reader().read_metadata()
    records, blobs = tensor_records(index), blob_keys(index)

    def pieces_of(leaf: ShardedTensor, data: Tensor) -> list[Piece]:
        return [leaf.piece(data)] if leaf.key in records else []

    return _Files(directory.reader(), records, blobs, pieces_of, f"{OBJECT}/", directory.meta)


@arguments(
    "sharded_state_dict checkpoint_dir -sharded_strategy=None -common_strategy=None -validate_access_integrity=True "
    "strict='assume_ok_unexpected' -verify_integrity=False process_group=None"
)
def load(sharded_state_dict: StateDict, checkpoint_dir: Any, strict: Any, process_group: Any) -> Any:
    """A tree with the values of a checkpoint in the places of the leaves, and its plain values. Collective.

    Tensors are new ones: nothing of the model changes until it loads them. An optimizer's state is put in place here.
    With a strict that returns mismatches: (tree, keys of the file not asked for, keys asked for and not in it).
    """
    ranks, how = Ranks(process_group), StrictHandling(strict)
    files = _open(checkpoint_dir, process_group)
    plain = leaves_of(sharded_state_dict)
    built = {id(leaf): leaf.build() for leaf in plain if isinstance(leaf, ShardedTensorFactory)}
    leaves = [part for leaf in plain for part in leaves_of(built.get(id(leaf), leaf))]
    staged = {
        id(leaf): (leaf, torch.empty(leaf.local_shape, dtype=leaf.dtype, device=getattr(leaf.data, "device", "cpu")))
        for leaf in leaves
        if isinstance(leaf, ShardedTensor)
    }
    pieces = {number: files.pieces_of(leaf, data) for number, (leaf, data) in staged.items()}
    objects = {f"{files.objects}{leaf.unique_key}" for leaf in leaves if isinstance(leaf, ShardedObject)}
    asked = objects | {piece.key for found in pieces.values() for piece in found}
    lacking = {leaf.key for number, (leaf, _) in staged.items() if not pieces[number]} | objects - files.blobs
    flat = [piece for found in pieces.values() for piece in found]
    everybody = ranks.gather((asked, lacking, layers_of(flat)))
    unexpected = sorted(set().union(*(theirs for _, theirs, _ in everybody)))
    missing = sorted({*files.records, *files.blobs} - {COMMON} - set().union(*(theirs for theirs, _, _ in everybody)))
    if not files.objects:  # Megatron's layers keep a state of TransformerEngine's beside their weights
        missing = [key for key in missing if "._extra_state/" not in key]
        short = layers_lacking(set().union(*(theirs for _, _, theirs in everybody)), files.records)
        ranks.agree(None if short is None else f"cannot load {checkpoint_dir}: {short}")
    ranks.agree(_refusal(how, unexpected, missing, checkpoint_dir))
    ranks.agree(_shapes_differ(flat, files.records, checkpoint_dir))
    optimizers = _optimizers(leaves)
    if optimizers and not files.objects:
        raise CheckpointError(
            f"{checkpoint_dir} was written by Megatron, whose optimizer states are not read; leave the optimizer out "
            "of the tree, and begin with the weights"
        )
    if how in (StrictHandling.LOG_ALL, StrictHandling.LOG_UNEXPECTED) and (unexpected or missing) and ranks.rank == 0:
        logger.warning(
            "loading %s: asked for and not in it: %s; not asked for: %s", checkpoint_dir, unexpected, missing
        )

    planner = PieceLoadPlanner(flat, sorted({COMMON, *objects} & files.blobs))
    with _quiet():
        dcp.load(
            {}, storage_reader=files.reader, planner=planner, process_group=process_group, no_dist=not ranks.started
        )
    for optimizer in optimizers:
        load_checkpoint(Path(checkpoint_dir) / OPTIMIZER, optimizer.model_chunks, optimizer, group=process_group)

    def found(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensorFactory):
            parts = map_leaves(built[id(leaf)], found)
            complete = len(leaves_of(parts)) == len(leaves_of(built[id(leaf)]))
            return leaf.merge_fn(parts) if complete else DROPPED
        if isinstance(leaf, ShardedTensor):
            return staged[id(leaf)][1] if pieces[id(leaf)] else DROPPED
        if isinstance(leaf, ShardedObject):
            blob = planner.blobs.get(f"{files.objects}{leaf.unique_key}")
            return DROPPED if blob is None else _value(blob, leaf.unique_key)
        if isinstance(leaf, OptimizerState):
            return OptimizerState(leaf.optimizer, loaded=True)
        return leaf.unwrap() if isinstance(leaf, LocalNonpersistentObject) else leaf

    result = merge(files.common(planner.blobs), map_leaves(sharded_state_dict, found))
    if how in (StrictHandling.RETURN_ALL, StrictHandling.RETURN_UNEXPECTED):
        return result, set(missing), set(unexpected)
    return result


def _refusal(how: StrictHandling, unexpected: list[str], missing: list[str], place: Any) -> str | None:
    raises = how in (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
    if raises and unexpected:
        return (
            f"cannot load {place}: it does not have {', '.join(map(repr, unexpected[:3]))}; strict='ignore_all' goes on"
        )
    if how is StrictHandling.RAISE_ALL and missing:
        return f"cannot load {place}: nobody asks for {', '.join(map(repr, missing[:3]))}, which it has"
    return None


def _shapes_differ(pieces: Iterable[Piece], records: Mapping[str, Any], place: Any) -> str | None:
    for piece in pieces:
        if tuple(records[piece.key].size) != tuple(piece.shape):
            return (
                f"cannot load {place}: {piece.key!r} is {list(records[piece.key].size)} in it and {list(piece.shape)} "
                "here; build the model that was saved"
            )
    return None


def load_common_state_dict(checkpoint_dir: Any) -> Any:
    """The plain values of a checkpoint. Collective over the default group."""
    return load({}, checkpoint_dir, strict=StrictHandling.IGNORE_ALL)


@arguments("checkpoint_dir -sharded_strategy=None -common_strategy=None")
def load_tensors_metadata(checkpoint_dir: Any) -> StateDict:
    """Every tensor of a checkpoint as a ShardedTensor without data. Collective over the default group."""
    found: StateDict = {}
    for key, record in _open(checkpoint_dir).records.items():
        shape = tuple(record.size)
        found[key] = ShardedTensor(key, None, record.properties.dtype, shape, shape, (0,) * len(shape))
    return found


def load_plain_tensors(checkpoint_dir: Any) -> StateDict:
    """Every tensor of a checkpoint, whole, on every rank. Collective over the default group."""
    tensors = load_tensors_metadata(checkpoint_dir)
    found: StateDict = load(tensors, checkpoint_dir, strict=StrictHandling.IGNORE_ALL)
    return {key: found[key] for key in tensors}


@arguments("checkpoint_dir=None * preloaded_state_dict=None")
def load_content_metadata(checkpoint_dir: Any, preloaded_state_dict: StateDict | None) -> Any:
    """What `save` was given as content_metadata."""
    if preloaded_state_dict is not None:
        return preloaded_state_dict.get("content_metadata")
    if checkpoint_dir is None:
        raise ValueError("content_metadata is in the checkpoint; pass checkpoint_dir")
    files = _open(checkpoint_dir)
    return files.meta.get("content_metadata") if files.objects else files.common({}).get("content_metadata")
