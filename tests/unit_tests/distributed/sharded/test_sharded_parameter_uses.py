"""Sharded parameters under uses that few models have: the losses are those of replicated ones."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from core import parallel_state
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Placement,
    finalize_model_grads,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.booster.test_booster_checkpoint import shared
from tests.unit_tests.ranks import ranks

STEPS = 3


def squares(model: Any) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 32).view(4, 8)).square().mean()


def wrapped(module: nn.Module, **options: Any) -> DistributedDataParallel:
    options = {"data_parallel_sharding_strategy": "optim_grads_params", "bucket_size": 100, **options}
    return DistributedDataParallel(None, DistributedDataParallelConfig(**options), module)


def losses(module: nn.Module, loss_of: Callable[[Any], torch.Tensor], **options: Any) -> list[float]:
    model = wrapped(module, **options)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0), [model])
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        finalize_model_grads([model])
        assert optimizer.step()[0]
        found.append(loss.item())
    return found


def placements(folder: Path) -> dict[str, dict[str, Any]]:
    below: Any = {"offload_param_frac": 1.0, "offload_optim_frac": 1.0, "directory": folder}
    return {
        "mapped": {},
        "gathered": {"share_host_memory": False},
        "files": {"placement": Placement(**below)},
        "a budget": {"placement": Placement(**below, memory_budget_bytes=10**6)},
    }


class Signed(nn.Module):
    """Its weight is saved for backward as a view with a negative bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.view_as_complex(self.weight).conj().imag


class Sparse(nn.Module):
    """Saves a sparse tensor for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.sparse.mm(torch.eye(8).to_sparse(), self.weight) @ x.t()).t()


class Latents(nn.Module):
    """Adds a view of its weight, as learned queries are, when the weight's bucket has been given up for others."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 8))
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.latents.expand(4, -1)
        return torch.tanh(self.layers(x)) + queries


class Offloaded(nn.Module):
    """Keeps what it saves, weights too, on the CPU."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.again = again

    def run(self, x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            return torch.tanh(self.norm(self.linear(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.again else self.run(x)


class Selective(nn.Module):
    """Keeps the results of products, and computes the rest again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keeps = operator is torch.ops.aten.addmm.default
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(self.run, x, use_reentrant=False, context_fn=contexts)


def gradient_penalty(model: Any) -> torch.Tensor:
    """Of gradients of a part, of which a loss does not reach all parameters."""
    half = model.module[0](torch.ones(2, 8)).square().mean()
    params = list(model.parameters())
    grads = torch.autograd.grad(half, params, create_graph=True, materialize_grads=True)
    assert [grad.shape for grad in grads] == [param.shape for param in params]
    assert not grads[-1].any() and grads[0].any()
    return squares(model) + sum(grad.square().sum() for grad in grads)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.Tensor]]] = {
    "signed": (lambda: nn.Sequential(nn.Linear(8, 8), Signed()), squares),
    "latents": (Latents, squares),
    "sparse": (lambda: nn.Sequential(nn.Linear(8, 8), Sparse()), squares),
    "offloaded": (lambda: nn.Sequential(*(Offloaded(False) for _ in range(3))), squares),
    "offloaded again": (lambda: nn.Sequential(*(Offloaded(True) for _ in range(3))), squares),
    "selective": (lambda: nn.Sequential(*(Selective() for _ in range(3))), squares),
    "materialized": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), gradient_penalty),
}


@ranks(2, nightly=(1, 3))
@pytest.mark.parametrize("name", MODELS)
def test_rare_uses_train_as_replicated_parameters(rank: int, world: int, tmp_path: Path, name: str) -> None:
    parallel_state.initialize_model_parallel()
    make, loss_of = MODELS[name]
    folder = shared(tmp_path)
    torch.manual_seed(0)
    wanted = losses(make(), loss_of, data_parallel_sharding_strategy="optim_grads", reduce_microbatches="every")
    assert len(set(wanted)) == STEPS
    for how, options in placements(folder).items():
        torch.manual_seed(0)
        assert losses(make(), loss_of, **options) == wanted, how


@ranks(2)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_behind_writes_inside_gathered_is_the_one_that_is_raised(
    rank: int, world: int, error: type[BaseException]
) -> None:
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with model.gathered():
        before = [param.clone() for param in model.parameters()]
    with pytest.raises(error, match="of the user"), model.gathered():
        for param in model.parameters():
            param.data = param.data * 2
        raise error("of the user")
    with model.gathered():
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)), "dropped"


class Routed(nn.Module):
    """Another module on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[self.rank](x) + x


@ranks(2)
def test_what_ranks_that_use_different_modules_have_found_is_not_handed_on(
    rank: int, world: int, tmp_path: Path
) -> None:
    parallel_state.initialize_model_parallel()
    everything: Any = {"offload_param_frac": 1.0, "offload_optim_frac": 1.0, "directory": shared(tmp_path)}
    found = []
    for route in (0, rank):
        torch.manual_seed(0)
        model = wrapped(Routed(route), placement=Placement(**everything, memory_budget_bytes=10**6))
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0), [model])
        for _ in range(2):
            optimizer.zero_grad()
            squares(model).backward()
            finalize_model_grads([model])
            optimizer.step()
        found.append(model.memstats)
    assert found[0] is not None and found[1] is None
