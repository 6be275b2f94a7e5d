"""record_with: record sketches of every n-th step of a loop, to find the first difference between two runs."""

from __future__ import annotations

import functools
import os
import types
from array import array
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.checkpoint.global_slices import GlobalSlice
from core.distributed import DistributedDataParallel
from core.groups import agree
from core.pipeline_parallel import PipelineRunner
from core.verify.gathered import WrappedModel, buckets_of
from core.verify.record.file import TABLES, Entry, RecordedStep, added, header
from core.verify.record.modules import Key, ModuleSketches
from core.verify.record.sketches import Sketch, entries_of, of_part, parts_of
from core.verify.torch_model import TorchLoopJob, TorchModel, some_world
from core.watch.waiting import waiting
from core.watch.warn_user import warn_user


class Row(NamedTuple):
    """One rank's entry of a table; ``part`` is equal for ranks with the same part of a parameter, or equal outputs."""

    key: Key
    stage: int  # of the pipeline
    order: int  # in the stage's forward
    part: Hashable
    entry: Entry
    eps: float


def record_with(
    model: nn.Module | PipelineRunner | Sequence[nn.Module],
    optimizer: Any,
    path: str | os.PathLike[str],
    *,
    every: int = 1,
    first_step: int = 1,
    mesh: DeviceMesh | None = None,
) -> StepRecording:
    """Record sketches of a loop's steps in a file that ``python -m core compare`` reads.

    A recorded step writes, by names of the unsplit model, a digest, the norm and random projections of every module's
    output, of the gradient there, of every parameter's gradient and of every updated weight. They do not depend on the
    layout. Other steps cost nothing: hooks are on the modules only during recorded steps.

    Collective over the default process group, as is every recorded ``optimizer.step()``: rank 0 gathers the sketches
    before it returns, and writes them. If the file can no longer be written, rank 0 warns, and all ranks continue
    without recording.

        with record_with(model, optimizer, "run-a.jsonl", every=10):
            for tokens, labels in batches:
                ...

    Args:
        model: Model as the loop calls it: in our wrapper, in torch's DDP, sharded by fully_shard, split by DTensors, or
            plain; a PipelineRunner or a list of its wrapped chunks for a pipeline.
        optimizer: The optimizer whose ``step`` ends a step of the loop.
        path: File to write, on rank 0; directories are created. ``first_step`` 1 overwrites it, otherwise it is
            appended to.
        every: Steps 1, 1 + every, 1 + 2 * every, ... are recorded.
        first_step: Number of the next step, from 1; larger in a run that resumes.
        mesh: As in verify_with.

    Returns:
        The recording; a context manager. ``close`` ends it.

    Raises:
        ValueError: If ``every`` or ``first_step`` is less than 1, before any collective; on all ranks, if the positions
            of the ranks are unknown.
        OSError: On all ranks, if the file cannot be created.
    """
    if every < 1 or first_step < 1:
        raise ValueError(f"record_with was given every={every} and first_step={first_step}; both are numbers from 1")
    recording = StepRecording(model, path, every=every, first_step=first_step, mesh=mesh)
    recording.listen_to(optimizer)
    return recording


class StepRecording:
    """Recording of a loop's steps.

    ``close``, or the end of its context, removes it from model and optimizer.

    Args:
        model, path, every, first_step, mesh: As for record_with.

    Attributes:
        steps: Number of steps that the optimizer has made, with those before ``first_step``.
        failure: Reason why recording has ended early; empty if it has not. The same on all ranks.
    """

    def __init__(
        self,
        model: Any,
        path: str | os.PathLike[str],
        *,
        every: int = 1,
        first_step: int = 1,
        mesh: DeviceMesh | None = None,
    ) -> None:
        is_pipeline = isinstance(model, PipelineRunner)
        models = model.chunks if is_pipeline else [model] if isinstance(model, nn.Module) else model
        chunks = [part for each in models for part in each.modules() if isinstance(part, DistributedDataParallel)]
        with some_world():
            self.torch_job = None if chunks else TorchLoopJob(models[0], lambda *_: None, mesh)
        self.model = WrappedModel(chunks) if self.torch_job is None else self.torch_job.torch_model
        self.every, self.steps, self.path = every, first_step - 1, Path(path)
        self.failure = ""
        self.is_closed = False
        self.file: TextIO | None = None
        self.armed = ExitStack()
        self.closing = ExitStack()
        self.sketches: list[ModuleSketches] | None = None  # hooks; None if the next step is not recorded
        self.parts: dict[Key, list[tuple[Hashable, list[Sketch]]]] = {}
        self.rates: tuple[float, ...] = ()
        groups = self.model.groups
        stages = [number * groups.size("pp") + groups.rank("pp") for number in range(len(self.model.chunks))]
        self.stages = model.stage_numbers if is_pipeline else stages
        with agree.together(None, "the file of the recording", OSError):
            if self._is_first_rank:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = self.path.open("w" if first_step == 1 else "a", buffering=1)
                self.file.write(("\n" if first_step > 1 else "") + header(self._layout()) + "\n")
        self._arm(weights=True)

    @property
    def _is_first_rank(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def _layout(self) -> str:
        world = dist.get_world_size() if dist.is_initialized() else 1
        sizes = [(axis, self.model.groups.size(axis)) for axis in ("tp", "pp", "cp", "ep")]
        split = [f"{axis} {size}" for axis, size in sizes if size > 1]
        dtype = str(self.model.dtype).removeprefix("torch.")
        return ", ".join([f"{world} rank{'s' * (world > 1)}", *split, dtype])

    def __enter__(self) -> StepRecording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the recording: remove all hooks and close the file. Idempotent, not collective."""
        self.is_closed = True
        self._disarm()
        self.closing.close()
        if self.file is not None:
            self.file.close()
            self.file = None

    def listen_to(self, optimizer: Any) -> None:
        """Call ``before_update`` and ``after_update`` around an optimizer's ``step``."""
        step, known = optimizer.step, vars(optimizer).get("step")

        @functools.wraps(step)
        def recorded(_: Any, *args: Any, **kwargs: Any) -> Any:
            self.before_update(optimizer)
            result = step(*args, **kwargs)
            self.after_update()
            return result

        def restore() -> None:
            vars(optimizer).pop("step", None)
            if known is not None:
                vars(optimizer)["step"] = known

        vars(optimizer)["step"] = types.MethodType(recorded, optimizer)  # a scheduler of torch expects a method
        self.closing.callback(restore)

    def before_update(self, optimizer: Any) -> None:
        """Sketch the reduced gradients, before an optimizer uses them."""
        if self.sketches is not None:
            self.rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
            self._record_parameters("grads", optimizer)

    def after_update(self) -> None:
        """Sketch the weights after an update, and write the step. Collective if the step is recorded."""
        self.steps += 1
        recorded = self.sketches is not None
        if recorded:
            self._record_parameters("after")
            everyone = self._gathered()
            self._disarm()
            error = None
            if self.file is not None:
                try:
                    self.file.write(merged(everyone, self.steps, self.rates).line() + "\n")
                except OSError as caught:
                    error = 0, str(caught)
            failed = agree.first(error, None, "the write of a recorded step")
            if failed is not None:
                self.failure = f"{self.path} can no longer be written: {failed[1]}"
                self.close()
                if self._is_first_rank:
                    warn_user(f"{self.failure}. Recording has ended with step {self.steps - 1}; training continues")
        self._arm(weights=not recorded)

    def _arm(self, *, weights: bool) -> None:
        """Put hooks on the modules if the next step is recorded, and sketch its weights if no earlier step has."""
        if self.is_closed or self.steps % self.every:
            return
        self.parts = {}
        self.sketches = []
        for number, chunk in enumerate(self.model.chunks):
            self.sketches.append(ModuleSketches(chunk.module, self.model.split_weights(number)))
            self.armed.callback(self.sketches[-1].remove)
        if self.torch_job is not None:
            self.armed.enter_context(self.torch_job.watched(lambda *_: self._record_parameters("grads")))
        if weights:
            self._record_parameters("before")

    def _disarm(self) -> None:
        self.armed.close()
        self.sketches = None

    @torch.no_grad()
    def _record_parameters(self, table: str, optimizer: Any = None) -> None:
        """Sketch this rank's parts of gradients or weights. Gradients are sketched once a step: before torch clips."""
        if any(known == table for known, _ in self.parts):
            return
        scaler = getattr(optimizer, "grad_scaler", None) or getattr(optimizer, "scaler", None)
        scale = 1.0 if scaler is None or self.torch_job is not None else float(scaler.value)
        for place, flat, first, pending in self._local_parts(table):
            if place.is_copy or not flat.numel():
                continue
            factor = float(pending) / scale if table == "grads" else 1.0
            part = tuple((box.global_offset, box.size) for box in parts_of(first, flat.numel(), place))
            sketches = of_part(flat.contiguous(), first, place, is_gradient=table == "grads", factor=factor)
            self.parts.setdefault((table, place.name), []).append((part, sketches))

    def _local_parts(self, table: str) -> Iterator[tuple[GlobalSlice, Tensor, int, Any]]:
        """Yield (place, flat elements, index of the first one, factor that a gradient still lacks)."""
        if isinstance(self.model, TorchModel):
            grads = self.model.gradients() if table == "grads" else {}
            for held in self.model.trained:
                yield held.place, grads.get(held.key, held.tensor).reshape(-1), 0, 1.0
            return
        for number, chunk in enumerate(self.model.chunks):
            places = {held.place.local_name: held.place for held in self.model.held if held.chunk == number}
            for bucket in buckets_of(chunk):
                for index, slot in enumerate(bucket.layout.slots):
                    if table == "grads":
                        flat, within = bucket.valid_grad, bucket.valid_range
                    elif bucket.sharded and bucket.memory.param_shard is not None:
                        flat, within = bucket.memory.param_shard, bucket.shard_range
                    else:
                        flat, within = bucket.params[index].detach().reshape(-1), bucket.ranges[index]
                    first = max(0, within[0] - bucket.ranges[index][0])
                    yield places[slot.name], bucket.part_of(flat, index, within), first, bucket.step.pending_scale

    def _gathered(self) -> list[Row]:
        """Return the rows of all ranks on rank 0."""
        assert self.sketches is not None, "a recorded step"
        data_rank = self.model.groups.rank("dp_cp")
        found: list[tuple[Key, int, int, Hashable, list[Sketch]]] = []
        for stage, chunk in zip(self.stages, self.sketches, strict=True):
            found += [(key, stage, n, None, calls) for n, (key, calls) in enumerate(chunk.sketches.items())]
        order = {held.name: (self.stages[held.chunk], n) for n, held in enumerate(self.model.held)}
        found += [
            (key, *order[key[1]], part, boxes) for key, parts in self.parts.items() for part, boxes in parts if boxes
        ]
        entries = iter(entries_of([sketch for *_, sketches in found for sketch in sketches]))
        eps = max([chunk.eps for chunk in self.sketches] + [torch.finfo(self.model.dtype).eps])
        mine = []
        for key, stage, number, part, sketches in found:
            entry = added([next(entries) for _ in sketches])
            same = data_rank, entry.digest, array("d", entry.numbers).tobytes()
            mine.append(Row(key, stage, number, part or same, entry, eps))
        if not dist.is_initialized():
            return mine
        everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with waiting("the sketches of a recorded step", dist.group.WORLD):
            dist.gather_object(mine, everyone, dst=0)
        return [row for rank in everyone or () for row in rank]


def merged(rows: Sequence[Row], step: int, rates: tuple[float, ...]) -> RecordedStep:
    """Add the sketches of all ranks. Pure.

    A part that several ranks hold counts once. Tensor-parallel ranks may hold an output or parts of it: equal sketches
    are of one tensor. A container of which several pipeline stages hold parts has the outputs of its last stage.
    """
    last: dict[Key, int] = {}
    for row in rows:
        last[row.key] = max(row.stage, last.get(row.key, 0))
    parts: dict[Key, dict[Hashable, Entry]] = {}
    for row in sorted(rows, key=lambda row: (row.stage, row.order)):
        if row.stage == last[row.key]:
            parts.setdefault(row.key, {})[row.part] = row.entry
    tables: dict[str, dict[str, Entry]] = {table: {} for table in TABLES}
    for (table, name), found in parts.items():
        tables[table][name] = added(found.values())
    return RecordedStep(step, max(row.eps for row in rows), rates, tables)
