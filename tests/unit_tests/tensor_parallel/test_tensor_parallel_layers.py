"""Split linear layers and embedding: values, gradients and tags, and the fused weight gradient."""

from __future__ import annotations

import contextlib
import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.groups.process_groups import ProcessGroups
from core.model_parallel_config import ModelParallelConfig
from core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    checkpoint,
    draw_master,
    layers,
    linear_with_grad_accumulation_and_async_allreduce,
    tensor_parallel_join,
    tensor_parallel_slice,
)
from core.tensor_parallel.deferred_weights import deferred_weight_gradients
from core.tensor_parallel.initialization import normal_init
from core.tensor_parallel.mappings import split_first, split_last
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap
from tests.unit_tests.torch_calls import added_in_place

INIT = normal_init(1.0)


def config(tp: int, *, sequence_parallel: bool = False, **changes: Any) -> ModelParallelConfig:
    return ModelParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        **{"params_dtype": torch.float64, **changes},
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def master(out: int, into: int, name: str = "layer") -> Tensor:
    return draw_master((out, into), INIT, f"{name}.weight", 0).double()


def set_bias(layer: nn.Module, whole: Tensor) -> None:
    split = getattr(layer.bias, "tensor_model_parallel", False)
    if split:
        whole = tensor_parallel_slice(whole, 0, layer.tp_size, layer.tp_rank, layer.bias.partition_stride)
    layer.bias.data.copy_(whole)


@ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("skip_bias_add", [False, True], ids=["", "skip"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.in_suite()
def test_column_parallel_linear(
    rank: int, world: int, sequence_parallel: bool, skip_bias_add: bool, stride: int
) -> None:
    layer = ColumnParallelLinear(
        6, 8, config=config(world, sequence_parallel=sequence_parallel), init_method=INIT, stride=stride,
        skip_bias_add=skip_bias_add, tp_group=dist.group.WORLD, name="layer",
    )  # fmt: skip
    x, weight, bias, grad = normal(4, 3, 6), master(8, 6), normal(8, seed=1), normal(4, 3, 8, seed=2)
    set_bias(layer, bias)
    given = (split_first(x, dist.group.WORLD) if sequence_parallel else x).requires_grad_()

    output, left = layer(given)
    if skip_bias_add:
        assert left is layer.bias
        output = output + left
    part = [tensor_parallel_slice(t, -1, world, rank, stride) for t in (F.linear(x, weight, bias), grad)]
    (output * part[1]).sum().backward()

    torch.testing.assert_close(output, part[0])
    grad_x, grad_weight = grad @ weight, torch.einsum("sbo,sbi->oi", grad, x)
    torch.testing.assert_close(given.grad, split_first(grad_x, dist.group.WORLD) if sequence_parallel else grad_x)
    torch.testing.assert_close(layer.weight.grad, tensor_parallel_slice(grad_weight, 0, world, rank, stride))
    torch.testing.assert_close(layer.bias.grad, tensor_parallel_slice(grad.sum((0, 1)), 0, world, rank, stride))
    for param in layer.parameters():
        assert (param.tensor_model_parallel, param.partition_dim, param.partition_stride) == (True, 0, stride)


@ranks(2)
@pytest.mark.parametrize("size", [8, 7], ids=["even", "padded"])
def test_column_parallel_linear_gathers_its_output(rank: int, world: int, size: int) -> None:
    layer = ColumnParallelLinear(
        6, size, config=config(world), init_method=INIT, bias=False, gather_output=True, allow_padding=True,
        tp_group=dist.group.WORLD, name="layer",
    )  # fmt: skip
    x, grad = normal(4, 3, 6).requires_grad_(), normal(4, 3, size, seed=2)
    output, _ = layer(x)
    (output * grad).sum().backward()
    torch.testing.assert_close(output, F.linear(x, master(size, 6)))
    torch.testing.assert_close(x.grad, grad @ master(size, 6))


@ranks(2)
@pytest.mark.parametrize(
    ("sequence_parallel", "input_is_parallel"),
    [(False, False), (False, True), (True, True)],
    ids=["whole", "parallel", "sp"],
)
@pytest.mark.parametrize("skip_bias_add", [False, True], ids=["", "skip"])
@pytest.mark.in_suite()
def test_row_parallel_linear(
    rank: int, world: int, sequence_parallel: bool, input_is_parallel: bool, skip_bias_add: bool
) -> None:
    group = dist.group.WORLD
    layer = RowParallelLinear(
        6, 8, config=config(world, sequence_parallel=sequence_parallel), init_method=INIT, tp_group=group, name="layer",
        input_is_parallel=input_is_parallel, skip_bias_add=skip_bias_add,
    )  # fmt: skip
    x, weight, bias, grad = normal(4, 3, 6), master(8, 6), normal(8, seed=1), normal(4, 3, 8, seed=2)
    set_bias(layer, bias)
    given = (split_last(x, group) if input_is_parallel else x).requires_grad_()

    output, left = layer(given)
    if skip_bias_add:
        assert left is layer.bias
        output = output + left
    want = F.linear(x, weight, bias)
    if sequence_parallel:
        want, own_grad = split_first(want, group), split_first(grad, group)
    else:
        own_grad = grad
    (output * own_grad).sum().backward()

    torch.testing.assert_close(output, want)
    grad_x = grad @ weight
    torch.testing.assert_close(given.grad, split_last(grad_x, group) if input_is_parallel else grad_x)
    grad_weight = torch.einsum("sbo,sbi->oi", grad, x)
    torch.testing.assert_close(layer.weight.grad, tensor_parallel_slice(grad_weight, 1, world, rank))
    # The bias is complete on each rank, or under sequence parallelism this rank's part of the sum, and says so.
    torch.testing.assert_close(layer.bias.grad, own_grad.sum((0, 1)))
    assert layer.bias.sequence_parallel is sequence_parallel
    assert not getattr(layer.bias, "tensor_model_parallel", False)
    assert (layer.weight.tensor_model_parallel, layer.weight.partition_dim) == (True, 1)


@ranks(1, 2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_vocab_parallel_embedding(rank: int, world: int, sequence_parallel: bool) -> None:
    group, weight = dist.group.WORLD, master(13, 6)
    ids = torch.randint(0, 13, (3, 4), generator=torch.Generator().manual_seed(1))
    ids[0, :2] = torch.tensor([0, 12])
    leaf, grad = weight.clone().requires_grad_(), normal(3, 4, 6, seed=2)
    want = F.embedding(ids, leaf)
    want.backward(grad)
    for fused in (False, True):
        layer = VocabParallelEmbedding(
            13, 6, init_method=INIT, config=config(world, gradient_accumulation_fusion=fused),
            reduce_scatter_embeddings=sequence_parallel, tp_group=group, name="layer",
        )  # fmt: skip
        own = layer.weight
        own.grad = own.main_grad = torch.zeros_like(own)
        output = layer(ids)
        own_want, own_grad = want, grad
        if sequence_parallel:
            own_want, own_grad = (split_first(whole.transpose(0, 1), group) for whole in (want, grad))
        torch.testing.assert_close(output, own_want)
        backward = functools.partial(output.backward, own_grad)
        assert added_in_place(backward) is fused
        torch.testing.assert_close(own.main_grad, tensor_parallel_slice(leaf.grad, 0, world, rank))
        assert own.grad is own.main_grad
        with pytest.raises(ValueError, match=r"\[0, 13\], expected 0 <= id < 13"):
            layer(torch.tensor([[0, 13]]))


GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_16_bit_weights_add_their_gradient_to_an_fp32_buffer_unrounded(device: str | torch.device) -> None:
    x, grad = normal(64, 8).bfloat16().to(device), normal(64, 16, seed=1).bfloat16().to(device)
    weight = nn.Parameter(master(16, 8).bfloat16().to(device))
    weight.grad_dtype = torch.float32
    weight.grad = weight.main_grad = torch.full((16, 8), 0.5, device=device)
    for _ in range(2):
        output = linear_with_grad_accumulation_and_async_allreduce(x, weight, None, True, False, False, None)
        output.backward(grad)
    expected = 0.5 + 2 * grad.double().t() @ x.double()
    assert weight.grad is weight.main_grad
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_fused_gradients_accumulate_in_place_and_fire_the_hook(recompute: bool) -> None:
    layer = ColumnParallelLinear(
        6, 8, config=config(1, gradient_accumulation_fusion=True), init_method=INIT, bias=False,
        pg_collection=ProcessGroups(), name="layer",
    )  # fmt: skip
    weight, fired = layer.weight, []
    weight.register_post_accumulate_grad_hook(lambda param: fired.append(param))
    buffer = torch.zeros(100, dtype=torch.float64)
    weight.grad = weight.main_grad = buffer[10:58].view(8, 6)
    x = normal(4, 3, 6)
    for _ in range(2):
        given = x.clone().requires_grad_()
        output = checkpoint(lambda t: layer(t)[0], False, given) if recompute else layer(given)[0]
        assert added_in_place(output.sum().backward)
    expected = 2 * torch.ones(8, 1, dtype=torch.float64) * x.sum((0, 1))
    assert weight.grad is weight.main_grad
    torch.testing.assert_close(buffer[10:58].view(8, 6), expected)
    assert buffer[:10].abs().sum() == 0 and buffer[58:].abs().sum() == 0
    assert len(fired) == 2


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_tied_weights_gradient_is_made_in_the_buffer_alone(device: str | torch.device, dtype: torch.dtype) -> None:
    """Rows of the tokens and the product of the logits, for two microbatches; one hook a backward, after both."""
    settings = config(1, gradient_accumulation_fusion=True, params_dtype=dtype)
    embedding = VocabParallelEmbedding(
        50, 6, init_method=INIT, config=settings, pg_collection=ProcessGroups(), name="tied"
    ).to(device)
    logits = ColumnParallelLinear(
        6, 50, config=settings, init_method=INIT, bias=False, skip_weight_param_allocation=True,
        pg_collection=ProcessGroups(),
    )  # fmt: skip
    weight, seen = embedding.weight, []
    buffer = torch.zeros(1000, device=device)
    weight.grad_dtype = torch.float32
    weight.grad = weight.main_grad = buffer[100:400].view(50, 6)
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.main_grad.abs().sum().item()))
    ids = torch.tensor([[3, 3, 3, 0], [49, 3, 7, 8]], device=device)
    grad = normal(2, 4, 50, seed=3).to(dtype).to(device)
    for _ in range(2):
        assert added_in_place(functools.partial(logits(embedding(ids), weight)[0].backward, grad))

    exact = weight.detach().cpu().double()
    rows, at = grad.cpu().double().view(8, 50), ids.cpu().view(8)
    expected = rows.t() @ exact[at]
    into_rows = rows @ exact
    for token, number in enumerate(at.tolist()):
        expected[number] += into_rows[token]
    # The gradient of the hidden states is in bf16 between the two layers; sums are in fp32 either way.
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(weight.main_grad.cpu().double(), 2 * expected, **close)
    assert weight.grad is weight.main_grad
    assert buffer[:100].abs().sum() == 0 and buffer[400:].abs().sum() == 0
    assert len(seen) == 2 and seen[0] == pytest.approx(seen[1] / 2, rel=1e-4)


@pytest.mark.parametrize("case", ["bf16 buffer", "another grad"])
def test_an_embeddings_gradient_that_may_not_be_added_in_place_is_returned(case: str) -> None:
    """In bf16 a row that 300 tokens share would stop growing at 256: autograd's kernel knows better, or is left to."""
    settings = config(1, gradient_accumulation_fusion=True, params_dtype=torch.float32)
    layer = VocabParallelEmbedding(9, 4, init_method=INIT, config=settings, pg_collection=ProcessGroups(), name="rows")
    layer.weight.main_grad = torch.zeros(9, 4, dtype=torch.bfloat16 if case == "bf16 buffer" else torch.float32)
    if case == "bf16 buffer":
        layer.weight.grad_dtype = torch.bfloat16
        layer.weight.grad = layer.weight.main_grad
    assert not added_in_place(layer(torch.full((1, 300), 5)).sum().backward)
    assert torch.equal(layer.weight.grad.float(), 300.0 * torch.eye(9)[5].unsqueeze(1).expand(9, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_a_gpu_apexs_kernel_is_called_where_its_symbols_are(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    class OnGPU(SimpleNamespace):
        is_cuda = True

    called: list[tuple[str, Any]] = []
    kernel = ModuleType("fused_weight_gradient_mlp_cuda")
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", kernel)
    layers._apex_kernel.cache_clear()
    assert layers._apex_kernel() is None, "a package that is called so and has no such kernel"
    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        setattr(kernel, name, lambda *tensors, name=name: called.append((name, tensors)))
    layers._apex_kernel.cache_clear()

    main_grad, grad, x = OnGPU(dtype=dtype), normal(5, 3).bfloat16(), normal(5, 2, seed=1).bfloat16()
    layers.add_product(main_grad, grad, x)
    layers._apex_kernel.cache_clear()

    ((name, tensors),) = called
    assert name == ("wgrad_gemm_accum_fp32" if dtype == torch.float32 else "wgrad_gemm_accum_fp16")
    assert torch.equal(tensors[0], x) and torch.equal(tensors[1], grad) and tensors[2] is main_grad


@pytest.mark.parametrize("case", ["no main_grad", "grad was cleared", "another grad"])
def test_without_the_wrappers_buffer_a_fused_layer_returns_its_gradient(case: str) -> None:
    layer = ColumnParallelLinear(
        6, 8, config=config(1, gradient_accumulation_fusion=True), init_method=INIT, bias=False,
        pg_collection=ProcessGroups(), name="layer",
    )  # fmt: skip
    if case != "no main_grad":
        layer.weight.main_grad = torch.full_like(layer.weight, 9.0)
        layer.weight.grad = None if case == "grad was cleared" else torch.zeros_like(layer.weight)
    x = normal(4, 3, 6)
    assert not added_in_place(layer(x)[0].sum().backward)
    torch.testing.assert_close(layer.weight.grad, torch.ones(8, 1, dtype=torch.float64) * x.sum((0, 1)))
    assert case == "no main_grad" or torch.equal(layer.weight.main_grad, torch.full_like(layer.weight, 9.0))


class Tied(nn.Module):
    """An embedding, a linear layer, and logits by the embedding's weight; `hidden` and `logits` of the last call."""

    def __init__(self) -> None:
        super().__init__()
        settings = config(1, gradient_accumulation_fusion=True, params_dtype=torch.float32)
        common: dict[str, Any] = {"config": settings, "init_method": INIT, "pg_collection": ProcessGroups()}
        self.embedding = VocabParallelEmbedding(20, 8, name="embedding", **common)
        self.linear = ColumnParallelLinear(8, 8, name="linear", **common)
        self.output = ColumnParallelLinear(8, 20, bias=False, skip_weight_param_allocation=True, **common)
        self.shift = nn.Parameter(torch.zeros(20))

    def forward(self, ids: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.linear(self.embedding(ids))[0])
        self.logits = self.output(self.hidden, self.embedding.weight)[0] + self.shift
        return self.logits

    def plain(self, ids: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The same from torch's own functions, on copies of the parameters: (them, hidden, logits)."""
        leaves = {name: param.detach().clone().requires_grad_() for name, param in self.named_parameters()}
        weight = leaves["embedding.weight"]
        hidden = torch.tanh(F.linear(F.embedding(ids, weight), leaves["linear.weight"], leaves["linear.bias"]))
        return leaves, hidden, F.linear(hidden, weight) + leaves["shift"]


IDS = torch.tensor([[3, 3, 4, 5], [0, 19, 3, 1]])


@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
@pytest.mark.parametrize("case", ["grad of hidden", "grad of the weight", "inputs=hidden", "inputs=bias"])
def test_a_backward_that_is_to_leave_a_weights_gradient_alone_does(case: str, deferred: bool) -> None:
    """As a gradient penalty or adaptive weights of losses ask for, between forward and the step's own backward."""
    model = Tied()
    leaves, hidden, logits = model.plain(IDS)
    model(IDS)
    for param in model.parameters():
        param.grad = param.main_grad = torch.ones_like(param)
    of_bias = torch.autograd.grad(logits.square().sum(), leaves["linear.bias"], retain_graph=True)[0]
    with deferred_weight_gradients() if deferred else contextlib.nullcontext([]) as queue:
        loss = model.logits.square().sum()
        if case == "grad of hidden":
            (got,) = torch.autograd.grad(loss, model.hidden, retain_graph=True)
            torch.testing.assert_close(got, torch.autograd.grad(logits.square().sum(), hidden)[0])
        elif case == "grad of the weight":
            weights = (model.embedding.weight, model.linear.weight)
            got_both = torch.autograd.grad(loss, weights, retain_graph=True)
            own = (leaves["embedding.weight"], leaves["linear.weight"])
            torch.testing.assert_close(got_both, torch.autograd.grad(logits.square().sum(), own))
        else:
            loss.backward(inputs=[model.linear.bias if case == "inputs=bias" else model.hidden], retain_graph=True)
    assert not queue
    for name, param in model.named_parameters():
        added = of_bias if (case, name) == ("inputs=bias", "linear.bias") else torch.zeros_like(param)
        assert param.grad is param.main_grad
        torch.testing.assert_close(param.main_grad, 1 + added, msg=name)
    if case != "inputs=bias":
        assert of_bias.norm() > 1, "the reference would not be noticed"


@pytest.mark.parametrize("case", ["tensor hooks", "an older torch"])
def test_what_cannot_be_added_in_place_is_left_to_autograd(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that changes the gradient of a weight sees it, once, and what it returns is what is added."""
    model, factor, seen = Tied(), 1.0, []
    leaves, _, logits = model.plain(IDS)
    weights = [model.embedding.weight, model.linear.weight]
    for weight in weights:
        weight.grad = weight.main_grad = torch.ones_like(weight)
    if case == "tensor hooks":
        factor = 3.0
        for weight in weights:
            weight.register_hook(lambda grad: seen.append(grad) or 3 * grad)
    else:
        monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    assert not added_in_place(model(IDS).square().mean().backward)
    logits.square().mean().backward()
    for weight, name in zip(weights, ("embedding.weight", "linear.weight"), strict=True):
        assert weight.grad is weight.main_grad
        torch.testing.assert_close(weight.main_grad, 1 + factor * leaves[name].grad)
        assert leaves[name].grad.norm() > 0.1
    assert len(seen) == (2 if case == "tensor hooks" else 0)


@ranks(1)
def test_gradients_that_were_dropped_do_not_come_back(rank: int, world: int) -> None:
    """A loss was bad: `module.zero_grad()`, and the next backward does not use the fused layers."""
    parallel_state.initialize_model_parallel()
    model = Tied()
    ddp = wrap(model)
    for deferred in (False, True):
        ddp.zero_grad_buffer()
        with deferred_weight_gradients() if deferred else contextlib.nullcontext([]) as queue:
            ddp(IDS).square().sum().backward()
        with torch.no_grad():
            for work in queue:
                work()
        assert len(queue) == (2 if deferred else 0)
        assert model.linear.weight.main_grad.norm() > 1 and model.embedding.weight.main_grad.norm() > 1
        model.zero_grad()
        (5 * model.shift).sum().backward()
        finalize_model_grads([ddp])
        for name, param in model.named_parameters():
            assert torch.equal(param.main_grad, torch.full_like(param, 5.0 if name == "shift" else 0.0)), name


def test_a_fused_layer_is_compiled_into_one_graph() -> None:
    layer = ColumnParallelLinear(
        6, 8, config=config(1, gradient_accumulation_fusion=True), init_method=INIT, bias=False,
        pg_collection=ProcessGroups(), name="layer",
    )  # fmt: skip
    layer.weight.grad = layer.weight.main_grad = torch.ones_like(layer.weight)
    x = normal(4, 3, 6)
    torch.compile(lambda given: layer(given)[0], backend="eager", fullgraph=True)(x).sum().backward()
    expected = 1 + torch.ones(8, 1, dtype=torch.float64) * x.sum((0, 1))
    torch.testing.assert_close(layer.weight.main_grad, expected)


def test_a_frozen_weight_passes_the_gradient_on_and_gets_none() -> None:
    layer = ColumnParallelLinear(6, 8, config=config(1), init_method=INIT, pg_collection=ProcessGroups(), name="layer")
    layer.weight.requires_grad_(False)
    x = normal(4, 3, 6).requires_grad_()
    layer(x)[0].sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(4, 3, 6))
    assert layer.weight.grad is None


def test_under_autocast_products_are_16_bit_and_gradients_have_the_parameters_dtype() -> None:
    settings = config(1, params_dtype=torch.float32)
    layer = ColumnParallelLinear(6, 8, config=settings, init_method=INIT, pg_collection=ProcessGroups(), name="layer")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = layer(normal(4, 3, 6).float())
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32 and layer.bias.grad.dtype == torch.float32


def test_sizes_that_do_not_divide_are_refused_with_the_arithmetic() -> None:
    alone, settings = ProcessGroups(), config(1)
    with pytest.raises(ValueError, match="ColumnParallelLinear up .*: 7 is not divisible by 2"):
        ColumnParallelLinear(6, 7, config=settings, init_method=INIT, stride=2, pg_collection=alone, name="up")
    with pytest.raises(ValueError, match="RowParallelLinear down .*: 7 is not divisible by 2"):
        RowParallelLinear(7, 6, config=settings, init_method=INIT, stride=2, pg_collection=alone, name="down")


def test_a_config_for_another_tensor_parallel_size_is_refused_unless_a_group_is_given() -> None:
    with pytest.raises(ValueError, match="tensor_model_parallel_size is 2 and the tensor-parallel group has 1 ranks"):
        RowParallelLinear(6, 8, config=config(2), init_method=INIT, pg_collection=ProcessGroups())


@ranks(2)
def test_contradicting_layouts_of_the_input_are_refused(rank: int, world: int) -> None:
    group, settings = dist.group.WORLD, config(world, sequence_parallel=True)
    with pytest.raises(ValueError, match="input_is_parallel=False with sequence_parallel=True"):
        RowParallelLinear(6, 8, config=settings, init_method=INIT, input_is_parallel=False, tp_group=group)
    with pytest.raises(ValueError, match="gather_output=True with sequence_parallel=True"):
        ColumnParallelLinear(6, 8, config=settings, init_method=INIT, gather_output=True, tp_group=group)


def test_a_layer_without_a_weight_asks_for_one_of_the_right_shape() -> None:
    layer = ColumnParallelLinear(
        6, 8, config=config(1), init_method=INIT, bias=False, skip_weight_param_allocation=True,
        pg_collection=ProcessGroups(),
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="called without a weight"):
        layer(normal(4, 6))
    with pytest.raises(RuntimeError, match=r"\[6, 8\], expected \[8, 6\]"):
        layer(normal(4, 6), normal(6, 8))


# -- initialisation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_joined_slices_are_the_master(dim: int, stride: int) -> None:
    whole = normal(8, 8)
    slices = [tensor_parallel_slice(whole, dim, 4, rank, stride) for rank in range(4)]
    assert torch.equal(tensor_parallel_join(slices, dim, stride), whole)


def test_a_slice_with_a_stride_holds_its_part_of_each_part() -> None:
    gate_and_up = torch.tensor([0, 1, 2, 3, 10, 11, 12, 13])
    assert tensor_parallel_slice(gate_and_up, 0, 2, 1, stride=2).tolist() == [2, 3, 12, 13]
    assert tensor_parallel_slice(torch.tensor([5, 6, 7]), 0, 2, 1).tolist() == [7, 0]  # padded


def test_a_named_master_depends_on_seed_and_name_only() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = draw_master((4, 3), INIT, "a.weight", 1)
    torch.rand(9)
    assert torch.equal(draw_master((4, 3), INIT, "a.weight", 1), first)
    assert not torch.equal(draw_master((4, 3), INIT, "b.weight", 1), first)
    assert not torch.equal(draw_master((4, 3), INIT, "a.weight", 2), first)
    torch.set_rng_state(state)
    draw_master((4, 3), INIT, "a.weight", 1)
    assert torch.equal(torch.get_rng_state(), state), "the default stream was disturbed"
    draw_master((4, 3), INIT, None, 1)
    assert not torch.equal(torch.get_rng_state(), state), "a weight without a name comes from the default stream"
