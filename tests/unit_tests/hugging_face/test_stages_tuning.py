"""LoRA on pipeline stages: trained as on one process, and one plain adapter directory of all stages."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft

from core import parallel_state
from core.distributed import DistributedDataParallelConfig
from core.hugging_face import (
    PlanError,
    add_lora,
    save_split,
    split_stages,
    stage_activations,
    stage_forward_step,
    stages_config,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel import PipelineRunner, plan_pipeline, wrap_stages
from core.verify.in_double import InDouble
from tests.unit_tests.hugging_face.models import small, tokens, whole
from tests.unit_tests.ranks import ranks

LAYERS = 4


def train(
    base: Any, tp: int, pp: int, chunks: int, targets: Any, directory: Path, layers: Sequence[int] = range(LAYERS)
) -> None:
    schedule = "Interleaved1F1B" if chunks > 1 else "1F1B"
    layout = plan_pipeline(LAYERS, pp, schedule=schedule, chunks=chunks if chunks > 1 else None)
    parallel_state.initialize_model_parallel(tp, pp, get_embedding_ranks=layout.embedding_ranks)
    groups = parallel_state.get_process_groups()
    torch.manual_seed(5 + groups.rank("tp"))
    only = None if len(layers) == LAYERS else list(layers)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, layers_to_transform=only
    )
    stages = add_lora(split_stages(copy.deepcopy(base), layout), config)
    save_split(stages, directory / "start")
    torch.distributed.barrier()
    reference = peft.PeftModel.from_pretrained(copy.deepcopy(base), directory / "start", is_trainable=True).double()
    start = {name: p.detach().clone() for name, p in reference.named_parameters() if p.requires_grad}
    assert {int(name.split(".layers.")[1].split(".")[0]) for name in start} == set(layers)
    batches = [[tokens(length=8, seed=10 * step + n) for n in range(4)] for step in range(2)]
    plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.5)
    stages = [stage.double() for stage in stages]
    wrapped = wrap_stages(stages_config(layout, tp), DistributedDataParallelConfig(), stages)
    options = OptimizerConfig(lr=0.5, optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    optimizer = get_megatron_optimizer(options, wrapped)
    runner = PipelineRunner(wrapped, layout, stage_forward_step, stage_activations(stages[0], 2, 8), schedule=schedule)
    with InDouble():
        for batch in batches:
            plain.zero_grad()
            expected = torch.stack([reference(input_ids=ids, labels=ids).loss for ids in batch]).mean()
            expected.backward()
            plain.step()
            for chunk in wrapped:
                chunk.zero_grad_buffer()
            loss = runner.step([{"input_ids": ids, "labels": ids} for ids in batch]).loss
            optimizer.step()
            assert float(loss) == pytest.approx(float(expected.detach()), abs=1e-9)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                wanted = reference.get_parameter(name).detach()
                torch.testing.assert_close(whole(stage, name, parameter.detach()), wanted, rtol=1e-8, atol=1e-10)
    assert max(float((reference.get_parameter(name) - start[name]).abs().max()) for name in start) > 1e-3
    save_split(wrapped, directory / "end")
    torch.distributed.barrier()
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), directory / "end")
    for name in start:
        torch.testing.assert_close(
            loaded.get_parameter(name).double(), reference.get_parameter(name), rtol=1e-5, atol=1e-6
        )
    again = add_lora(split_stages(copy.deepcopy(base), layout), directory=directory / "end")
    for old, new in zip(stages, again, strict=True):
        for name, parameter in old.named_parameters():
            assert torch.equal(new.get_parameter(name), parameter.to(new.get_parameter(name).dtype)), name


@ranks(2)
@pytest.mark.parametrize(("family", "chunks"), [("llama", 1), ("opt", 2)])
@pytest.mark.in_suite(1)
def test_adapters_of_stages_train_as_on_one_process(
    rank: int, world: int, family: str, chunks: int, tmp_path: Path
) -> None:
    values = {"ffn_dim": 64, "dropout": 0.0, "word_embed_proj_dim": 16} if family == "opt" else {}
    base = small(family, num_hidden_layers=LAYERS, **values)
    train(base, 1, 2, chunks, "all-linear" if family == "llama" else ["q_proj", "fc1", "fc2"], tmp_path)


@ranks(4)
def test_adapters_of_stages_over_tp_train_as_on_one_process(rank: int, world: int, tmp_path: Path) -> None:
    train(small("llama", num_hidden_layers=LAYERS), 2, 2, 1, "all-linear", tmp_path)


@ranks(2)
@pytest.mark.parametrize(("layers", "chunks"), [([2, 3], 1), ([0], 1), ([1], 2)])
def test_stages_without_an_adapter_train_next_to_those_that_have_one(
    rank: int, world: int, layers: list[int], chunks: int, tmp_path: Path
) -> None:
    train(small("llama", num_hidden_layers=LAYERS), 1, 2, chunks, ["q_proj", "v_proj"], tmp_path, layers)


@ranks(4)
def test_stages_without_an_adapter_are_split_over_tp(rank: int, world: int, tmp_path: Path) -> None:
    train(small("llama", num_hidden_layers=LAYERS), 2, 2, 1, ["q_proj", "down_proj"], tmp_path, [3])


@ranks(2)
def test_adapters_of_no_layer_are_refused_on_all_ranks(rank: int, world: int) -> None:
    layout = plan_pipeline(LAYERS, 2)
    parallel_state.initialize_model_parallel(1, 2)
    stages = split_stages(small("llama", num_hidden_layers=LAYERS), layout)
    with pytest.raises(PlanError, match=r"layers_to_transform=\[7\] of the LoraConfig name no layer of any stage"):
        add_lora(stages, peft.LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[7]))
