"""Training as people write it: the ways to run backward, to edit gradients and weights, to zero and to read.

Each habit is written once, as a loop of a user's would have it, and runs on both sides: on plain torch and on ours (see
habit_sides). A program yields where the gradients of all ranks are to be made one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import smooth_l1_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters

from tests.unit_tests.distributed.habit_cases import ADAPTERS, STEPS, Case
from tests.unit_tests.distributed.habit_models import Broken, Data, Net, data_of, set_step

Program = Iterator[None]


class Local(Protocol):
    """One rank's training: plain torch's, or ours."""

    case: Case
    rank: int
    module: Net  # the user's own

    def __call__(self, data: Data, *args: Any, **kwargs: Any) -> Any:
        """The forward that a loop calls."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Around backwards that shall not reduce."""

    def backward(self, loss: torch.Tensor) -> None:
        """The backward that a loop calls."""

    def zero_grad(self) -> None:
        """In the way of the case."""

    def step(self) -> None:
        """The optimizer's."""

    def load(self, state: dict[str, Any]) -> None:
        """load_state_dict of the wrapper."""

    def restart(self) -> None:
        """Save the optimizer, and go on with another one that has loaded what was saved."""

    def change_lr(self, factor: float) -> None:
        """In all groups."""

    def clip(self, max_norm: float = 0.0, value: float = 0.0) -> None:
        """Clip the gradients by norm or by value."""

    def gathered(self) -> AbstractContextManager[None]:
        """Around reads and writes of whole parameters outside of a forward."""

    def note(self, name: str, value: Any) -> None:
        """What is compared between the sides: a number or a tensor."""


def train(local: Local) -> Program:
    """The whole of a case."""
    case = local.case
    with local.gathered():
        start = copy.deepcopy(local.module.state_dict())
    first = [param for param in local.module.parts[0].parameters() if param.requires_grad]
    average: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        set_step(local.module, step)
        if case.freezes and step in (1, 3):
            for param in first:
                param.requires_grad_(step == 3)
        if step == 1 and case.adapter == ADAPTERS[1]:
            local.module.add_adapter(case.dtype)
        if step == 2 and local.module.adapter is not None:
            local.module.adapter.requires_grad_(True)
        if case.weight_edits[step] is not None:
            with local.gathered() if case.gathers_always else nullcontext():
                edit_weights(local, case.weight_edits[step], start)
        if case.zero != "forgotten" or step == 0:
            local.zero_grad()
        yield from BACKWARD_OF[case.backwards[step]](local, step)
        yield
        edit_gradients(local, case.edits[step])
        local.step()
        with local.gathered() if case.gathers_always else nullcontext():
            read(local, step, average)
        if "a loss that is not stepped" in case.reads:  # as a generator's is for its discriminator
            local.backward(loss(local, step, 9))
        if case.saves and step == 1:
            local.restart()
        if case.changes_lr and step == 1:
            local.change_lr(0.5)


# -- backward ---------------------------------------------------------------------------------------------------------


def batch(local: Local, step: int, microbatch: int = 0) -> Data:
    """This rank's data."""
    return data_of(local.rank, step, microbatch, local.case.dtype)


def loss_of(outputs: tuple[torch.Tensor, torch.Tensor], data: Data) -> torch.Tensor:
    """One loss of both outputs. Its gradient is bounded, so that no case grows without end."""
    answer, aside = outputs
    return smooth_l1_loss(answer, data.target) + aside


def loss(local: Local, step: int, microbatch: int = 0) -> torch.Tensor:
    """Of one microbatch; it is noted."""
    data = batch(local, step, microbatch)
    value = loss_of(local(data), data)
    local.note("loss", value)
    return value


def one_backward(local: Local, step: int) -> Program:
    local.backward(loss(local, step))
    yield from ()


def under_no_sync(local: Local, step: int) -> Program:
    last = local.case.microbatches - 1
    for microbatch in range(last + 1):
        with local.no_sync() if microbatch < last else nullcontext():
            local.backward(loss(local, step, microbatch) / (last + 1))
    yield from ()


def without_no_sync(local: Local, step: int) -> Program:
    for microbatch in range(local.case.microbatches):
        local.backward(loss(local, step, microbatch))
    yield from ()


def finalized_each(local: Local, step: int) -> Program:
    for microbatch in range(local.case.microbatches):
        if microbatch:
            yield
        local.backward(loss(local, step, microbatch))


def twice(local: Local, step: int) -> Program:
    value = loss(local, step)
    value.backward(retain_graph=True)
    value.backward()
    yield from ()


def several_losses(local: Local, step: int) -> Program:
    data = batch(local, step)
    answer, aside = local(data)
    losses = [smooth_l1_loss(answer, data.target), answer.abs().mean(), aside]
    torch.autograd.backward(losses, [torch.ones_like(each) for each in losses])
    yield from ()


def stack_order(local: Local, step: int) -> Program:
    losses = [loss(local, step, microbatch) for microbatch in range(2)]
    for value in reversed(losses):
        local.backward(value)
    yield from ()


def trainable(local: Local) -> list[nn.Parameter]:
    return [param for param in local.module.parameters() if param.requires_grad]


def grads_assigned(local: Local, step: int) -> Program:
    params = trainable(local)
    grads = torch.autograd.grad(loss(local, step), params, allow_unused=True)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    yield from ()


def grads_added(local: Local, step: int) -> Program:
    local.backward(loss(local, step, 0))
    params = trainable(local)
    grads = torch.autograd.grad(loss(local, step, 1), params, allow_unused=True)
    for param, grad in zip(params, grads, strict=True):
        if grad is not None:
            param.grad = grad if param.grad is None else param.grad + grad
    yield from ()


def recomputed(reentrant: bool) -> Callable[[Local, int], Program]:
    def run(local: Local, step: int) -> Program:
        local.module.recompute = reentrant
        local.backward(loss(local, step))
        local.module.recompute = None
        yield from ()

    return run


def one_output(local: Local, step: int) -> Program:
    data = batch(local, step)
    answer, aside = local(data)
    local.backward(aside if step % 2 else smooth_l1_loss(answer, data.target))
    yield from ()


def some_inputs(local: Local, step: int) -> Program:
    loss(local, step).backward(inputs=trainable(local)[step % 2 :: 2])
    yield from ()


def dropped(local: Local, step: int) -> Program:
    local.backward(loss(local, step, 1))
    local.zero_grad()
    local.backward(loss(local, step))
    yield from ()


def in_two_parts(local: Local, step: int) -> Program:
    data = batch(local, step)
    middle = (len(local.module.parts) + 1) // 2
    hidden = local(data, stop=middle)
    cut = hidden.detach().requires_grad_()
    local.backward(loss_of(local(data, cut, start=middle), data))
    if hidden.requires_grad:
        hidden.backward(cut.grad)
    yield from ()


def hooked(local: Local, step: int) -> Program:
    handles = [param.register_hook(lambda grad: grad * 0.5) for param in trainable(local)[::2]]
    data = batch(local, step)
    answer, aside = local(data)
    answer.register_hook(lambda grad: grad * 3)
    local.backward(loss_of((answer, aside), data))
    for handle in handles:
        handle.remove()
    yield from ()


def hooked_after(local: Local, step: int) -> Program:
    def halve(param: torch.Tensor) -> None:
        param.grad.mul_(0.5)  # type: ignore[union-attr]

    handles = [param.register_post_accumulate_grad_hook(halve) for param in trainable(local)[::2]]
    local.backward(loss(local, step))
    for handle in handles:
        handle.remove()
    yield from ()


def penalty(local: Local, step: int) -> Program:
    value = loss(local, step)
    grads = torch.autograd.grad(value, trainable(local), create_graph=True, allow_unused=True)
    norms = [grad.pow(2).sum() for grad in grads if grad is not None]
    local.backward(value + 0.01 * torch.stack([norm.to(value.dtype) for norm in norms]).sum())
    yield from ()


def broken_forward(local: Local, step: int) -> Program:
    data = batch(local, step)
    try:
        local(Data(data.x, data.tokens, data.target, data.turn, broken=True))
    except Broken:
        local.backward(loss(local, step))
    yield from ()


def broken_backward(local: Local, step: int) -> Program:
    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise Broken("the user's own")

    params = trainable(local)
    handle = params[len(params) // 2].register_hook(fail)
    try:
        local.backward(loss(local, step))
    except Broken:
        local.zero_grad()
    handle.remove()
    local.backward(loss(local, step, 1))
    yield from ()


def evaluated(local: Local, step: int) -> Program:
    for microbatch in range(2):
        local.module.eval()
        with torch.no_grad():
            loss(local, step, 5)
        local.module.train()
        with local.no_sync() if microbatch == 0 else nullcontext():
            local.backward(loss(local, step, microbatch))
    local.module.eval()
    loss(local, step, 6)  # with grad mode on, and no one calls backward
    local.module.train()
    yield from ()


def without_backward(local: Local, step: int) -> Program:
    loss(local, step, 1)
    local.backward(loss(local, step))
    loss(local, step, 2)
    yield from ()


def in_a_thread(local: Local, step: int) -> Program:
    value = loss(local, step)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(local.backward, value).result()
    yield from ()


def unequal(local: Local, step: int) -> Program:
    for microbatch in range(2 if local.rank == 0 else 1):
        local.backward(loss(local, step, microbatch))
    yield from ()


def idle(local: Local, step: int, *, forward: bool) -> Program:
    lazy = local.case.world > 1 and local.rank == step % local.case.world
    if not lazy:
        local.backward(loss(local, step))
    elif forward:
        loss(local, step)
    yield from ()


def functional(local: Local, step: int) -> Program:
    data = batch(local, step)
    weights = {name: 0.9 * param for name, param in local.module.named_parameters()}
    outputs = torch.func.functional_call(local.module, weights, (data,), tie_weights=True)
    local.backward(loss_of(outputs, data))
    yield from ()


BACKWARD_OF: dict[str, Callable[[Local, int], Program]] = {
    "one backward": one_backward,
    "microbatches under no_sync": under_no_sync,
    "microbatches without no_sync": without_no_sync,
    "finalize after every microbatch": finalized_each,
    "one graph twice": twice,
    "several losses at once": several_losses,
    "losses in the order of a stack": stack_order,
    "autograd.grad, assigned": grads_assigned,
    "autograd.grad, added": grads_added,
    "recomputed, reentrant": recomputed(True),
    "recomputed, not reentrant": recomputed(False),
    "a loss of one output": one_output,
    "only some inputs": some_inputs,
    "dropped and begun again": dropped,
    "in two parts": in_two_parts,
    "hooks on tensors and parameters": hooked,
    "a hook after accumulation": hooked_after,
    "a penalty on gradients": penalty,
    "a forward that raises": broken_forward,
    "a backward that raises": broken_backward,
    "an evaluation in between": evaluated,
    "a forward without a backward": without_backward,
    "in a thread": in_a_thread,
    "more microbatches on rank 0": unequal,
    "no backward on one rank": lambda local, step: idle(local, step, forward=True),
    "no forward on one rank": lambda local, step: idle(local, step, forward=False),
    "functional call": functional,
}


# -- edits and reads --------------------------------------------------------------------------------------------------


@torch.no_grad()
def edit_gradients(local: Local, name: str | None) -> None:
    """Between the reduction and the step, as loops do: whoever has no gradient is passed over."""
    params = [param for param in local.module.parameters() if param.grad is not None]
    if name == "clip by norm":
        local.note("norm", clip_grad_norm_(local.module.parameters(), 0.2))
    elif name == "clip by value, then by norm":
        local.clip(value=0.02), local.clip(max_norm=0.05)
    elif name == "clip by norm, then by value":
        local.clip(max_norm=0.2), local.clip(value=0.02)
    elif name == "clip by value":
        clip_grad_value_(local.module.parameters(), 0.02)
    elif name == "look at gradients":
        for param in params:
            local.note("gradient", param.grad)
    for number, param in enumerate(local.module.parameters()):
        if param.grad is None:
            continue
        if name == "scale in place":
            param.grad.mul_(0.5)
        elif name == "assign a multiple":
            param.grad = param.grad * 2
        elif name == "set some to None" and number % 3 == 0:
            param.grad = None
        elif name == "add decay by hand":
            param.grad.add_(param, alpha=0.1)


@torch.no_grad()
def edit_weights(local: Local, name: str | None, start: dict[str, torch.Tensor]) -> None:
    """At the beginning of a step."""
    params = list(local.module.parameters())
    if name == "shrink .data":
        for param in params:
            param.data.mul_(0.9)
    elif name == "copy_ under no_grad":
        for param in params[::2]:
            param.copy_(param * 0.8)
    elif name == "load the module":
        local.module.load_state_dict(start)
    elif name == "load the wrapper":
        local.load(start)
    elif name == "load one part":
        prefix = "parts.0."
        own = {key.removeprefix(prefix): value for key, value in start.items() if key.startswith(prefix)}
        local.module.parts[0].load_state_dict(own)
    elif name == "vector_to_parameters":
        head = list(local.module.head.parameters())
        vector_to_parameters(parameters_to_vector(head) * 0.9, head)


@torch.no_grad()
def read(local: Local, step: int, average: dict[str, torch.Tensor]) -> None:
    """What loops read of the weights when the optimizer has stepped."""
    names = local.case.reads
    if "average of the weights" in names:
        for key, param in local.module.named_parameters():
            average[key] = average[key].lerp_(param, 0.5) if key in average else param.detach().clone()
            local.note(f"average of {key}", average[key])
    if "a copy of the module" in names:
        data = batch(local, step, 8)
        local.note("the copy's loss", loss_of(copy.deepcopy(local.module).eval()(data), data))
    if "norms of the weights" in names:
        for key, param in local.module.named_parameters():
            local.note(f"norm of {key}", param.norm())
    if "a part's state_dict" in names:
        for key, value in local.module.parts[-1].state_dict().items():
            local.note(key, value)
