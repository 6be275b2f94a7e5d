"""Rules by name see the names of the whole model in every stage of a pipeline."""

from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.optimizer import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    get_megatron_optimizer,
)
from core.pipeline_parallel import PipelineLayout
from tests.unit_tests.pipeline_parallel.pipeline_reference import (
    build_whole,
    full_name,
    microbatch,
    start_pipeline,
    whole_step,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

LR, DECAY = 0.2, 0.1
CONFIG = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=LR, weight_decay=DECAY, clip_grad=0.0)

RULES: dict[str, dict[str, Any]] = {
    "overrides": {
        "config_overrides": {
            ParamKey(name="decoder.layers.1.*"): {"lr_mult": 0.1},
            ParamKey(with_name_predicate=ParamWithNamePredicate("third", lambda p, name: ".layers.3." in name)): {
                "wd_mult": 0.0
            },
            ParamKey(name="embedding.word_embeddings.weight"): {"wd_mult": 3.0},
        },
    },
    "conditions": {
        "scale_lr_cond": lambda name, param: ".layers.1." in name,
        "lr_mult": 0.1,
        "no_weight_decay_cond": lambda name, param: ".layers.3." in name,
    },
}


def numbers_of(name: str, rules: str) -> tuple[float, float]:
    """(learning rate, weight decay) that the rules give to a parameter of the whole model."""
    tied = rules == "overrides" and name == "embedding.word_embeddings.weight"
    decay = 0.0 if ".layers.3." in name else 3 * DECAY if tied else DECAY
    return LR * (0.1 if ".layers.1." in name else 1.0), decay


@ranks(2)
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("rules", list(RULES))
@pytest.mark.in_suite()
def test_a_rule_names_the_same_layers_however_the_model_is_cut(rank: int, world: int, chunks: int, rules: str) -> None:
    layout = PipelineLayout.even(4, pp=2, chunks=chunks)
    runner = start_pipeline(layout, "1F1B" if chunks == 1 else "Interleaved1F1B")
    optimizer = get_megatron_optimizer(CONFIG, runner.chunks, **RULES[rules])
    for chunk in runner.chunks:
        chunk.zero_grad_buffer()
    runner.step([microbatch(0, number) for number in range(2)])
    assert optimizer.step()[0]

    whole = build_whole()
    grads, _ = whole_step(whole, 1, 2)
    compared = 0
    for chunk, number in zip(runner.chunks, runner.stage_numbers, strict=True):
        for local, param in chunk.module.named_parameters():
            name = full_name(local, layout.stage(number).layer_numbers, tied=True)
            start = whole.get_parameter(name).detach()
            lr, decay = numbers_of(name, rules)
            want = start - lr * (grads[name] + decay * start)
            assert (want - start).norm() > 1e-4, f"{name}: the reference has not moved"
            torch.testing.assert_close(
                param.detach(), want, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
            )
            compared += 1
    assert compared > 20


def stage(rank: int) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


@ranks(2)
def test_stages_that_do_not_say_global_names_refuse_a_rule_that_counts_layers(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    ddp = wrap(stage(rank))
    counting: list[dict[str, Any]] = [
        {"config_overrides": {ParamKey(name="0.*"): {"lr_mult": 0.1}}},
        {"config_overrides": {ParamKey(name="?.weight"): {"lr_mult": 0.1}}},
        {"scale_lr_cond": lambda name, param: name.startswith("2"), "lr_mult": 0.1},
    ]
    for rule in counting:
        with pytest.raises(ValueError, match=r"'\d\.\w+'.*ranks 0 and 1.*global_names"):
            get_megatron_optimizer(CONFIG, [ddp], **rule)
    vectors = ParamKey(predicate=ParamPredicate("vector", lambda param: param.dim() == 1))
    get_megatron_optimizer(CONFIG, [ddp])
    for key in (vectors, ParamKey(name="*.bias")):
        optimizer = get_megatron_optimizer(CONFIG, [ddp], config_overrides={key: {"lr_mult": 0.5}})
        assert sorted(group["lr"] for group in optimizer.param_groups) == [LR / 2, LR]


@ranks(2)
def test_stages_of_the_users_own_say_what_their_parts_are_called(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = stage(rank)
    model.global_names = {"0": str(2 * rank), "2": str(2 * rank + 1)}  # type: ignore[assignment]
    optimizer = get_megatron_optimizer(CONFIG, [wrap(model)], config_overrides={ParamKey(name="2.*"): {"lr_mult": 0.5}})
    sizes = {group["lr"]: sum(param.numel() for param in group["params"]) for group in optimizer.param_groups}
    assert sizes == ({LR: 24, LR / 2: 0} if rank == 0 else {LR: 12, LR / 2: 12})
