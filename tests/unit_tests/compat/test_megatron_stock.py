"""Beside Megatron Core itself, where it is installed: the same losses, gradients, names and groups.

Without it these tests are skipped. What it takes of CUDA without asking is replaced, so that it computes on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import core.compat.megatron as mcore
from core.compat.megatron.faces import gpt, groups, microbatches
from core.compat.megatron.faces.configs import TransformerConfig
from tests.unit_tests.ranks import ranks

pytestmark = pytest.mark.nightly
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"share_embeddings_and_output_weights": True}),
    (
        dict(normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
             num_query_groups=2),
        {"position_embedding_type": "rope"},
    ),
    (dict(kv_channels=16), {"position_embedding_type": "rope", "rotary_base": 5000}),
]  # fmt: skip


def stock(path: str) -> Any:
    """A module of the real package; skips where there is none."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core{path}")


@ranks(1)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_losses_and_gradients_of_a_gpt_are_stocks(rank: int, world: int, case: int) -> None:
    warnings.simplefilter("ignore")
    theirs = stock(".models.gpt.gpt_model")
    shape, options = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            tracker = stock(".tensor_parallel.random").CudaRNGStatesTracker
            patch.setattr(tracker, "fork", lambda self, name=None: contextlib.nullcontext())
        stock(".parallel_state").initialize_model_parallel(1, 1)
        mcore.mpu.initialize_model_parallel(1, 1)
        common: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0)
        common |= {"attention_dropout": 0.0, "use_cpu_initialization": True, **shape}
        norm = shape.get("normalization")
        spec = stock(".models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(normalization=norm)
        config = stock(".transformer.transformer_config").TransformerConfig(**common)
        torch.manual_seed(0)
        reference = theirs.GPTModel(config, spec, 64, 16, **options)
        spec = gpt.get_gpt_layer_local_spec(normalization=norm)
        model = gpt.GPTModel(TransformerConfig(**common), spec, 64, 16, **options)
        weights = dict(reference.named_parameters())
        assert {name: p.shape for name, p in model.named_parameters()} == {name: p.shape for name, p in weights.items()}
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights[name])
        tokens, labels = torch.randint(64, (2, 16)), torch.randint(64, (2, 16))
        given = (tokens, torch.arange(16).expand(2, 16), torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1))
        losses, expected = model(*given, labels=labels), reference(*given, labels=labels)
        torch.testing.assert_close(losses, expected, atol=2e-6, rtol=0)
        torch.testing.assert_close(model(*given), reference(*given), atol=2e-6, rtol=0)
        losses.mean().backward()
        expected.mean().backward()
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad, weights[name].grad, atol=1e-7, rtol=1e-4)
        assert max(float(p.grad.abs().max()) for p in weights.values()) > 1e-3
        stock(".parallel_state").destroy_model_parallel()


def test_groups_of_ranks_are_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = stock(".parallel_state").RankGenerator
    for sizes in (
        dict(tp=2, ep=1, dp=2, pp=2, cp=2),
        dict(tp=2, ep=2, dp=2, pp=2, cp=1),
        dict(tp=1, ep=1, dp=3, pp=2, cp=1),
    ):
        for order in ("tp-cp-ep-dp-pp", "tp-cp-pp-ep-dp"):
            mine, other = (kind(**sizes, order=order, rank_offset=3) for kind in (groups.RankGenerator, theirs))
            for token in ("tp", "dp", "pp", "tp-dp", "tp-pp", "dp-pp"):
                assert mine.get_ranks(token) == other.get_ranks(token), (sizes, order, token)
    monkeypatch.setenv("WORLD_SIZE", "12")
    grids = [
        kind([2, 3, 2], ["tp", "cp", "dp"]) for kind in (stock(".hyper_comm_grid").HyperCommGrid, groups.HyperCommGrid)
    ]
    for dims in ("tp", "cp", "dp", ["tp", "dp"], ["cp", "dp"], ["tp", "cp", "dp"]):
        expected, found = (sorted(map(list, grid.get_rank_enum(dims))) for grid in grids)
        assert found == expected, dims
    assert not dist.is_initialized()


def test_microbatches_are_stocks() -> None:
    theirs = stock(".num_microbatches_calculator")
    for rampup in (None, [8, 8, 120], [4, 4, 50]):
        for module in (microbatches, theirs):
            module.destroy_num_microbatches_calculator()
            module.init_num_microbatches_calculator(1, rampup, 32, 2, 2, False)
        for consumed in range(0, 160, 7):
            for module in (microbatches, theirs):
                module.update_num_microbatches(consumed, consistency_check=False)
            assert microbatches.get_num_microbatches() == theirs.get_num_microbatches(), (rampup, consumed)
            assert microbatches.get_current_global_batch_size() == theirs.get_current_global_batch_size()
    for module in (microbatches, theirs):
        module.destroy_num_microbatches_calculator()
