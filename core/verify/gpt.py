"""Our own GPT under the oracle: small, every kind of parameter, every gradient far from zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from core import parallel_state
from core.distributed import DistributedDataParallelConfig
from core.models import GPTModel
from core.process_groups import ProcessGroups
from core.tensor_parallel import draw_master, tensor_parallel_slice
from core.tensor_parallel.initialization import normal_init
from core.transformer import TransformerConfig
from core.verify.check import check_gradients
from core.verify.layouts import Layout
from core.verify.report import GradientReport

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
SAMPLES, SEQUENCE, VOCABULARY = 144, 8, 13  # samples divide into 9 and 16 parts; 13 words into no number of ranks
MODELS: dict[str, dict[str, Any]] = {
    "classic": {},
    "modern": {
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "num_query_groups": 4,
        "qk_layernorm": True,
        "share_embeddings_and_output_weights": False,
        "add_bias_linear": False,
    },
}


def check_gpt(layout: Layout, dtype: str = "fp64") -> GradientReport:
    """The report on one layout. Collective over a started default process group of `layout.world` ranks."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, num_distributed_optimizer_instances=layout.instances
    )
    try:
        groups = parallel_state.get_process_groups()
        config = model_config(layout, DTYPES[dtype])
        plain = model_config(Layout(model=layout.model, per_token=layout.per_token), torch.float64)
        return check_gradients(
            lambda: build(config, groups),
            token_sum if layout.per_token else token_mean,
            global_batch(),
            reference_fn=lambda: build(plain, ProcessGroups()),
            config=config,
            ddp_config=wrapper_config(layout),
            dtype=DTYPES[dtype],
            microbatches=layout.microbatches,
            pg_collection=groups,
            title=f"{dtype} {layout}",
        )
    finally:
        parallel_state.destroy_model_parallel()


def model_config(layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """The model of a layout."""
    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "ffn_hidden_size": 48,
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE,
        "params_dtype": dtype,
        "init_method_std": 0.3,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sp,
        "gradient_accumulation_fusion": layout.fusion,
        "recompute_granularity": "full" if layout.recompute else None,
        "calculate_per_token_loss": layout.per_token,
    }
    return TransformerConfig(**{**settings, **MODELS[layout.model]})


def wrapper_config(layout: Layout) -> DistributedDataParallelConfig:
    """How a layout keeps and reduces gradients."""
    return DistributedDataParallelConfig(
        data_parallel_sharding_strategy=layout.strategy,
        overlap_grad_reduce=layout.overlap,
        bucket_size=layout.bucket_size,
        num_distributed_optimizer_instances=layout.instances,
        average_in_collective=layout.average,
        deterministic_reduction=layout.deterministic,
    )


def build(config: TransformerConfig, groups: ProcessGroups) -> GPTModel:
    """The GPT, with norms and biases that are not the ones and zeros they start from."""
    model = GPTModel(config, groups)
    size, rank = groups.size("tp"), groups.rank("tp")
    for name, param in model.named_parameters():
        if param.dim() == 1:
            split = bool(getattr(param, "tensor_model_parallel", False))
            noise = draw_master((param.numel() * (size if split else 1),), normal_init(0.2), name, seed=5)
            if split:
                noise = tensor_parallel_slice(noise, 0, size, rank, getattr(param, "partition_stride", 1))
            with torch.no_grad():
                param += noise
    return model


def global_batch() -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, labels, mask), each [SAMPLES, SEQUENCE]; the first samples have no token that counts, others few."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE), generator=generator)
    kept = torch.linspace(0.0, 1.0, SAMPLES).unsqueeze(1)
    mask = torch.rand(SAMPLES, SEQUENCE, generator=generator) < kept
    mask[: SAMPLES // 8] = False
    return tokens, labels, mask


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    """The mean loss of all tokens."""
    tokens, labels, _ = batch
    loss: Tensor = model(tokens, labels).mean()
    return loss


def token_sum(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """(the summed loss of the tokens that count, their number)."""
    tokens, labels, mask = batch
    return (model(tokens, labels) * mask).sum(), mask.sum()
