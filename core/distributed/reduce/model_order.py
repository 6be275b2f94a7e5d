"""ModelOrder: decides which of several wrapped models on one communicator is reduced next.

A communicator pairs the n-th collective of one rank with the n-th of every other rank. Within one model the reducer
fixes the order. Between models backward has no fixed order, because a rank may call them in another order or skip one.
So if several models share a group, backward launches nothing, and each model's buckets are launched in its finalize.
All ranks must make that call in the same order, and they ask each other which model is next. The chunks of one pipeline
have a fixed order (``link_chunks``) and count as one model.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from core.distributed.buffer.bucket import Bucket
from core.distributed.wire.backend import timeout_of
from core.groups.agree import SyncError
from core.watch.waiting import waiting


class Reducer(Protocol):
    """Interface of a GradReducer for other reducers on the same communicator."""

    buckets: list[Bucket]

    @property
    def shards_gradients(self) -> bool: ...
    @property
    def has_launched(self) -> bool: ...
    def start(self) -> None: ...
    def count_other_models(self) -> None: ...


class ModelOrder:
    """Reducers that share one communicator, numbered in wrap order, which is the same on all ranks."""

    # Belongs to the communicator and dies with it; torch's ProcessGroup takes no attribute of ours.
    _of_group: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, ModelOrder]] = weakref.WeakKeyDictionary()

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.wraps = 0  # models wrapped so far, so also the number of the next model
        self.launches = 0  # by all models since the first wrap; the same on all ranks whenever no step is open
        # Numbers of the models that no rank had deleted when ranks last asked each other; None before they can.
        self.living: set[int] | None = None
        self._reducers: dict[int, weakref.ref[Reducer]] = {}  # oldest first
        self._questions: dist.ProcessGroupGloo | None = None  # used only for these questions

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ModelOrder:
        return cls._of_group.setdefault(group, cls(dist.get_process_group_ranks(group)))

    def join(self, reducer: Reducer) -> None:
        self._reducers[self.wraps] = weakref.ref(reducer)
        if self.living is not None:
            self.living.add(self.wraps)
        self.wraps += 1
        for each in self._alive().values():
            each.count_other_models()

    def _alive(self) -> dict[int, Reducer]:
        found = {number: reference() for number, reference in self._reducers.items()}
        return {number: reducer for number, reducer in found.items() if reducer is not None}

    @property
    def shared(self) -> bool:
        """True if all ranks hold several live models, and must ask each other which one is next."""
        return self.living is not None and len(self.living) > 1

    def count_others(self, chunks: Sequence[Reducer]) -> int:
        """Return the number of other models that use the communicator.

        If gradients are sharded, backward waits for other ranks, so all ranks must get the same answer. Ranks delete a
        model at different times. The number from the ranks' last question is therefore used there.
        """
        models = self._alive()
        agreed = self.living is not None and any(chunk.shards_gradients for chunk in chunks)
        return sum(models.get(number) not in chunks for number in (self.living if agreed else models) or ())

    # -- what ranks ask each other ----------------------------------------------------------------------------------

    def finish_begun_steps(self, control: dist.ProcessGroup | None) -> None:
        """Launch the rest of every step that any rank has begun to launch, before the first collective of a wrap.

        Collective over ``control``, a gloo group of the same ranks, because the data group may be busy. Without one
        each rank decides alone. Raises SyncError on all ranks if a model was deleted in a step whose reductions only
        some ranks have launched: the next collective would be paired with one of these reductions.
        """
        if self.wraps == 0:
            return
        models = self._alive()
        begun = [int(n in models and models[n].has_launched) for n in range(self.wraps)]
        if control is not None:
            if self._questions is None:
                store = dist.PrefixStore(f"core.model_order/{control.group_name}", dist.group.WORLD.get_group_store())
                rank, size = dist.get_rank(control), dist.get_world_size(control)
                self._questions = dist.ProcessGroupGloo(store, rank, size, timeout=timeout_of(control))
            begun = self._largest([*begun, *self._gone(models)])
            self._record_gone(begun[self.wraps :])
        for number, reducer in models.items():
            if begun[number] and (self.living is None or number in self.living):
                reducer.start()
        if control is not None:
            most, minus_least = self._largest([self.launches, -self.launches])
            if most != -minus_least:
                raise SyncError(
                    f"a model was deleted in the middle of a step, when ranks {self.ranks} had launched {-minus_least} "
                    f"to {most} reductions each, so the next one would be mixed with them. Call zero_grad_buffer() on "
                    "all ranks before you delete a model between backward and finalize_model_grads; restart now"
                )

    def refusal(self, reducer: Reducer) -> str | None:
        """Return why this model must not be reduced now, if other ranks reduce another one; else None. Collective."""
        models = self._alive()
        own = next(number for number, other in models.items() if other is reducer)
        most, minus_least, *gone = self._largest([own, -own, *self._gone(models)])
        self._record_gone(gone)
        if most == -minus_least:
            return None
        turns = self._largest([own if rank == dist.get_rank() else 0 for rank in self.ranks])
        found = []
        for number in dict.fromkeys(turns):
            whose = f" (that of {models[number].buckets[-1].contracts[-1].name!r})" if number in models else ""
            ranks = [rank for rank, turn in zip(self.ranks, turns, strict=True) if turn == number]
            found.append(f"model {number}{whose} on ranks {ranks}")
        return (
            f"ranks {self.ranks} are about to reduce different models at the same time: {', '.join(found)}. Nothing "
            "was reduced. Call finalize_model_grads for all models in one order on every rank"
        )

    def _gone(self, models: dict[int, Reducer]) -> list[bool]:
        return [number not in models for number in range(self.wraps)]

    def _record_gone(self, gone: Sequence[int]) -> None:
        self.living = {number for number, is_gone in enumerate(gone) if not is_gone}
        for each in self._alive().values():
            each.count_other_models()

    def _largest(self, values: Sequence[int]) -> list[int]:
        assert self._questions is not None, "finish_begun_steps connects the ranks before the first question"
        largest, options = torch.tensor(values, dtype=torch.int64, device="cpu"), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        with waiting("the question which model is reduced", self.ranks):
            self._questions.allreduce([largest], options).wait()
        found: list[int] = largest.tolist()
        return found
