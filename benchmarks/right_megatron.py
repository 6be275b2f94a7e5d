"""A small loop of Megatron Core's own (model, wrapper, schedule, optimizer) on the CPU, compared with one process."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from core.verify import GradientReport, WrongGradientError, verify_with

WORDS, LENGTH = 32, 8


@dataclass(frozen=True)
class Layout:
    """A layout of Megatron Core on 2 ranks or more, and a fault in it.

    Attributes:
        sequence: sequence parallelism.
        sharded: use its distributed optimizer.
        tied: share the word embedding with the output layer.
        break_model: makes a fault in a rank's model, before the wrap.
        break_step: makes a fault around the step of the wrapped model.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    sequence: bool = False
    sharded: bool = False
    tied: bool = False
    microbatches: int = 2
    break_model: Callable[[Any], None] | None = None
    break_step: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None


def stock(path: str) -> Any:
    """A module of Megatron Core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core{path}")


class OnTheCPU(TorchFunctionMode):
    """Megatron's models and optimizers ask for 'cuda' by its name; here they get the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        kwargs = dict(kwargs or {})
        kwargs |= {"device": "cpu"} if str(kwargs.get("device")).startswith("cuda") else {}
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_this_device() -> Iterator[None]:
    """Megatron's modules on the CPU if there is no GPU; its groups are destroyed at the end."""
    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")))
            stack.enter_context(mock.patch.object(torch.cuda, "synchronize", lambda *device: None))
            stack.enter_context(mock.patch.object(torch.cuda, "current_stream", lambda *device: None))
            tracker = stock(".tensor_parallel.random").CudaRNGStatesTracker
            fork = mock.patch.object(tracker, "fork", lambda self, name=None: contextlib.nullcontext())
            stack.enter_context(fork)
            # 0.16.1 asks for TransformerEngine's product by a name that it has only where that is installed.
            moe = stock(".transformer.moe.moe_utils")
            stack.enter_context(mock.patch.object(moe, "te_general_gemm", None, create=True))
        try:
            yield
        finally:
            stock(".parallel_state").destroy_model_parallel()


class Norm(nn.LayerNorm):
    """A layer norm for sequence parallelism; Megatron's own needs apex or TransformerEngine for that."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel


def gpt_in(layout: Layout, alone: Any = None) -> Any:
    """Megatron's GPT: this rank's part; or the unsplit one, with a group of this rank."""
    experts: dict[str, Any] = {}
    if layout.ep > 1:
        experts = dict(num_moe_experts=4, moe_router_topk=2, moe_token_dispatcher_type="allgather")
        experts |= dict(moe_router_load_balancing_type="none", moe_ffn_hidden_size=16, add_bias_linear=False)
    own = dict(tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp)
    own |= dict(expert_model_parallel_size=layout.ep, sequence_parallel=layout.sequence)
    config = stock(".transformer.transformer_config").TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        pipeline_dtype=torch.float32, use_cpu_initialization=True, **experts, **({} if alone else own),
    )  # fmt: skip
    layer = stock(".models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    blocks = stock(".transformer.transformer_block").TransformerBlockSubmodules
    spec = blocks(layer_specs=[layer] * (2 if alone else 2 // layout.pp), layer_norm=Norm)
    state = stock(".parallel_state")
    place = {} if alone else {"pre_process": state.is_pipeline_first_stage()}
    place |= {} if alone else {"post_process": state.is_pipeline_last_stage()}
    names = ("tp", "pp", "cp", "embd", "pos_embd", "tp_cp", "dp", "dp_cp", "ep", "expt_tp", "expt_dp", "tp_ep")
    groups: dict[str, Any] = {}
    if alone:
        kind = stock(".process_groups_config").ProcessGroupCollection
        groups["pg_collection"] = kind(**{name: alone for name in (*names, "tp_dp_cp", "tp_ep_pp")})
    return stock(".models.gpt.gpt_model").GPTModel(
        config, spec, WORDS, LENGTH, share_embeddings_and_output_weights=layout.tied, **place, **groups
    )


def report_of(layout: Layout) -> GradientReport:
    """Run one step of Megatron's own loop, and return the report about it. Collective over the world."""
    stock(".parallel_state").initialize_model_parallel(
        layout.tp, layout.pp, layout.vpp, expert_model_parallel_size=layout.ep
    )
    alone = dist.new_group([0])
    torch.manual_seed(1)
    with OnTheCPU():
        model: Any = gpt_in(layout)
    if layout.break_model is not None:
        layout.break_model(model)
    theirs = stock(".distributed")
    options = theirs.DistributedDataParallelConfig(use_distributed_optimizer=layout.sharded, bucket_size=2000)
    model.config.finalize_model_grads_func = theirs.finalize_model_grads
    model = theirs.DistributedDataParallel(model.config, options, model)
    settings = stock(".optimizer").OptimizerConfig(
        optimizer="adam", lr=0.1, clip_grad=0.01, use_distributed_optimizer=layout.sharded
    )
    with OnTheCPU():
        optimizer = stock(".optimizer").get_megatron_optimizer(settings, [model])
    check = verify_with(model, lambda: gpt_in(layout, alone), _loss)
    generator = torch.Generator().manual_seed(3 + stock(".parallel_state").get_data_parallel_rank())

    def batches() -> Iterator[tuple[Tensor, ...]]:
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for _ in range(layout.microbatches):
            tokens = torch.randint(WORDS, (3, LENGTH + 1), generator=generator)
            yield tokens[:, :-1], torch.arange(LENGTH).expand(3, LENGTH), mask, tokens[:, 1:]

    model.zero_grad_buffer()
    try:
        with contextlib.nullcontext() if layout.break_step is None else layout.break_step(model), OnTheCPU():
            stock(".pipeline_parallel").get_forward_backward_func()(
                forward_step_func=_loss_step, data_iterator=batches(), model=[model],
                num_microbatches=layout.microbatches, seq_length=LENGTH, micro_batch_size=3, forward_only=False,
            )  # fmt: skip
            optimizer.step()
    except WrongGradientError:
        pass
    assert check.report is not None
    return check.report


def _loss_step(data_iterator: Any, chunk: Any) -> Any:
    """A microbatch's losses, and their mean."""
    *given, labels = next(data_iterator)
    return chunk(*given, labels=labels), lambda losses: (losses.mean(), {"lm loss": losses.mean().detach()})


def _loss(model: nn.Module, *given: Tensor, labels: Tensor) -> Tensor:
    """Megatron's loss asks for the groups of the layout, so the unsplit model's is torch's."""
    if sum(1 for _ in model.children()) == 1:  # in its wrapper
        losses: Tensor = model(*given, labels=labels)
        return losses.mean()
    return F.cross_entropy(model(*given).flatten(0, 1), labels.flatten())
