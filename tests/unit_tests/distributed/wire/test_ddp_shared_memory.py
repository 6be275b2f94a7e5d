"""Parameters whose memory something else uses too: two of them, a buffer, a kept view; and those that only lie side by
side in one tensor.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import LayoutMismatch, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

STRATEGIES = ("no_shard", "optim", "optim_grads")
SGD = OptimizerConfig(optimizer="sgd", lr=0.5, weight_decay=0.0, clip_grad=0.0, sgd_momentum=0.0)


class Pair(nn.Module):
    """Two linear layers, and whatever a test hangs on them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))


def step_of_one_process(model: nn.Module, world: int) -> dict[str, torch.Tensor]:
    """Parameters after a plain SGD step over the mean of all ranks' gradients."""
    for rank in range(world):
        (model(inputs(rank)).sum() / world).backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def step_of_ours(model: nn.Module, rank: int, strategy: str) -> dict[str, torch.Tensor]:
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    optimizer = get_megatron_optimizer(SGD, [ddp])
    ddp(inputs(rank)).sum().backward()
    finalize_model_grads([ddp])
    assert optimizer.step()[0]
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@ranks(2)
def test_two_parameters_of_one_memory_are_refused_by_both_names(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        tied = Pair()
        tied.b.weight.data = tied.a.weight.data
        half = Pair()
        half.b.bias.data = half.a.weight.data[1]
        for model, names in ((tied, "'a.weight' and 'b.weight'"), (half, "'a.weight' and 'b.bias'")):
            with pytest.raises(ValueError, match=f"{names} share memory.*one Parameter object"):
                wrap(model, data_parallel_sharding_strategy=strategy)
        # The remedy that the error names.
        tied = Pair()
        tied.b.weight = tied.a.weight
        reference = copy.deepcopy(tied)
        start = tied.a.weight.detach().clone()
        got, wanted = step_of_ours(tied, rank, strategy), step_of_one_process(reference, world)
        assert tied.b.weight is tied.a.weight and (wanted["a.weight"] - start).abs().max() > 0.1
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name])


@ranks(2)
@pytest.mark.parametrize("kind", ["buffer", "attribute", "frozen parameter"])
def test_a_tensor_that_lies_in_a_parameters_memory_follows_its_updates_or_is_refused(
    rank: int, world: int, kind: str
) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model = Pair()
        view = model.a.weight.detach().t()[1:]
        if kind == "buffer":
            model.b.register_buffer("seen", view, persistent=False)
        elif kind == "attribute":
            model.b.seen = view
        else:
            model.b.seen = nn.Parameter(view, requires_grad=False)
        if strategy != "no_shard":
            wanted = f"{kind} 'b.seen' shares memory with parameter 'a.weight'.*no_shard"
            with pytest.raises(ValueError, match=wanted):
                wrap(model, data_parallel_sharding_strategy=strategy)
            continue
        start = view.clone()
        step_of_ours(model, rank, strategy)
        assert torch.equal(model.b.seen, model.a.weight.t()[1:]) and (view - start).abs().max() > 0.1


@ranks(2)
@pytest.mark.parametrize("cut", ["rows", "columns", "with a frozen part"])
def test_parameters_cut_from_one_tensor_keep_their_values_and_train(rank: int, world: int, cut: str) -> None:
    """As q, k and v of one tensor; columns lie in one another's span without a common element."""
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model = Pair()
        both = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
        if cut == "columns":
            model.a.weight.data, model.b.weight.data = both[:, :4], both[:, 4:]
        else:
            both = both.view(8, 4)
            model.a.weight.data, model.b.weight.data = both[:4], both[4:]
        model.a.weight.requires_grad_(cut != "with a frozen part")
        start, reference = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
        got, wanted = step_of_ours(model, rank, strategy), step_of_one_process(reference, world)
        assert (wanted["b.weight"] - start["b.weight"]).abs().max() > 0.1
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name], msg=f"{strategy} {name}")


@ranks(1)
def test_a_weight_that_torch_makes_again_in_each_forward_is_no_kept_view(rank: int, world: int) -> None:
    """torch's spectral_norm leaves a view under the old name until the first forward."""
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model = Pair()
        torch.nn.utils.spectral_norm(model.a)
        assert model.a.weight.data_ptr() == model.a.weight_orig.data_ptr()
        reference = copy.deepcopy(model)
        got, wanted = step_of_ours(model, rank, strategy), step_of_one_process(reference, world)
        assert got.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name])


@ranks(2)
def test_a_parameter_whose_storage_was_freed_is_refused_by_name(rank: int, world: int) -> None:
    """Reading it would end the process. One rank alone may have freed it; all are told."""
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model = Pair()
        if rank == 1:
            model.a.weight.untyped_storage().resize_(0)
        with pytest.raises((ValueError, LayoutMismatch), match="'a.weight' has 64 bytes but its storage has 0"):
            wrap(model, data_parallel_sharding_strategy=strategy)
    model = Pair()
    model.b.bias = nn.Parameter(torch.ones(1).expand(4))
    with pytest.raises(ValueError, match="'b.bias' has 16 bytes but its storage has 4"):
        wrap(model)
