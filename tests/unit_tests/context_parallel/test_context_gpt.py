"""A GPT whose sequence is split: its loss and every gradient are those of one process on the whole batch, in fp64."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core import parallel_state
from core.context_parallel import get_batch_on_this_cp_rank, join_sequence
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.pipeline_parallel import (
    PipelineRunner,
    build_gpt_stages,
    gpt_activations,
    gpt_forward_step,
    plan_pipeline,
    wrap_stages,
)
from core.tensor_parallel import tensor_parallel_slice
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT, run_page
from tests.unit_tests.transformer.test_gpt import VOCAB, assert_close, make_config, make_model

BATCH, MICROBATCHES = 2, 2
ROTARY: dict[str, Any] = {
    "position_embedding_type": "rope",
    "num_query_groups": 4,
    "num_attention_heads": 8,
    "qk_layernorm": True,
    "share_embeddings_and_output_weights": False,
}
LAYOUTS = {
    "cp2": {"cp": 2},
    "cp3": {"cp": 3, "hidden_size": 24, "num_attention_heads": 6, "num_query_groups": 3},
    "cp4, rotary": {"cp": 4, **ROTARY},
    "cp2 tp2 sp dp2, rotary": {"cp": 2, "tp": 2, "sequence_parallel": True, **ROTARY},
    "cp8": {"cp": 8, "hidden_size": 32, "num_attention_heads": 16, "num_query_groups": 8},
    "cp2 dp2": {"cp": 2, "recompute_granularity": "full"},
    "cp2 tp2 sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp2 tp2 sp, rotary": {"cp": 2, "tp": 2, "sequence_parallel": True, "recompute_granularity": "selective", **ROTARY},
}


def make_batch(length: int, replica: int, microbatch: int, packed: bool) -> dict[str, Tensor]:
    """The tokens of one data-parallel replica; how many of them count differs between all of its chunks."""
    generator = torch.Generator().manual_seed(100 * replica + microbatch)
    tokens, labels = torch.randint(0, VOCAB, (2, BATCH, length), generator=generator)
    mask = torch.rand(BATCH, length, generator=generator) < torch.linspace(0.2, 1.0, length)
    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask}
    if packed:
        starts = torch.rand(BATCH, length, generator=generator) < 0.25
        starts[:, 0] = True
        place = torch.arange(length).expand(BATCH, length)
        batch["document_ids"] = starts.cumsum(1)
        batch["position_ids"] = place - torch.where(starts, place, 0).cummax(1).values
    return batch


def losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Loss of each token that counts, zero for the others."""
    places = {name: batch.get(name) for name in ("position_ids", "document_ids")}
    return model(batch["tokens"], batch["labels"], **places) * batch["loss_mask"]


def document_losses(model: GPTModel, batch: dict[str, Tensor]) -> Tensor:
    """The same, computed without any mask: each packed document goes through the model by itself."""
    if "document_ids" not in batch:
        return losses(model, batch)
    rows = []
    for row in range(BATCH):
        lengths = batch["document_ids"][row].unique_consecutive(return_counts=True)[1].tolist()
        pieces = zip(batch["tokens"][row].split(lengths), batch["labels"][row].split(lengths), strict=True)
        rows.append(torch.cat([model(tokens[None], labels[None])[0] for tokens, labels in pieces]))
    return torch.stack(rows) * batch["loss_mask"]


def check_against_one_process(layout: str, packed: bool, comm_type: str) -> None:
    settings = dict(LAYOUTS[layout])
    cp, tp = settings.pop("cp"), settings.pop("tp", 1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    groups = parallel_state.get_process_groups()
    length = 4 * cp
    common = {"max_sequence_length": length, "calculate_per_token_loss": True, **settings}
    alone = {**common, "sequence_parallel": False, "recompute_granularity": None}
    reference = make_model(make_config(**alone), ProcessGroups())
    config = make_config(tp, context_parallel_size=cp, cp_comm_type=comm_type, **common)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(bucket_size=500), make_model(config, groups))

    total = 0
    for replica in range(groups.size("dp")):
        for microbatch in range(MICROBATCHES):
            batch = make_batch(length, replica, microbatch, packed)
            whole = document_losses(reference, batch)
            whole.sum().backward()
            total += int(batch["loss_mask"].sum())
            if replica == groups.rank("dp"):
                expected = whole.detach()  # of the last microbatch
    for param in reference.parameters():
        param.grad /= total

    mine = torch.zeros((), dtype=torch.int64)
    for microbatch in range(MICROBATCHES):
        batch = get_batch_on_this_cp_rank(make_batch(length, groups.rank("dp"), microbatch, packed))
        loss = losses(ddp, batch)
        if microbatch < MICROBATCHES - 1:
            with ddp.no_sync():
                loss.sum().backward()
        else:
            loss.sum().backward()
        mine += batch["loss_mask"].sum()
    finalize_model_grads([ddp], mine)

    parts = [torch.empty_like(loss) for _ in range(cp)]
    dist.all_gather(parts, loss.detach(), group=groups.cp)
    assert_close("loss", join_sequence(torch.cat(parts, 1), 1, cp), expected)
    wanted = dict(reference.named_parameters())
    for name, param in ddp.module.named_parameters():
        whole = wanted[name].grad
        if getattr(param, "tensor_model_parallel", False):
            whole = tensor_parallel_slice(whole, param.partition_dim, tp, groups.rank("tp"), param.partition_stride)
        assert_close(name, param.main_grad, whole)
        assert wanted[name].grad.abs().max() > 1e-6, f"{name}: the reference itself is zero"


@ranks(2)
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.in_suite()
def test_two_context_ranks_are_one_process(rank: int, world: int, comm_type: str, packed: bool) -> None:
    check_against_one_process("cp2", packed, comm_type)


@ranks(3)
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
def test_three_context_ranks_are_one_process(rank: int, world: int, comm_type: str) -> None:
    check_against_one_process("cp3", True, comm_type)


@ranks(4)
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("layout", ["cp4, rotary", "cp2 dp2", "cp2 tp2 sp", "cp2 tp2 sp, rotary"])
@pytest.mark.in_suite()
def test_context_ranks_next_to_other_axes_are_one_process(rank: int, world: int, layout: str, comm_type: str) -> None:
    check_against_one_process(layout, layout in ("cp2 dp2", "cp2 tp2 sp, rotary"), comm_type)


@pytest.mark.nightly
@ranks(8)
@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("layout", ["cp2 tp2 sp dp2, rotary", "cp8"])
def test_eight_ranks_are_one_process(rank: int, world: int, layout: str, packed: bool, comm_type: str) -> None:
    check_against_one_process(layout, packed, comm_type)


@ranks(2)
def test_without_per_token_loss_gradients_are_the_mean_over_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    reference = make_model(make_config(), ProcessGroups())
    config = make_config(context_parallel_size=world)
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(), make_model(config, parallel_state.get_process_groups())
    )
    whole = make_batch(8, 0, 0, packed=False)
    reference(whole["tokens"], whole["labels"]).mean().backward()

    batch = get_batch_on_this_cp_rank(whole)
    ddp(batch["tokens"], batch["labels"]).mean().backward()
    finalize_model_grads([ddp])

    for (name, param), want in zip(ddp.module.named_parameters(), reference.parameters(), strict=True):
        assert_close(name, param.main_grad, want.grad)


@ranks(4)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("comm_type", ["p2p", "a2a"])
@pytest.mark.in_suite()
def test_pipeline_stages_split_the_sequence_too(rank: int, world: int, comm_type: str, packed: bool) -> None:
    layout = plan_pipeline(num_layers=2, pp=2, schedule="1F1B", microbatches=2)
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, context_parallel_size=2, get_embedding_ranks=layout.embedding_ranks
    )
    reference = make_model(make_config(), ProcessGroups())
    config = make_config(
        pipeline_model_parallel_size=2, context_parallel_size=2, calculate_per_token_loss=True, cp_comm_type=comm_type
    )
    stages = build_gpt_stages(config, layout)
    weights = dict(reference.named_parameters())
    (stage,) = stages
    own = {name: stage_name(name, stage) for name, _ in stage.named_parameters()}
    with torch.no_grad():
        for name, param in stage.named_parameters():
            param.copy_(weights[own[name]])
    chunks = wrap_stages(config, DistributedDataParallelConfig(), stages)
    runner = PipelineRunner(chunks, layout, gpt_forward_step, gpt_activations(config, BATCH, 8), schedule="1F1B")
    batches = [make_batch(8, 0, number, packed=packed) for number in range(2)]
    total = sum(batch["loss_mask"].sum() for batch in batches)
    for batch in batches:
        losses(reference, batch).sum().backward()

    runner.step([get_batch_on_this_cp_rank(batch) for batch in batches])

    for name, param in stage.named_parameters():
        assert_close(name, param.main_grad, weights[own[name]].grad / total)


def stage_name(name: str, stage: GPTModel) -> str:
    """What the whole model calls a stage's parameter: its layers count on, its head's weight is the tied embedding."""
    if name == "output_layer.weight":
        return "embedding.word_embeddings.weight"
    return name if stage.pre_process else name.replace("decoder.layers.0.", "decoder.layers.1.")


@ranks(4)
def test_the_page_on_long_sequences_does_what_it_says(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        names = run_page(ROOT / "docs" / "source" / "context.md", monkeypatch)
    reference = GPTModel(dataclasses.replace(names["config"], context_parallel_size=1), ProcessGroups())
    total = 0
    for replica in range(2):
        with mock.patch.object(parallel_state, "get_data_parallel_rank", lambda replica=replica: replica):
            whole = names["read_batch"]()
        loss = reference(whole["tokens"], whole["labels"], document_ids=whole["document_ids"])
        (loss * whole["loss_mask"]).sum().backward()
        total += whole["loss_mask"].sum()
    for ours, want in zip(names["model"].module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.main_grad, want.grad / total, rtol=1e-4, atol=1e-7)
    assert reference.embedding.word_embeddings.weight.grad.abs().max() / total > 1e-4
