"""`verify_with` over Megatron Core's own GPTModel and wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.verify import GradientReport, WrongGradientError, verify_with
from tests.unit_tests.core_compat.test_megatron_stock import Layout, Norm, OnTheCPU, loss_step, on_this_device, stock
from tests.unit_tests.ranks import ranks

pytestmark = pytest.mark.nightly
WORDS, LENGTH, MICROBATCHES = 32, 8, 2


def gpt_of(tp: int, gated: bool, alone: Any = None) -> Any:
    """Megatron Core's model. alone: a group of this rank, for a model that splits nothing."""
    config = stock(".transformer.transformer_config").TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu,
    )
    groups = None
    if alone is not None:
        kind = stock(".process_groups_config").ProcessGroupCollection
        groups = kind(**{name: alone for name in ("tp", "pp", "cp", "embd", "pos_embd", "tp_cp", "dp", "dp_cp")})
    spec = stock(".models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    return stock(".models.gpt.gpt_model").GPTModel(config, spec, WORDS, LENGTH, pg_collection=groups)


def loss_of(model: nn.Module, tokens: Tensor, positions: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Megatron's loss asks for the groups of the layout, so the whole model's is torch's."""
    if model.config.tensor_model_parallel_size > 1:
        losses: Tensor = model(tokens, positions, mask, labels=labels)
        return losses.mean()
    return F.cross_entropy(model(tokens, positions, mask).flatten(0, 1), labels.flatten())


def first_step(wrapper: str, fault: bool, gated: bool = False) -> GradientReport:
    """One step of a loop. The fault: the second layer's product leaves out the sum of its input's gradients."""
    alone = dist.new_group([0])
    torch.manual_seed(1)
    model = gpt_of(2, gated)
    model.decoder.layers[1].mlp.linear_fc1.explicit_expert_comm = fault
    if wrapper == "ours":
        model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    else:
        of_theirs = stock(".distributed")
        model = of_theirs.DistributedDataParallel(model.config, of_theirs.DistributedDataParallelConfig(), model)
    finalize = finalize_model_grads if wrapper == "ours" else stock(".distributed").finalize_model_grads
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrapper == "theirs, with their optimizer":  # which clips
        of_theirs = stock(".optimizer")
        options = of_theirs.OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.01)
        with OnTheCPU():
            optimizer = of_theirs.get_megatron_optimizer(options, [model])
    check = verify_with(model, lambda: gpt_of(1, gated, alone), loss_of)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    data_rank = stock(".parallel_state").get_data_parallel_rank()
    generator = torch.Generator().manual_seed(3 + data_rank)
    model.zero_grad_buffer()
    for _ in range(MICROBATCHES):
        tokens = torch.randint(WORDS, (3, LENGTH + 1), generator=generator)
        given = tokens[:, :-1], torch.arange(LENGTH).expand(3, LENGTH), mask, tokens[:, 1:]
        check.note(*given)
        (loss_of(model, *given) / MICROBATCHES).backward()
    try:
        finalize([model])
        if wrapper == "theirs":
            for param in model.parameters():
                param.grad = param.main_grad
        with OnTheCPU() if "their optimizer" in wrapper else nullcontext():
            optimizer.step()
    except WrongGradientError:
        pass
    assert check.report is not None
    return check.report


@ranks(2, 4)
@pytest.mark.parametrize("wrapper", ["theirs", "theirs, with their optimizer", "ours"])
@pytest.mark.in_suite()
def test_a_model_of_megatron_core_is_compared_in_both_wrappers(rank: int, world: int, wrapper: str) -> None:
    with on_this_device():
        stock(".parallel_state").initialize_model_parallel(2)
        if wrapper == "ours":
            parallel_state.initialize_model_parallel(2)
        right, wrong = (first_step(wrapper, fault) for fault in (False, True))
    assert right.ok and right.parameters == 29, str(right)
    assert not wrong.ok and "decoder.layers.1.mlp.linear_fc1" in str(wrong), str(wrong)


@ranks(2)
def test_a_gated_layer_of_megatron_core_is_compared_section_by_section(rank: int, world: int) -> None:
    with on_this_device():
        stock(".parallel_state").initialize_model_parallel(2)
        report = first_step("theirs", fault=False, gated=True)
        assert report.ok and report.parameters == 29, str(report)


@dataclass(frozen=True)
class Case:
    """A layout of Megatron Core, with its own schedule and optimizer; and a fault in it."""

    layout: Layout
    tied: bool = False
    microbatches: int = 2
    break_model: Callable[[Any], None] | None = None  # before the wrap
    break_step: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None  # around the step
    found: str = ""  # text in the report of a wrong program


def alone_groups(alone: Any) -> Any:
    kind = stock(".process_groups_config").ProcessGroupCollection
    names = ("tp", "pp", "cp", "embd", "pos_embd", "tp_cp", "dp", "dp_cp", "ep", "expt_tp", "expt_dp", "tp_ep")
    return kind(**{name: alone for name in (*names, "tp_dp_cp", "tp_ep_pp")})


def gpt_in(case: Case, alone: Any = None) -> Any:
    """Stock's GPT: this rank's part, or the whole."""
    layout, experts = case.layout, {}
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
    groups = {"pg_collection": alone_groups(alone)} if alone else {}
    return stock(".models.gpt.gpt_model").GPTModel(
        config, spec, WORDS, LENGTH, share_embeddings_and_output_weights=case.tied, **place, **groups
    )


def report_of(case: Case) -> GradientReport:
    """One step of Megatron's own loop, and the report about it."""
    alone = dist.new_group([0])
    torch.manual_seed(1)
    with OnTheCPU():
        model: Any = gpt_in(case)
    if case.break_model is not None:
        case.break_model(model)
    theirs = stock(".distributed")
    options = theirs.DistributedDataParallelConfig(use_distributed_optimizer=case.layout.sharded, bucket_size=2000)
    model.config.finalize_model_grads_func = theirs.finalize_model_grads
    model = theirs.DistributedDataParallel(model.config, options, model)
    settings = stock(".optimizer").OptimizerConfig(
        optimizer="adam", lr=0.1, clip_grad=0.01, use_distributed_optimizer=case.layout.sharded
    )
    with OnTheCPU():
        optimizer = stock(".optimizer").get_megatron_optimizer(settings, [model])
    check = verify_with(model, lambda: gpt_in(case, alone), whole_loss)
    generator = torch.Generator().manual_seed(3 + stock(".parallel_state").get_data_parallel_rank())

    def batches() -> Iterator[tuple[Tensor, ...]]:
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for _ in range(case.microbatches):
            tokens = torch.randint(WORDS, (3, LENGTH + 1), generator=generator)
            yield tokens[:, :-1], torch.arange(LENGTH).expand(3, LENGTH), mask, tokens[:, 1:]

    model.zero_grad_buffer()
    try:
        with contextlib.nullcontext() if case.break_step is None else case.break_step(model), OnTheCPU():
            stock(".pipeline_parallel").get_forward_backward_func()(
                forward_step_func=loss_step, data_iterator=batches(), model=[model],
                num_microbatches=case.microbatches, seq_length=LENGTH, micro_batch_size=3, forward_only=False,
            )  # fmt: skip
            optimizer.step()
    except WrongGradientError:
        pass
    assert check.report is not None
    return check.report


def whole_loss(model: nn.Module, *given: Tensor, labels: Tensor) -> Tensor:
    """Megatron's loss asks for the groups of the layout, so the whole model's is torch's."""
    if sum(1 for _ in model.children()) == 1:  # in its wrapper
        losses: Tensor = model(*given, labels=labels)
        return losses.mean()
    return F.cross_entropy(model(*given).flatten(0, 1), labels.flatten())


def untagged(model: Any) -> None:
    """A norm under sequence parallelism whose gradient no rule completes."""
    model.decoder.layers[1].pre_mlp_layernorm.weight.sequence_parallel = False


def no_sum(model: Any) -> None:
    """A product that leaves out the sum of its input's gradients."""
    model.decoder.layers[1].mlp.linear_fc1.explicit_expert_comm = True


def untied(model: Any) -> Any:
    """The gradients of the tied weight's two copies stay apart."""
    return mock.patch.object(stock(".distributed.finalize_model_grads"), "_allreduce_word_embedding_grads", nothing)


def unscaled(model: Any) -> Any:
    """The reduction of one bucket leaves out the division by the number of ranks."""
    return mock.patch.object(model.buffers[0].buckets[-1], "gradient_scaling_factor", 1.0)


def experts_averaged_again(model: Any) -> Any:
    """Experts' gradients are divided by the expert data group's size, as dense ones are by the data group's."""
    for bucket in model.expert_parallel_buffers[0].buckets:
        bucket.gradient_scaling_factor = 1.0
    return contextlib.nullcontext()


def doubled(model: Any) -> Any:
    """Each microbatch after the first doubles what is there (the symptom of Megatron's issue 6660)."""
    param = model.module.decoder.layers[0].mlp.linear_fc1.weight
    param.register_hook(lambda grad: None if float(param.main_grad.abs().sum()) == 0 else grad + param.main_grad)
    return contextlib.nullcontext()


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


LAYER = "decoder.layers.1.mlp.linear_fc1"
CASES = {
    "data": Case(Layout()),
    "data, sharded": Case(Layout(sharded=True)),
    "tensor and sequence": Case(Layout(tp=2, sequence=True)),
    "tensor, sharded": Case(Layout(tp=2, sharded=True)),
    "pipeline": Case(Layout(pp=2), tied=True, microbatches=3),
    "pipeline, sharded": Case(Layout(pp=2, sharded=True)),
    "experts": Case(Layout(ep=2)),
    "experts, sharded": Case(Layout(ep=2, sharded=True)),
    "wrong: norm of sequence parallelism": Case(
        Layout(tp=2, sequence=True), break_model=untagged, found="decoder.layers.1.pre_mlp_layernorm.weight"
    ),
    "wrong: no sum of inputs' gradients": Case(Layout(tp=2), break_model=no_sum, found=LAYER),
    "wrong: tied weight": Case(Layout(pp=2), tied=True, break_step=untied, found="embedding.word_embeddings.weight"),
    "wrong: one bucket": Case(Layout(sharded=True), break_step=unscaled, found="2 times"),
    "wrong: experts": Case(Layout(ep=2), break_step=experts_averaged_again, found="local_experts"),
    "wrong: microbatches": Case(
        Layout(sharded=True), break_step=doubled, found="decoder.layers.0.mlp.linear_fc1.weight"
    ),
}


@ranks(2, 4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.in_suite()
def test_megatrons_own_loop_is_compared_in_its_layouts(rank: int, world: int, name: str) -> None:
    case = CASES[name]
    with on_this_device():
        layout = case.layout
        stock(".parallel_state").initialize_model_parallel(layout.tp, layout.pp, expert_model_parallel_size=layout.ep)
        report = report_of(case)
    if case.found:
        assert not report.ok and case.found in str(report), str(report)
    else:
        assert report.ok and not report.notes, str(report)


@ranks(2)
def test_what_is_not_read_of_megatron_core_is_refused(rank: int, world: int) -> None:
    with on_this_device():
        stock(".parallel_state").initialize_model_parallel(1, 2, 2)
        with pytest.raises(ValueError, match="virtual_pipeline_model_parallel_size above 1, of which the parts"):
            verify_with(nn.Linear(2, 2), lambda: nn.Linear(2, 2), loss_of)
