"""save_tree and load_tree: a tree of sharded tensors and plain values in one directory, durable and for any layout.

A directory has one checkpoint in the format of core.checkpoint, and every byte is verified when it is loaded. Loading
also supports directories written by Megatron's dist_checkpointing, including optimizer states; see torch_dist.
"""

from __future__ import annotations

import argparse
import io
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from core.checkpoint.agreement import Ranks
from core.checkpoint.boxes import Box
from core.checkpoint.directory import find_intact
from core.checkpoint.errors import CheckpointError
from core.checkpoint.global_slices import GlobalSlice, buffer_slices, global_slices
from core.checkpoint.load import load_checkpoint, put_in_place
from core.checkpoint.load_plan import LoadPlan
from core.checkpoint.pieces import Piece, box_view, groups_of, module_of
from core.checkpoint.planners import PieceLoadPlanner, PieceSavePlanner, blob_keys, tensor_records
from core.checkpoint.root_directory import list_committed
from core.checkpoint.save import save_checkpoint
from core.checkpoint.saver import CheckpointSaver
from core_compat.megatron.torch_dist import (
    MegatronReader,
    is_megatrons,
    layers_lacking,
    layers_of,
    pieces_in,
    plan_states,
)
from core_compat.megatron.tree import (
    DROPPED,
    SHARDED,
    LocalNonpersistentObject,
    OptimizerState,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    is_main_replica,
    leaves_of,
    map_leaves,
    with_saved,
)

__all__ = ["LoadedTree", "load_tree", "module_tree", "save_tree"]

logger = logging.getLogger(__name__)
STEP = 0  # step of the only checkpoint in a directory
COMMON, OBJECT, OPTIMIZER = "common", "object", "optimizer"  # the blob of plain values, blobs by key, a directory


# -- a module's tree -------------------------------------------------------------------------------------------------


def module_tree(chunk: Any, prefix: str = "") -> StateDict:
    """Map a module's parameter and buffer names to their parts of the full model's tensors. Does not communicate.

    Keys in the file are ``prefix`` followed by the name in the full model, which a module declares by ``global_names``.

    Args:
        chunk (Module): Model chunk, wrapped or not.
        prefix (str, optional): Prefix of all names.

    Raises:
        ValueError: If parameters are sharded over data ranks.
    """
    from core.distributed.sharded.sharded_parameter import ShardedParameter

    module, groups = module_of(chunk), groups_of(chunk)
    slices = {**global_slices(module, groups), **buffer_slices(module, groups)}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found: StateDict = {}
    for name, piece in slices.items():
        if isinstance(tensors[name], ShardedParameter):
            raise ValueError(
                f"parameter {name!r} is sharded over data-parallel ranks (optim_grads_params), so this rank lacks its "
                "full values; save with core.checkpoint.save_checkpoint(root, step, [model], optimizer)"
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


def save_tree(
    tree: StateDict,
    directory: str | os.PathLike[str],
    *,
    content_metadata: Any = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a tree: sharded tensors from ranks with their main replica, plain values from rank 0.

    Every rank of ``group`` must call it.

        save_tree({"model": module_tree(model), "step": 100}, "checkpoints/step_100")

    Args:
        tree (StateDict): Dictionaries and lists with sharded leaves and plain values.
        directory (str | os.PathLike[str]): An existing directory without a checkpoint.
        content_metadata: Values for JSON, returned by ``tree_metadata``.
        group (ProcessGroup, optional): Process group that saves. Defaults to the default group.

    Raises:
        CheckpointError: On all ranks, before anything is written, if a tensor is not covered exactly once.
    """
    ranks, root = Ranks(group), Path(directory)
    ranks.agree(None if root.is_dir() else f"{root} is no directory; make it on rank 0 first")
    leaves = [part for leaf in leaves_of(tree) for part in _built(leaf)]
    common = map_leaves(tree, lambda leaf: DROPPED if isinstance(leaf, SHARDED) else leaf)
    blobs = {COMMON: _bytes(common)} if ranks.rank == 0 else {}
    pieces = []
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor) and is_main_replica(leaf.replica_id):
            assert leaf.data is not None, f"{leaf.key} was given without data"
            pieces.append(leaf.piece(leaf.data.detach()))
        elif isinstance(leaf, ShardedObject) and is_main_replica(leaf.replica_id):
            blobs[f"{OBJECT}/{leaf.unique_key}"] = _bytes(leaf.data)
    for optimizer in _optimizers(leaves):
        save_checkpoint(root / OPTIMIZER, STEP, optimizer.model_chunks, optimizer, group=group)
    fill = partial(ranks.write, PieceSavePlanner(pieces, blobs))
    try:
        with CheckpointSaver(root, group) as saver:
            saver.save(STEP, fill, meta={"dist_checkpointing": 1, "content_metadata": content_metadata})
    except CheckpointException as failure:  # an error in the tree, the same on all ranks
        rank, (reason, _) = min(failure.failures.items())
        raise CheckpointError(f"cannot save {root}: rank {rank}: {reason}") from None


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


def is_tree(directory: str | os.PathLike[str]) -> bool:
    """Return ``True`` if the directory has a checkpoint written by ``save_tree`` or Megatron. Nothing is verified."""
    return bool(list_committed(Path(directory))) or is_megatrons(Path(directory))


@dataclass
class _Files:
    """Contents of a directory: tensors and blobs by key, with a lookup of a leaf's values."""

    reader: Any
    records: Mapping[str, Any]
    blobs: set[str]
    pieces_of: Callable[[Piece], list[Piece]]
    objects: str  # prefix of an object's key
    meta: Mapping[str, Any]

    def common(self, blobs: Mapping[str, bytes]) -> Any:
        return _value(blobs[COMMON], COMMON) if COMMON in blobs else self.reader.common()


def _open(root: Path, group: dist.ProcessGroup | None = None) -> _Files:
    if Ranks(group).any(is_megatrons(root) and not list_committed(root)):
        reader: Any = MegatronReader(str(root))
        objects, meta = "", dict[str, Any]()
    else:
        directory = find_intact(root, group=group)
        reader, objects, meta = directory.reader(), f"{OBJECT}/", dict(directory.meta)
    index = reader.read_metadata()
    records = tensor_records(index)

    def pieces_of(piece: Piece) -> list[Piece]:
        return ([piece] if piece.key in records else []) if objects else pieces_in(piece, records)

    return _Files(reader, records, blob_keys(index), pieces_of, objects, meta)


@dataclass(frozen=True)
class LoadedTree:
    """Result of ``load_tree``.

    Attributes:
        tree: The tree with loaded values instead of leaves.
        unasked: Keys of the file that no rank requested.
        lacking: Keys that this rank requested and the file does not have. Their leaves are left out.
    """

    tree: Any
    unasked: tuple[str, ...]
    lacking: tuple[str, ...]


def load_tree(
    tree: StateDict,
    directory: str | os.PathLike[str],
    *,
    refuse_lacking: bool = True,
    refuse_unasked: bool = False,
    group: dist.ProcessGroup | None = None,
) -> LoadedTree:
    """Load a checkpoint into a tree, replacing leaves by their values and plain values by the saved ones. Collective.

    Loaded tensors are new: the model does not change until it loads them. Only an optimizer's state is restored
    directly.

    Args:
        tree (StateDict): Dictionaries and lists with sharded leaves and plain values.
        directory (str | os.PathLike[str]): Directory written by ``save_tree`` or Megatron.
        refuse_lacking (bool, optional): Raise if the file lacks a tensor or object of the tree.
        refuse_unasked (bool, optional): Raise if the file has a tensor or object that no rank requests.
        group (ProcessGroup, optional): Process group that loads. Defaults to the default group.

    Returns:
        The loaded tree, and the keys that only one side has.

    Raises:
        CheckpointError: On all ranks, before anything is changed, if the file is damaged, has different shapes, or is
            rejected by ``refuse_lacking`` or ``refuse_unasked``.
    """
    ranks, root = Ranks(group), Path(directory)
    files = _open(root, group)
    plain = leaves_of(tree)
    built = {id(leaf): leaf.build() for leaf in plain if isinstance(leaf, ShardedTensorFactory)}
    leaves = [part for leaf in plain for part in leaves_of(built.get(id(leaf), leaf))]
    staged = {
        id(leaf): (leaf, torch.empty(leaf.local_shape, dtype=leaf.dtype, device=getattr(leaf.data, "device", "cpu")))
        for leaf in leaves
        if isinstance(leaf, ShardedTensor)
    }
    pieces = {number: files.pieces_of(leaf.piece(data)) for number, (leaf, data) in staged.items()}
    objects = {f"{files.objects}{leaf.unique_key}" for leaf in leaves if isinstance(leaf, ShardedObject)}
    lacking = {leaf.key for number, (leaf, _) in staged.items() if not pieces[number]} | objects - files.blobs
    optimizers = _optimizers(leaves)
    plans = _plans(optimizers, files, ranks, root) if not files.objects else []
    flat = [piece for found in (*pieces.values(), *(plan.pieces for plan in plans)) for piece in found]
    requested = objects.union({piece.key for piece in flat}, *(plan.used for plan in plans))
    everybody = ranks.gather((requested, lacking, layers_of(flat)))
    lacked = sorted(set().union(*(theirs for _, theirs, _ in everybody)))
    unasked = sorted({*files.records, *files.blobs} - {COMMON} - set().union(*(theirs for theirs, _, _ in everybody)))
    if not files.objects:  # Megatron's layers store a state of TransformerEngine next to their weights
        unasked = [key for key in unasked if "._extra_state/" not in key]
        short = layers_lacking(set().union(*(theirs for _, _, theirs in everybody)), files.records)
        ranks.agree(None if short is None else f"cannot load {root}: {short}")
    ranks.agree(_refusal(lacked if refuse_lacking else [], unasked if refuse_unasked else [], root))
    ranks.agree(_shapes_differ(flat, files.records, root))
    planner = PieceLoadPlanner(flat, sorted({COMMON, *objects} & files.blobs))
    ranks.read(planner, files.reader)
    for optimizer, plan in itertools.zip_longest(optimizers, plans):
        if plan is not None:
            put_in_place(optimizer.model_chunks, optimizer, plan)
        else:
            load_checkpoint(root / OPTIMIZER, optimizer.model_chunks, optimizer, group=group)

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

    whole = map_leaves(with_saved(tree, files.common(planner.blobs)), found)
    return LoadedTree(whole, tuple(unasked), tuple(lacked))


def _plans(optimizers: list[Any], files: _Files, ranks: Ranks, place: Any) -> list[LoadPlan]:
    """Create load plans for optimizers from Megatron's files. Raises CheckpointError on all ranks if one cannot
    load.
    """
    plans: list[LoadPlan] = []
    problem = None
    try:
        plans = [plan_states(optimizer, files.records, files.blobs, files.common({})) for optimizer in optimizers]
        problem = "; ".join([words for plan in plans for words in plan.problems][:3])
    except Exception as failure:  # the other ranks wait in the next gather
        problem = str(failure)
    ranks.agree(f"cannot load {place}: {problem}" if problem else None)
    everybody = ranks.gather([words for plan in plans for words in plan.notes])
    for note in dict.fromkeys(itertools.chain.from_iterable(everybody)):
        logger.warning("loading %s: %s", place, note)
    return plans


def _refusal(lacked: list[str], unasked: list[str], place: Path) -> str | None:
    if lacked:
        names = ", ".join(map(repr, lacked[:3]))
        return f"cannot load {place}: it does not have {names}; refuse_lacking=False (strict='ignore_all') ignores it"
    if unasked:
        return f"cannot load {place}: no leaf of the tree reads {', '.join(map(repr, unasked[:3]))}, which it has"
    return None


def _shapes_differ(pieces: Iterable[Piece], records: Mapping[str, Any], place: Any) -> str | None:
    for piece in pieces:
        if tuple(records[piece.key].size) != tuple(piece.shape):
            return (
                f"cannot load {place}: {piece.key!r} is {list(records[piece.key].size)} in it and {list(piece.shape)} "
                "here; build the model that was saved"
            )
    return None


def tree_tensors(directory: str | os.PathLike[str]) -> StateDict:
    """Return every tensor of a checkpoint as a ShardedTensor without data. Collective over the default group."""
    found: StateDict = {}
    for key, record in _open(Path(directory)).records.items():
        shape = tuple(record.size)
        found[key] = ShardedTensor(key, None, record.properties.dtype, shape, shape, (0,) * len(shape))
    return found


def tree_metadata(directory: str | os.PathLike[str]) -> Any:
    """Return the content_metadata passed to ``save_tree``. Collective over the default group."""
    files = _open(Path(directory))
    return files.meta.get("content_metadata") if files.objects else files.common({}).get("content_metadata")
