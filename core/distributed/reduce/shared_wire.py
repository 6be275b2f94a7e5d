"""SharedWire: several wrapped models, or chunks of one, that use the same communicators.

A communicator pairs the n-th collective of one rank with the n-th of another. Within one model the reducer keeps one
order. Between models there is none that backward could follow: a rank may call them in another order, or leave one out.
So with several models backward launches nothing, and each model's buckets leave in its finalize, which is a call that
all ranks make in the same order: they ask each other whose turn it is. Chunks of one pipeline have an order
(`link_chunks`) and count as one model.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from core.agree import SyncError
from core.distributed.reduce.step_state import StepState
from core.distributed.wire.backend import timeout_of
from core.waiting import waiting

if TYPE_CHECKING:
    from core.distributed.reduce.grad_reducer import GradReducer


class SharedWire:
    """The reducers that use one communicator."""

    # Belongs to the communicator and dies with it; torch's ProcessGroup takes no attribute of ours.
    _of_group: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, SharedWire]] = weakref.WeakKeyDictionary()

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self._joined: dict[int, weakref.ref[GradReducer]] = {}  # by the number of the wrap, oldest first
        self._wraps = 0
        self.launches = 0  # of all models, ever; equal on all ranks whenever no step is open
        self._questions: dist.ProcessGroupGloo | None = None  # that ranks ask each other
        # Numbers of the models that no rank had dropped when ranks last asked each other; None before they can.
        self.living: set[int] | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> SharedWire:
        """The one object that all models wrapped with `group` share."""
        return cls._of_group.setdefault(group, cls(dist.get_process_group_ranks(group)))

    @property
    def next_model(self) -> int:
        """The number of the next model that is wrapped, the same on all ranks."""
        return self._wraps

    def _by_number(self) -> dict[int, GradReducer]:
        alive = {number: reference() for number, reference in self._joined.items()}
        found = {number: reducer for number, reducer in alive.items() if reducer is not None}
        self._joined = {number: self._joined[number] for number in found}
        return found

    def quiesce(self, control: dist.ProcessGroup | None) -> None:
        """Before a collective that is not a reducer's: launch the rest of every step that some rank has begun to
        launch. Collective.

        control: a gloo group of the same ranks, beside which they ask each other on a communicator of its own, as that
        one may be busy. Without one each rank goes by itself. Raises SyncError on all ranks where a model was dropped
        in a step whose reductions only some ranks have launched: the next collective would be paired with one of them.
        """
        if self._wraps == 0:
            return
        models = self._by_number()
        flags = torch.zeros(2, self._wraps, dtype=torch.int64)  # the largest of all ranks counts
        begun, gone = flags
        gone.fill_(1)
        for number, reducer in models.items():
            gone[number] = 0
            begun[number] = reducer.state in (StepState.LAUNCHING, StepState.LAUNCHED)
        if control is not None:
            if self._questions is None:
                store = dist.PrefixStore("core.distributed.reduce.shared_wire", _get_process_group_store(control))
                rank, size = dist.get_rank(control), dist.get_world_size(control)
                self._questions = dist.ProcessGroupGloo(store, rank, size, timeout=timeout_of(control))
            self._ask(flags)
            self.living = set((gone == 0).nonzero().flatten().tolist())
        for number in (begun & ~gone).nonzero().flatten().tolist():
            models[number].start()
        if control is not None:
            most, minus_least = self._ask(torch.tensor([self.launches, -self.launches])).tolist()
            if most != -minus_least:
                raise SyncError(
                    f"a model was deleted in the middle of a step, when ranks {self.ranks} had launched {-minus_least} "
                    f"to {most} reductions each, so the next one would be mixed with them. Call zero_grad_buffer() on "
                    "all ranks before you delete a model between backward and finalize_model_grads; restart now"
                )

    def _ask(self, flags: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks, in place."""
        assert self._questions is not None, "quiesce connects the ranks before anybody asks"
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        with waiting("the question which model is reduced", self.ranks):
            self._questions.allreduce([flags], options).wait()
        return flags

    def unequal_turns(self, reducer: GradReducer) -> str | None:
        """Why this model must not be reduced now: other ranks are about to reduce another one. None if all reduce this
        one. Collective where models share the wire, on a communicator on which nothing else travels.
        """
        if not self.shared:
            return None
        models = self._by_number()
        own = next(number for number, other in models.items() if other is reducer)
        answer = torch.tensor([own, -own, *(number not in models for number in range(self._wraps))])
        self._ask(answer)
        first, minus_last, *gone = answer.tolist()
        self.living = {number for number, is_gone in enumerate(gone) if not is_gone}
        if first == -minus_last:
            return None
        turns = torch.zeros(len(self.ranks), dtype=torch.int64)
        turns[self.ranks.index(dist.get_rank())] = own
        self._ask(turns)
        by_rank = dict(zip(self.ranks, turns.tolist(), strict=True))
        found = [
            f"model {model}{_parameter_of(models.get(model))} on ranks {[r for r in self.ranks if by_rank[r] == model]}"
            for model in dict.fromkeys(by_rank.values())
        ]
        return (
            f"ranks {self.ranks} are about to reduce different models at the same time: {', '.join(found)}. Nothing "
            "was reduced. Call finalize_model_grads for all models in one order on every rank"
        )

    def join(self, reducer: GradReducer) -> None:
        """A model was wrapped."""
        self._joined[self._wraps] = weakref.ref(reducer)
        if self.living is not None:
            self.living.add(self._wraps)
        self._wraps += 1

    @property
    def shared(self) -> bool:
        """True if several models live on all ranks, which then ask each other whose turn it is."""
        return self.living is not None and len(self.living) > 1

    def is_own(self, unit: Sequence[GradReducer]) -> bool:
        """True if no other model uses it.

        Where gradients are sharded backward waits for other ranks, so there all ranks must say the same, and when a
        dropped model goes differs between them. What they said last counts.
        """
        models = self._by_number()
        agreed = self.living is not None and any(member.shards_gradients for member in unit)
        return all(models.get(number) in unit for number in (self.living if agreed else models) or ())


def _parameter_of(model: GradReducer | None) -> str:
    return "" if model is None else f" (that of {model.buckets[-1].contracts[-1].name!r})"


def link_chunks(reducers: Sequence[GradReducer]) -> None:
    """Give the chunks of this rank, in the model's order, one launch order: the last chunk's buckets first."""
    chunks = [weakref.ref(reducer) for reducer in reversed(reducers)]
    for reducer in reducers:
        reducer.chunks = chunks
