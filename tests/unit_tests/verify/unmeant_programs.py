"""Programs with mistakes that break no relation between ranks, for the command: all ranks do the same, and wrongly.

A program yields once a step, after `finalize_model_grads`; the loss of a microbatch is `squares`, or noted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core.context_parallel import get_batch_on_this_cp_rank
from core.distributed import finalize_model_grads
from core.verify import note
from tests.unit_tests.distributed.guard.loops import CLASSES, Net, samples, tokens
from tests.unit_tests.reference import wrap

Steps = Iterator[None]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    return loss


def sgd(params: Any, **options: Any) -> torch.optim.Optimizer:
    params = params.parameters() if isinstance(params, nn.Module) else params
    return torch.optim.SGD(params, **{"lr": 0.1, **options})


def train(
    make: Callable[[], nn.Module] = Net,
    *,
    optimizer_of: Callable[[Any], Any] = sgd,
    batch: Callable[[int], Tensor] = samples,
    loss_of: Callable[[Any, int], Tensor] | None = None,
    zeroes: bool = True,
    before_step: Callable[[Any, int], None] = lambda model, step: None,
    **options: Any,
) -> Steps:
    """A loop. optimizer_of: called with the wrapped model. before_step: with it and the number of the step."""
    model = wrap(make(), **options)
    optimizer = optimizer_of(model)
    for step in range(4):
        before_step(model, step)
        loss = squares(model, batch(step)) if loss_of is None else loss_of(model, step)
        loss.backward()
        finalize_model_grads([model])
        yield
        optimizer.step()
        if zeroes:
            model.zero_grad_buffer()


class Cut(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).detach()
        return self.last(self.layers[1](self.layers[0](self.norm(x))))


class CutBetweenLayers(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.norm(torch.tanh(self.first(x)))).detach()
        return self.last(self.layers[1](x))


class WithoutHead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second_head = nn.Linear(12, 2)


def frozen_after_the_wrap(model: Any, step: int) -> None:
    model.module.layers.requires_grad_(False)


def filtered() -> nn.Module:
    """A filter by names that takes too many."""
    net = Net()
    for name, param in net.named_parameters():
        param.requires_grad_("norm" in name)
    return net


class Column(Net):
    """[b, WIDTH] to [b, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 1)


def regression(loss: Callable[[Tensor, Tensor], Tensor]) -> Steps:
    """loss: of outputs [b, 1] and targets [b]."""

    def loss_of(model: Any, step: int) -> Tensor:
        x, y = samples(step), samples(step)[:, :3].sum(dim=1)
        note(lambda whole, x, y: loss(whole(x), y), x, y)
        return loss(model(x), y)

    return train(Column, loss_of=loss_of)


class Recomputed(Net):
    """Its layers are recomputed in backward, from memory that was written to in between."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for layer in self.layers:
            before = x.clone()
            x = before + torch.tanh(checkpoint(layer, before, use_reentrant=False))  # type: ignore[operator]
            before.data.mul_(0.5)
        return self.last(x)


def evaluates_with_dropout(model: Any, step: int) -> None:
    with torch.no_grad():
        model(samples(50))


class Dropping(Net):
    """Drops elements of what it is given, but no gradient with values: dropout of a forward without gradients alone."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if torch.is_grad_enabled() else self.drop(x))


def stays_in_eval(model: Any, step: int) -> None:
    if step == 1:
        model.eval()


def of_two(model: Any) -> Any:
    """The last layer is in two optimizers."""
    whole, head = sgd(model), sgd(model.module.last)
    return type("Both", (), {"step": lambda _: (whole.step(), head.step()), "parts": (whole, head)})()


def by_group(model: Any) -> torch.optim.Optimizer:
    """One of the groups has a learning rate of 0."""
    rest = [param for name, param in model.module.named_parameters() if "last" not in name]
    return sgd([{"params": rest}, {"params": model.module.last.parameters(), "lr": 0.0}])


def parts_of_two_batches() -> Steps:
    torch.manual_seed(3)
    model = wrap(nn.Embedding(11, CLASSES))
    optimizer = sgd(model)
    for step in range(4):
        model.zero_grad_buffer()
        batch = get_batch_on_this_cp_rank({"tokens": tokens(step, dist.get_rank())[0]})
        squares(model, batch["tokens"]).backward()
        finalize_model_grads([model])
        yield
        optimizer.step()


# name -> (program, what the report says, True if it says that gradients are right)
UNMEANT: dict[str, tuple[Callable[[], Steps], str, bool]] = {
    "the same data on all ranks": (
        lambda: train(batch=lambda step: samples(step, rank=0)),
        *(r"also seen: data ranks \[0, 1\] were given the same microbatches.*DistributedSampler", True),
    ),
    "one rank reads its first batch again": (
        lambda: train(batch=lambda step: samples(0 if dist.get_rank() == 1 else step)),
        *(r"also seen: data ranks \[1\] were given the microbatches of the step before once more", True),
    ),
    "gradients are not zeroed": (
        lambda: train(zeroes=False),
        *("the gradients of the step before are still there", False),
    ),
    "the optimizer holds a copy's parameters": (
        lambda: train(optimizer_of=lambda model: sgd(copy.deepcopy(model.module))),
        *("10 parameters had a gradient and have not moved.*SGD holds other parameters of the same shapes", True),
    ),
    "the optimizer holds a part": (
        lambda: train(
            optimizer_of=lambda model: sgd([p for n, p in model.module.named_parameters() if "layers" not in n])
        ),
        *(r"4 parameters had a gradient .*no optimizer holds them: 'layers.\d", True),
    ),
    "a group with a learning rate of 0": (
        lambda: train(optimizer_of=by_group),
        *("2 parameters .* though an optimizer holds them: 'last.weight', 'last.bias'.*learning rate", True),
    ),
    "a layer in two optimizers": (
        lambda: train(optimizer_of=of_two),
        *("2 parameters are in two optimizers: 'last.weight', 'last.bias'", True),
    ),
    "a cut graph": (lambda: train(Cut), "cut graph: `first`.*2 of 10 trained .* 'first.weight', 'first.bias'", False),
    "a graph cut between layers": (
        lambda: train(CutBetweenLayers),
        *("cut graph: .*6 of 10 trained parameters got no gradient", False),
    ),
    "a head that is never called": (
        lambda: train(WithoutHead),
        *("also seen: 2 of 12 trained parameters got no gradient on any rank: 'second_head.weight'", True),
    ),
    "frozen after the wrap": (
        lambda: train(before_step=frozen_after_the_wrap),
        *("also seen: 4 of 10 parameters were frozen after the wrap", False),
    ),
    "a filter that freezes all but norms": (
        lambda: train(filtered),
        *("also seen: only vectors are trained.*all 4 matrices", True),
    ),
    "targets broadcast against a column": (
        lambda: regression(lambda out, y: (out - y).pow(2).mean()),
        *(r"also seen: .*not on its own target.*\[n, n\]", True),
    ),
    "a column of targets broadcasts against outputs": (
        lambda: regression(lambda out, y: (out.squeeze(1) - y[:, None]).pow(2).mean()),
        *("also seen: .*not on its own target", True),
    ),
    "an input is written to before a recomputation": (lambda: train(Recomputed), r"recomputation: `layers", False),
    "an evaluation with dropout": (
        lambda: train(Dropping, before_step=evaluates_with_dropout),
        *(r"also seen: a forward without gradients ran in training mode, so 'drop' .*model.eval\(\)", True),
    ),
    "eval mode stays on": (
        lambda: train(before_step=stays_in_eval),
        *(r"also seen: \d forwards with gradients ran in eval mode", True),
    ),
}
