"""Selection of the checkpoint to load: the newest one with every byte as saved, the same on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from core.checkpoint.agreement import Ranks
from core.checkpoint.damage import Damage, damage_of, open_manifest, shares
from core.checkpoint.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from core.checkpoint.manifest import Manifest, TensorRecord
from core.checkpoint.root_directory import Committed, list_committed, read_latest
from core.checkpoint.save_arguments import whole_number
from core.watch.warn_user import warn_user

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

RELIST_S = 10.0  # how long to list again while another job deletes the checkpoints found

Root = str | os.PathLike[str]


@dataclass(frozen=True)
class CheckpointDirectory:
    """A committed directory that has been verified."""

    path: Path
    step: int
    manifest: Manifest
    rank: int  # rank of this process in the loading group
    skipped: tuple[str, ...] = ()  # newer checkpoints that were rejected, with the reason

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.manifest.meta

    @property
    def world_size(self) -> int:
        return self.manifest.world_size

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        return self.manifest.tensors

    def reader(self) -> StorageReader:
        """Return a storage reader for ``dcp.load`` that verifies each item again."""
        from core.checkpoint.checked_reader import CheckedReader

        return CheckedReader(self.path, self.manifest, self.rank)


def list_steps(root: Root) -> list[int]:
    """List the steps of committed checkpoints, oldest commit first. Nothing is verified."""
    return list(dict.fromkeys(found.step for found in list_committed(Path(root))))


def latest_step(root: Root) -> int | None:
    """Return the step that was committed last, or ``None`` if there is no checkpoint. Nothing is verified."""
    committed = list_committed(Path(root))
    return committed[-1].step if committed else None


def find_intact(
    root: Root, step: int | None = None, group: dist.ProcessGroup | None = None, *, strict: bool = False
) -> CheckpointDirectory:
    """Find the checkpoint to load and verify every byte of it.

    All ranks of ``group`` must call it, and they get the same directory. Each rank reads a share of the files, so the
    checkpoint is read only once.

        directory = find_intact("checkpoints")
        dcp.load(state, storage_reader=directory.reader())

    Args:
        root (Root): Root directory of the checkpoints.
        step (int, optional): Step to load. By default the newest commit is loaded. If that one is damaged, a warning
            describes the damage and the newest intact one is returned. A step passed here is never replaced by another.
        group (ProcessGroup, optional): Process group that loads. Defaults to the default group.
        strict (bool, optional): Raise if the newest commit is damaged, instead of returning an older one.

    Returns:
        The verified directory.

    Raises:
        CheckpointError: If ``root`` or ``step`` is invalid, or ``step`` differs between ranks.
        CheckpointNotFound: If there is no such checkpoint. The text is the same on every rank.
        CheckpointDamaged: If the checkpoint is damaged. The text is the same on every rank.
    """
    ranks = Ranks(group)
    problem = None
    if not isinstance(root, (str, os.PathLike)):
        problem = f"root is {root!r}; it is the path of a directory"
    elif step is not None and whole_number(step) is None:
        problem = f"step is {step!r}; expected an integer, or None for the newest checkpoint"
    ranks.agree_on_arguments(problem, {"step": step}, CheckpointError)
    path = Path(os.path.realpath(root))
    until = time.monotonic() + RELIST_S
    while True:
        found = _newest_intact(path, step, ranks, strict)
        if found is not None:
            return found
        if ranks.on_first(lambda: time.monotonic() > until):
            raise CheckpointNotFound(
                f"For {RELIST_S:g} s no checkpoint in {path} has stayed long enough to be read, and there was one: "
                "`latest` names it. Does a job that saves there keep too few (keep_last)?"
            )


def _newest_intact(path: Path, step: int | None, ranks: Ranks, strict: bool) -> CheckpointDirectory | None:
    """Return the directory for ``find_intact``, or ``None`` if the job that saves here has just deleted everything."""
    candidates = ranks.on_first(lambda: list_committed(path)[::-1])
    if not candidates:
        if ranks.on_first(lambda: read_latest(path)) is not None:
            return None
        raise CheckpointNotFound(f"There is no checkpoint in {path}.")
    wanted = candidates if step is None else [found for found in candidates if found.step == step][:1]
    if not wanted:
        steps = ", ".join(str(found.step) for found in reversed(candidates))
        raise CheckpointNotFound(f"There is no checkpoint of step {step} in {path}; there are steps {steps}.")
    skipped: list[str] = []
    has_vanished = False
    for candidate in wanted:
        manifest, damages = _check(candidate, ranks)
        if not damages:
            assert manifest is not None, "no damage means that it was read"
            if skipped:
                _warn(ranks, f"{' '.join(skipped)} Loading step {candidate.step} from {candidate.path} instead.")
            return CheckpointDirectory(candidate.path, candidate.step, manifest, ranks.rank, tuple(skipped))
        if not ranks.on_first(candidate.path.exists):
            has_vanished = True  # deleted while it was checked: not damaged
            continue
        skipped.append(_refusal(candidate, damages))
        if strict or step is not None:
            others = [found.step for found in candidates if found != candidate]
            hint = f"Other steps here: {', '.join(map(str, others))}." if others else "There is no other step here."
            raise CheckpointDamaged(f"{skipped[0]} {hint}")
    if skipped and not has_vanished:
        raise CheckpointDamaged(f"No checkpoint in {path} is intact. {' '.join(skipped)}")
    return None


def check_directory(path: Path) -> list[Damage]:
    """List all damage of a step's directory, using only this process. The list is empty if it is intact."""
    opened = open_manifest(path)
    if isinstance(opened, Damage):
        return [opened]
    _, manifest = opened
    return [damage for file in manifest.files if (damage := damage_of(path, file, manifest)) is not None]


def _check(candidate: Committed, ranks: Ranks) -> tuple[Manifest | None, list[tuple[int, Damage]]]:
    """Return (manifest, [(rank that found it, damage)]). The damage list is the same on every rank."""
    opened = open_manifest(candidate.path)
    manifest: Manifest | None = None
    found: list[Damage] = []
    if isinstance(opened, Damage):
        found = [opened]
    else:
        _, manifest = opened
        share = shares(manifest.files, ranks.world)[ranks.rank]
        found = [damage for file in share if (damage := damage_of(candidate.path, file, manifest)) is not None]
    everybody = ranks.gather(found)
    return manifest, [(ranks.global_rank(rank), damage) for rank, theirs in enumerate(everybody) for damage in theirs]


def _refusal(candidate: Committed, damages: list[tuple[int, Damage]]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, damage in damages:
        by_text.setdefault(str(damage), []).append(rank)
    texts = [f"{text} [found by rank {', '.join(map(str, ranks))}]" for text, ranks in by_text.items()]
    return f"Checkpoint of step {candidate.step} in {candidate.path} is damaged: {'; '.join(texts)}."


def _warn(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        warn_user(text, RuntimeWarning)
