"""Beside Megatron Core itself, where it is installed: the same losses, gradients, names and groups.

Without it these tests are skipped. What it takes of CUDA without asking is replaced, so that it computes on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import core.compat.megatron as mcore
from core.compat.megatron.faces import gpt, microbatches, specs
from core.compat.megatron.faces.configs import TransformerConfig
from core.hyper_comm_grid import HyperCommGrid, RankGenerator
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


@contextlib.contextmanager
def on_this_device() -> Iterator[None]:
    """Stock's modules on the CPU where there is no GPU; its groups are destroyed at the end."""
    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            tracker = stock(".tensor_parallel.random").CudaRNGStatesTracker
            patch.setattr(tracker, "fork", lambda self, name=None: contextlib.nullcontext())
        yield
        stock(".parallel_state").destroy_model_parallel()


def stocks_gpt(options: dict[str, Any], **shape: Any) -> tuple[Any, Any]:
    """(its configuration, its model), with the weights of one seed."""
    common: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0)
    common |= {"attention_dropout": 0.0, "use_cpu_initialization": True, **shape}
    spec = stock(".models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(normalization=shape.get("normalization"))
    config = stock(".transformer.transformer_config").TransformerConfig(**common)
    torch.manual_seed(0)
    return common, stock(".models.gpt.gpt_model").GPTModel(config, spec, 64, 16, **options)


@ranks(1)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_losses_and_gradients_of_a_gpt_are_stocks(rank: int, world: int, case: int) -> None:
    shape, options = CASES[case]
    with on_this_device():
        stock(".parallel_state").initialize_model_parallel(1, 1)
        mcore.mpu.initialize_model_parallel(1, 1)
        common, reference = stocks_gpt(options, **shape)
        spec = specs.get_gpt_layer_local_spec(normalization=shape.get("normalization"))
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


def batch_of(step: int, part: int) -> tuple[torch.Tensor, ...]:
    """(tokens, positions, causal mask, labels) of one sample [1, 16]."""
    words = torch.randint(64, (1, 17), generator=torch.Generator().manual_seed(10 * step + part))
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    return words[:, :-1], torch.arange(16).unsqueeze(0), mask, words[:, 1:]


@ranks(2)
@pytest.mark.parametrize(("tp", "sharded"), [(1, False), (1, True), (2, False), (2, True)])
def test_stocks_own_gpt_trains_in_our_wrapper(rank: int, world: int, tp: int, sharded: bool) -> None:
    with on_this_device():
        stock(".parallel_state").initialize_model_parallel(tp, 1)
        mcore.mpu.initialize_model_parallel(tp, 1)
        options = {"share_embeddings_and_output_weights": True}
        _, module = stocks_gpt(options, tensor_model_parallel_size=tp)
        config = module.config
        config.finalize_model_grads_func = mcore.distributed.finalize_model_grads
        ddp_config = mcore.distributed.DistributedDataParallelConfig(overlap_grad_reduce=True)
        ddp_config.use_distributed_optimizer = sharded
        model = mcore.DistributedDataParallel(config, ddp_config, module)
        settings = mcore.optimizer.OptimizerConfig(
            optimizer="sgd", lr=0.5, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.5
        )
        settings.use_distributed_optimizer = sharded
        optimizer = mcore.optimizer.get_megatron_optimizer(settings, [model])

        def forward_step(data_iterator: Any, chunk: Any) -> Any:
            *given, labels = next(data_iterator)
            return chunk(*given, labels=labels), lambda losses: (losses.mean(), {"lm loss": losses.mean().detach()})

        found, parts = [], 2 // tp
        for step in range(5):
            optimizer.zero_grad()
            mine = range(2) if tp == 2 else range(rank, rank + 1)
            reports = mcore.pipeline_parallel.get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iter([batch_of(step, part) for part in mine]),
                model=[model], num_microbatches=len(mine), seq_length=16, micro_batch_size=1,
            )  # fmt: skip
            optimizer.step()
            total = torch.stack([report["lm loss"] for report in reports]).mean()
            dist.all_reduce(total, group=mcore.mpu.get_data_parallel_group())
            found.append(float(total) / parts)
        stock(".parallel_state").destroy_model_parallel()

        alone = dist.new_subgroups(1)[0]
        stock(".parallel_state").initialize_model_parallel(1, 1)
        _, whole = stocks_gpt({**options, "pg_collection": stocks_alone(alone)})
        plain = torch.optim.SGD(whole.parameters(), lr=0.5)
        expected = []
        for step in range(5):
            plain.zero_grad()
            loss = (
                sum(whole(*given, labels=labels).mean() for *given, labels in (batch_of(step, p) for p in range(2))) / 2
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
            plain.step()
            expected.append(float(loss.detach()))
        assert found == pytest.approx(expected, abs=2e-6)
        assert max(expected) - min(expected) > 0.01


def stocks_alone(alone: Any) -> Any:
    """Stock's collection of groups, each of this rank alone."""
    groups_of = stock(".process_groups_config").ProcessGroupCollection
    return groups_of(tp=alone, cp=alone, pp=alone, embd=None, tp_cp=alone, dp=alone, dp_cp=alone, mp=alone, ep=alone)


def test_groups_of_ranks_are_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = stock(".parallel_state").RankGenerator
    for sizes in (
        dict(tp=2, ep=1, dp=2, pp=2, cp=2),
        dict(tp=2, ep=2, dp=2, pp=2, cp=1),
        dict(tp=1, ep=1, dp=3, pp=2, cp=1),
    ):
        for order in ("tp-cp-ep-dp-pp", "tp-cp-pp-ep-dp"):
            mine, other = (kind(**sizes, order=order, rank_offset=3) for kind in (RankGenerator, theirs))
            for token in ("tp", "dp", "pp", "tp-dp", "tp-pp", "dp-pp"):
                assert mine.get_ranks(token) == other.get_ranks(token), (sizes, order, token)
    monkeypatch.setenv("WORLD_SIZE", "12")
    grids = [kind([2, 3, 2], ["tp", "cp", "dp"]) for kind in (stock(".hyper_comm_grid").HyperCommGrid, HyperCommGrid)]
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
