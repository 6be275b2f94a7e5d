"""LoadPlan: the reads of one rank from a checkpoint into staging memory. Nothing is read or changed yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from core.checkpoint.algorithm_keys import AlgorithmKeys, keys_by_group
from core.checkpoint.optimizer_pieces import WEIGHTS, Entry, entries_of, entry_pieces, leaves
from core.checkpoint.pieces import MODEL, OPTIMIZER, LocalTensor, Piece, box_view, local_tensors, tied_names
from core.checkpoint.planners import read_items, tensor_records

MAPPED_BYTES = 2**16  # from this size on, freed memory returns to the system instead of the C library
LACKS = "the checkpoint lacks "  # first words of problems that strict=False allows


@dataclass(frozen=True)
class Keeps:
    """Facts about the algorithm that updates a parameter. ``keys`` is ``None`` if unknown."""

    algorithm: str
    keys: AlgorithmKeys | None
    was_saved: bool  # the saving job used the same algorithm


@dataclass
class LoadPlan:
    """The boxes that one rank will read, with its problems and notes."""

    pieces: list[Piece] = field(default_factory=list)
    staged: list[tuple[LocalTensor, torch.Tensor]] = field(default_factory=list)
    entries: list[tuple[Entry, dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    without_state: set[str] = field(default_factory=set)  # names of parameters
    used: set[str] = field(default_factory=set)  # names of tensors of which this rank stores a part
    keys: dict[tuple[int, str], Keeps] = field(default_factory=dict)  # key: (id(optimizer), parameter name in it)


def plan_load(chunks: list[Any], optimizer: Any, metadata: Metadata, meta: Mapping[str, Any]) -> LoadPlan:
    """Compare chunks and their optimizer with the index of a checkpoint. Mismatches are listed in ``problems``."""
    records = tensor_records(metadata)
    tensors = local_tensors(chunks)
    plan = LoadPlan()
    for local in tensors:
        _plan_tensor(plan, local, records)
    # A plain state_dict has a shared parameter under each of its names.
    plan.used |= {f"{MODEL}.{name}" for name in tied_names(chunks)}
    entries = entries_of(optimizer, chunks, tensors)
    for leaf in leaves(optimizer):
        plan.keys |= {(id(leaf), name): keeps for name, keeps in _algorithms(leaf, meta).items()}
    in_file = _state_keys_in(records)
    readable = {id(local) for local, _ in plan.staged}
    for entry in entries:
        if id(entry.local) in readable:
            _plan_entry(plan, entry, in_file.get(entry.local.slice.name, set()), records)
        else:  # weights missing in the file (strict=False) start fresh
            plan.entries.append((entry, {"offset": entry.offset, "numel": entry.numel}))
    if plan.entries and not in_file:
        plan.notes.append("the checkpoint has no optimizer state: it starts fresh")
    elif plan.without_state and any(keys - {WEIGHTS} for keys in in_file.values()):
        names = sorted(plan.without_state)
        plan.notes.append(
            f"the checkpoint has no optimizer state of {names[0]!r} (and {len(names) - 1} more), as if it was frozen: "
            "that starts fresh"
        )
    for number, piece in enumerate(plan.pieces):
        try:
            read_items(piece, number, metadata)
        except ValueError as failure:
            plan.problems.append(str(failure))
    return plan


def _plan_tensor(plan: LoadPlan, local: LocalTensor, records: Mapping[str, TensorStorageMetadata]) -> None:
    """Plan a parameter or buffer, read from its own tensor or from its master weights if they have more precision."""
    piece = local.slice
    plan.used.add(local.key)
    record = records.get(local.key)
    if record is None:
        plan.problems.append(f"{LACKS}{local.key!r}")
        return
    if tuple(record.size) != piece.shape:
        plan.problems.append(
            f"{local.key!r} has shape {list(record.size)} in the checkpoint and {list(piece.shape)} in this model"
        )
        return
    key, master = local.key, f"{OPTIMIZER}.{WEIGHTS}.{piece.name}"
    if local.is_param and master in records and local.tensor.dtype.itemsize > record.properties.dtype.itemsize:
        key = master
    if local.shard is not None:
        first, part = local.shard
        kept = Entry(None, piece.name, local, first, part.numel(), {})
        plan.staged.append((local, _staged(plan, kept, WEIGHTS, part.dtype, key)))
        return
    staging = _staging(local.tensor.shape, local.tensor.dtype)  # padding stays zero
    plan.staged.append((local, staging))
    plan.pieces += [Piece(key, piece.shape, box.global_offset, box_view(staging, box)) for box in piece.boxes]


def _algorithms(leaf: Any, meta: Mapping[str, Any]) -> dict[str, Keeps]:
    """Return facts about each parameter's algorithm, by the optimizer's parameter names."""
    keys = keys_by_group(leaf.optimizer)
    labels = [group.get("optimizer", type(leaf.optimizer).__name__) for group in leaf.param_groups]
    saved = {
        group.get("optimizer", record["algorithm"])
        for record in meta.get("optimizer", ())
        for group in record["param_groups"]
    }
    return {
        leaf.names[id(shard.param)]: Keeps(labels[segment.group], keys[segment.group], labels[segment.group] in saved)
        for masters in leaf.masters
        for segment in masters.segments
        for shard in segment.shards
    }


def _state_keys_in(records: Mapping[str, TensorStorageMetadata]) -> dict[str, set[str]]:
    """Return the optimizer state keys in the file for each parameter."""
    found: dict[str, set[str]] = {}
    for key in records:
        kind, _, rest = key.partition(".")
        if kind == OPTIMIZER:
            state_key, _, name = rest.partition(".")
            found.setdefault(name, set()).add(state_key)
    return found


def _plan_entry(
    plan: LoadPlan,
    entry: Entry,
    in_file: set[str],
    records: Mapping[str, TensorStorageMetadata],
) -> None:
    """Plan one range of optimizer state: load it if the file has all keys of the algorithm, else start fresh."""
    keeps = plan.keys[id(entry.optimizer), entry.name]
    saved = in_file - {WEIGHTS}
    if not saved and (keeps.keys is None or keeps.keys.kept):
        plan.without_state.add(entry.local.slice.name)
    state: dict[str, Any] = {"offset": entry.offset, "numel": entry.numel}
    if WEIGHTS in entry.state:
        # A file of full precision has no separate masters: the weights are the masters.
        key = entry.key(WEIGHTS) if WEIGHTS in in_file else entry.local.key
        state[WEIGHTS] = _staged(plan, entry, WEIGHTS, entry.state[WEIGHTS].dtype, key)
    for key in sorted(_wanted(plan, keeps, saved)):
        record = records[entry.key(key)]
        dtype = record.properties.dtype
        is_scalar = keeps.keys is None or key in keeps.keys.scalars
        if is_scalar and not record.size:
            state[key] = torch.zeros((), dtype=dtype, device="cpu")
            plan.pieces.append(Piece(entry.key(key), (), (), state[key]))
        elif tuple(record.size) != entry.local.slice.shape:
            plan.problems.append(
                f"{entry.key(key)!r} has shape {list(record.size)} in the checkpoint and its parameter "
                f"{list(entry.local.slice.shape)} in this model"
            )
        else:
            state[key] = _staged(plan, entry, key, dtype, entry.key(key))
    plan.entries.append((entry, state))


def _wanted(plan: LoadPlan, keeps: Keeps, saved: set[str]) -> set[str]:
    """Return the state keys to load: all keys of the algorithm if the file has them, else none."""
    if keeps.keys is None:
        if saved and not keeps.was_saved:
            plan.notes.append(f"{keeps.algorithm} is not what was saved with: its state starts fresh")
        return saved if keeps.was_saved else set()
    kept = set(keeps.keys.kept)
    if saved and not kept <= saved:
        plan.notes.append(
            f"{keeps.algorithm} keeps {sorted(kept)} of a parameter and the checkpoint has {sorted(saved)}: its state "
            "starts fresh"
        )
        return set()
    if saved - kept:
        plan.notes.append(f"{keeps.algorithm} keeps no {sorted(saved - kept)}, which the checkpoint has: left out")
    return saved & kept


def _staged(plan: LoadPlan, entry: Entry, state_key: str, dtype: torch.dtype, key: str) -> torch.Tensor:
    flat = _staging(entry.numel, dtype)
    plan.pieces += entry_pieces(entry, state_key, flat, key)
    return flat


def _staging(shape: int | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    from core.distributed.wire import huge_pages

    return huge_pages.zeros(shape, dtype, torch.device("cpu"), MAPPED_BYTES)
