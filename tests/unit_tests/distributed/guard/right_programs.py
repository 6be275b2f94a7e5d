"""Right programs of the kinds people write, on two data ranks: GANs, adapters, reinforcement learning, SAM and others.

Each of them trains as it should under torch DDP or on one process, and a watch that looks for unusual things would find
some in each. A program yields once a step, after `finalize_model_grads`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from core.distributed import DistributedDataParallel, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.distributed.guard.loops import CLASSES, WIDTH, Net, samples
from tests.unit_tests.distributed.guard.right_models import (
    Adapted,
    Codes,
    Column,
    Denoiser,
    Dropped,
    Experts,
    Gan,
    Growing,
    Reversible,
    Scaled,
    SequenceOverAllRanks,
    TakesItsPart,
    Tasks,
    TwoHeads,
    WithPooler,
    Words,
)
from tests.unit_tests.reference import wrap

Steps = Iterator[None]
STEPS = 5


def same(step: int) -> Tensor:
    """A batch that all ranks are given."""
    return samples(step, rank=0)


def sgd(params: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(params.parameters() if isinstance(params, nn.Module) else params, lr=lr)


def loop(
    model: DistributedDataParallel,
    loss: Callable[[int], Tensor],
    optimizer: Any = None,
    *,
    after_finalize: Callable[[int], None] = lambda step: None,
    after_step: Callable[[int], None] = lambda step: None,
    every: int = 1,
) -> Steps:
    """The usual loop. after_step: runs when gradients are zero. every: steps of the optimizer."""
    optimizer = sgd(model) if optimizer is None else optimizer
    for step in range(STEPS):
        loss(step).backward()
        finalize_model_grads([model])
        after_finalize(step)
        if step % every == 0:
            optimizer.step()
        optimizer.zero_grad()
        after_step(step)
        yield


def trained(module: nn.Module, loss: Callable[[nn.Module, int], Tensor] | None = None, **about: Any) -> Steps:
    model = wrap(module)
    loss = loss or (lambda net, step: net(samples(step)).pow(2).mean())
    return loop(model, lambda step: loss(model, step), **about)


def parts_trained(module: nn.Module, choose: Callable[[nn.Module], list[Any]], lr: float = 0.1) -> Steps:
    """The optimizer holds some parameters, and nothing is frozen."""
    model = wrap(module)
    return loop(model, lambda step: model(samples(step)).pow(2).mean(), sgd(choose(model.module), lr))


def gan(real: Callable[[int, Tensor], Tensor], starts: int = 0, dropout: float = 0.0, clamp: float = 0.0) -> Steps:
    """The discriminator's fakes come from a forward without gradients."""
    torch.manual_seed(1)
    model = wrap(Gan(dropout))
    maker, judge = sgd(model.module.maker), sgd(model.module.judge)
    for step in range(STEPS):
        if step >= starts:
            with torch.no_grad():
                fakes = model(samples(step))
            model.zero_grad_buffer()
            logits = model(torch.cat([samples(step)[:, :CLASSES], fakes]), "judge")
            real(step, logits).backward()
            finalize_model_grads([model])
            judge.step()
            with torch.no_grad():
                for param in model.module.judge.parameters() if clamp else ():
                    param.clamp_(-clamp, clamp)
        model.zero_grad_buffer()
        (-model(samples(step), "both").mean()).backward()
        finalize_model_grads([model])
        maker.step()
        yield


def logistic(step: int, logits: Tensor) -> Tensor:
    return F.softplus(-logits[:4]).mean() + F.softplus(logits[4:]).mean()


def least_squares(step: int, logits: Tensor) -> Tensor:
    wanted = torch.rand((), generator=torch.Generator().manual_seed(step)) * 0.2
    return (logits[:4] - 0.9 - wanted / 2).pow(2).mean() + (logits[4:] - wanted).pow(2).mean()


def gradient_penalty() -> Steps:
    def loss(model: nn.Module, step: int) -> Tensor:
        x = samples(step).requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (slope.norm(dim=1) - 1).pow(2).mean()

    return trained(Column(), loss)


def one_target(value: Callable[[int, Tensor], Any]) -> Steps:
    return trained(
        Column(), lambda model, step: (lambda out: (out - value(step, out)).pow(2).mean())(model(samples(step)))
    )


def alpha_zero() -> Steps:
    """All positions of one game have its result."""

    def loss(model: nn.Module, step: int) -> Tensor:
        policy, value = model(samples(step))
        return F.cross_entropy(policy, samples(step)[:, :CLASSES].softmax(-1)) + (value - (-1.0) ** step).pow(2).mean()

    return trained(TwoHeads(), loss)


def tokens_of(dtype: torch.dtype) -> Steps:
    return trained(
        Words(), lambda model, step: model((samples(step).abs() * 5).long().clamp(max=16).to(dtype)).pow(2).mean()
    )


def only_vectors(module: nn.Module) -> nn.Module:
    for param in module.parameters():
        param.requires_grad_(param.dim() == 1)
    return module


def gradual_unfreezing() -> Steps:
    model = wrap(Net())
    optimizer = sgd(model.module.last)
    layers = [model.module.layers[1], model.module.layers[0], model.module.first]

    def add(step: int) -> None:
        if layers:
            optimizer.add_param_group({"params": list(layers.pop(0).parameters())})

    return loop(model, lambda step: model(samples(step)).pow(2).mean(), optimizer, after_step=add)


class WarmUp(torch.optim.Optimizer):
    """A user's optimizer, of which each group begins later."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, group in enumerate(self.param_groups):
            group["lr"] = 0.1 * max(0, self.count - number)
            for param in group["params"]:
                if param.grad is not None and group["lr"]:
                    param.add_(param.grad, alpha=-group["lr"])
        self.count += 1


def warm_up() -> Steps:
    model = wrap(Net())
    groups = [{"params": list(part.parameters())} for part in model.module.children()]
    return loop(model, lambda step: model(samples(step)).pow(2).mean(), WarmUp(groups))


class Both:
    """Two optimizers in one object, which has no groups of its own."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class BothOfTorch(Both, torch.optim.Optimizer):
    def __init__(self, *optimizers: Any) -> None:
        Both.__init__(self, *optimizers)


def two_optimizers(kind: type[Both]) -> Steps:
    model = wrap(Net())
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    return loop(model, lambda step: model(samples(step)).pow(2).mean(), kind(sgd(matrices), sgd(vectors)))


def by_hand(some: Callable[[str, int], bool] = lambda name, step: True) -> Steps:
    model = wrap(Net())
    for step in range(STEPS):
        model.zero_grad_buffer()
        model(samples(step)).pow(2).mean().backward()
        finalize_model_grads([model])
        with torch.no_grad():
            for name, param in model.module.named_parameters():
                if some(name, step):
                    param -= 0.1 * param.grad
        yield


def optimizer_made_later() -> Steps:
    model = wrap(Net())
    optimizers = [sgd(model.module.last)]

    def make(step: int) -> None:
        if step == 2:
            optimizers.append(sgd(model.module.layers))

    step = type(
        "Step", (), {"step": lambda _: [o.step() for o in optimizers], "zero_grad": lambda _: model.zero_grad()}
    )
    return loop(model, lambda step: model(samples(step)).pow(2).mean(), step(), after_step=make)


def codes_moved_by_hand() -> Steps:
    model = wrap(Codes())

    def move(step: int) -> None:
        with torch.no_grad():
            middle = model.module(same(step)).mean(0)
            model.module.codes.lerp_(middle.expand_as(model.module.codes), 0.01)

    held = [param for name, param in model.module.named_parameters() if name != "codes"]
    return loop(model, lambda step: model(samples(step)).pow(2).mean(), sgd(held), after_step=move)


def stochastic_rounding() -> Steps:
    model = wrap(Net().bfloat16(), grad_reduce_in_fp32=False)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        model.zero_grad_buffer()
        model(samples(step).bfloat16()).float().pow(2).mean().backward()
        finalize_model_grads([model])
        with torch.no_grad():
            for param in model.parameters():
                wide = param.float() - 0.01 * param.grad.float()
                bits = wide.view(torch.int32) + torch.randint(
                    0, 2**16, wide.shape, generator=generator, dtype=torch.int32
                )
                param.copy_((bits & -(2**16)).view(torch.float32))
        yield


def tasks(choose: Callable[[int], int]) -> Steps:
    return trained(Tasks(), lambda model, step: model(samples(step), choose(step)).pow(2).mean())


def gradients_decay() -> Steps:
    """A momentum in `.grad`: it is halved in place of zeroed."""
    model = wrap(Net())
    optimizer = sgd(model, lr=0.01)
    for step in range(STEPS):
        model(samples(step)).pow(2).mean().backward()
        finalize_model_grads([model])
        optimizer.step()
        for param in model.parameters():
            param.grad.mul_(0.5)
        yield


def metric_after_backward() -> Steps:
    model = wrap(Net())
    return loop(
        model,
        lambda step: model(samples(step)).pow(2).mean(),
        after_finalize=lambda step: model.module.layers[0](samples(7, rank=0).new_ones(2, 12)).sum().item(),
    )


def grad_cache() -> Steps:
    """Contrastive loss over a large batch: embed without gradients, then again in parts with the cached gradients."""
    model = wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        parts = samples(step).chunk(2)
        with torch.no_grad():
            cached = [model(part).requires_grad_() for part in parts]
        with torch.enable_grad():
            whole = torch.cat([part.detach().requires_grad_() for part in cached])
            (slope,) = torch.autograd.grad(F.cross_entropy(whole @ whole.T, torch.arange(len(whole))), whole)
        with model.no_sync():
            for part, out in zip(parts, slope.chunk(2), strict=True):
                model(part).backward(out)
        finalize_model_grads([model])
        optimizer.step()
        optimizer.zero_grad()
        yield


def self_conditioned() -> Steps:
    def loss(model: nn.Module, step: int) -> Tensor:
        guess = None
        if (step + dist.get_rank()) % 2:
            with torch.no_grad():
                guess = model(samples(step))
        return model(samples(step), guess).pow(2).mean()

    return trained(Denoiser(), loss)


def monte_carlo_dropout(scheduled: bool) -> Steps:
    """Forwards without gradients in training mode are meant: an uncertainty, or the model's own last outputs."""
    model = wrap(nn.Sequential(Net(), nn.Dropout(0.5), nn.Linear(CLASSES, WIDTH)))

    def loss(step: int) -> Tensor:
        with torch.no_grad():
            drawn = torch.stack([model(samples(step)) for _ in range(3)])
        return model(samples(step) + drawn[0] if scheduled else samples(step)).pow(2).mean()

    return loop(model, loss)


def by_torch_func(per_sample: bool) -> Steps:
    model = wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        model.zero_grad_buffer()
        if per_sample:
            params = {name: param.detach() for name, param in model.module.named_parameters()}

            def loss(params: Any, x: Tensor) -> Tensor:
                return functional_call(model.module, params, (x.unsqueeze(0),)).pow(2).mean()

            each = vmap(grad(loss), in_dims=(None, 0))(params, samples(step))
            scale = {name: value.mean(0) for name, value in each.items()}
            (sum((param * scale[name]).sum() for name, param in model.module.named_parameters())).backward()  # type: ignore[union-attr]
        else:
            vmap(lambda x: model(x).pow(2).sum())(samples(step)).mean().backward()
        finalize_model_grads([model])
        optimizer.step()
        yield


def sam(*, of_rank: bool, optimizer_of: Callable[[Any], Any] = sgd, data: bool = False, **options: Any) -> Steps:
    """Sharpness-aware: up along the gradient, of all ranks or of each rank, and back before the step."""
    model = wrap(Net(), **options)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss = model(samples(step)).pow(2).mean()
        if of_rank:
            direction = list(torch.autograd.grad(loss, list(model.parameters())))
        else:
            loss.backward()
            finalize_model_grads([model])
            direction = [param.grad.clone() for param in model.parameters()]
        before = moved(model, direction)
        model.zero_grad_buffer()
        model(samples(step)).pow(2).mean().backward()
        finalize_model_grads([model])
        restore(model, before, data=data)
        optimizer.step()
        optimizer.zero_grad()
        yield


@torch.no_grad()
def moved(model: nn.Module, direction: list[Tensor]) -> list[Tensor]:
    """Move the weights; return copies of them from before."""
    before = [param.detach().clone() for param in model.parameters()]
    for param, part in zip(model.parameters(), direction, strict=True):
        param.add_(part, alpha=0.05)
    return before


@torch.no_grad()
def restore(model: nn.Module, before: list[Tensor], *, data: bool = False) -> None:
    for param, was in zip(model.parameters(), before, strict=True):
        if data:
            param.data = was
        else:
            param.copy_(was)


def noise_of_rank(step: int, model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return [torch.randn(param.shape, generator=generator) for param in model.parameters()]


def perturbed(optimizer_of: Callable[[Any], Any] | None = sgd, *, data: bool = False, **options: Any) -> Steps:
    """Each rank adds its noise before the forward and takes it back before the step; None for a step by hand."""
    model = wrap(Net(), **options)
    optimizer = None if optimizer_of is None else optimizer_of(model)
    for step in range(STEPS):
        before = moved(model, noise_of_rank(step, model))
        model(samples(step)).pow(2).mean().backward()
        finalize_model_grads([model])
        restore(model, before, data=data)
        if optimizer is None:
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
            model.zero_grad_buffer()
        else:
            optimizer.step()
            optimizer.zero_grad()
        yield


def ours(model: DistributedDataParallel, **options: Any) -> Any:
    return get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, **options), [model])


def in_turn(parts: int) -> Callable[[int], int]:
    return lambda step: step % parts


# The programs of which each was warned of, or stopped, by a watch that looked for unusual things.
NAMED: dict[str, Callable[[], Steps]] = {
    "a GAN with fakes under no_grad and dropout": lambda: gan(logistic, dropout=0.3),
    "a discriminator that starts later": lambda: gan(logistic, starts=3),
    "a least-squares GAN with soft labels": lambda: gan(least_squares),
    "a value net with one return for the episode": lambda: one_target(lambda step, out: float(step)),
    "AlphaZero's value head": alpha_zero,
    "outputs that are pulled to their mean": lambda: one_target(lambda step, out: out.mean().detach()),
    "batches of one rating": lambda: one_target(lambda step, out: 1.0 + step % 5),
    "overfitting two batches on purpose": lambda: trained(Net(), lambda net, step: net(same(step % 2)).pow(2).mean()),
    "a model that takes its part of the batch": lambda: trained(
        TakesItsPart(), lambda net, step: net(same(step)).pow(2).mean()
    ),
    "sequence parallelism of the user's over all ranks": lambda: trained(
        SequenceOverAllRanks(), lambda net, step: net(same(step)).pow(2).mean()
    ),
    "tokens in uint16": lambda: tokens_of(torch.uint16),
    "inputs in uint32": lambda: tokens_of(torch.uint32),
    "LoRA whose base is not frozen": lambda: parts_trained(Adapted(), lambda net: [net.a, net.b]),
    "BitFit": lambda: trained(only_vectors(Net())),
    "IA3 scales": lambda: trained(Scaled()),
    "a linear probe by the optimizer alone": lambda: parts_trained(Net(), lambda net: list(net.last.parameters())),
    "gradual unfreezing": gradual_unfreezing,
    "groups that warm up from 0": warm_up,
    "updates by hand": by_hand,
    "updates by hand, some every fourth step": lambda: by_hand(lambda name, step: "norm" in name or step % 4 == 0),
    "an optimizer of a part that is made later": optimizer_made_later,
    "codes of a VQ-VAE that are moved by hand": codes_moved_by_hand,
    "stochastic rounding with one seed": stochastic_rounding,
    "tasks that take turns": lambda: tasks(in_turn(3)),
    "tasks that are drawn by rank": lambda: tasks(lambda step: (step + dist.get_rank()) % 4),
    "language adapters one by one": lambda: tasks(lambda step: step // 2),
    "experts before the router": lambda: trained(
        Experts(), lambda net, step: net(samples(step), step > 2).pow(2).mean()
    ),
    "layer drop": lambda: trained(Dropped(by_rank=False)),
    "stochastic depth by rank": lambda: trained(Dropped(by_rank=True)),
    "progressive growing": lambda: trained(
        Growing(), lambda net, step: net(samples(step), 1 + step // 2).pow(2).mean()
    ),
    "an auxiliary loss that starts later": lambda: trained(
        Tasks(), lambda net, step: net(samples(step)).mean() + (net(samples(step), 4).pow(2).mean() if step > 2 else 0)
    ),
    "BERT with its unused pooler": lambda: trained(WithPooler()),
    "two optimizers in one object": lambda: two_optimizers(Both),
    "two optimizers in one of torch's": lambda: two_optimizers(BothOfTorch),
    "gradients that decay": gradients_decay,
    "a submodule called after a backward": metric_after_backward,
    "reversible blocks in bf16": lambda: trained(
        Reversible().bfloat16(), lambda net, step: net(samples(step).bfloat16()).float().pow(2).mean()
    ),
    "GradCache": grad_cache,
    "a whole model recomputed reentrantly": lambda: trained(
        Net(),
        lambda net, step: checkpoint(net, samples(step).requires_grad_(), use_reentrant=True).pow(2).mean(),  # type: ignore[union-attr]
    ),
    "self-conditioned diffusion": self_conditioned,
    "scheduled sampling": lambda: monte_carlo_dropout(scheduled=True),
    "Monte Carlo dropout": lambda: monte_carlo_dropout(scheduled=False),
    "a loss by torch.func": lambda: by_torch_func(per_sample=False),
    "per-sample gradients by torch.func": lambda: by_torch_func(per_sample=True),
    "SAM": lambda: sam(of_rank=False),
    "SAM of each rank's gradient": lambda: sam(of_rank=True),
    "noise of each rank until the step": perturbed,
}
