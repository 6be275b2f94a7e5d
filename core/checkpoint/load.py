"""load_checkpoint: every rank reads the boxes it holds now, from whatever boxes were written.

Three phases, so that a run that cannot go on is left as it was: find out what is missing or does not fit, on all ranks;
read into memory of its own; and only when every rank has all of it, put it in place.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from core.checkpoint.agreement import Ranks
from core.checkpoint.algorithm_keys import AlgorithmKeys, keys_by_group
from core.checkpoint.directory import CheckpointDirectory, find_intact
from core.checkpoint.errors import CheckpointError
from core.checkpoint.optimizer_pieces import WEIGHTS, Entry, entries_of, entry_pieces, leaves
from core.checkpoint.pieces import MODEL, OPTIMIZER, LocalTensor, Piece, box_view, groups_of, local_tensors, tied_names
from core.checkpoint.planners import PieceLoadPlanner, blob_keys, read_items, tensor_records
from core.checkpoint.random_state import random_key, read_random_state, set_random_state
from core.checkpoint.save import (
    CONTENT_FORMAT,
    LAYOUT_AXES,
    checked_chunks,
    layout_of,
    loss_scaler_of,
    settle,
    words_of,
)
from core.optimizer.optimizer_state import load_groups

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class LoadReport:
    """What was loaded. notes: what the file holds and was not taken, or was wanted and is not in it, in sentences."""

    step: int
    path: Path
    layout: dict[str, Any]  # that it was saved at
    extra: dict[str, Any]
    configuration: dict[str, Any]
    random_restored: bool
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # damaged steps that were passed over


@dataclass(frozen=True)
class _Keeps:
    """What is known of the algorithm that updates a parameter. keys: None where nobody can say."""

    algorithm: str
    keys: AlgorithmKeys | None
    was_saved: bool  # by a job that used the same algorithm


@dataclass
class _Plan:
    """What one rank will read, and what it has found to be wrong or worth saying."""

    pieces: list[Piece] = field(default_factory=list)
    staged: list[tuple[LocalTensor, torch.Tensor]] = field(default_factory=list)
    entries: list[tuple[Entry, dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    without_state: set[str] = field(default_factory=set)  # names of parameters
    used: set[str] = field(default_factory=set)  # names of tensors that this rank holds a part of
    keys: dict[tuple[int, str], _Keeps] = field(default_factory=dict)  # by id(optimizer) and its name of a parameter


def load_checkpoint(
    root: str | os.PathLike[str],
    model_chunks: Sequence[Any],
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    step: int | None = None,
    strict: bool = True,
    load_random_state: bool = True,
    load_hyperparameters: bool = False,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Go on from a checkpoint, saved at this layout or another. Collective over `group`, all ranks of the job.

    step: that one, or the newest intact one. strict: refuse a file whose tensors are not exactly the model's; without
    it what both have is loaded, and the report's notes name the rest. Learning rates, decay and all other settings stay
    those of the optimizer as it was built, unless load_hyperparameters. Random streams come back where every parallel
    size is the one they were saved at, and stay as they are elsewhere.
    Raises CheckpointError, the same on every rank, before anything has been changed.
    """
    ranks = Ranks(group)
    directory = find_intact(root, step, group)
    reader = directory.reader()
    plan, error, metadata = _Plan(), None, Metadata({})
    chunks: list[Any] = []
    groups: list[list[dict[str, Any]]] = []
    try:
        chunks = checked_chunks(model_chunks)
        _check_format(directory.meta)
        metadata = reader.read_metadata()
        plan = _plan(chunks, optimizer, metadata, directory.meta)
        groups = _saved_groups(optimizer, directory.meta) if load_hyperparameters else []
    except Exception as failure:  # the others wait in the next gather, and must hear of it
        error = f"cannot load {directory.path}: {words_of(failure)}"
    _refuse_together(ranks, directory, plan, metadata, error, strict=strict)

    random_name = _random_name(directory, chunks, metadata) if load_random_state else None
    planner = PieceLoadPlanner(plan.pieces, [] if random_name is None else [random_name])
    try:
        with warnings.catch_warnings():  # torch's, that there is one process only
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=not ranks.started)
    except CheckpointException as failure:
        raise CheckpointError(f"cannot load {directory.path}: {_first_reason(failure)}") from None

    meta = directory.meta
    ranks.agree(_load_numbers(directory, scheduler, loss_scaler_of(optimizer)))
    _put_in_place(chunks, optimizer, plan)
    for leaf, saved in zip(leaves(optimizer), groups, strict=False):
        load_groups(leaf.param_groups, saved)
    if random_name is not None:
        set_random_state(read_random_state(planner.blobs[random_name]))
    notes = tuple(dict.fromkeys(note for found in ranks.gather(plan.notes) for note in found))
    if ranks.rank == 0:
        for note in notes:
            logger.warning("loading %s: %s", directory.path, note)
    return LoadReport(
        directory.step,
        directory.path,
        dict(meta.get("layout", {})),
        dict(meta.get("extra", {})),
        dict(meta.get("configuration", {})),
        random_name is not None,
        notes,
        tuple(directory.skipped),
    )


# -- what to read ----------------------------------------------------------------------------------------------------


def _plan(chunks: list[Any], optimizer: Any, metadata: Metadata, meta: Mapping[str, Any]) -> _Plan:
    records = tensor_records(metadata)
    tensors = local_tensors(chunks)
    plan = _Plan()
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
        else:  # weights that the file has not (strict=False) start fresh
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


def _check_format(meta: Mapping[str, Any]) -> None:
    found = meta.get("content_format")
    if found != CONTENT_FORMAT:
        raise ValueError(
            f"its content has format {found!r} and this version of the package reads {CONTENT_FORMAT}; it was saved by "
            f"version {meta.get('versions', {}).get('core', 'unknown')}"
        )


def _plan_tensor(plan: _Plan, local: LocalTensor, records: Mapping[str, TensorStorageMetadata]) -> None:
    """A parameter or buffer from its own tensor, or from its master weights where they hold more digits."""
    piece = local.slice
    plan.used.add(local.key)
    record = records.get(local.key)
    if record is None:
        plan.problems.append(f"the checkpoint lacks {local.key!r}")
        return
    if tuple(record.size) != piece.shape:
        plan.problems.append(
            f"{local.key!r} has shape {list(record.size)} in the checkpoint and {list(piece.shape)} in this model"
        )
        return
    key, master = local.key, f"{OPTIMIZER}.{WEIGHTS}.{piece.name}"
    if local.is_param and master in records and local.tensor.dtype.itemsize > record.properties.dtype.itemsize:
        key = master
    covered = sum(box.numel for box in piece.boxes) == local.tensor.numel()
    make = torch.empty if covered else torch.zeros  # zeros are the padding's values
    staging = make(local.tensor.shape, dtype=local.tensor.dtype, device=CPU)
    plan.staged.append((local, staging))
    plan.pieces += [Piece(key, piece.shape, box.global_offset, box_view(staging, box)) for box in piece.boxes]


def _algorithms(leaf: Any, meta: Mapping[str, Any]) -> dict[str, _Keeps]:
    """By the optimizer's names of parameters."""
    keys = keys_by_group(leaf.optimizer)
    labels = [group.get("optimizer", type(leaf.optimizer).__name__) for group in leaf.param_groups]
    saved = {
        group.get("optimizer", record["algorithm"])
        for record in meta.get("optimizer", ())
        for group in record["param_groups"]
    }
    return {
        leaf.names[id(piece.param)]: _Keeps(labels[run.group], keys[run.group], labels[run.group] in saved)
        for masters in leaf.masters
        for run in masters.runs
        for piece in run.slices
    }


def _state_keys_in(records: Mapping[str, TensorStorageMetadata]) -> dict[str, set[str]]:
    """By parameter the state keys that the file has of it."""
    found: dict[str, set[str]] = {}
    for key in records:
        kind, _, rest = key.partition(".")
        if kind == OPTIMIZER:
            state_key, _, name = rest.partition(".")
            found.setdefault(name, set()).add(state_key)
    return found


def _plan_entry(
    plan: _Plan,
    entry: Entry,
    in_file: set[str],
    records: Mapping[str, TensorStorageMetadata],
) -> None:
    """One range of the optimizer's state: what its algorithm keeps, if the file has all of that; else a fresh start."""
    keeps = plan.keys[id(entry.optimizer), entry.name]
    saved = in_file - {WEIGHTS}
    if not saved and (keeps.keys is None or keeps.keys.kept):
        plan.without_state.add(entry.local.slice.name)
    state: dict[str, Any] = {"offset": entry.offset, "numel": entry.numel}
    if WEIGHTS in entry.state:
        # A file of full precision has no masters beside the weights: they are them.
        key = entry.key(WEIGHTS) if WEIGHTS in in_file else entry.local.key
        state[WEIGHTS] = _staged(plan, entry, WEIGHTS, entry.state[WEIGHTS].dtype, key)
    for key in sorted(_wanted(plan, keeps, saved)):
        record = records[entry.key(key)]
        dtype = record.properties.dtype
        is_scalar = keeps.keys is None or key in keeps.keys.scalars
        if is_scalar and not record.size:
            state[key] = torch.zeros((), dtype=dtype)
            plan.pieces.append(Piece(entry.key(key), (), (), state[key]))
        elif tuple(record.size) != entry.local.slice.shape:
            plan.problems.append(
                f"{entry.key(key)!r} has shape {list(record.size)} in the checkpoint and its parameter "
                f"{list(entry.local.slice.shape)} in this model"
            )
        else:
            state[key] = _staged(plan, entry, key, dtype, entry.key(key))
    plan.entries.append((entry, state))


def _wanted(plan: _Plan, keeps: _Keeps, saved: set[str]) -> set[str]:
    """The state keys to load: all that the algorithm keeps, where the file has all of them; else none."""
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


def _staged(plan: _Plan, entry: Entry, state_key: str, dtype: torch.dtype, key: str) -> torch.Tensor:
    flat = torch.empty(entry.numel, dtype=dtype, device=CPU)
    pieces = entry_pieces(entry, state_key, flat, key)
    if sum(piece.data.numel() for piece in pieces) < entry.numel:
        flat.zero_()  # padding
    plan.pieces += pieces
    return flat


def _refuse_together(
    ranks: Ranks, directory: CheckpointDirectory, plan: _Plan, metadata: Metadata, error: str | None, *, strict: bool
) -> None:
    """One CheckpointError on all ranks if any of them cannot load, or if nobody wants a tensor of the file."""
    everybody = ranks.gather((error, plan.problems, plan.used))
    failures = [failure for failure, _, _ in everybody if failure is not None]
    if failures:
        raise CheckpointError(ranks.joined([failure for failure, _, _ in everybody]))
    lacking = "the checkpoint lacks "
    problems = list(dict.fromkeys(problem for _, found, _ in everybody for problem in found))
    used = set().union(*(names for _, _, names in everybody))
    unexpected = sorted(key for key in tensor_records(metadata) if key.startswith(f"{MODEL}.") and key not in used)
    odd = [f"the checkpoint has {key!r}, which this model has not" for key in unexpected]
    if not strict:
        plan.notes += [problem for problem in plan.problems if problem.startswith(lacking)]
        plan.notes += odd if ranks.rank == 0 else []
        problems, odd = [problem for problem in problems if not problem.startswith(lacking)], []
    found = problems + odd
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise CheckpointError(
            f"cannot load {directory.path}: {'; '.join(found[:3])}{more}. Nothing was changed. Build the model that "
            "was saved (its configuration is in the manifest), or load what fits with strict=False"
        )


def _random_name(directory: CheckpointDirectory, chunks: list[Any], metadata: Metadata) -> str | None:
    """This rank's streams in the file, where every parallel size is the one they were saved at."""
    saved, now = directory.meta.get("layout", {}), layout_of(chunks)
    name = random_key(groups_of(chunks[0]))
    same = all(saved.get(axis) == now[axis] for axis in LAYOUT_AXES)
    return name if same and name in blob_keys(metadata) else None


def _first_reason(failure: Any) -> str:
    rank, (error, _) = min(failure.failures.items())
    return f"rank {rank}: {error}"


# -- putting it in place ---------------------------------------------------------------------------------------------


@torch.no_grad()
def _put_in_place(chunks: list[Any], optimizer: Any, plan: _Plan) -> None:
    settle(chunks)
    for local, staging in plan.staged:
        local.tensor.copy_(staging)
    plan.staged.clear()
    for leaf in leaves(optimizer):
        by_name: dict[str, list[dict[str, Any]]] = {}
        for entry, state in plan.entries:
            if entry.optimizer is leaf:
                keys = plan.keys[id(leaf), entry.name].keys
                numbers = () if keys is None else keys.numbers & state.keys()
                by_name.setdefault(entry.name, []).append({**state, **{key: state[key].item() for key in numbers}})
        leaf.load_state_by_parameter(by_name)


def _saved_groups(optimizer: Any, meta: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """The hyperparameters of the file by optimizer and param group. ValueError where they are of other ones."""
    saved = meta.get("optimizer", [])
    mine = leaves(optimizer)
    if len(saved) != len(mine):
        raise ValueError(f"load_hyperparameters: {len(saved)} optimizers were saved, and there are {len(mine)} here")
    found = []
    for leaf, record in zip(mine, saved, strict=True):
        if record["algorithm"] != type(leaf.optimizer).__name__:
            raise ValueError(
                f"load_hyperparameters: those of {record['algorithm']} were saved, and the optimizer here is "
                f"{type(leaf.optimizer).__name__}"
            )
        groups = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
            for group in record["param_groups"]
        ]
        load_groups([dict(group) for group in leaf.param_groups], groups)  # on copies: does it fit?
        found.append(groups)
    return found


def _load_numbers(directory: CheckpointDirectory, scheduler: Any, scaler: Any) -> str | None:
    """Give scheduler and loss scaler their states; why they refuse, and then both are as before."""
    undo = []
    for name, target in (("scheduler", scheduler), ("loss_scaler", scaler)):
        state = directory.meta.get(name)
        if target is None or state is None:
            continue
        undo.append((target, copy.deepcopy(target.state_dict())))
        try:
            target.load_state_dict(state)
        except (ValueError, TypeError, KeyError) as failure:
            for changed, before in undo[:-1]:
                changed.load_state_dict(before)
            return f"cannot load {directory.path}: the {name} refuses its state: {failure}"
    return None
