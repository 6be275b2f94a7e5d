"""Linear layers and an embedding split over tensor parallelism: by output features, input features or vocabulary.

The gradient contract reads the attributes ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride`` of
split parameters, and ``sequence_parallel`` of replicated ones. Nothing is split without a tensor-parallel group.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from core.groups.process_groups import ProcessGroups
from core.model_parallel_config import ModelParallelConfig
from core.tensor_parallel.deferred_weights import current_queue
from core.tensor_parallel.initialization import (
    InitMethod,
    draw_master,
    padded_vocab_size,
    set_tensor_model_parallel_attributes,
    tensor_parallel_slice,
)
from core.tensor_parallel.mappings import (
    divide,
    gather_first,
    gather_from_tensor_model_parallel_region,
    group_rank,
    group_size,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    start_all_reduce,
    start_gather_first,
    start_reduce_scatter_first,
    tensor_parallel_group,
)


class _ParallelLayer(nn.Module):
    """Base class of the three layers, with their group and the slicing of master weights."""

    def __init__(
        self, config: ModelParallelConfig, tp_group: dist.ProcessGroup | None, pg_collection: ProcessGroups | None
    ) -> None:
        super().__init__()
        self.config = config
        self.tp_group = tp_group if tp_group is not None else tensor_parallel_group(config, pg_collection)
        self.tp_size = group_size(self.tp_group)
        self.tp_rank = group_rank(self.tp_group)
        self.sequence_parallel = config.sequence_parallel and self.tp_size > 1

    def _new_weight(
        self, master_shape: tuple[int, ...], dim: int, stride: int, init_method: InitMethod, name: str | None
    ) -> nn.Parameter:
        shape = list(master_shape)
        shape[dim] = -(-shape[dim] // self.tp_size)
        weight = nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(weight, True, dim, stride, master_shape[dim])
        if self.config.perform_initialization:
            full_name = None if name is None else f"{name}.weight"
            master = draw_master(master_shape, init_method, full_name, getattr(self.config, "init_seed", 0))
            with torch.no_grad():
                weight.copy_(tensor_parallel_slice(master, dim, self.tp_size, self.tp_rank, stride))
        return weight


class ColumnParallelLinear(_ParallelLayer):
    """Linear layer Y = X A^T + b with the output features of A split over tensor parallelism.

    A ``RowParallelLinear`` usually consumes the split output, so that the pair needs one collective per pass:

        up = ColumnParallelLinear(1024, 4096, config=config, init_method=init)
        down = RowParallelLinear(4096, 1024, config=config, init_method=init)
        wide, _ = up(hidden)  # [s, b, 4096 / tp]
        hidden, _ = down(F.gelu(wide))  # [s, b, 1024]

    Under sequence parallelism, the input has shape [s / tp, b, input_size].

    Args:
        input_size, output_size: Features of the full layer.
        config (ModelParallelConfig): Model-parallel configuration.
        init_method (InitMethod): Initializes the full weight in place.
        bias (bool): Add a bias.
        gather_output (bool): All-gather the output features to [s, b, output_size].
        stride (int): Number of parts of the output that are split separately (2 for SwiGLU's gate and up).
        skip_bias_add (bool): Return the bias instead of adding it, so that the caller can fuse the addition.
        skip_weight_param_allocation (bool): Create no weight. Each forward then passes one.
        allow_padding (bool): Pad an ``output_size`` that tp does not divide with zero rows (for a vocabulary).
        tp_group (ProcessGroup): Tensor-parallel group. Defaults to the group in ``pg_collection``.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
        name (str): Module path in the full model, which seeds its weight. Defaults to torch's CPU generator.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        allow_padding: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        pg_collection: ProcessGroups | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config, tp_group, pg_collection)
        if gather_output and self.sequence_parallel:
            raise ValueError(
                f"ColumnParallelLinear {name or ''}: gather_output=True with sequence_parallel=True would gather all "
                "features of the full sequence on every rank; set one of them to False"
            )
        if allow_padding and stride == 1:
            output_size_padded = padded_vocab_size(output_size, self.tp_size)
        else:
            output_size_padded = output_size
            divide(output_size, self.tp_size * stride, f"output_size of ColumnParallelLinear {name or ''} over tensor-"
                   f"parallel size {self.tp_size} times stride {stride}")  # fmt: skip
        self.input_size = input_size
        self.output_size = output_size
        self.output_size_per_partition = output_size_padded // self.tp_size
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.weight: nn.Parameter | None = None
        if not skip_weight_param_allocation:
            self.weight = self._new_weight((output_size, input_size), 0, stride, init_method, name)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(self.output_size_per_partition, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride, output_size)

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the bias if it was not added (else ``None``).

        Args:
            input_ (Tensor): [s, b, input_size], or [s / tp, b, input_size] under sequence parallelism.
            weight (Tensor, optional): Weight to use instead of the layer's own, such as a tied embedding.
        """
        weight = self.weight_for(weight)
        output = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            allreduce_dgrad=self.tp_size > 1 and not self.sequence_parallel,
            sequence_parallel=self.sequence_parallel,
            tp_group=self.tp_group,
        )
        if self.gather_output and self.tp_size > 1:
            output = gather_from_tensor_model_parallel_region(output, self.tp_group)[..., : self.output_size]
        return output, self.bias if self.skip_bias_add else None

    def weight_for(self, given: Tensor | None) -> Tensor:
        """Return ``given``, or else the layer's own weight. Raises RuntimeError for a missing one or a wrong shape."""
        weight = self.weight if given is None else given
        if weight is None:
            raise RuntimeError(
                "ColumnParallelLinear was built with skip_weight_param_allocation=True and called without a weight"
            )
        if weight.shape != (self.output_size_per_partition, self.input_size):
            raise RuntimeError(
                f"ColumnParallelLinear: weight has shape {list(weight.shape)}, expected "
                f"{[self.output_size_per_partition, self.input_size]}"
            )
        return weight


class RowParallelLinear(_ParallelLayer):
    """Linear layer Y = X A^T + b with the input features of A split over tensor parallelism.

    Partial outputs are summed to [s, b, output_size] before the bias is added. Under sequence parallelism they are
    reduce-scattered to [s / tp, b, output_size], and the bias gradient covers only this rank's positions.

    Args:
        input_size, output_size, config, init_method, bias: As for ``ColumnParallelLinear``.
        input_is_parallel (bool): ``True`` for an input [s, b, input_size / tp], ``False`` for [s, b, input_size].
        skip_bias_add (bool): Return the bias instead of adding it.
        stride (int): Number of input parts that are split separately.
        tp_group, pg_collection, name: As for ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: InitMethod,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        stride: int = 1,
        tp_group: dist.ProcessGroup | None = None,
        pg_collection: ProcessGroups | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config, tp_group, pg_collection)
        if self.sequence_parallel and not input_is_parallel:
            raise ValueError(
                f"RowParallelLinear {name or ''}: input_is_parallel=False with sequence_parallel=True; the input is "
                "split along the sequence there, not along its features. Set input_is_parallel=True"
            )
        divide(input_size, self.tp_size * stride, f"input_size of RowParallelLinear {name or ''} over tensor-parallel "
               f"size {self.tp_size} times stride {stride}")  # fmt: skip
        self.input_size = input_size
        self.output_size = output_size
        self.input_size_per_partition = input_size // self.tp_size
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.weight = self._new_weight((output_size, input_size), 1, stride, init_method, name)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype))
            self.bias.sequence_parallel = self.sequence_parallel

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the bias if it was not added (else ``None``)."""
        if not self.input_is_parallel and self.tp_size > 1:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        output = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            self.weight,
            None,
            gradient_accumulation_fusion=self.config.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
            tp_group=self.tp_group,
        )
        if self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output, self.tp_group)
        elif self.tp_size > 1:
            output = reduce_from_tensor_model_parallel_region(output, self.tp_group)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias.to(output.dtype), None


class VocabParallelEmbedding(_ParallelLayer):
    """Embedding with the vocabulary, padded to a multiple of tp, split over tensor parallelism.

    Each rank looks up the ids in its range, and the results are summed. With ``gradient_accumulation_fusion`` only the
    batch's gradient rows are added to ``main_grad``; autograd would materialize a full gradient, mostly zeros.

    Args:
        num_embeddings (int): Vocabulary size of the full model.
        embedding_dim (int): Features per token.
        reduce_scatter_embeddings (bool, optional): Return [s / tp, b, embedding_dim] instead of [b, s, embedding_dim].
        init_method, config, tp_group, pg_collection, name: As for ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        config: ModelParallelConfig,
        reduce_scatter_embeddings: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        pg_collection: ProcessGroups | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config, tp_group, pg_collection)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.num_embeddings_per_partition = padded_vocab_size(num_embeddings, self.tp_size) // self.tp_size
        self.vocab_start_index = self.tp_rank * self.num_embeddings_per_partition
        self.weight = self._new_weight((num_embeddings, embedding_dim), 0, 1, init_method, name)

    def forward(self, input_: Tensor) -> Tensor:
        """Look up token ids. An id outside the vocabulary raises ValueError (on a GPU, torch's device assertion)."""
        outside = (input_ < 0) | (input_ >= self.num_embeddings)
        if input_.device.type == "cpu" and bool(outside.any()):
            raise ValueError(
                f"token ids are in [{int(input_.min())}, {int(input_.max())}], expected 0 <= id < "
                f"{self.num_embeddings}, the size of the vocabulary"
            )
        row = input_ - self.vocab_start_index
        elsewhere = (row < 0) | (row >= self.num_embeddings_per_partition)
        # An id of no rank stays out of range, for the lookup to find; it must not pass for an id of another rank.
        row = row.masked_fill(elsewhere, 0).masked_fill(outside, -1)
        if self.config.gradient_accumulation_fusion and torch.is_grad_enabled():
            output = _Rows.apply(row, self.weight)
        else:
            output = F.embedding(row, self.weight)
        output = output.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            output = rearrange(output, "b s h -> s b h")
            if self.tp_size > 1:
                output = reduce_scatter_to_sequence_parallel_region(output, self.tp_group)
        elif self.tp_size > 1:
            output = reduce_from_tensor_model_parallel_region(output, self.tp_group)
        return output


class _Rows(torch.autograd.Function):
    """``F.embedding`` whose gradient is added to the weight's ``main_grad``, if it exists."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.parameter = weight
        return F.embedding(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (rows,), weight = ctx.saved_tensors, ctx.parameter
        if not ctx.needs_input_grad[1]:
            return None, None
        rows, grad = rows.reshape(-1), grad.reshape(-1, grad.shape[-1])
        # Not into 16 bits: there a frequent token's row would be rounded once for each time it occurs.
        main_grad = main_grad_of(weight)
        if main_grad is None or main_grad.dtype.itemsize < 4:
            return None, torch.ops.aten.embedding_dense_backward(grad, rows, weight.shape[0], -1, False)
        if main_grad.is_cuda:  # index_add_ would add in any order there
            main_grad.index_put_((rows,), grad.to(main_grad.dtype), accumulate=True)
        else:
            main_grad.index_add_(0, rows, grad.to(main_grad.dtype))
        return None, None


# -- the product itself ----------------------------------------------------------------------------------------------


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute input @ weight^T + bias. Backward overlaps its collective with the weight-gradient matmul.

    Args:
        input: [s, ..., in], with the sequence as first dimension.
        weight: This rank's weight, [out, in].
        bias: This rank's bias, [out], or ``None``.
        gradient_accumulation_fusion: Add the weight gradient directly to ``weight.main_grad``, if it exists.
        allreduce_dgrad: The input is replicated, so backward all-reduces its gradient. Excludes ``sequence_parallel``.
        sequence_parallel: All-gather the input [s / tp, ...] (again in backward) and reduce-scatter its gradient.
        tp_group: Tensor-parallel group, or ``None`` for one rank.
    """
    if allreduce_dgrad and sequence_parallel:
        raise ValueError("allreduce_dgrad and sequence_parallel exclude each other: a gradient is summed once")
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight, bias = input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    output: Tensor = _Linear.apply(
        input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel, tp_group
    )
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fuse: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        # Under recomputation the saved weight comes back as another tensor; main_grad is on this one.
        ctx.parameter, ctx.fuse = weight, fuse
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.group = allreduce_dgrad, sequence_parallel, group
        if sequence_parallel and group is not None:
            input = gather_first(input, group)
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sequence_group = ctx.group if ctx.sequence_parallel else None

        queue = current_queue()
        if needs_weight and queue is not None and ctx.parameter.is_leaf and _is_accumulated(ctx.parameter):
            queue.append(functools.partial(_add_weight_gradient, ctx.parameter, grad, input, sequence_group))
            needs_weight = False

        gathering = reducing = None
        if needs_weight and sequence_group is not None:
            gathering = start_gather_first(input, sequence_group)
        grad_input = grad @ weight if needs_input else None
        if grad_input is not None and sequence_group is not None:
            reducing = start_reduce_scatter_first(grad_input, sequence_group)
        elif grad_input is not None and ctx.allreduce_dgrad:
            reducing = start_all_reduce(grad_input, ctx.group)
        if gathering is not None:
            input = gathering.wait()
        grad_weight = _weight_gradient(ctx.parameter if ctx.fuse else None, grad, input) if needs_weight else None
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(dim=0) if needs_bias else None
        if reducing is not None:
            grad_input = reducing.wait()
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _weight_gradient(parameter: Tensor | None, grad: Tensor, input: Tensor) -> Tensor | None:
    """Return a weight's gradient [out, in], or ``None`` after adding it to the parameter's ``main_grad``."""
    grad, input = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
    main_grad = None if parameter is None else main_grad_of(parameter)
    if main_grad is None:
        return grad.t() @ input
    add_product(main_grad, grad, input)
    return None


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """Return the wrapper's gradient buffer for a parameter, if the running backward may add to it.

    If ``main_grad`` is not the parameter's ``.grad`` (the user cleared it, or uses another buffer), the result is
    ``None`` and autograd accumulates. ``grad_added_to_main_grad`` is not set: it would outlive a ``zero_grad()``.
    """
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    if main_grad is None or parameter.grad is not main_grad or not _is_accumulated(parameter):
        return None
    return main_grad


def _is_accumulated(parameter: Tensor) -> bool:
    """Return ``True`` if the running backward only accumulates this leaf's gradient into ``.grad``.

    It is ``False`` for autograd.grad and backward(inputs=...), which may leave ``.grad`` unchanged, for a tensor hook,
    which may change the gradient, if torch cannot decide, and in a compiled backward, which is traced only once.
    """
    if torch.compiler.is_compiling():
        return False
    will_execute = getattr(torch._C, "_will_engine_execute_node", None)
    if will_execute is None or parameter._backward_hooks:
        return False
    try:
        return bool(will_execute(get_gradient_edge(parameter).node))
    except RuntimeError:  # autograd.grad(..., parameter): the gradient goes to the caller
        return False


def _add_weight_gradient(parameter: Tensor, grad: Tensor, input: Tensor, group: dist.ProcessGroup | None) -> None:
    """Accumulate a deferred weight gradient. Collective over ``group`` if given (sequence parallelism)."""
    if group is not None:
        input = gather_first(input, group)
    grad, input = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
    if type(parameter.grad) is Tensor:
        add_product(parameter.grad, grad, input)
        return
    product = (grad.t() @ input).to(getattr(parameter, "grad_dtype", None) or parameter.dtype)
    if parameter.grad is None:
        parameter.grad = product
    else:  # the wrapper's placeholder, which keeps what comes after the reduction has begun
        parameter.grad.add_(product.detach())


def add_product(main_grad: Tensor, grad: Tensor, input: Tensor) -> None:
    """Compute main_grad += grad^T @ input in the dtype of main_grad."""
    kernel = _apex_kernel() if main_grad.is_cuda else None
    if kernel is not None and main_grad.dtype == torch.float32:
        kernel.wgrad_gemm_accum_fp32(input.contiguous(), grad.contiguous(), main_grad)
    elif kernel is not None and main_grad.dtype in (torch.float16, torch.bfloat16) and main_grad.dtype == grad.dtype:
        kernel.wgrad_gemm_accum_fp16(input.contiguous(), grad.contiguous(), main_grad)
    elif main_grad.dtype == grad.dtype:
        main_grad.addmm_(grad.t(), input)
    elif main_grad.is_cuda and main_grad.dtype == torch.float32:
        torch.addmm(main_grad, grad.t(), input, out_dtype=torch.float32, out=main_grad)
    else:  # no CPU product writes a wider dtype than it reads
        main_grad.addmm_(grad.t().to(main_grad.dtype), input.to(main_grad.dtype))


@functools.cache
def _apex_kernel() -> ModuleType | None:
    """Return apex's fused weight-gradient kernel, identified by its symbols, since other packages are named apex
    too.
    """
    try:
        import fused_weight_gradient_mlp_cuda as kernel
    except ImportError:
        return None
    symbols = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
    return kernel if all(hasattr(kernel, symbol) for symbol in symbols) else None
