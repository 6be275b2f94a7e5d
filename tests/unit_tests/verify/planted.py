"""Mistakes of loops that no check was built for, each with its right twin: a program on two data ranks.

A program yields once a step, after `finalize_model_grads`. `found` says what finds the mistake first: the watch of the
first two steps, the command by gradients, the command with `--steps 3` by weights, a line of "also seen" in either, or
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.distributed import finalize_model_grads
from core.verify import note
from tests.unit_tests.distributed.guard.loops import Net, samples
from tests.unit_tests.reference import wrap
from tests.unit_tests.verify.unmeant_programs import squares

MICROBATCHES = 2
ALSO, ALSO_STEPS = "also seen", "also seen with --steps"


@dataclass
class Run:
    """A loop that runs."""

    model: Any
    optimizer: Any
    step: int = 0
    number: int = 0  # of the microbatch

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def params(self) -> list[Any]:
        return list(self.model.module.parameters())

    @property
    def grads(self) -> list[Tensor]:
        return [param.grad for param in self.params]


def nothing(run: Run) -> None:
    """Do nothing."""


def momentum(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def own_batch(run: Run) -> Tensor:
    return samples(10 * run.step + run.number)


def mean(run: Run, x: Tensor) -> Tensor:
    return squares(run.model, x) / MICROBATCHES


def train(
    make: Callable[[], nn.Module] = Net,
    *,
    batch: Callable[[Run], Tensor] = own_batch,
    loss_of: Callable[[Run, Tensor], Tensor | None] = mean,
    begin: Callable[[Run], object] = nothing,
    after_backward: Callable[[Run], object] = nothing,
    before_finalize: Callable[[Run], object] = nothing,
    finalized: Callable[[Run], object] = nothing,
    skips: Callable[[Run], bool] = lambda run: False,
    stepped: Callable[[Run], object] = nothing,
) -> Iterator[None]:
    """A loop with momentum over two microbatches."""
    model = wrap(make())
    run = Run(model, momentum(model))
    for run.step in range(4):
        model.zero_grad_buffer()
        begin(run)
        for run.number in range(MICROBATCHES):
            loss = loss_of(run, batch(run))
            if loss is not None:
                loss.backward()
            after_backward(run)
        before_finalize(run)
        finalize_model_grads([model])
        yield
        with torch.no_grad():
            finalized(run)
        if not skips(run):
            run.optimizer.step()
        with torch.no_grad():
            stepped(run)


# -- parts of programs -----------------------------------------------------------------------------------------------


def norm_of(run: Run) -> float:
    return float(torch.stack([grad.norm() for grad in run.grads]).norm())


class ClipByHand:
    """A clip by a norm that is measured before or after the reduction."""

    def measure(self, run: Run) -> None:
        self.norm = norm_of(run)

    def clip(self, run: Run) -> None:
        for grad in run.grads:
            grad.mul_(0.1 / self.norm)


def clipped_by_hand(before: bool) -> Iterator[None]:
    clip = ClipByHand()
    if before:
        return train(before_finalize=clip.measure, finalized=clip.clip)
    return train(finalized=lambda run: (clip.measure(run), clip.clip(run)))


def add_noise(run: Run, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 * seed + run.step)
    for grad in run.grads:
        grad.add_(torch.randn(grad.shape, generator=generator), alpha=1e-2)


def scale_rates(run: Run, factor: float) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= factor


def scale_weights(run: Run, factor: float) -> None:
    for param in run.params:
        param.mul_(factor)


def evaluate_average(run: Run, restores: bool) -> None:
    kept = [param.clone() for param in run.params]
    scale_weights(run, 0.9)  # the average
    if restores:
        for param, value in zip(run.params, kept, strict=True):
            param.copy_(value)


def step_by_hand(run: Run) -> None:
    with torch.no_grad():
        for param, grad in zip(run.params, run.grads, strict=True):
            param.sub_(grad, alpha=0.01)


def load_head(run: Run) -> None:
    run.model.module.last.weight.copy_(torch.ones(5, 12))


def with_penalty(run: Run, x: Tensor, on: bool) -> Tensor:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) + 0.1 * sum(param.square().sum() for param in model.parameters())

    note(loss, x)
    return (loss if on else squares)(run.model, x) / MICROBATCHES


def validate(run: Run, trains: bool) -> None:
    with torch.set_grad_enabled(trains):
        run.model.train(trains)
        loss = squares(run.model, samples(50 + run.step))
        if trains:
            loss.backward()
        run.model.train()


class LastLoss:
    """One backward for the loss of the last microbatch, or for the sum."""

    def __init__(self, sums: bool) -> None:
        self.sums, self.total = sums, None

    def loss_of(self, run: Run, x: Tensor) -> Tensor | None:
        loss = mean(run, x)
        self.total = loss if self.total is None or not self.sums else self.total + loss
        if run.number < MICROBATCHES - 1:
            return None
        total, self.total = self.total, None
        return total


def clip_torch(run: Run) -> None:
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)


class Detached(Net):
    """Its first layer gets no gradient on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.first(x))
        x = self.norm(first.detach() if dist.get_rank() == 1 and self.training else first)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x)


class Cached(Net):
    """Keeps the last layer's weight for several forwards; its gradient passes through."""

    forwards = 2 * MICROBATCHES

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.last.weight
        if torch.is_grad_enabled():
            if self.count % self.forwards == 0:
                self.kept = weight.detach().clone()
            self.count += 1
            weight = weight + (self.kept - weight).detach()
        x = self.norm(torch.tanh(self.first(x)))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.linear(x, weight, self.last.bias)


class Fresh(Cached):
    forwards = MICROBATCHES


def reduce_by_hand(run: Run) -> None:
    for grad in run.grads:
        dist.all_reduce(grad)


def to_16_bits(tensors: list[Any]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(tensor.bfloat16())


def scale_grads(run: Run, factor: float, names: str = "") -> None:
    for name, param in run.model.module.named_parameters():
        if names in name:
            param.grad.mul_(factor)


def clip_by_last_layer(run: Run) -> None:
    norm = float(run.model.module.last.weight.grad.norm())
    scale_grads(run, 0.01 / norm)


class Average:
    """A moving average of the weights, which is written into the shadow or into the model."""

    def __init__(self, into_model: bool) -> None:
        self.into_model, self.shadow = into_model, None

    def update(self, run: Run) -> None:
        if self.shadow is None:
            self.shadow = [param.clone() for param in run.params]
        for param, average in zip(run.params, self.shadow, strict=True):
            mixed = 0.5 * param + 0.5 * average
            (param if self.into_model else average).copy_(mixed)


class CopiedHead(Net):
    """Its last bias is to be that of the embedding; a copy of it trains alone."""


def new_optimizer(run: Run) -> None:
    run.optimizer = momentum(run.model)


@dataclass(frozen=True)
class Planted:
    mistake: Callable[[], Iterator[None]]
    right: Callable[[], Iterator[None]]
    found: str


def both(found: str, of: Callable[[bool], Iterator[None]]) -> Planted:
    """of: makes the mistake if it is given True."""
    return Planted(lambda: of(True), lambda: of(False), found)


def on_one_rank(found: str, hook: str, act: Callable[[Run], object], rank: int = 0, step: int | None = None) -> Planted:
    """One rank alone does at a hook of the loop what all ranks do in the right twin."""

    def made(wrong: bool) -> Iterator[None]:
        def acts(run: Run) -> None:
            if (not wrong or run.rank == rank) and step in (None, run.step):
                act(run)

        return train(**{hook: acts})  # type: ignore[arg-type]

    return both(found, made)


def if_wrong(found: str, **hooks: Any) -> Planted:
    """The right twin lacks the hooks."""
    return Planted(lambda: train(**hooks), lambda: train(), found)


def chosen(found: str, hook: str, act: Callable[[Run, Any], object], wrong: Any, right: Any) -> Planted:
    """A hook with a wrong and a right argument."""
    return both(found, lambda is_wrong: train(**{hook: lambda *run: act(*run, wrong if is_wrong else right)}))


PLANTED: dict[str, Planted] = {
    # Ranks come apart.
    "a clip by each rank's norm before the reduction": both("watch", clipped_by_hand),
    "noise on gradients from the rank's seed": both(
        "watch", lambda wrong: train(finalized=lambda run: add_noise(run, run.rank if wrong else 7))
    ),
    "a schedule on rank 0 alone": on_one_rank("watch", "stepped", lambda run: scale_rates(run, 0.5)),
    "decay by hand on rank 0 alone": on_one_rank("watch", "stepped", lambda run: scale_weights(run, 0.99)),
    "an average that stays after an evaluation on rank 1": both(
        "watch", lambda wrong: train(stepped=lambda run: evaluate_average(run, not wrong or run.rank == 0))
    ),
    "a step that rank 1 leaves out": both(
        "watch", lambda wrong: train(skips=lambda run: run.step == 1 and (run.rank == 1 or not wrong))
    ),
    "weights saved in 16 bits and kept so on rank 0": on_one_rank(
        "watch", "stepped", lambda run: to_16_bits(run.params)
    ),
    "a state that rank 1 clears": on_one_rank("watch", "stepped", lambda run: run.optimizer.state.clear(), 1, 0),
    "a head that rank 0 loads alone": on_one_rank("watch", "stepped", load_head, 0, 1),
    "an update by hand before the reduction": Planted(
        lambda: train(before_finalize=step_by_hand), lambda: train(finalized=step_by_hand), "watch"
    ),
    # All ranks are equal, and the gradient is another one.
    "a penalty on rank 0 alone": both(
        "command", lambda wrong: train(loss_of=lambda run, x: with_penalty(run, x, not wrong or run.rank == 0))
    ),
    "a short window divided by the full count": if_wrong("command", loss_of=lambda run, x: squares(run.model, x) / 3),
    "a validation with backward": chosen("command", "before_finalize", validate, True, False),
    "the backward of the last microbatch's loss alone": both(
        "command", lambda wrong: train(loss_of=LastLoss(sums=not wrong).loss_of)
    ),
    "a clip between two backwards": Planted(
        lambda: train(after_backward=lambda run: clip_torch(run) if run.number == 0 else None),
        lambda: train(finalized=clip_torch),
        "command",
    ),
    "a layer that one rank detaches": Planted(lambda: train(Detached), lambda: train(), "command"),
    "a loss weighted by the rank's share": if_wrong("command", loss_of=lambda run, x: mean(run, x) / 2),
    "a reduction by hand before the wrapper's": if_wrong("command", before_finalize=reduce_by_hand),
    "gradients kept in 16 bits between microbatches": if_wrong(
        "command", after_backward=lambda run: to_16_bits(run.grads)
    ),
    "a weight cached over two steps": Planted(lambda: train(Cached), lambda: train(Fresh), "command"),
    # The gradient is right, and the step is not.
    "gradients cleared before the step": if_wrong("--steps", finalized=lambda run: scale_grads(run, 0.0)),
    "a callback that steps once more": if_wrong("--steps", stepped=lambda run: run.optimizer.step()),
    "a state that an evaluation clears": if_wrong(ALSO_STEPS, stepped=lambda run: run.optimizer.state.clear()),
    "a norm over one layer clips all": if_wrong("nothing", finalized=clip_by_last_layer),
    # Right in some programs.
    "an average written into the model": both(ALSO_STEPS, lambda wrong: train(stepped=Average(wrong).update)),
    "a factor of the world size by hand": if_wrong(ALSO_STEPS, finalized=lambda run: scale_grads(run, 2.0)),
    "a factor left in one layer": if_wrong(ALSO_STEPS, finalized=lambda run: scale_grads(run, 8.0, "last")),
    "a new optimizer in each step": if_wrong(ALSO_STEPS, stepped=new_optimizer),
    "shards that overlap": if_wrong(
        ALSO, batch=lambda run: samples(10 * run.step + (run.number + run.rank) % 3, rank=0)
    ),
    "eval mode that stays on on rank 1": both(
        "command",
        lambda wrong: train(begin=lambda run: run.model.train(not (wrong and run.rank == 1 and run.step == 1))),
    ),
}
