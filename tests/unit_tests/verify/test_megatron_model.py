"""`verify_with` over Megatron Core's own GPTModel and wrapper."""

from __future__ import annotations

import contextlib
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers_right import PROGRAMS, answer_on_rank
from benchmarks.right_megatron import Layout, OnTheCPU, report_of
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.verify import GradientReport, WrongGradientError, verify_with
from tests.unit_tests.core_compat.test_megatron_stock import on_this_device, stock
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


def experts_not_divided(model: Any) -> Any:
    """Experts' gradients are not divided by the number of data ranks."""
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
# A fault, and the parameter or factor that the report names.
WRONG: dict[str, tuple[Layout, str]] = {
    "norm of sequence parallelism": (
        Layout(tp=2, sequence=True, break_model=untagged), "decoder.layers.1.pre_mlp_layernorm.weight"
    ),
    "no sum of inputs' gradients": (Layout(tp=2, break_model=no_sum), LAYER),
    "tied weight": (Layout(pp=2, tied=True, break_step=untied), "embedding.word_embeddings.weight"),
    "one bucket": (Layout(sharded=True, break_step=unscaled), "times too large"),
    "experts": (Layout(ep=2, break_step=experts_not_divided), "local_experts"),
    "microbatches": (Layout(sharded=True, break_step=doubled), "layers.0.mlp.linear_fc1.weight"),
}  # fmt: skip


@ranks(2, 4)
@pytest.mark.parametrize("layout", PROGRAMS["Megatron Core"])
def test_a_right_program_of_megatrons_own_loop_gives_no_alarm(rank: int, world: int, layout: str) -> None:
    stock("")
    answer, why = answer_on_rank("Megatron Core", layout)
    assert answer == ("not read" if "virtual" in layout else "equal"), why


@ranks(2, 4)
@pytest.mark.parametrize("fault", WRONG)
def test_a_fault_in_megatrons_own_loop_is_found_and_placed(rank: int, world: int, fault: str) -> None:
    layout, named = WRONG[fault]
    with on_this_device():
        report = report_of(layout)
    assert not report.ok and named in str(report), str(report)
