"""Our own GPT under the oracle: small, every kind of parameter, every gradient far from zero."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.checkpoint.global_slices import global_slices
from core.context_parallel import split_sequence
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import size_options
from core.models import GPTModel
from core.pipeline_parallel import (
    PipelineRunner,
    build_gpt_stages,
    gpt_activations,
    gpt_forward_step,
    wrap_stages,
)
from core.tensor_parallel import draw_master
from core.tensor_parallel.initialization import normal_init
from core.transformer import TransformerConfig
from core.verify.check import check_gradients
from core.verify.gathered import slice_of
from core.verify.job import Job, PipelineJob, PlainJob
from core.verify.report import GradientReport
from tests.layouts.layouts import EXPERT_FFN, EXPERTS, FFN, HEADS, QUERY_GROUPS, SEQUENCE, Layout
from tests.layouts.tagged import add_tagged

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
VOCABULARY = 13  # words divide over no number of ranks
FEWEST_SAMPLES = 24
BIAS_RATE = 0.05  # large, so that a bias that moved by other counts chooses other experts in the next step
MODELS: dict[str, dict[str, Any]] = {
    "classic": {},
    "modern": {
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "num_query_groups": QUERY_GROUPS,
        "qk_layernorm": True,
        "add_bias_linear": False,
    },
    "tagged": {},
}


def check_gpt(layout: Layout, dtype: str = "fp64", *, steps: int = 2) -> GradientReport:
    """The report on one layout. Collective over a started default process group of `layout.world` ranks."""
    with groups_of(layout) as groups:
        return check_gradients(
            lambda: build_model(layout, DTYPES[dtype], groups),
            token_sum if layout.per_token else token_mean,
            global_batch(layout),
            reference_fn=lambda: build_whole(layout),
            dtype=DTYPES[dtype],
            microbatches=layout.microbatches,
            steps=steps,
            split_fn=lambda part: local_part(part, groups),
            pg_collection=groups,
            title=f"{dtype} {layout}",
        )


def job_of(layout: Layout, dtype: str, groups: ProcessGroups, ddp_config: DistributedDataParallelConfig) -> Job:
    """The layout's job, for training."""
    model = build_model(layout, DTYPES[dtype], groups, ddp_config)
    if isinstance(model, PipelineRunner):
        return PipelineJob(model, layout.microbatches, lambda part: local_part(part, groups))
    return PlainJob(
        model,
        token_sum if layout.per_token else token_mean,
        layout.microbatches,
        lambda part: local_part(part, groups),
    )


@contextmanager
def groups_of(layout: Layout) -> Iterator[ProcessGroups]:
    """The layout's process groups for as long as the block runs. ValueError, before any, for a layout that is none."""
    if layout.problem is not None:
        raise ValueError(f"layout [{layout}] cannot run: {layout.problem}")
    if layout.world != dist.get_world_size():
        raise ValueError(f"layout [{layout}] is of {layout.world} ranks, and {dist.get_world_size()} have started")
    ends = layout.pipeline.embedding_ranks if layout.pipeline is not None else None
    parallel_state.initialize_model_parallel(
        **size_options(layout),
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        num_distributed_optimizer_instances=layout.instances,
        order=layout.order,
        get_embedding_ranks=ends,
        get_position_embedding_ranks=ends if layout.model == "tagged" else None,
    )
    try:
        yield parallel_state.get_process_groups()
    finally:
        parallel_state.destroy_model_parallel()


# --- the model --------------------------------------------------------------------------------------------------------


def model_config(layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """The model of a layout."""
    settings: dict[str, Any] = {
        "num_layers": layout.num_layers,
        "hidden_size": 32,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN,
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE,
        "params_dtype": dtype,
        "init_method_std": 0.18,  # about 1 / sqrt(hidden): gradients are of one size from the first layer to the last
        "share_embeddings_and_output_weights": layout.shares_embedding,
        "calculate_per_token_loss": layout.per_token,
    }
    if layout.experts is not None:
        settings |= {
            "num_moe_experts": EXPERTS,
            "moe_layer_freq": 2,
            "moe_ffn_hidden_size": EXPERT_FFN,
            "moe_token_dispatcher_type": layout.experts,
            "moe_router_load_balancing_type": layout.aux or "none",
            "moe_aux_loss_coeff": 0.2 if layout.aux else 0.0,
            "moe_z_loss_coeff": 0.1 if layout.aux else None,
            "moe_router_score_function": "sigmoid" if layout.expert_bias else "softmax",
            "moe_router_enable_expert_bias": layout.expert_bias,
            "moe_router_bias_update_rate": BIAS_RATE,
            "moe_shared_expert_intermediate_size": EXPERT_FFN if layout.shared else None,
            "moe_shared_expert_gate": layout.shared,
        }
    return TransformerConfig(**{**settings, **MODELS[layout.model], **_splitting(layout)})


def _splitting(layout: Layout) -> dict[str, Any]:
    """How a config says what a layout splits, and what it does otherwise than one process would."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "cp_comm_type": layout.cp_comm or "p2p",
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "gradient_accumulation_fusion": layout.fusion,
        "recompute_granularity": "full" if layout.recompute else None,
    }


def whole_config(layout: Layout, dtype: torch.dtype = torch.float64) -> TransformerConfig:
    """The same model on one process."""
    return dataclasses.replace(model_config(layout, dtype), **_splitting(Layout()))


def wrapper_config(layout: Layout, *, check_replicas: bool = False) -> DistributedDataParallelConfig:
    """How a layout keeps and reduces gradients."""
    return DistributedDataParallelConfig(
        data_parallel_sharding_strategy=layout.strategy,
        overlap_grad_reduce=layout.overlap,
        bucket_size=layout.bucket_size,
        num_distributed_optimizer_instances=layout.instances,
        average_in_collective=layout.average,
        deterministic_reduction=layout.deterministic,
        scale_in_optimizer=layout.scale_in_optimizer,
        keep_params_whole=layout.whole_shards,
        reduce_microbatches="every" if layout.every_microbatch else "last",
        overlap_param_gather=layout.overlap_gather,
        check_replicas=check_replicas,
    )


def build_model(
    layout: Layout, dtype: torch.dtype, groups: ProcessGroups, ddp_config: DistributedDataParallelConfig | None = None
) -> DistributedDataParallel | PipelineRunner:
    """This rank's part of the model, wrapped; stages come with the runner of their schedule."""
    config = model_config(layout, dtype)
    ddp_config = ddp_config or wrapper_config(layout)
    pipeline = layout.pipeline
    if pipeline is None or layout.schedule is None:
        model = GPTModel(config, groups)
        prepare(model, layout, groups)
        return DistributedDataParallel(config, ddp_config, model, pg_collection=groups)
    stages = build_gpt_stages(config, pipeline, groups)
    for stage in stages:
        prepare(stage, layout, groups)
    chunks = wrap_stages(config, ddp_config, stages, groups)
    activations = gpt_activations(config, samples_of(layout) // layout.dp // layout.microbatches, SEQUENCE)
    return PipelineRunner(
        chunks, pipeline, gpt_forward_step, activations, schedule=layout.schedule, pg_collection=groups
    )


def build_whole(layout: Layout) -> GPTModel:
    """The whole model on this process, in fp64."""
    model = GPTModel(whole_config(layout), ProcessGroups())
    prepare(model, layout, ProcessGroups())
    return model


def prepare(model: GPTModel, layout: Layout, groups: ProcessGroups) -> None:
    """Norms and biases that are not the ones and zeros they start from; and what a tagged model has more."""
    if layout.model == "tagged":
        add_tagged(model, groups)
    params = dict(model.named_parameters())
    for name, place in global_slices(model, groups).items():
        if params[name].dim() == 1 or name.endswith(("bias1", "bias2")):  # those of experts are stacked
            noise = draw_master(place.shape, normal_init(0.2), place.name, seed=5)
            with torch.no_grad():
                params[name] += slice_of(place, noise).to(params[name].device)


# --- the batch --------------------------------------------------------------------------------------------------------


def samples_of(layout: Layout) -> int:
    """The global batch: as many for each microbatch of each data rank, two at least."""
    pieces = layout.dp * layout.microbatches
    return pieces * max(2, -(-FEWEST_SAMPLES // pieces))


def global_batch(layout: Layout, step: int = 0) -> dict[str, Tensor]:
    """tokens, labels, and for a loss per token loss_mask, each [samples, SEQUENCE].

    The first data rank has no token that counts (of one data rank, the first samples), the others have few to many.
    """
    samples = samples_of(layout)
    generator = torch.Generator().manual_seed(11 + step)
    tokens = torch.randint(0, VOCABULARY, (samples, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCABULARY, (samples, SEQUENCE), generator=generator)
    kept = torch.linspace(0.0, 1.0, samples).unsqueeze(1)
    mask = torch.rand(samples, SEQUENCE, generator=generator) < kept
    mask[: samples // max(4, layout.dp)] = False
    return {"tokens": tokens, "labels": labels, **({"loss_mask": mask} if layout.per_token else {})}


def local_part(part: dict[str, Tensor], groups: ProcessGroups) -> dict[str, Tensor]:
    """What this context-parallel rank holds of a microbatch."""
    size, rank = groups.size("cp"), groups.rank("cp")
    return {name: split_sequence(tensor, 1, size, rank) for name, tensor in part.items()}


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    """The mean loss of all tokens."""
    loss: Tensor = model(batch["tokens"], batch["labels"]).mean()
    return loss


def token_sum(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """(the summed loss of the tokens that count, their number)."""
    mask = batch["loss_mask"]
    return (model(batch["tokens"], batch["labels"]) * mask).sum(), mask.sum()
