"""record_with: record sketches of every n-th step of a loop, to find the first difference between two runs."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.distributed import DistributedDataParallel
from core.groups import agree
from core.pipeline_parallel import PipelineRunner
from core.verify.gathered import WrappedModel, buckets_of
from core.verify.record.file import Entry, header
from core.verify.record.merge import Key, Row, merged
from core.verify.record.modules import ModuleSketches
from core.verify.record.sketches import Sketch, of_part, parts_of
from core.verify.torch_model import TorchLoopJob, TorchModel, some_world
from core.watch.waiting import waiting
from core.watch.warn_user import warn_user


def record_with(
    model: nn.Module | PipelineRunner | Sequence[nn.Module],
    optimizer: Any,
    path: str | os.PathLike[str],
    *,
    every: int = 1,
    first_step: int = 1,
    mesh: DeviceMesh | None = None,
) -> StepRecording:
    """Record sketches of a loop's steps in a file that `python -m core compare` reads.

    A recorded step writes, by names of the unsplit model, a digest, the norm and random projections of every module's
    output, of the gradient there, of every parameter's gradient and of every updated weight. They do not depend on the
    layout. Other steps cost nothing: hooks are on the modules only during recorded steps.

    Collective over the default process group, as is every recorded `optimizer.step()`: rank 0 gathers the sketches
    before it returns, and writes them. If the file can no longer be written, rank 0 warns, and all ranks continue
    without recording.

        with record_with(model, optimizer, "run-a.jsonl", every=10):
            for tokens, labels in batches:
                ...

    Args:
        model: Model as the loop calls it: in our wrapper, in torch's DDP, sharded by fully_shard, split by DTensors, or
            plain; a PipelineRunner or a list of its wrapped chunks for a pipeline.
        optimizer: The optimizer whose `step` ends a step of the loop.
        path: File to write, on rank 0; directories are created. `first_step` 1 overwrites it, otherwise it is appended
            to.
        every: Steps 1, 1 + every, 1 + 2 * every, ... are recorded.
        first_step: Number of the next step, from 1; larger in a run that resumes.
        mesh: As in verify_with.

    Returns:
        The recording; a context manager. `close` ends it.

    Raises:
        ValueError: If `every` or `first_step` is less than 1, before any collective; on all ranks, if the positions of
            the ranks are unknown.
        OSError: On all ranks, if the file cannot be created.
    """
    if every < 1 or first_step < 1:
        raise ValueError(f"record_with was given every={every} and first_step={first_step}; both are numbers from 1")
    recording = StepRecording(model, path, every=every, first_step=first_step, mesh=mesh)
    recording.listen_to(optimizer)
    return recording


class StepRecording:
    """Recording of a loop's steps. `close`, or the end of its context, removes it from model and optimizer.

    Args:
        model: As in record_with.
        path: As in record_with.
        every: As in record_with.
        first_step: As in record_with.
        mesh: As in record_with.

    Attributes:
        steps: Number of steps that the optimizer has made, with those before `first_step`.
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
        given = (
            model.chunks if isinstance(model, PipelineRunner) else [model] if isinstance(model, nn.Module) else model
        )
        chunks = [part for each in given for part in each.modules() if isinstance(part, DistributedDataParallel)]
        with some_world():
            self.torch_job = None if chunks else TorchLoopJob(given[0], lambda *_: None, mesh)
        self.model = WrappedModel(chunks) if self.torch_job is None else self.torch_job.torch_model
        self.every, self.steps, self.path = every, first_step - 1, Path(path)
        self.failure = ""
        self.is_closed = False
        self.file: TextIO | None = None
        self.armed = ExitStack()
        self.closing = ExitStack()
        self.sketches: list[ModuleSketches] | None = None  # hooks; None if the next step is not recorded
        self.parts: dict[Key, list[tuple[int, Sketch]]] = {}
        self.rates: tuple[float, ...] = ()
        groups = self.model.groups
        stages = [number * groups.size("pp") + groups.rank("pp") for number in range(len(self.model.chunks))]
        self.stages = model.stage_numbers if isinstance(model, PipelineRunner) else stages
        self.data_rank = groups.rank("dp_cp")
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
        """Call `before_update` and `after_update` around an optimizer's `step`."""
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
        if self.sketches is None:
            return
        self.rates = tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)
        self._take_gradients(optimizer)

    def after_update(self) -> None:
        """Sketch the weights after an update, and write the step. Collective if the step is recorded."""
        self.steps += 1
        recorded = self.sketches is not None
        if recorded:
            self._take_weights("after")
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
            split = {
                held.name.removesuffix(".weight"): held.place
                for held in self.model.held
                if held.chunk == number and held.name.endswith(".weight") and held.place.shape != held.place.local_shape
            }
            sketches = ModuleSketches(chunk.module, split)
            self.armed.enter_context(sketches)
            self.sketches.append(sketches)
        if self.torch_job is not None:
            self.armed.enter_context(self.torch_job.watched(lambda *_: self._take_gradients(None)))
        if weights:
            self._take_weights("before")

    def _disarm(self) -> None:
        self.armed.close()
        self.sketches = None

    # -- parameters -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _take_gradients(self, optimizer: Any) -> None:
        """Sketch the reduced gradients, once a step: before they are clipped, if torch clips them."""
        if any(table == "grads" for table, _ in self.parts):
            return
        if isinstance(self.model, TorchModel):
            grads = self.model.gradients()
            for held in self.model.trained:
                self._take("grads", held.place, grads[held.key].reshape(-1), 0)
            return
        scaler = getattr(optimizer, "grad_scaler", None) or getattr(optimizer, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.value)
        for places, bucket in self._buckets():
            factor = float(bucket.pending_scale) / scale
            for index, slot in enumerate(bucket.layout.slots):
                first = max(0, bucket.valid_range[0] - bucket.ranges[index][0])
                self._take("grads", places[slot.name], bucket.valid_part(index), first, factor)

    @torch.no_grad()
    def _take_weights(self, table: str) -> None:
        if isinstance(self.model, TorchModel):
            for held in self.model.trained:
                self._take(table, held.place, held.tensor.reshape(-1), 0)
            return
        for places, bucket in self._buckets():
            for index, slot in enumerate(bucket.layout.slots):
                if bucket.sharded and bucket.param_shard is not None:
                    first = max(0, bucket.shard_range[0] - bucket.ranges[index][0])
                    part = bucket.part_of(bucket.param_shard, index, bucket.shard_range)
                    self._take(table, places[slot.name], part, first)
                else:
                    self._take(table, places[slot.name], bucket.params[index].detach().reshape(-1), 0)

    def _buckets(self) -> Iterator[tuple[Mapping[str, Any], Any]]:
        """Yield each bucket with the places of its chunk's parameters."""
        for number, chunk in enumerate(self.model.chunks):
            places = {held.place.local_name: held.place for held in self.model.held if held.chunk == number}
            for bucket in buckets_of(chunk):
                yield places, bucket

    def _take(self, table: str, place: Any, flat: Tensor, first: int, factor: float = 1.0) -> None:
        if place.is_copy or not flat.numel():
            return
        sketch = of_part(flat.contiguous(), first, place, counts_tiny=table == "grads")
        if factor != 1.0:
            sketch.numbers[:-1].mul_(factor)[0] *= factor
        part = hash(tuple((box.global_offset, box.size) for box in parts_of(first, flat.numel(), place)))
        self.parts.setdefault((table, place.name), []).append((part, sketch))

    # -- all ranks ------------------------------------------------------------------------------------------------

    def _gathered(self) -> list[Any]:
        """Return every rank's tables on rank 0: (data rank, rounding unit, rows by table and name)."""
        assert self.sketches is not None, "a recorded step"
        found: list[tuple[Key, int, float, Sketch, int]] = []
        for stage, chunk in zip(self.stages, self.sketches, strict=True):
            for index, (key, sketch) in enumerate(chunk.sketches.items()):
                found.append((key, 0, stage + index / len(chunk.sketches), sketch, stage))
        held = self.model.held
        order = {each.name: self.stages[each.chunk] + index / len(held) for index, each in enumerate(held)}
        found += [(key, part, order[key[1]], sketch, 0) for key, parts in self.parts.items() for part, sketch in parts]
        numbers = torch.cat([sketch.numbers for *_, sketch, _ in found]).tolist() if found else []
        digests = torch.stack([sketch.digest for *_, sketch, _ in found]).tolist() if found else []
        rows, start = [], 0
        for (key, part, at, sketch, stage), digest in zip(found, digests, strict=True):
            end = start + len(sketch.numbers)
            entry = Entry(sketch.numel, sketch.width, digest, tuple(numbers[start:end]))
            rows.append((key, stage, Row(part, at, entry)))
            start = end
        eps = max([chunk.eps for chunk in self.sketches] + [torch.finfo(self.model.dtype).eps])
        mine = (self.data_rank, eps, rows)
        if not dist.is_initialized():
            return [mine]
        everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with waiting("the sketches of a recorded step", dist.group.WORLD):
            dist.gather_object(mine, everyone, dst=0)
        return everyone or []
