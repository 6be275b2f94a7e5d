"""The GPT: in every layout and variant its loss and every gradient are those of one process, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.distributed.gradient_contract import read_contracts
from core.models import GPTModel
from core.process_groups import ProcessGroups
from core.tensor_parallel import draw_master, tensor_parallel_slice
from core.tensor_parallel.initialization import normal_init
from core.transformer import TransformerConfig
from tests.unit_tests.ranks import ranks

VOCAB, SEQUENCE, BATCH = 13, 8, 2  # 13 divides by no tensor-parallel size: the vocabulary is padded

VARIANTS: dict[str, dict[str, Any]] = {
    "learned positions, GELU, LayerNorm, tied": {},
    "rotary, SwiGLU, RMSNorm, untied, no bias": {
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "share_embeddings_and_output_weights": False,
        "add_bias_linear": False,
    },
    # Rotary, because without it a key's bias shifts all scores of a row alike and has no gradient at all.
    "grouped queries, q/k norm, rotary": {
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "qk_layernorm": True,
        "position_embedding_type": "rope",
    },
    "full recompute, fusion": {"recompute_granularity": "full", "gradient_accumulation_fusion": True},
    "selective recompute, rotary, SwiGLU with bias, RMS q/k norm, fusion, untied": {
        "recompute_granularity": "selective",
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gradient_accumulation_fusion": True,
        "share_embeddings_and_output_weights": False,
    },
}


def make_config(tp: int = 1, **changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=24,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE + 3,
        params_dtype=torch.float64,
        init_method_std=0.3,
        tensor_model_parallel_size=tp,
    )
    return TransformerConfig(**{**settings, **changes})


def make_model(config: TransformerConfig, groups: ProcessGroups) -> GPTModel:
    """A model whose biases and norms are not the zeros and ones they start from."""
    model = GPTModel(config, groups)
    size, rank = groups.size("tp"), groups.rank("tp")
    for name, param in model.named_parameters():
        if param.dim() == 1:
            split = getattr(param, "tensor_model_parallel", False)
            noise = draw_master((param.numel() * (size if split else 1),), normal_init(0.2), name, seed=5)
            if split:
                noise = tensor_parallel_slice(noise, 0, size, rank, param.partition_stride)
            param.data += noise
    return model


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    weights = torch.rand(BATCH, SEQUENCE, generator=generator, dtype=torch.float64)
    return tokens, labels, weights


def run_backward(model: GPTModel, microbatches: int = 2) -> Tensor:
    """Loss of each token; gradients accumulate over the microbatches."""
    tokens, labels, weights = make_batch()
    for _ in range(microbatches):
        loss = model(tokens, labels)
        (loss * weights).sum().backward()
    return loss.detach()


def keep_main_grads(model: nn.Module) -> None:
    """What the wrapper does: each gradient is a buffer that .grad and .main_grad both name."""
    for param in model.parameters():
        param.grad = param.main_grad = torch.zeros_like(param)


def assert_close(name: str, got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape, name
    error, scale = (got - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 1e-10 * max(scale, 1e-3), f"{name}: off by {error:.3g}, largest value {scale:.3g}"


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_every_gradient_are_those_of_one_process(
    rank: int, world: int, sequence_parallel: bool, variant: str
) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    groups = parallel_state.get_process_groups()
    reference = make_model(
        make_config(**{**VARIANTS[variant], "gradient_accumulation_fusion": False, "recompute_granularity": None}),
        ProcessGroups(),
    )
    config = make_config(world, sequence_parallel=sequence_parallel, **VARIANTS[variant])
    model = make_model(config, groups)
    keep_main_grads(model)

    expected_loss, loss = run_backward(reference), run_backward(model)

    assert_close("loss", loss, expected_loss)
    contracts = read_contracts(list(model.named_parameters()), model, groups, config)
    expected = dict(reference.named_parameters())
    assert contracts.keys() == expected.keys()
    for name, param in model.named_parameters():
        contract, grad, whole = contracts[name], param.grad.clone(), expected[name].grad
        assert param.grad is param.main_grad, name
        if contract.partial_over:
            assert contract.partial_over == ("tp",), name
            dist.all_reduce(grad, group=groups.tp)
        if contract.sharded_over:
            whole = tensor_parallel_slice(whole, param.partition_dim, world, rank, param.partition_stride)
        assert_close(name, grad, whole)
        assert expected[name].grad.abs().max() > 1e-4, f"{name}: the reference itself is zero"
    fused = [name for name, param in model.named_parameters() if getattr(param, "grad_added_to_main_grad", False)]
    assert bool(fused) == config.gradient_accumulation_fusion
