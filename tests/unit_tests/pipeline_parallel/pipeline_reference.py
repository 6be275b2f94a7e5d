"""What the pipeline tests share: a GPT in stages, the whole GPT on one process, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core import parallel_state
from core.distributed import DistributedDataParallelConfig
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.pipeline_parallel import (
    PipelineLayout,
    PipelineRunner,
    build_gpt_stages,
    gpt_activations,
    gpt_forward_step,
    wrap_stages,
)
from core.tensor_parallel import draw_master, tensor_parallel_slice
from core.tensor_parallel.initialization import normal_init
from core.transformer import TransformerConfig
from tests.unit_tests.reference import whole_grads

VOCAB, SEQUENCE, BATCH = 13, 8, 2


def make_config(**changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = dict(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        ffn_hidden_size=12,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE + 3,
        params_dtype=torch.float64,
        init_method_std=0.3,
    )
    return TransformerConfig(**{**settings, **changes})


def microbatch(data_rank: int, number: int, weight: float = 1.0) -> dict[str, Tensor]:
    """Different tokens on every data rank and in every microbatch; some do not count, the others `weight` each."""
    generator = torch.Generator().manual_seed(1000 * data_rank + number + 3)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    mask = (torch.rand(BATCH, SEQUENCE, generator=generator) < 0.7).double() * weight
    return {"tokens": tokens, "labels": labels, "loss_mask": mask}


def full_name(name: str, layers: Sequence[int], *, tied: bool) -> str:
    """The name in the whole model of a parameter of a stage that holds `layers`."""
    if name == "output_layer.weight" and tied:
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(layers[int(parts[2])])
    return ".".join(parts)


def perturb(stage: GPTModel, layers: Sequence[int], groups: ProcessGroups) -> None:
    """Biases and norms that are not the zeros and ones they start from."""
    size, rank = groups.size("tp"), groups.rank("tp")
    for name, param in stage.named_parameters():
        if param.dim() == 1:
            split = getattr(param, "tensor_model_parallel", False)
            full = full_name(name, layers, tied=True)
            noise = draw_master((param.numel() * (size if split else 1),), normal_init(0.2), full, seed=5)
            if split:
                noise = tensor_parallel_slice(noise, 0, size, rank, param.partition_stride)
            param.data += noise


def build_whole(**changes: Any) -> GPTModel:
    """The model on one process."""
    model = GPTModel(make_config(**changes), ProcessGroups())
    perturb(model, range(model.config.num_layers), ProcessGroups())
    return model


def whole_step(
    model: GPTModel,
    data_ranks: int,
    count: int,
    *,
    per_token: bool = False,
    scale: float = 1.0,
    token_weight: float = 1.0,
) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients by name and the loss of each data rank, by a plain loop over everything."""
    model.zero_grad(set_to_none=True)
    places = [(data_rank, number) for data_rank in range(data_ranks) for number in range(count)]
    all_tokens = sum(float(microbatch(*place, token_weight)["loss_mask"].sum()) for place in places)
    losses = []
    for data_rank in range(data_ranks):
        total, tokens = 0.0, 0.0
        for number in range(count):
            batch = microbatch(data_rank, number, token_weight)
            value = (model(batch["tokens"], labels=batch["labels"]) * batch["loss_mask"]).sum()
            valid = batch["loss_mask"].sum()
            if per_token:
                total, tokens = total + value.item(), tokens + valid.item()
                (value * scale / all_tokens).backward()
            else:
                total, tokens = total + (value / valid).item(), tokens + 1
                (value * scale / valid / count / data_ranks).backward()
        losses.append(total / tokens)
    grads = {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    return grads, losses


def start_pipeline(
    layout: PipelineLayout,
    schedule: str,
    *,
    tp: int = 1,
    groups: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    prepare: Callable[[list[GPTModel]], None] | None = None,
    activations: Any = None,
) -> PipelineRunner:
    """Groups, stages, wrappers and runner, as a user writes them."""
    virtual = layout.chunks if layout.chunks > 1 else None
    sizes = dict(pipeline_model_parallel_size=layout.pp, tensor_model_parallel_size=tp)
    parallel_state.initialize_model_parallel(
        **sizes,
        virtual_pipeline_model_parallel_size=virtual,
        get_embedding_ranks=layout.embedding_ranks,
        **(groups or {}),
    )
    model_config = make_config(
        **{**sizes, "num_layers": layout.num_layers, "virtual_pipeline_model_parallel_size": virtual, **(config or {})}
    )
    stages = build_gpt_stages(model_config, layout)
    held = parallel_state.get_process_groups()
    for stage, number in zip(stages, layout.stages_of(held.rank("pp")), strict=True):
        perturb(stage, layout.stage(number).layer_numbers, held)
    if prepare is not None:
        prepare(stages)
    chunks = wrap_stages(model_config, DistributedDataParallelConfig(**(ddp or {})), stages)
    shape = gpt_activations(model_config, BATCH, SEQUENCE)
    return PipelineRunner(chunks, layout, gpt_forward_step, activations or shape, schedule=schedule)


def assert_gradients(
    runner: PipelineRunner, expected: dict[str, Tensor], *, rtol: float = 1e-10, wrong: Sequence[str] = ()
) -> None:
    """Every gradient of every chunk is its slice of the whole model's, on every rank; all ranks raise, or none.

    wrong: what this rank has found wrong already.
    """
    groups = parallel_state.get_process_groups()
    tied = runner.config.share_embeddings_and_output_weights
    found, compared = list(wrong), 0
    for chunk, number in zip(runner.chunks, runner.stage_numbers, strict=True):
        params = dict(chunk.module.named_parameters())
        for name, grad in whole_grads(chunk).items():
            full = full_name(name, runner.layout.stage(number).layer_numbers, tied=tied)
            want = expected[full]
            if getattr(params[name], "tensor_model_parallel", False):
                split = params[name].partition_dim, groups.size("tp"), groups.rank("tp"), params[name].partition_stride
                want = tensor_parallel_slice(want, *split)
            error, scale = (grad - want).norm().item(), want.norm().item()
            if not error <= rtol * max(scale, 1e-3):
                ratio = grad.norm().item() / scale if scale else float("nan")
                found.append(f"{full}: off by {error:.3g} of {scale:.3g}, ratio {ratio:.6g}")
            compared += 1
    everywhere: list[tuple[list[str], int]] = [([], 0)] * dist.get_world_size()
    dist.all_gather_object(everywhere, (found, compared))
    for rank, (problems, _) in enumerate(everywhere):
        assert not problems, f"rank {rank}: {problems}"
    compared = sum(count for _, count in everywhere)
    assert compared >= len(expected) * groups.size("tp") * groups.size("dp_cp"), f"only {compared} compared"


def zero_buffers(runner: PipelineRunner) -> None:
    for chunk in runner.chunks:
        chunk.zero_grad_buffer()


def check_steps(
    runner: PipelineRunner,
    whole: GPTModel,
    count: int,
    *,
    steps: int = 2,
    per_token: bool = False,
    scale: float = 1.0,
    token_weight: float = 1.0,
    rtol: float = 1e-10,
    clear: Callable[[PipelineRunner], None] = zero_buffers,
) -> None:
    """Steps of `count` microbatches: loss and every gradient are those of one process."""
    groups = parallel_state.get_process_groups()
    data_rank, data_ranks = groups.rank("dp_cp"), groups.size("dp_cp")
    options: dict[str, Any] = {"per_token": per_token, "scale": scale, "token_weight": token_weight}
    expected, losses = whole_step(whole, data_ranks, count, **options)
    assert all(want.norm() > 1e-6 for want in expected.values()), "the reference is zero"
    for _ in range(steps):
        clear(runner)
        outcome = runner.step([microbatch(data_rank, number, token_weight) for number in range(count)])
        want = losses[data_rank]
        same = abs(outcome.loss.item() - want) <= max(rtol / 100, 1e-12) * abs(want)
        wrong = [] if same else [f"loss {outcome.loss.item()} is not {want}"]
        assert_gradients(runner, expected, rtol=rtol, wrong=wrong)
