"""Several optimizers in a chain make the steps that one makes over all of their parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.optimizer.test_optimizer import ALGORITHMS, STRATEGIES
from tests.unit_tests.optimizer.test_optimizer_fp16 import assert_bit_equal
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import Net, loss_of, make_net, wrap

CLIP = 2.0


def two_models(dtype: torch.dtype = torch.float64) -> list[Net]:
    return [make_net(dtype, seed=3), make_net(dtype, seed=4, width=13)]


def chain_of(models: list[Net], strategy: str, options: list[dict[str, Any]], **common: Any) -> tuple[list[Any], Any]:
    chunks = [wrap(model, data_parallel_sharding_strategy=strategy) for model in models]
    optimizers = [
        get_megatron_optimizer(OptimizerConfig(clip_grad=CLIP, **option, **common), [chunk])
        for chunk, option in zip(chunks, options, strict=True)
    ]
    return chunks, ChainedOptimizer(optimizers)


def backward(chunks: list[Any], optimizer: Any, rank: int, number: int) -> None:
    optimizer.zero_grad()
    for chunk in chunks:
        optimizer.scale_loss(loss_of(chunk, rank, number)).backward()
        finalize_model_grads([chunk])


@ranks(1, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_chain_clips_by_the_norm_of_all_and_each_steps_in_its_own_way(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    options = [ALGORITHMS["sgd"], ALGORITHMS["adamw"]]
    plain = [copy.deepcopy(model) for model in two_models()]
    chunks, optimizer = chain_of(two_models(), strategy, options)

    def reference_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
        params = list(model.parameters())
        return [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ]

    references: list[torch.optim.Optimizer] = [
        torch.optim.SGD(reference_groups(plain[0], 0.1), lr=options[0]["lr"], momentum=0.9),
        torch.optim.AdamW(reference_groups(plain[1], 0.1), lr=options[1]["lr"], eps=options[1]["adam_eps"]),
    ]
    for number in range(3):
        for reference, model in zip(references, plain, strict=True):
            reference.zero_grad()
            for other in range(world):
                (loss_of(model, other, number) / world).backward()
        norm = nn.utils.clip_grad_norm_([p for model in plain for p in model.parameters()], CLIP)
        for reference in references:
            reference.step()
        backward(chunks, optimizer, rank, number)
        updated, got, _ = optimizer.step()
        assert updated and got == pytest.approx(norm.item(), rel=1e-12) and norm > CLIP
    for model, chunk, start in zip(plain, chunks, two_models(), strict=True):
        for name, want in model.named_parameters():
            assert torch.allclose(chunk.module.get_parameter(name), want, rtol=1e-10, atol=1e-12), name
            assert (want - start.get_parameter(name)).norm() > 1e-3
    assert len(optimizer.param_groups) == sum(len(o.param_groups) for o in optimizer.chained_optimizers)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_in_one_model_skips_both_under_one_scale(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    options = [ALGORITHMS["sgd"], ALGORITHMS["adamw"]]
    chunks, optimizer = chain_of(
        two_models(torch.float16), strategy, options, fp16=True, initial_loss_scale=64.0, hysteresis=1
    )
    scalers = {id(child.grad_scaler) for child in optimizer.chained_optimizers}
    assert scalers == {id(optimizer.grad_scaler)}
    backward(chunks, optimizer, rank, 0)
    assert optimizer.step()[0]
    before = copy.deepcopy([chunk.state_dict() for chunk in chunks])
    backward(chunks, optimizer, rank, 1)
    bucket = chunks[1].grad_buffers[0].buckets[0]
    if rank == 0:
        bucket.valid_part(len(bucket.params) - 1)[:1].fill_(float("nan"))
        bucket.valid_part(0)[:1].fill_(float("nan"))
    assert optimizer.step() == (False, None, None)
    assert optimizer.get_loss_scale().item() == 32.0
    assert_bit_equal([chunk.state_dict() for chunk in chunks], before)
    backward(chunks, optimizer, rank, 1)
    assert optimizer.step()[0]
    assert not torch.equal(chunks[0].module.first.weight, before[0]["first.weight"])


@ranks(2)
def test_a_chain_is_saved_as_a_list_and_resumes(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    options = [ALGORITHMS["sgd"], ALGORITHMS["adamw"]]
    chunks, optimizer = chain_of(two_models(), "optim", options)
    backward(chunks, optimizer, rank, 0)
    optimizer.step()
    weights, state = copy.deepcopy(([chunk.state_dict() for chunk in chunks], optimizer.state_dict()))
    assert isinstance(state, list) and len(state) == 2
    again, resumed = chain_of(two_models(), "optim", options)
    for chunk, saved in zip(again, weights, strict=True):
        chunk.load_state_dict(saved)
    resumed.load_state_dict(state)
    for which, chain in ((chunks, optimizer), (again, resumed)):
        backward(which, chain, rank, 1)
        assert chain.step()[0]
    assert_bit_equal([chunk.state_dict() for chunk in again], [chunk.state_dict() for chunk in chunks])
    single = ChainedOptimizer([get_megatron_optimizer(OptimizerConfig(lr=0.1), [again[0]])])
    assert isinstance(single.state_dict(), dict)
    with pytest.raises(ValueError, match="2 optimizers and this one 1"):
        single.load_state_dict(state)
    with pytest.raises(ValueError, match="a parameter named"):
        optimizer.state_by_parameter()


@ranks(1)
def test_optimizers_that_cannot_decide_alike_are_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    chunks = [wrap(model) for model in two_models()]
    one = get_megatron_optimizer(OptimizerConfig(lr=0.1), [chunks[0]])
    with pytest.raises(ValueError, match="clip_grad is 1.0 in optimizer 0 of the chain and 2.0 in optimizer 1"):
        ChainedOptimizer([one, get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=2.0), [chunks[1]])])
    with pytest.raises(ValueError, match="same model chunk"):
        ChainedOptimizer([one, get_megatron_optimizer(OptimizerConfig(lr=0.1), [chunks[0]])])
    with pytest.raises(ValueError, match="no optimizer"):
        ChainedOptimizer([])


class Tied(nn.Module):
    """A stage that shares its only weight with the other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(3, 4, bias=False)
        self.embedding.weight.shared_embedding = True  # type: ignore[assignment]
        nn.init.ones_(self.embedding.weight)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tied_weights_of_two_models_with_one_name_both_count_in_the_norm(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    models = [wrap(Tied(), data_parallel_sharding_strategy=strategy) for _ in range(2)]
    chain = ChainedOptimizer([get_megatron_optimizer(OptimizerConfig(lr=0.1), [model]) for model in models])
    chain.zero_grad()
    for model, factor in zip(models, (3.0, 4.0), strict=True):
        (factor * model.module.embedding(torch.ones(1, 3)).sum()).backward()
        finalize_model_grads([model])
    # Each stage adds its factor, and a tied weight counts once.
    assert chain.get_grad_norm() == pytest.approx(2 * 5 * 12**0.5, rel=1e-6)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.in_suite()
def test_tied_weights_of_two_models_in_one_optimizer_are_two_weights(
    rank: int, world: int, strategy: str, together: bool
) -> None:
    """Of one name, and not of one model: neither their norms nor, finalized together, their gradients are one."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    models = [wrap(Tied(), data_parallel_sharding_strategy=strategy) for _ in range(2)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="sgd", lr=0.5, weight_decay=0.0, clip_grad=0.0), models
    )
    optimizer.zero_grad()
    for model, factor in zip(models, (3.0, 4.0), strict=True):
        (factor * model.module.embedding(torch.ones(1, 3)).sum()).backward()
        if not together:
            finalize_model_grads([model])
    if together:
        finalize_model_grads(models)
    assert optimizer.step()[1] == pytest.approx(2 * 5 * 12**0.5, rel=1e-6)
    for model, factor in zip(models, (3.0, 4.0), strict=True):
        assert torch.equal(model.module.embedding.weight, torch.full((4, 3), 1.0 - 0.5 * 2 * factor))


@ranks(2)
def test_a_model_that_lacks_a_chunk_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, create_gloo_process_groups=False
    )
    chunks = [wrap(Tied()) for _ in range(3)]
    with pytest.raises(ValueError, match=r"3 model chunks were given and virtual_pipeline_model_parallel_size is 2"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), chunks)
