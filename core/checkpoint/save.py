"""save_checkpoint: every rank writes its boxes of the model and the optimizer, and the other state of a run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import core
from core.checkpoint.agreement import Ranks
from core.checkpoint.errors import CheckpointError
from core.checkpoint.global_slices import written_here
from core.checkpoint.optimizer_pieces import (
    WEIGHTS,
    entries_of,
    entry_pieces,
    leaves,
    optimizer_pieces,
    sharded_weights,
    written_entries,
)
from core.checkpoint.pieces import Piece, groups_of, local_tensors, model_pieces, module_of, tied_names
from core.checkpoint.planners import PieceSavePlanner
from core.checkpoint.random_state import random_key, save_random_state
from core.checkpoint.save_arguments import checked_step, keep_last_error
from core.checkpoint.saver import CheckpointSaver, SaveReport
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import AXES
from core.watch.warn_user import warn_user

CONTENT_FORMAT = 1  # version of names and of the contents of `meta`
LAYOUT_AXES = {axis.label: axis.name for axis in AXES if axis.name != "expt_dp"}  # expert dp follows from the others


def save_checkpoint(
    root: str | os.PathLike[str],
    step: int,
    model_chunks: Sequence[Any],
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    configuration: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    saver: CheckpointSaver | None = None,
    keep_last: int | None = None,
) -> SaveReport:
    """Save the state of a training run as step ``step`` under ``root``, so that it loads at any parallel layout.

    Each rank writes its own shards, and the checkpoint becomes visible only once the files of all ranks are on disk. A
    killed save leaves the older checkpoints intact. All ranks of ``group`` must call it between steps.

        save_checkpoint("checkpoints", step, chunks, optimizer, scheduler, keep_last=3)

    Args:
        root: Root directory of the checkpoints.
        step: Step number.
        model_chunks (Sequence[Module]): List of this rank's wrapped model chunks, even if there is only one.
        optimizer (MegatronOptimizer, optional): Optimizer of these chunks. ``None`` saves only weights.
        scheduler (OptimizerParamScheduler, optional): Any object with a ``state_dict()`` that JSON can represent.
        extra: Values for JSON, such as the data position, the same on every rank. Returned as ``LoadReport.extra``.
        configuration: Values for JSON, the same on every rank. Returned as ``LoadReport.configuration``.
        group: All ranks of the job, able to communicate CPU objects. Defaults to the default group.
        saver: A long-lived CheckpointSaver for this root, for asynchronous saves. By default one is created for this
            save.
        keep_last: Number of committed checkpoints to keep if no saver is passed. Defaults to all.

    Returns:
        A report of the save from this rank's point of view.

    Raises:
        CheckpointError: The same on every rank. Invalid arguments and state that cannot be saved are rejected before
            anything is written; storage errors are raised too.
    """
    ranks = Ranks(group)
    pieces: list[Piece] = []
    blobs: dict[str, bytes] = {}
    meta: dict[str, Any] = {}
    chunks: list[Any] = []
    error: str | None = None
    try:
        step = checked_step(step)
        _check_saver(saver, root, keep_last)
        chunks = checked_chunks(model_chunks)
        pieces = _pieces(chunks, optimizer)
        blobs = {random_key(groups_of(chunks[0])): save_random_state()}
        meta = _meta(step, chunks, optimizer, scheduler, extra, configuration)
    except Exception as failure:  # the other ranks wait in the next gather and need this error
        error = f"cannot save step {step}: {words_of(failure)}"
    ranks.agree_on_arguments(error, {"extra": json.dumps(meta.get("extra"), sort_keys=True)}, CheckpointError)
    holds = {"a saver": saver is not None, "an optimizer": optimizer is not None, "a scheduler": scheduler is not None}
    everybody = ranks.gather((tied_names(chunks), holds))
    ranks.agree(passed_by_some([given for _, given in everybody]))
    meta["tied"] = {name: kept for names, _ in everybody for name, kept in names.items()}
    fill = partial(ranks.write, PieceSavePlanner(pieces, blobs))
    if saver is not None:
        return saver.save(step, fill, meta=meta)
    with CheckpointSaver(root, group, keep_last=keep_last) as once:
        return once.save(step, fill, meta=meta)


def _check_saver(saver: CheckpointSaver | None, root: str | os.PathLike[str], keep_last: int | None) -> None:
    """Raise ValueError if a saver cannot be created from these arguments, or the given saver contradicts them."""
    if not isinstance(root, (str, os.PathLike)):
        raise ValueError(f"root is {root!r}; it is the path of a directory")
    if (text := keep_last_error(keep_last)) is not None:
        raise ValueError(text)
    if saver is None:
        return
    if not isinstance(saver, CheckpointSaver):
        raise ValueError(f"saver is a {type(saver).__name__}; pass a CheckpointSaver, or None to save once")
    if Path(os.path.realpath(root)) != saver.root.path:
        raise ValueError(f"root is {root} and the saver was made for {saver.root.path}; pass the saver's root")
    if keep_last is not None and keep_last != saver.keep_last:
        raise ValueError(
            f"keep_last is {keep_last} and the saver's is {saver.keep_last}; say it to CheckpointSaver(keep_last=...)"
        )


def passed_by_some(everybody: Sequence[Mapping[str, bool]]) -> str | None:
    """Return an error text if only some ranks passed an optimizer or the like, since state would be missing."""
    for what in everybody[0]:
        without = [rank for rank, given in enumerate(everybody) if not given[what]]
        if 0 < len(without) < len(everybody):
            none = f"no {what.partition(' ')[2]}" if " " in what else f"not {what}"
            return f"ranks {without} were given {none} and the others {what}; pass it on every rank"
    return None


def checked_chunks(model_chunks: Sequence[Any]) -> list[Any]:
    """Return the chunks as a list. Raises ValueError if a model is passed instead of a list, or the list is empty."""
    if isinstance(model_chunks, torch.nn.Module) and not isinstance(model_chunks, torch.nn.ModuleList):
        raise ValueError(
            "model_chunks is a model, expected a list of this rank's chunks; pass [model] for a single chunk"
        )
    chunks = [_wrapper_in(chunk) for chunk in model_chunks]
    if not chunks:
        raise ValueError("model_chunks is empty; pass this rank's wrapped chunks")
    return chunks


def _wrapper_in(chunk: Any) -> Any:
    """Return the wrapper inside other modules, like finalize_model_grads. A bare module is returned unchanged."""
    part = chunk
    while part is not None:
        if isinstance(getattr(part, "groups", None), ProcessGroups):
            return part
        part = getattr(part, "module", None)
    return chunk


def words_of(failure: Exception) -> str:
    """Return the text of an error, with its type unless this package defines it."""
    return (
        str(failure) if isinstance(failure, (ValueError, CheckpointError)) else f"{type(failure).__name__}: {failure}"
    )


def settle(chunks: Sequence[Any]) -> None:
    """Finish parameter all-gathers in flight, so that parameters have the optimizer's latest values. Collective."""
    for chunk in chunks:
        if hasattr(chunk, "finish_param_sync"):
            chunk.finish_param_sync()


def _pieces(chunks: Sequence[Any], optimizer: Any) -> list[Piece]:
    settle(chunks)
    _warn_of_extra_state(chunks)
    tensors = local_tensors(chunks)
    whole = [local for local in tensors if local.shard is None]
    mine = written_here(local.slice for local in whole if local.is_param)
    # Buffers may differ between data ranks (running statistics): the first data rank writes them.
    mine |= {local.slice.name for local in whole if not local.is_param and local.slice.replica == 0}
    pieces = model_pieces(local for local in whole if local.slice.name in mine)
    for entry in written_entries(sharded_weights(tensors), chunks, tensors):
        pieces += entry_pieces(entry, WEIGHTS, entry.state[WEIGHTS], entry.local.key)
    entries = entries_of(optimizer, chunks, tensors)
    return pieces + optimizer_pieces(written_entries(entries, chunks, tensors))


def _warn_of_extra_state(chunks: Sequence[Any]) -> None:
    """Warn that values of get_extra_state are not saved, because they have no global name and no slice."""
    for chunk in chunks:
        for name, value in module_of(chunk).state_dict(keep_vars=True).items():
            if name.endswith("_extra_state") and value is not None:
                warn_user(f"{name!r} is no parameter or buffer, and is not saved", UserWarning)
                return


def layout_of(chunks: Sequence[Any]) -> dict[str, int | str]:
    """Return the sizes of the parallel axes and the sharding strategy, to record them in the file."""
    groups = groups_of(chunks[0])
    layout: dict[str, int | str] = {axis: groups.size(field) for axis, field in LAYOUT_AXES.items()}
    if groups.dp is None:
        layout["dp"] = groups.size("dp_cp")
    layout["chunks"] = len(chunks)
    layout["strategy"] = getattr(getattr(chunks[0], "ddp_config", None), "strategy", "no_shard")
    return layout


def _meta(
    step: int,
    chunks: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    extra: Mapping[str, Any] | None,
    configuration: Mapping[str, Any] | None,
) -> dict[str, Any]:
    scaler = loss_scaler_of(optimizer)
    meta = {
        "content_format": CONTENT_FORMAT,
        "step": step,
        "layout": layout_of(chunks),
        **versions(),
        "optimizer": [_hyperparameters(leaf) for leaf in leaves(optimizer)],
        "scheduler": None if scheduler is None else plain(scheduler.state_dict()),
        "loss_scaler": None if scaler is None else plain(scaler.state_dict()),
        "configuration": dict(configuration or {}),
        "extra": dict(extra or {}),
    }
    for name in ("extra", "configuration", "scheduler"):
        try:
            json.dumps(meta[name])
        except (TypeError, ValueError) as failure:
            raise ValueError(
                f"{name} cannot be written as JSON ({failure}); give it numbers, strings, lists and dictionaries"
            ) from None
    return meta


def _hyperparameters(leaf: Any) -> dict[str, Any]:
    """Return an optimizer's algorithm and groups. Values that JSON cannot represent are stored as text.

    "written" has the group values that a schedule has changed or added, which are part of the schedule's state.
    """
    from core.optimizer.optimizer_state import GROUP_NAME, save_groups

    groups, built = (
        json.loads(json.dumps(plain(save_groups(each)), default=str)) for each in (leaf.param_groups, leaf.built_groups)
    )
    written = [
        {k: v for k, v in group.items() if k == GROUP_NAME or k not in before or v != before[k]}
        for group, before in zip(groups, built, strict=True)
    ]
    return {"algorithm": type(leaf.optimizer).__name__, "param_groups": groups, "written": written}


def versions() -> dict[str, Any]:
    """Return the versions of the software that writes the file."""
    return {"versions": {"core": core.__version__, "torch": torch.__version__, "python": platform.python_version()}}


def loss_scaler_of(optimizer: Any) -> Any:
    """Return the loss scaler of a run, or ``None``."""
    for holder in (optimizer, *leaves(optimizer)):
        scaler = getattr(holder, "grad_scaler", None)
        if scaler is not None:
            return scaler
    return None


def plain(value: Any) -> Any:
    """Convert tensors and numpy values to numbers and tuples to lists, so that JSON can represent a state."""
    if isinstance(value, (torch.Tensor, np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
