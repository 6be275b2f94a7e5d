"""Random streams of dropout in split models: equal on ranks that compute the same values, different on all others."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.tensor_parallel.dataflow import Dataflow
from core.tensor_parallel.random import (
    SEQUENCE_DROPOUT_STREAM,
    RNGState,
    begin_state,
    current_state,
    dropout_seed,
    get_rng_tracker,
    install_state,
    seed_of,
)

REGIONS = "dropout_regions"  # attribute of a split model: its SplitRegions over tp


class ForwardStream:
    """Hooks of a split model that let a training forward draw equal random numbers on all ranks of tp and cp.

    The first forward is collective over these ranks. Without ``model_parallel_manual_seed`` it starts the stream from
    the lowest rank's torch seed; if only some ranks have called that function, it raises RuntimeError on all.
    Recomputation by torch's checkpoint draws the same numbers, because the stream is installed in torch's default
    generators while the model runs.
    """

    meets_ranks = True  # False while a step is planned without other ranks

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._has_begun = False
        self._forks: list[ExitStack] = []  # one per running forward; only the outermost forks

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardStream:
        return ForwardStream(self.groups)  # process groups cannot be copied

    def attach(self, model: nn.Module) -> None:
        """Register the hooks on a model, or on a wrapper around a model that has them."""
        model.register_forward_pre_hook(self.enter, prepend=True)
        model.register_forward_hook(self.leave, always_call=True)

    def enter(self, model: nn.Module, *_: Any) -> None:
        """Start drawing from the stream. A forward pre-hook."""
        fork = ExitStack()
        if model.training and not self._forks:
            self._begin()
            fork.enter_context(get_rng_tracker().fork(SEQUENCE_DROPOUT_STREAM))
        self._forks.append(fork)

    def leave(self, *_: Any) -> None:
        """Restore the caller's random state, also after an error. A forward hook."""
        if self._forks:
            self._forks.pop().close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let forwards inside the context neither start nor use the stream."""
        self._forks.append(ExitStack())
        try:
            yield
        finally:
            self._forks.pop()

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Let all ranks of tp and cp draw the lowest rank's numbers inside the context. Collective over these ranks."""
        own = current_state()
        states = agree.gather(own, self._groups_with_equal_draws(), "the random numbers of generate")
        first = min(states)
        install_state(states[first])
        try:
            yield
        finally:
            if first != dist.get_rank():
                install_state(own)

    def _groups_with_equal_draws(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.groups.tp, self.groups.cp) if group is not None]

    def _begin(self) -> None:
        if self._has_begun or not ForwardStream.meets_ranks:
            return
        self._has_begun = True
        tracker = get_rng_tracker()
        mine = torch.initial_seed(), SEQUENCE_DROPOUT_STREAM in tracker
        answers = agree.gather(mine, self._groups_with_equal_draws(), "the seed of dropout")
        seeded = [rank for rank, (_, has_stream) in answers.items() if has_stream]
        if not seeded:
            seed, _ = answers[min(answers)]
            tracker.add(SEQUENCE_DROPOUT_STREAM, dropout_seed(SEQUENCE_DROPOUT_STREAM, seed, self.groups))
        elif len(seeded) < len(answers):
            raise RuntimeError(
                f"ranks {seeded} of {list(answers)} have called model_parallel_manual_seed and the others have not, so "
                "dropout would differ between copies of the same activations; call it on every rank"
            )


class SplitRegions:
    """Hooks of modules that drop elements of tensors split over ranks: inside them, each rank draws different numbers.

    The numbers follow from one number drawn outside and this rank's index in the group ``axis``. Recomputation by
    torch's checkpoint restores the outer stream and therefore draws the same numbers.
    """

    def __init__(self, axis: str, rank: int) -> None:
        self.place = f"{axis} {rank}"
        self._handles: list[Any] = []
        self._outside: RNGState | None = None  # None outside these modules
        self._begun: list[bool] = []
        self._paused: list[RNGState | None] = []

    def attach(self, modules: Collection[nn.Module], inner: Collection[nn.Module] = ()) -> None:
        """Register the hooks on modules that drop elements of split tensors.

        ``inner`` are modules inside them that drop elements of replicated tensors.
        """
        for around, before, after in ((modules, self.begin, self.end), (inner, self.pause, self.resume)):
            for module in around:
                self._handles.append(module.register_forward_pre_hook(before))
                self._handles.append(module.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Switch to this rank's stream. A forward pre-hook."""
        begins = module.training and self._outside is None
        self._begun.append(begins)
        if begins:
            number = int(torch.randint(2**62, (), device="cpu"))
            self._outside = current_state()
            begin_state(seed_of(number, self.place))

    def end(self, *_: Any) -> None:
        """Restore the outer stream, also after an error. A forward hook."""
        if self._begun and self._begun.pop() and self._outside is not None:
            install_state(self._outside)
            self._outside = None

    def pause(self, *_: Any) -> None:
        """Restore the outer stream for a module that drops elements of replicated tensors. A forward pre-hook."""
        self._paused.append(None if self._outside is None else current_state())
        if self._outside is not None:
            install_state(self._outside)

    def resume(self, *_: Any) -> None:
        """Return to this rank's stream after such a module. A forward hook."""
        own = self._paused.pop() if self._paused else None
        if own is not None:
            self._outside = current_state()
            install_state(own)


def has_dropout(model: Any) -> bool:
    """Return ``True`` if a module or the config has a dropout probability above 0."""
    config = model.config.get_text_config().to_dict()
    named = [value for name, value in config.items() if "drop" in name]
    probabilities = [getattr(module, "p", 0.0) for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(isinstance(value, (int, float)) and value > 0 for value in (*named, *probabilities))


def drop_parts_apart(model: Any, flow: Dataflow, groups: ProcessGroups) -> None:
    """Let tp ranks draw different dropout masks in modules whose tensors a watched forward has shown to be split."""
    before = getattr(model, REGIONS, None)
    if before is not None:  # left from the base model, before adapters were added
        before.remove()
    if not has_dropout(model):
        return
    modules = dict(model.named_modules())
    own = flow.drops[True] - flow.drops[False] - {""}
    inner = [name for name in flow.drops[False] if any(name.startswith(f"{outer}.") for outer in own)]
    regions = SplitRegions("tp", groups.rank("tp"))
    regions.attach([modules[name] for name in own], [modules[name] for name in inner])
    setattr(model, REGIONS, regions)
