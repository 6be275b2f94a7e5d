"""The mappings between regions: forward values and gradients as small numbers that one can check by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core import parallel_state
from core.tensor_parallel import mappings
from tests.unit_tests.ranks import ranks


def whole(world: int) -> Tensor:
    """[2 * world, 1, 2 * world]: entry (i, 0, j) is 10 * i + j."""
    size = 2 * world
    return (10.0 * torch.arange(size).view(size, 1, 1) + torch.arange(size)).double()


def run(mapping, input_: Tensor, grad: Tensor, **arguments) -> tuple[Tensor, Tensor]:
    """The mapping's output, and the input's gradient given the output's."""
    leaf, given = input_.clone().requires_grad_(), grad.clone()
    output = mapping(leaf, group=dist.group.WORLD, **arguments)
    output.backward(grad)
    assert torch.equal(leaf, input_) and torch.equal(grad, given), "what was given was overwritten"
    return output.detach(), leaf.grad


def rows(tensor: Tensor, rank: int) -> Tensor:
    return tensor[2 * rank : 2 * rank + 2]


def columns(tensor: Tensor, rank: int) -> Tensor:
    return tensor[..., 2 * rank : 2 * rank + 2]


@ranks(2, 3)
def test_copy_to_leaves_the_input_and_sums_its_gradient(rank: int, world: int) -> None:
    output, grad = run(mappings.copy_to_tensor_model_parallel_region, torch.tensor([5.0]), torch.tensor([10.0**rank]))
    assert output.tolist() == [5.0]
    assert grad.tolist() == [sum(10.0**r for r in range(world))]


@ranks(2, 3)
def test_reduce_from_sums_the_input_and_leaves_its_gradient(rank: int, world: int) -> None:
    mapping = mappings.reduce_from_tensor_model_parallel_region
    output, grad = run(mapping, torch.tensor([10.0**rank]), torch.tensor([7.0]))
    assert output.tolist() == [sum(10.0**r for r in range(world))]
    assert grad.tolist() == [7.0]


@ranks(2, 3)
def test_scatter_to_keeps_own_columns_and_gathers_the_gradient(rank: int, world: int) -> None:
    grads = whole(world) + 0.5
    output, grad = run(mappings.scatter_to_tensor_model_parallel_region, whole(world), columns(grads, rank))
    assert torch.equal(output, columns(whole(world), rank))
    assert torch.equal(grad, grads)


@ranks(2, 3)
def test_gather_from_joins_columns_and_keeps_own_of_the_gradient(rank: int, world: int) -> None:
    grads = whole(world) + 0.5
    output, grad = run(mappings.gather_from_tensor_model_parallel_region, columns(whole(world), rank), grads)
    assert torch.equal(output, whole(world))
    assert torch.equal(grad, columns(grads, rank))


@ranks(2, 3)
def test_scatter_to_sequence_keeps_own_positions_and_gathers_the_gradient(rank: int, world: int) -> None:
    grads = whole(world) + 0.5
    output, grad = run(mappings.scatter_to_sequence_parallel_region, whole(world), rows(grads, rank))
    assert torch.equal(output, rows(whole(world), rank))
    assert torch.equal(grad, grads)


@ranks(2, 3)
def test_gather_from_sequence_sums_partial_gradients_and_keeps_own_positions(rank: int, world: int) -> None:
    mapping, grads = mappings.gather_from_sequence_parallel_region, whole(world) * 100.0**rank
    output, grad = run(mapping, rows(whole(world), rank), grads)
    assert torch.equal(output, whole(world))
    assert torch.equal(grad, rows(whole(world), rank) * sum(100.0**r for r in range(world)))


@ranks(2, 3)
def test_gather_from_sequence_before_replicated_work_does_not_sum_gradients(rank: int, world: int) -> None:
    mapping, grads = mappings.gather_from_sequence_parallel_region, whole(world) + 0.5
    output, grad = run(mapping, rows(whole(world), rank), grads, tensor_parallel_output_grad=False)
    assert torch.equal(output, whole(world))
    assert torch.equal(grad, rows(grads, rank))


@ranks(2, 3)
def test_reduce_scatter_to_sequence_sums_own_positions_and_gathers_the_gradient(rank: int, world: int) -> None:
    mapping, grads = mappings.reduce_scatter_to_sequence_parallel_region, whole(world) + 0.5
    output, grad = run(mapping, whole(world) * 100.0**rank, rows(grads, rank))
    assert torch.equal(output, rows(whole(world), rank) * sum(100.0**r for r in range(world)))
    assert torch.equal(grad, grads)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_tensors_that_are_not_contiguous_are_mapped_alike(rank: int, world: int, dtype: torch.dtype) -> None:
    square = whole(world).squeeze(1).to(dtype)
    for mapping in (
        mappings.copy_to_tensor_model_parallel_region,
        mappings.reduce_from_tensor_model_parallel_region,
        mappings.scatter_to_tensor_model_parallel_region,
        mappings.gather_from_tensor_model_parallel_region,
        mappings.scatter_to_sequence_parallel_region,
        mappings.gather_from_sequence_parallel_region,
        mappings.reduce_scatter_to_sequence_parallel_region,
    ):
        shape = mapping(square, group=dist.group.WORLD).shape
        grad = torch.arange(shape.numel()).view(*reversed(shape)).to(dtype).t()
        strided = run(mapping, square.t(), grad)
        packed = run(mapping, square.t().contiguous(), grad.contiguous())
        assert torch.equal(strided[0], packed[0]) and torch.equal(strided[1], packed[1]), mapping.__name__


@ranks(2)
def test_a_sequence_that_does_not_divide_is_refused_with_the_arithmetic(rank: int, world: int) -> None:
    for mapping in (
        mappings.scatter_to_sequence_parallel_region,
        mappings.reduce_scatter_to_sequence_parallel_region,
    ):
        with pytest.raises(ValueError, match="sequence.*5 is not divisible by 2"):
            mapping(torch.zeros(5, 1, 2), group=dist.group.WORLD)


@ranks(2)
def test_gradients_of_gradients_flow_through_a_mapping(rank: int, world: int) -> None:
    leaf = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
    total = mappings.reduce_from_tensor_model_parallel_region(leaf**3, dist.group.WORLD)
    (grad,) = torch.autograd.grad(total.sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), leaf)
    assert second.item() == 6.0 * (1.0 + rank)


@ranks(2)
def test_without_a_group_parallel_state_is_asked(rank: int, world: int) -> None:
    one = torch.ones(1)
    assert mappings.reduce_from_tensor_model_parallel_region(one).item() == 1.0  # nothing is initialised: one rank
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    assert mappings.reduce_from_tensor_model_parallel_region(one).item() == world
