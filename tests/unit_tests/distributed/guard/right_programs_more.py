"""More right programs on two data ranks, and some over tensor parallelism and pipelines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from core import parallel_state
from core.distributed import finalize_model_grads
from core.pipeline_parallel import PipelineRunner
from core.pipeline_parallel.layout import PipelineLayout
from tests.unit_tests.distributed.guard.loops import CLASSES, WIDTH, Net, SplitNet, samples, tokens
from tests.unit_tests.distributed.guard.right_models import (
    Tasks,
    TwoHeads,
)
from tests.unit_tests.distributed.guard.right_programs import (
    STEPS,
    Steps,
    gan,
    gradient_penalty,
    loop,
    ours,
    perturbed,
    sam,
    same,
    sgd,
    trained,
)
from tests.unit_tests.reference import wrap


def squares(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(samples(step)).pow(2).mean()
    return loss


class WithTeacher(nn.Module):
    """A student and a frozen copy of it, which follows (a mean teacher, BYOL, MoCo, DQN's target)."""

    def __init__(self, every: int = 1, rate: float = 0.1) -> None:
        super().__init__()
        self.student, self.teacher = Net(), Net().requires_grad_(False)
        self.every, self.rate = every, rate
        self.register_buffer("queue", torch.zeros(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
            self.queue = torch.cat([target, self.queue])[:8]
        return self.student(x) - target

    @torch.no_grad()
    def follow(self, step: int) -> None:
        if step % self.every == 0:
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, self.rate)


def teacher(**options: Any) -> Steps:
    model = wrap(WithTeacher(**options))
    return loop(model, lambda step: squares(model, step), after_step=model.module.follow)


def many_epochs_of_one_batch() -> Steps:
    """PPO: several steps on the batch that a rollout has given."""
    return trained(TwoHeads(), lambda net, step: sum(part.pow(2).mean() for part in net(samples(step // 3))))  # type: ignore[return-value]


def reinforce() -> Steps:
    """The policy's log-probabilities times the advantage, which is the same for all actions of an episode."""
    return trained(Net(), lambda net, step: -(net(samples(step)).log_softmax(-1)[:, 0] * (step - 2.0)).mean())


def actor_and_critic() -> Steps:
    """Two losses with an optimizer each, over one trunk."""
    model = wrap(TwoHeads())
    actor, critic = sgd([p for n, p in model.module.named_parameters() if "value" not in n]), sgd(model.module.value)
    for step in range(STEPS):
        for number, optimizer in enumerate((actor, critic)):
            model.zero_grad_buffer()
            model(samples(step))[number].pow(2).mean().backward()
            finalize_model_grads([model])
            optimizer.step()
        yield


def adversarial(net: nn.Module, step: int) -> Tensor:
    x = samples(step).requires_grad_()
    (slope,) = torch.autograd.grad(net(x).pow(2).mean(), x)
    return net((x + 0.1 * slope.sign()).detach()).pow(2).mean()


def edited(edit: Callable[[nn.Module, int], None]) -> Steps:
    """Reduced gradients are changed alike on all ranks."""
    model = wrap(Net())
    return loop(model, lambda step: squares(model, step), after_finalize=lambda step: edit(model, step))


def centralized(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        if param.dim() > 1:
            param.grad -= param.grad.mean(1, keepdim=True)


def noisy(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        param.grad += 0.01 * torch.randn(param.shape, generator=generator)


def clipped(model: nn.Module, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def lookahead() -> Steps:
    model = wrap(Net())
    slow = [param.detach().clone() for param in model.parameters()]

    @torch.no_grad()
    def back(step: int) -> None:
        for param, other in zip(model.parameters(), slow, strict=True):
            if step % 2:
                other.lerp_(param, 0.5)
                param.copy_(other)

    return loop(model, lambda step: squares(model, step), after_step=back)


def evaluates_an_average_on_one_rank(data: bool) -> Steps:
    """Rank 0 alone evaluates with the averaged weights, and puts its own back."""
    model = wrap(Net())
    average = copy.deepcopy(model.module).state_dict()

    @torch.no_grad()
    def evaluate(step: int) -> None:
        for name, value in model.module.state_dict().items():
            average[name].lerp_(value, 0.2)
        if dist.get_rank() == 0:
            own = copy.deepcopy(model.module.state_dict())
            for state in (average, own):
                if data:
                    for name, param in model.module.named_parameters():
                        param.data.copy_(state[name])
                else:
                    model.module.load_state_dict(state)
                model.eval()(same(9))
            model.train()

    return loop(model, lambda step: squares(model, step), after_step=evaluate)


def loads(at: int, *, wrapper: bool = True, optimizer_of: Callable[[Any], Any] = sgd, **options: Any) -> Steps:
    """All ranks load the same weights, before the first step or later."""
    model = wrap(Net(), **options)
    torch.manual_seed(1)
    state = {name: torch.randn_like(value) for name, value in Net().state_dict().items()}

    def load(step: int) -> None:
        if step == at:
            (model if wrapper else model.module).load_state_dict(state)

    load(-1)
    return loop(model, lambda step: squares(model, step), optimizer_of(model), after_step=load)


def written_alike(write: Callable[[nn.Parameter, int], None]) -> Steps:
    """All ranks write to their weights after a step, each alike."""
    model = wrap(Net())

    @torch.no_grad()
    def edit(step: int) -> None:
        for param in model.parameters():
            write(param, step)

    return loop(model, lambda step: squares(model, step), after_step=edit)


def dead_units(param: nn.Parameter, step: int) -> None:
    if param.dim() > 1 and step == 2:
        param[0] = torch.randn(param.shape[1], generator=torch.Generator().manual_seed(step))


def skips(step_is_left_out: Callable[[int], bool]) -> Steps:
    """All ranks leave out a step, such as one with a large loss."""
    model = wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        model.zero_grad_buffer()
        squares(model, step).backward()
        finalize_model_grads([model])
        if not step_is_left_out(step):
            optimizer.step()
        yield


class Carried(nn.Module):
    """A recurrent net whose state is carried from batch to batch; each rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.cell = nn.GRUCell(WIDTH, CLASSES)
        self.state = torch.zeros(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cell(x, self.state)
        self.state = out.detach()
        return out


class Masked(Net):
    """A masked autoencoder, with masks that are drawn by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = torch.Generator().manual_seed(dist.get_rank())
        self.token = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape, generator=self.draw) < 0.5
        return super().forward(torch.where(kept, x, self.token))


class Quantized(Net):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.last.weight
        low = weight + ((weight * 8).round() / 8 - weight).detach()
        x = self.norm(torch.tanh(self.first(x)))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.linear(x, low, self.last.bias)


class Takes(Net):
    """Any arguments; the first tensor of 2 dimensions is what counts."""

    def forward(self, given: Any, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        while isinstance(given, (dict, list)):
            given = next(iter(given.values())) if isinstance(given, dict) else given[0]
        return super().forward(given)


def takes(*others: Any, **more: Any) -> Steps:
    return trained(Takes(), lambda net, step: net({"a": [samples(step)]}, *others, **more).pow(2).mean())


def contrastive(net: nn.Module, step: int) -> Tensor:
    mine = F.normalize(net(samples(step)), dim=1)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.detach())
    parts[dist.get_rank()] = mine
    labels = torch.arange(len(mine)) + len(mine) * dist.get_rank()
    return F.cross_entropy(mine @ torch.cat(parts).T * 5, labels)


def meta(net: nn.Module, step: int) -> Tensor:
    """MAML: the loss after a step that is made inside the graph."""
    module = net.module
    params = dict(module.named_parameters())
    inner = functional_call(module, params, (samples(step),)).pow(2).mean()
    slopes = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    fast = {name: param - 0.1 * slope for (name, param), slope in zip(params.items(), slopes, strict=True)}
    loss: Tensor = functional_call(module, fast, (samples(step + 50),)).pow(2).mean()
    return loss


def uneven(net: nn.Module, step: int) -> Tensor:
    """Ranks have batches of other sizes; one is empty."""
    count = (step + 2 * dist.get_rank()) % 4
    return net(samples(step)[:count]).pow(2).sum() / 4


def accumulated(counts: Callable[[int], int]) -> Steps:
    model = wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        with model.no_sync():
            for number in range(counts(step)):
                squares(model, 10 * step + number).backward()
        finalize_model_grads([model])
        optimizer.step()
        optimizer.zero_grad()
        yield


def freezes_later() -> Steps:
    model = wrap(Net())

    def freeze(step: int) -> None:
        if step == 1:
            model.module.first.requires_grad_(False)

    return loop(model, lambda step: squares(model, step), after_step=freeze)


def evaluates(mode: Callable[[], Any]) -> Steps:
    model = wrap(nn.Sequential(Net(), nn.Dropout(0.2)))

    def look(step: int) -> None:
        with mode():
            model.eval()(same(50))
        model.train()

    return loop(model, lambda step: squares(model, step), after_step=look)


def two_models_in_one_optimizer() -> Steps:
    """A coarse and a fine field."""
    coarse, fine = wrap(Net()), wrap(nn.Linear(CLASSES, CLASSES))
    optimizer = sgd([*coarse.parameters(), *fine.parameters()])
    for step in range(STEPS):
        hidden = coarse(samples(step))
        (hidden.pow(2).mean() + fine(hidden.detach()).pow(2).mean()).backward()
        finalize_model_grads([coarse])
        finalize_model_grads([fine])
        optimizer.step()
        for model in (coarse, fine):
            model.zero_grad_buffer()
        yield


def swapped_roles() -> Steps:
    """Cycle-consistent: two makers, each a part of the other's loss."""
    model = wrap(nn.ModuleDict({"there": Net(), "back": nn.Linear(CLASSES, WIDTH)}))
    parts = model.module

    def loss(step: int) -> Tensor:
        x = samples(step)
        return (parts["back"](parts["there"](x)) - x).abs().mean() + parts["there"](
            parts["back"](x[:, :CLASSES])
        ).abs().mean()

    return loop(model, loss)


def in_16_bits(dtype: torch.dtype) -> Steps:
    model = wrap(Net().to(dtype), grad_reduce_in_fp32=dtype is torch.float16)
    loss_scale = 1.0 if dtype is torch.float16 else None
    return loop(
        model, lambda step: model(samples(step).to(dtype)).float().pow(2).mean(), ours(model, loss_scale=loss_scale)
    )


def other_optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Steps:
    model = wrap(Net())
    return loop(model, lambda step: squares(model, step), kind(model.parameters(), **options))


OWN: dict[str, Callable[[], Steps]] = {
    "a critic with clamped weights": lambda: gan(lambda step, out: out[4:].mean() - out[:4].mean(), clamp=0.1),
    "a gradient penalty": gradient_penalty,
    "a mean teacher": teacher,
    "a target net that follows every second step": lambda: teacher(every=2, rate=1.0),
    "many epochs of one rollout": many_epochs_of_one_batch,
    "REINFORCE": reinforce,
    "an actor and a critic": actor_and_critic,
    "adversarial training": lambda: trained(Net(), adversarial),
    "centralized gradients": lambda: edited(centralized),
    "noise on gradients from one seed": lambda: edited(noisy),
    "a clip of whole gradients": lambda: edited(clipped),
    "lookahead": lookahead,
    "an average that rank 0 evaluates": lambda: evaluates_an_average_on_one_rank(data=False),
    "an average that rank 0 evaluates through .data": lambda: evaluates_an_average_on_one_rank(data=True),
    "weights that all ranks load first": lambda: loads(-1),
    "weights that all ranks load later": lambda: loads(2),
    "weights that all ranks load into the module": lambda: loads(1, wrapper=False),
    "weights that all ranks load, sharded": lambda: loads(
        1, optimizer_of=ours, data_parallel_sharding_strategy="optim"
    ),
    "weight decay by hand": lambda: written_alike(lambda param, step: param.mul_(0.99)),
    "weights that are clamped": lambda: written_alike(lambda param, step: param.clamp_(-0.5, 0.5)),
    "weights that are pruned": lambda: written_alike(lambda param, step: param.mul_(param.abs() > 0.01)),
    "weights that are written through .data": lambda: written_alike(lambda param, step: param.data.mul_(0.9)),
    "dead units that are drawn again": lambda: written_alike(dead_units),
    "steps that all ranks leave out": lambda: skips(lambda step: step % 2 == 0),
    "no step at all": lambda: skips(lambda step: True),
    "a state that is carried": lambda: trained(Carried()),
    "masks by rank": lambda: trained(Masked()),
    "weights that are rounded in the forward": lambda: trained(Quantized()),
    "complex and empty inputs": lambda: takes(torch.ones(2, dtype=torch.complex64), torch.empty(0, 3), None, "text"),
    "sparse and boolean inputs": lambda: takes(torch.eye(3).to_sparse(), mask=torch.ones(2, dtype=torch.bool)),
    "inputs in float8 and int8": lambda: takes(torch.ones(4).to(torch.float8_e4m3fn), torch.ones(2).to(torch.int8)),
    "inputs on meta": lambda: takes(torch.empty(3, device="meta"), torch.tensor(3, dtype=torch.uint64)),
    "contrastive over all ranks": lambda: trained(Net(), contrastive),
    "two towers of one net": lambda: trained(
        Net(), lambda net, step: (net(samples(step)) - net(samples(step + 30))).pow(2).mean()
    ),
    "MAML": lambda: trained(Net(), meta),
    "batches of other sizes": lambda: trained(Net(), uneven),
    "accumulation that grows": lambda: accumulated(lambda step: 1 + step),
    "accumulation that differs by rank": lambda: accumulated(lambda step: 1 + (step + dist.get_rank()) % 2),
    "a layer that is frozen later": freezes_later,
    "evaluation under no_grad": lambda: evaluates(torch.no_grad),
    "evaluation in inference mode": lambda: evaluates(torch.inference_mode),
    "two models in one optimizer": two_models_in_one_optimizer,
    "two makers in a cycle": swapped_roles,
    "bf16 with masters": lambda: in_16_bits(torch.bfloat16),
    "fp16": lambda: in_16_bits(torch.float16),
    "Adam": lambda: other_optimizer(torch.optim.Adam),
    "Adagrad": lambda: other_optimizer(torch.optim.Adagrad),
    "Rprop": lambda: other_optimizer(torch.optim.Rprop),
    "a learning rate of 0": lambda: other_optimizer(torch.optim.SGD, lr=0.0),
    "weight norm": lambda: trained(
        parametrizations.weight_norm(Net().last, "weight"),
        lambda net, step: net(torch.ones(2, 12) * (step + dist.get_rank())).pow(2).mean(),
    ),
    "labels that are smoothed": lambda: trained(
        Net(), lambda net, step: F.cross_entropy(net(samples(step)), torch.arange(4), label_smoothing=0.1)
    ),
    "a loss of one class": lambda: trained(
        Net(), lambda net, step: F.cross_entropy(net(samples(step)), torch.zeros(4).long())
    ),
    "constants on all ranks": lambda: trained(Net(), lambda net, step: net(torch.ones(4, WIDTH)).pow(2).mean()),
    "one curriculum for all ranks": lambda: trained(Net(), lambda net, step: net(same(step)).pow(2).mean()),
    "a second head that never trains": lambda: trained(Tasks()),
    "SAM with a step that gathers": lambda: sam(
        of_rank=True, optimizer_of=ours, data_parallel_sharding_strategy="optim"
    ),
    "SAM of each rank that restores through .data": lambda: sam(of_rank=True, data=True),
    "noise of each rank, a step by hand": lambda: perturbed(None),
    "noise of each rank, a step that gathers": lambda: perturbed(ours, data_parallel_sharding_strategy="optim"),
    "noise of each rank, our optimizer": lambda: perturbed(ours),
    "noise of each rank, compared in each step": lambda: perturbed(check_weights_interval=1),
}


# -- over tensor parallelism -------------------------------------------------------------------------------------------


class Given(SplitNet):
    """A split net that is given more than tokens, or finds them itself."""

    def forward(self, tokens: Tensor | None, labels: Tensor, *_: Any, broadcasts: bool = False) -> Tensor:  # type: ignore[override]
        if broadcasts:
            tokens = torch.zeros(3, 4, dtype=torch.int64) if tokens is None else tokens.clone()
            dist.broadcast(tokens, 0, group=parallel_state.get_tensor_model_parallel_group())
        assert tokens is not None, "given or broadcast"
        return super().forward(tokens, labels)


def given(arguments: Callable[[int], tuple[Any, ...]], **options: Any) -> Steps:
    model = wrap(Given())
    return loop(model, lambda step: model(*arguments(step), **options))


def local_labels(step: int) -> tuple[Any, ...]:
    """Labels of this rank's classes are made before the forward; the net is given those of all as well."""
    x, y = tokens(step)
    return x, y, y - dist.get_rank() * 2


def on_first_rank_alone(step: int) -> tuple[Any, ...]:
    x, y = tokens(step)
    return x if dist.get_rank() == 0 else torch.zeros_like(x), y


OVER_TENSOR: dict[str, Callable[[], Steps]] = {
    "the rank's number among the inputs": lambda: given(lambda step: (*tokens(step), torch.tensor([dist.get_rank()]))),
    "labels that are made local before the forward": lambda: given(local_labels),
    "tokens on the first rank alone": lambda: given(on_first_rank_alone, broadcasts=True),
    "positions of this rank's part": lambda: given(lambda step: (*tokens(step), torch.arange(2) + 2 * dist.get_rank())),
    "a mask of this rank's part": lambda: given(
        lambda step: (*tokens(step), torch.eye(2).roll(dist.get_rank()).bool())
    ),
    "a seed by rank among the inputs": lambda: given(lambda step: (*tokens(step), torch.tensor([7, dist.get_rank()]))),
    "an offset in uint16": lambda: given(
        lambda step: (*tokens(step), torch.tensor([5 * dist.get_rank()]).to(torch.uint16))
    ),
}


# -- over stages -------------------------------------------------------------------------------------------------------


def stages(batch: Callable[[Tensor, Tensor], Any], *, needs: Callable[[Any], tuple[Any, Any]]) -> Steps:
    """A pipeline of two stages. batch: what a rank gives its stage; needs: what is in it, tokens and labels."""
    torch.manual_seed(3)
    rank = dist.get_rank()
    model = wrap(nn.Embedding(11, WIDTH) if rank == 0 else nn.Linear(WIDTH, CLASSES))

    def forward(chunk: nn.Module, given: Any, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            return chunk(needs(given)[0])
        return F.cross_entropy(chunk(hidden).flatten(0, 1), needs(given)[1].flatten())

    shape = [torch.empty(3, 4, WIDTH, device="meta")]
    runner = PipelineRunner([model], PipelineLayout((1, 1), 2), forward, shape)
    optimizer = sgd(model)
    for step in range(STEPS):
        model.zero_grad_buffer()
        runner.step([batch(*tokens(10 * step + number)) for number in range(2)])
        optimizer.step()
        yield


OVER_STAGES: dict[str, Callable[[], Steps]] = {
    "stages that are handed bare tensors": lambda: stages(
        lambda x, y: x if dist.get_rank() == 0 else y, needs=lambda one: (one, one)
    ),
    "empty batches at one end": lambda: stages(
        lambda x, y: (x, y) if dist.get_rank() else (x, torch.zeros_like(y)), needs=lambda both: both
    ),
    "tokens that the last stage does not read": lambda: stages(
        lambda x, y: {"tokens": x if dist.get_rank() == 0 else x * 0 - 1, "labels": y},
        needs=lambda named: (named["tokens"], named["labels"]),
    ),
    "labels that the first stage does not read": lambda: stages(
        lambda x, y: [x, y if dist.get_rank() else y.flip(0)], needs=lambda both: both
    ),
}
