"""The random streams by which split models drop: alike on ranks that compute the same, others on each of the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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

REGIONS = "dropout_regions"  # the attribute of a split model that holds those over tp


CHANCE = ("drop", "jitter")  # in names of probabilities and of widths of noise


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in training mode, and no layer drops or adds noise. Modes and configurations come back.

    Running statistics do not move.
    """
    modules = list(model.modules())
    modes = [(module, module.training) for module in modules]
    configs = {id(config): config for config in (getattr(module, "config", None) for module in modules)}
    before = [(config, dict(vars(config))) for config in configs.values() if hasattr(config, "get_text_config")]
    attributes = [(module, name, value) for module in modules for name, value in _chances(module)]
    stream = getattr(model, "forward_stream", None)
    try:
        for module in modules:
            module.training = not getattr(module, "track_running_stats", False)
        for config, values in before:
            vars(config).update({name: 0.0 for name in values if _is_chance(name, values[name])})
        for module, name, _ in attributes:
            setattr(module, name, 0.0)
        with nullcontext() if stream is None else stream.paused():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for config, values in before:
            vars(config).clear()
            vars(config).update(values)
        for module, name, value in attributes:
            setattr(module, name, value)


def _is_chance(name: str, value: Any) -> bool:
    return isinstance(value, float) and value > 0 and any(word in name for word in CHANCE)


def _chances(module: nn.Module) -> list[tuple[str, float]]:
    """Attributes of a module that hold a probability above 0, or a width of noise."""
    drops = "Dropout" in type(module).__name__
    return [(n, value) for n, value in vars(module).items() if _is_chance("drop" if drops and n == "p" else n, value)]


class ForwardStream:
    """Hooks of a split model: a forward in training draws from the stream that ranks of tp and cp have alike.

    The first one is collective over these ranks. Without `model_parallel_manual_seed` it begins the stream, by torch's
    own seed on the lowest of them; RuntimeError on all where some have called it. Recomputation by torch's checkpoint
    draws the same, because the stream stands in torch's default generators while the model runs.
    """

    meets_ranks = True  # False while a step is planned, where there are no other ranks

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self._has_begun = False
        self._forks: list[ExitStack] = []  # of forwards that run: a wrapper's and the model's own are one

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardStream:
        return ForwardStream(self.groups)  # groups cannot be copied

    def attach(self, model: nn.Module) -> None:
        """Put the hooks into a model, or into a wrapper around one that has them."""
        model.register_forward_pre_hook(self.enter, prepend=True)
        model.register_forward_hook(self.leave, always_call=True)

    def enter(self, model: nn.Module, *_: Any) -> None:
        """Before a forward."""
        fork = ExitStack()
        if model.training and not self._forks:
            self._begin()
            fork.enter_context(get_rng_tracker().fork(SEQUENCE_DROPOUT_STREAM))
        self._forks.append(fork)

    def leave(self, *_: Any) -> None:
        """After a forward, or after its error."""
        if self._forks:
            self._forks.pop().close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, forwards do not begin or use the stream: what runs there draws nothing that counts."""
        self._forks.append(ExitStack())
        try:
            yield
        finally:
            self._forks.pop()

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Inside, ranks of tp and cp draw what the lowest of them would draw alone. Collective over these ranks."""
        own = current_state()
        states = agree.gather(own, self._groups_alike(), "the random numbers of generate")
        first = min(states)
        install_state(states[first])
        try:
            yield
        finally:
            if first != dist.get_rank():
                install_state(own)

    def _groups_alike(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.groups.tp, self.groups.cp) if group is not None]

    def _begin(self) -> None:
        if self._has_begun or not ForwardStream.meets_ranks:
            return
        self._has_begun = True
        tracker = get_rng_tracker()
        mine = torch.initial_seed(), SEQUENCE_DROPOUT_STREAM in tracker
        answers = agree.gather(mine, self._groups_alike(), "the seed of dropout")
        seeded = [rank for rank, (_, has_stream) in answers.items() if has_stream]
        if not seeded:
            seed, _ = answers[min(answers)]
            tracker.add(SEQUENCE_DROPOUT_STREAM, dropout_seed(SEQUENCE_DROPOUT_STREAM, seed, self.groups))
        elif len(seeded) < len(answers):
            raise RuntimeError(
                f"ranks {seeded} of {list(answers)} have called model_parallel_manual_seed and the others have not, so "
                "dropout of what they have copies of would differ; call it on every rank"
            )


class SplitRegions:
    """Hooks of modules that drop of what each rank has another part of: inside, a rank draws numbers of its own.

    They follow from one number drawn outside and from the rank's place, so that recomputation by torch's checkpoint,
    which puts the stream outside back, draws the same ones.
    """

    def __init__(self, axis: str, rank: int) -> None:
        self.place = f"{axis} {rank}"
        self._handles: list[Any] = []
        self._outside: RNGState | None = None  # None outside
        self._begun: list[bool] = []
        self._paused: list[RNGState | None] = []

    def attach(self, modules: Collection[nn.Module], inner: Collection[nn.Module] = ()) -> None:
        """Put the hooks into modules. inner: modules among their children that drop of what ranks have copies of."""
        for around, before, after in ((modules, self.begin, self.end), (inner, self.pause, self.resume)):
            for module in around:
                self._handles.append(module.register_forward_pre_hook(before))
                self._handles.append(module.register_forward_hook(after, always_call=True))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Before a module."""
        begins = module.training and self._outside is None
        self._begun.append(begins)
        if begins:
            number = int(torch.randint(2**62, (), device="cpu"))
            self._outside = current_state()
            begin_state(seed_of(number, self.place))

    def end(self, *_: Any) -> None:
        """After a module, or after its error."""
        if self._begun and self._begun.pop() and self._outside is not None:
            install_state(self._outside)
            self._outside = None

    def pause(self, *_: Any) -> None:
        """Before a module that drops of copies."""
        self._paused.append(None if self._outside is None else current_state())
        if self._outside is not None:
            install_state(self._outside)

    def resume(self, *_: Any) -> None:
        """After a module that drops of copies."""
        own = self._paused.pop() if self._paused else None
        if own is not None:
            self._outside = current_state()
            install_state(own)


def has_dropout(model: Any) -> bool:
    """True if a module or the configuration names a probability above 0."""
    config = model.config.get_text_config().to_dict()
    named = [value for name, value in config.items() if "drop" in name]
    held = [getattr(module, "p", 0.0) for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(isinstance(value, (int, float)) and value > 0 for value in (*named, *held))


def drop_parts_apart(model: Any, flow: Dataflow, groups: ProcessGroups) -> None:
    """Have ranks of tp drop elements of their own where a watched forward has shown that each has another part."""
    before = getattr(model, REGIONS, None)
    if before is not None:  # of the model that adapters were put around
        before.remove()
    if not has_dropout(model):
        return
    modules = dict(model.named_modules())
    own = flow.drops[True] - flow.drops[False] - {""}
    inner = [name for name in flow.drops[False] if any(name.startswith(f"{outer}.") for outer in own)]
    regions = SplitRegions("tp", groups.rank("tp"))
    regions.attach([modules[name] for name in own], [modules[name] for name in inner])
    setattr(model, REGIONS, regions)
