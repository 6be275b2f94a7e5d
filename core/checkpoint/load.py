"""load_checkpoint: every rank reads the boxes it needs now, regardless of the boxes that were written.

Loading has three phases, so that a failed load leaves the run unchanged: find missing or mismatched state on all ranks;
read into separate memory; and copy it into place only after every rank has read everything.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from core.checkpoint.agreement import Ranks
from core.checkpoint.directory import CheckpointDirectory, find_intact
from core.checkpoint.errors import CheckpointError
from core.checkpoint.load_plan import LACKS, LoadPlan, plan_load
from core.checkpoint.optimizer_pieces import leaves
from core.checkpoint.pieces import MODEL, groups_of
from core.checkpoint.planners import PieceLoadPlanner, blob_keys, tensor_records
from core.checkpoint.random_state import random_key, read_random_state, set_random_state
from core.checkpoint.save import (
    CONTENT_FORMAT,
    LAYOUT_AXES,
    checked_chunks,
    layout_of,
    loss_scaler_of,
    passed_by_some,
    settle,
    words_of,
)

logger = logging.getLogger(__name__)
LONGEST_RANDOM_STATE = 1 << 20  # bytes; the state of Python, numpy, torch and a tracker has some ten thousand
META_KINDS = {
    **dict.fromkeys(("layout", "extra", "configuration", "versions", "tied", "scheduler", "loss_scaler"), Mapping),
    "optimizer": list,
}


@dataclass(frozen=True)
class LoadReport:
    """Result of a load.

    Attributes:
        step: Step that was loaded.
        path: Directory that was read.
        layout: Layout at which the checkpoint was saved.
        extra: The ``extra`` passed to the save.
        configuration: The ``configuration`` passed to the save.
        random_restored: True if random states were restored.
        notes: Sentences about state that was not loaded, or is not in the file.
        skipped: One sentence for each newer checkpoint that was damaged.
    """

    step: int
    path: Path
    layout: dict[str, Any]  # layout at the save
    extra: dict[str, Any]
    configuration: dict[str, Any]
    random_restored: bool
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # one sentence for each newer, damaged checkpoint


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
    """Load a checkpoint that was saved at this parallel layout or a different one.

    All ranks of the job must call it. A load either succeeds on every rank, or raises and leaves model, optimizer and
    scheduler unchanged.

        report = load_checkpoint("checkpoints", chunks, optimizer, scheduler)
        first_step = report.step + 1

    Args:
        root (str | os.PathLike[str]): Root directory of the checkpoints.
        model_chunks (Sequence[Module]): Wrapped model chunks of this rank.
        optimizer (MegatronOptimizer, optional): The optimizer of these chunks. ``None`` loads only weights.
        scheduler (OptimizerParamScheduler, optional): LR scheduler whose state is loaded.
        step (int, optional): Step to load. Defaults to the newest intact one.
        strict (bool, optional): Reject a checkpoint whose tensors are not exactly the model's. If ``False``, common
            tensors are loaded, and the report's notes name the others.
        load_random_state (bool, optional): Restore random states if every parallel size equals the saved one. Otherwise
            random states stay unchanged.
        load_hyperparameters (bool, optional): Also load learning rates, weight decay and other settings of param
            groups. If ``False``, they stay as the optimizer was built.
        group (ProcessGroup, optional): Process group of all ranks of the job. Defaults to the default group.

    Returns:
        A report of the loaded step and of everything that was not loaded.

    Raises:
        CheckpointError: The same on every rank, before anything has been changed.
    """
    ranks = Ranks(group)
    directory = find_intact(root, step, group)
    reader = directory.reader()
    plan, error, metadata = LoadPlan(), None, Metadata({})
    random_name: str | None = None
    chunks: list[Any] = []
    groups: list[list[dict[str, Any]]] = []
    try:
        chunks = checked_chunks(model_chunks)
        _check_format(directory.meta)
        metadata = reader.read_metadata()
        plan = plan_load(chunks, optimizer, metadata, directory.meta)
        groups = _saved_groups(optimizer, directory.meta) if load_hyperparameters else []
        random_name = _random_name(directory, chunks, metadata) if load_random_state else None
    except Exception as failure:  # the other ranks wait in the next gather and need this error
        error = f"cannot load {directory.path}: {words_of(failure)}"
    given = {
        "an optimizer": optimizer is not None,
        "a scheduler": scheduler is not None,
        "strict=True": bool(strict),
        "load_random_state=True": bool(load_random_state),
        "load_hyperparameters=True": bool(load_hyperparameters),
    }
    _refuse_together(ranks, directory, plan, metadata, error, given, strict=strict)

    planner = PieceLoadPlanner(plan.pieces, [] if random_name is None else [random_name])
    try:
        ranks.read(planner, reader)
    except CheckpointException as failure:
        rank, (error, _) = min(failure.failures.items())
        raise CheckpointError(f"cannot load {directory.path}: rank {rank}: {error}") from None

    planner.pieces, plan.pieces = [], []  # staging memory is freed once it is copied into place
    meta = directory.meta
    random_state, random_error = None, None
    try:
        random_state = None if random_name is None else read_random_state(planner.blobs[random_name])
    except Exception as failure:  # a forged file can raise any exception, and the other ranks wait
        random_error = f"cannot load {directory.path}: '{random_name}' holds no random state: {words_of(failure)}"
    ranks.agree(random_error)
    ranks.agree(_load_numbers(directory, optimizer, scheduler, loss_scaler_of(optimizer)))
    put_in_place(chunks, optimizer, plan)
    if meta.get("scheduler") is not None:
        _set_learning_rates(scheduler)
    for leaf, saved in zip(leaves(optimizer), groups, strict=False):
        _load_groups(leaf.param_groups, saved)
    if random_state is not None:
        set_random_state(random_state)
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
        random_state is not None,
        notes,
        tuple(directory.skipped),
    )


# -- checks before loading -------------------------------------------------------------------------------------------


def _check_format(meta: Mapping[str, Any]) -> None:
    for key, kind in META_KINDS.items():
        if meta.get(key) is not None and not isinstance(meta[key], kind):
            raise ValueError(f"its {key!r} is a {type(meta[key]).__name__}; it was not written by this package")
    found = meta.get("content_format")
    if found != CONTENT_FORMAT:
        raise ValueError(
            f"its content has format {found!r} and this version of the package reads {CONTENT_FORMAT}; it was saved by "
            f"version {meta.get('versions', {}).get('core', 'unknown')}"
        )


def _refuse_together(
    ranks: Ranks,
    directory: CheckpointDirectory,
    plan: LoadPlan,
    metadata: Metadata,
    error: str | None,
    given: Mapping[str, bool],
    *,
    strict: bool,
) -> None:
    """Raise one CheckpointError on all ranks if any rank cannot load, or if no rank reads one of the file's tensors."""
    everybody = ranks.gather((error, plan.problems, plan.used, given))
    failures = [failure for failure, *_ in everybody if failure is not None]
    if failures:
        raise CheckpointError(ranks.joined([failure for failure, *_ in everybody]))
    if (text := passed_by_some([theirs for *_, theirs in everybody])) is not None:
        raise CheckpointError(f"cannot load {directory.path}: {text}. Nothing was changed")
    problems = list(dict.fromkeys(problem for _, found, _, _ in everybody for problem in found))
    used = set().union(*(names for _, _, names, _ in everybody))
    unexpected = sorted(key for key in tensor_records(metadata) if key.startswith(f"{MODEL}.") and key not in used)
    odd = [f"the checkpoint has {key!r}, which this model has not" for key in unexpected]
    if not strict:
        plan.notes += [problem for problem in plan.problems if problem.startswith(LACKS)]
        plan.notes += odd if ranks.rank == 0 else []
        problems, odd = [problem for problem in problems if not problem.startswith(LACKS)], []
    found = problems + odd
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        where = " (its configuration is in the manifest)" if directory.meta.get("configuration") else ""
        raise CheckpointError(
            f"cannot load {directory.path}: {'; '.join(found[:3])}{more}. Nothing was changed. Use the model of the "
            f"saved run{where}, or load the matching part with strict=False"
        )


def _random_name(directory: CheckpointDirectory, chunks: list[Any], metadata: Metadata) -> str | None:
    """Return the name of this rank's random state in the file, or ``None`` unless every parallel size equals the saved
    one.
    """
    saved, now = directory.meta.get("layout", {}), layout_of(chunks)
    name = random_key(groups_of(chunks[0]))
    same = all(saved.get(axis) == now[axis] for axis in LAYOUT_AXES)
    if not same or name not in blob_keys(metadata):
        return None
    length = metadata.storage_data[MetadataIndex(name)].length
    if length > LONGEST_RANDOM_STATE:
        raise ValueError(f"{name!r} has {length} bytes, and a random state has at most {LONGEST_RANDOM_STATE}")
    return name


# -- putting it in place ---------------------------------------------------------------------------------------------


@torch.no_grad()
def put_in_place(chunks: list[Any], optimizer: Any, plan: LoadPlan) -> None:
    """Copy the values read by a plan into model chunks and optimizer. Collective if parameters are sharded."""
    settle(chunks)
    wrapped = [chunk for chunk in chunks if hasattr(chunk, "begin_param_update")]
    for chunk in wrapped:
        chunk.begin_param_update()
    for local, staging in plan.staged:
        (local.tensor if local.shard is None else local.shard[1]).copy_(staging)
    for chunk in wrapped:
        chunk.record_param_write()
    plan.staged.clear()
    for leaf in leaves(optimizer):
        leaf.load_state_by_parameter(_taken_from(plan, leaf))


class _Taken(dict[str, Any]):
    """Dict whose values are removed when read, so that their memory is freed."""

    __getitem__ = dict.pop


def _taken_from(plan: LoadPlan, leaf: Any) -> _Taken:
    """Remove the values for one optimizer from a plan and return them by parameter name."""
    entries, plan.entries = plan.entries, [found for found in plan.entries if found[0].optimizer is not leaf]
    by_name: dict[str, list[dict[str, Any]]] = {}
    for entry, state in entries:
        if entry.optimizer is leaf:
            keys = plan.keys[id(leaf), entry.name].keys
            numbers = () if keys is None else keys.numbers & state.keys()
            by_name.setdefault(entry.name, []).append({**state, **{key: state[key].item() for key in numbers}})
    return _Taken(by_name)


def _saved_groups(optimizer: Any, meta: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the saved hyperparameters by optimizer and param group. Raises ValueError for other optimizers."""
    saved = meta.get("optimizer", [])
    mine = leaves(optimizer)
    if len(saved) != len(mine):
        raise ValueError(f"load_hyperparameters: {len(saved)} optimizers were saved, and there are {len(mine)} here")
    found = []
    for leaf, record in zip(mine, saved, strict=True):
        theirs, ours = _algorithms(record["param_groups"]), _algorithms(leaf.param_groups)
        if theirs != ours:
            raise ValueError(
                f"load_hyperparameters: the checkpoint has the hyperparameters of {sorted(theirs)}, expected "
                f"{sorted(ours)}"
            )
        groups = _with_tuples(record["param_groups"])
        _load_groups([dict(group) for group in leaf.param_groups], groups)  # try on copies first
        found.append(groups)
    return found


def _load_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    from core.optimizer.optimizer_state import load_groups  # an optimizer's job has loaded it; others need not

    load_groups(groups, saved)


def _algorithms(groups: Sequence[Mapping[str, Any]]) -> set[str]:
    return {group["optimizer"] for group in groups}


def _with_tuples(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert lists back to tuples (betas), because JSON stores tuples as lists."""
    return [{key: tuple(v) if isinstance(v, list) else v for key, v in group.items()} for group in groups]


def _set_learning_rates(scheduler: Any) -> None:
    """Set the groups' learning rates for a torch scheduler.

    torch's schedulers continue from the groups' rates, which in torch are loaded with the optimizer's state.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def _load_numbers(directory: CheckpointDirectory, optimizer: Any, scheduler: Any, scaler: Any) -> str | None:
    """Restore values that a schedule wrote into param groups, then the states of scheduler and loss scaler.

    If one of them rejects its state, return the error text and leave all of them unchanged.
    """
    from core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler

    meta = directory.meta
    groups = [group for leaf in leaves(optimizer) for group in leaf.param_groups]
    undo: list[Callable[[], Any]] = [partial(_set_groups, groups, [dict(group) for group in groups])]
    name = "optimizer"
    try:
        # Our scheduler recomputes group values from its own state. torch's schedulers continue from the group values.
        if scheduler is not None and meta.get("scheduler") and not isinstance(scheduler, OptimizerParamScheduler):
            for leaf, record in zip(leaves(optimizer), meta.get("optimizer", []), strict=False):
                if "written" in record and _algorithms(record["param_groups"]) == _algorithms(leaf.param_groups):
                    _load_groups(leaf.param_groups, _with_tuples(record["written"]))
        for name, target in (("scheduler", scheduler), ("loss_scaler", scaler)):
            if target is not None and meta.get(name) is not None:
                before = copy.deepcopy(target.state_dict())
                target.load_state_dict(meta[name])
                undo.append(partial(target.load_state_dict, before))
    except Exception as failure:  # a user's scheduler can raise anything, and the other ranks wait in the next gather
        for put_back in reversed(undo):
            put_back()
        return f"cannot load {directory.path}: the {name} refuses its state: {words_of(failure)}"
    return None


def _set_groups(groups: Sequence[dict[str, Any]], before: Sequence[Mapping[str, Any]]) -> None:
    for group, options in zip(groups, before, strict=True):
        group.clear()
        group.update(options)
