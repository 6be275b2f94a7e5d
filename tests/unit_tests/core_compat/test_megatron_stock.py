"""With Megatron Core itself: its models in our wrapper, its files, and its groups.

Where it is not installed the tests install it in a directory. What it takes of CUDA without asking is replaced, so that
it computes on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import core_compat.megatron as mcore
from benchmarks import right_megatron
from benchmarks.right_megatron import Norm, OnTheCPU
from core.groups.process_groups import ProcessGroups
from core.models.gpt import GPTModel
from core.transformer import TransformerConfig
from core_compat.megatron.faces import schedules
from core_compat.megatron.faces.hyper_comm_grid import HyperCommGrid, RankGenerator
from core_compat.megatron.tree_files import module_tree
from tests.unit_tests.booster.test_booster_checkpoint import shared
from tests.unit_tests.core_compat.megatron_page import PAGE
from tests.unit_tests.peers import import_from
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import program_of

pytestmark = pytest.mark.nightly
# Megatron's configuration, its model's arguments, and the fields of ours that say the same.
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {"share_embeddings_and_output_weights": False}),
    ({}, {"share_embeddings_and_output_weights": True}, {}),
    (
        dict(normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False,
             num_query_groups=2),
        {"position_embedding_type": "rope"},
        dict(normalization="RMSNorm", activation="swiglu", add_bias_linear=False, num_query_groups=2,
             position_embedding_type="rope", share_embeddings_and_output_weights=False),
    ),
    (
        dict(kv_channels=16),
        {"position_embedding_type": "rope", "rotary_base": 5000, "share_embeddings_and_output_weights": True},
        dict(kv_channels=16, position_embedding_type="rope", rotary_base=5000.0),
    ),
]  # fmt: skip


def stock(path: str) -> Any:
    """A module of the real package, installed by the tests if it is not; skips if it cannot be."""
    if importlib.util.find_spec("megatron") is None:
        import_from("megatron-core==0.16.1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core{path}")


@contextlib.contextmanager
def on_this_device() -> Iterator[None]:
    """Stock's modules on the CPU if there is no GPU, installed if they are not."""
    stock("")
    with right_megatron.on_this_device():
        yield


@ranks(1)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_losses_and_gradients_of_our_gpt_are_stocks(rank: int, world: int, case: int) -> None:
    shape, options, ours = CASES[case]
    common: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_attention_heads=4)
    with on_this_device():
        stock(".parallel_state").initialize_model_parallel(1, 1)
        layer = stock(".models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(normalization=shape.get("normalization"))
        dropout = dict(hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True)
        config = stock(".transformer.transformer_config").TransformerConfig(**common, **dropout, **shape)
        reference = stock(".models.gpt.gpt_model").GPTModel(config, layer, 64, 16, **options)
        model = GPTModel(TransformerConfig(**common, **ours, vocab_size=64, max_sequence_length=16), ProcessGroups())
        weights = dict(reference.named_parameters())
        assert {name: p.shape for name, p in model.named_parameters()} == {name: p.shape for name, p in weights.items()}
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(weights[name])
        tokens, labels = torch.randint(64, (2, 16)), torch.randint(64, (2, 16))
        given = (tokens, torch.arange(16).expand(2, 16), torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1))
        losses, expected = model(tokens, labels), reference(*given, labels=labels)
        torch.testing.assert_close(losses, expected, atol=2e-6, rtol=0)
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


@dataclass(frozen=True)
class Layout:
    """How stock's GPT is trained on 2 ranks."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence: bool = False
    sharded: bool = False
    bf16: bool = False

    @property
    def clip(self) -> float:
        """The norm that gradients are clipped to; none in bf16, where its last bit may turn a weight's rounding."""
        return 0.0 if self.bf16 else 0.5

    def model(self, whole: bool, layers: int = 2) -> Any:
        """Stock's GPT: this rank's part, or on this rank alone the whole."""
        own = dict(tensor_model_parallel_size=self.tp, pipeline_model_parallel_size=self.pp)
        own |= dict(expert_model_parallel_size=self.ep, sequence_parallel=self.sequence)
        experts: dict[str, Any] = dict(num_moe_experts=4, moe_router_topk=2, moe_token_dispatcher_type="allgather")
        experts |= dict(moe_router_load_balancing_type="none", moe_ffn_hidden_size=32, add_bias_linear=False)
        config = stock(".transformer.transformer_config").TransformerConfig(
            num_layers=layers, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
            use_cpu_initialization=True, bf16=self.bf16, params_dtype=torch.bfloat16 if self.bf16 else torch.float32,
            pipeline_dtype=torch.float32, **(experts if self.ep > 1 else {}), **({} if whole else own),
        )  # fmt: skip
        layer = stock(".models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        stages = 1 if whole else self.pp
        blocks = stock(".transformer.transformer_block").TransformerBlockSubmodules
        spec = blocks(layer_specs=[layer] * (layers // stages), layer_norm=Norm)
        place = {} if whole else {"pre_process": mcore.mpu.is_pipeline_first_stage()}
        place |= {} if whole else {"post_process": mcore.mpu.is_pipeline_last_stage()}
        model = stock(".models.gpt.gpt_model").GPTModel(config, spec, 64, 16, **place)
        return stock(".transformer.module").Float16Module(config, model) if self.bf16 else model

    def take(self, part: Any, whole: dict[str, torch.Tensor]) -> None:
        """Copy the whole model's weights into a rank's part."""
        layers, experts = 2 // self.pp, 4 // self.ep
        for name, param in part.named_parameters():
            name = counted(name, "layers", layers * mcore.mpu.get_pipeline_model_parallel_rank())
            name = counted(name, "local_experts", experts * mcore.mpu.get_expert_model_parallel_rank())
            given = whole[name]
            if getattr(param, "tensor_model_parallel", False) and self.tp > 1:
                given = given.chunk(self.tp, param.partition_dim)[mcore.mpu.get_tensor_model_parallel_rank()]
            param.data.copy_(given)


def counted(name: str, word: str, first: int) -> str:
    """A part's name in the whole model, whose layers or experts are counted from the first one on."""
    return re.sub(rf"\b{word}\.(\d+)", lambda found: f"{word}.{int(found[1]) + first}", name)


def loss_step(data_iterator: Any, chunk: Any) -> Any:
    """A microbatch's losses, and their mean."""
    *given, labels = next(data_iterator)
    return chunk(*given, labels=labels), lambda losses: (losses.mean(), {"lm loss": losses.mean().detach()})


def losses_alone(layout: Layout) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Stock's whole GPT in one process: its first weights, and the losses of five steps of SGD on fp32 weights."""
    stock(".parallel_state").initialize_model_parallel(1, 1)
    torch.manual_seed(0)
    whole = layout.model(True)
    start = {name: param.detach().clone() for name, param in whole.named_parameters()}
    masters = [param.detach().float().clone() for param in whole.parameters()]
    losses = []
    for step in range(5):
        sums, total = [torch.zeros_like(master) for master in masters], 0.0
        for part in range(2):
            whole.zero_grad()
            *given, labels = batch_of(step, part)
            loss = whole(*given, labels=labels).mean()
            loss.backward()
            for kept, param in zip(sums, whole.parameters(), strict=True):
                kept += 0.5 * param.grad.float()
            total += 0.5 * float(loss.detach())
        norm = torch.stack([kept.norm() for kept in sums]).norm()
        for master, param, kept in zip(masters, whole.parameters(), sums, strict=True):
            master -= 0.5 * kept * (min(1.0, layout.clip / float(norm)) if layout.clip else 1.0)
            param.data.copy_(master)
        losses.append(total)
    stock(".parallel_state").destroy_model_parallel()
    return start, losses


TRAINED = {
    "data": Layout(),
    "sharded": Layout(sharded=True),
    "tensor": Layout(tp=2),
    "tensor, sharded": Layout(tp=2, sharded=True),
    "tensor and sequence": Layout(tp=2, sequence=True),
    "tensor and sequence, sharded": Layout(tp=2, sequence=True, sharded=True),
    "pipeline": Layout(pp=2),
    "pipeline, sharded": Layout(pp=2, sharded=True),
    "experts": Layout(ep=2),
    "experts, sharded": Layout(ep=2, sharded=True),
    "bf16": Layout(bf16=True),
    "bf16, sharded": Layout(bf16=True, sharded=True),
}


@ranks(2)
@pytest.mark.parametrize("name", TRAINED)
def test_stocks_own_gpt_trains_in_our_wrapper_as_alone(rank: int, world: int, name: str) -> None:
    layout = TRAINED[name]
    with on_this_device():
        start, expected = losses_alone(layout)
        for state in (stock(".parallel_state"), mcore.mpu):
            state.initialize_model_parallel(layout.tp, layout.pp, expert_model_parallel_size=layout.ep)
        module = layout.model(False)
        layout.take(module, start)
        config = module.config
        config.finalize_model_grads_func = mcore.distributed.finalize_model_grads
        sharded = {"use_distributed_optimizer": layout.sharded}
        ddp_config = mcore.distributed.DistributedDataParallelConfig(
            overlap_grad_reduce=layout.pp == 1, grad_reduce_in_fp32=layout.bf16, **sharded
        )
        model = mcore.DistributedDataParallel(config, ddp_config, module)
        settings = mcore.optimizer.OptimizerConfig(
            optimizer="sgd",
            lr=0.5,
            sgd_momentum=0.0,
            weight_decay=0.0,
            **sharded,
        )
        settings.bf16, settings.clip_grad = layout.bf16, layout.clip
        optimizer = mcore.optimizer.get_megatron_optimizer(settings, [model])
        data, place = mcore.mpu.get_data_parallel_world_size(), mcore.mpu.get_data_parallel_rank()
        found = []
        for step in range(5):
            optimizer.zero_grad()
            mine = range(place, 2, data)
            reports = mcore.pipeline_parallel.get_forward_backward_func()(
                forward_step_func=loss_step, data_iterator=iter([batch_of(step, part) for part in mine]),
                model=[model], num_microbatches=len(mine), seq_length=16, micro_batch_size=1,
            )  # fmt: skip
            optimizer.step()
            if reports:
                total = torch.stack([report["lm loss"] for report in reports]).mean()
                dist.all_reduce(total, group=mcore.mpu.get_data_parallel_group())
                found.append(float(total) / data)
    if mcore.mpu.is_pipeline_last_stage():
        assert found == pytest.approx(expected, abs=1e-6)
    assert max(expected) - min(expected) > 0.01


def gradients_of_four_steps(ours: bool) -> list[dict[str, torch.Tensor]]:
    """Gradients of an expert layer of Megatron under global_aux_loss, finalized by us or by Megatron."""
    config = stock(".transformer.transformer_config").TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4, moe_router_topk=2,
        add_bias_linear=False,
        moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.5, moe_token_dispatcher_type="allgather",
        moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", moe_router_bias_update_rate=0.05,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, moe_ffn_hidden_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    spec = stock(".models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(num_experts=4)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    blocks = stock(".transformer.transformer_block").TransformerBlockSubmodules
    model = stock(".models.gpt.gpt_model").GPTModel(config, blocks(layer_specs=[spec], layer_norm=Norm), 64, 16)
    owner: Any = mcore if ours else stock("")
    kind = (mcore if ours else stock("")).distributed.DistributedDataParallelConfig
    wrapped = owner.distributed.DistributedDataParallel(config, kind(), model)
    found = []
    for step in range(4):
        wrapped.zero_grad_buffer()
        for part in range(2):
            *given, labels = batch_of(step, 2 * part + dist.get_rank())
            (wrapped(*given, labels=labels).mean() / 2).backward()
        finalize = owner.distributed.finalize_model_grads
        finalize([wrapped]) if ours else finalize([wrapped], None)
        found.append({name: param.main_grad.clone() for name, param in model.named_parameters()})
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.5 * param.main_grad
    return found


@ranks(2)
def test_gradients_of_megatrons_router_are_those_of_its_own_finalize_in_each_step(rank: int, world: int) -> None:
    with on_this_device():
        for state in (stock(".parallel_state"), mcore.mpu):
            state.initialize_model_parallel(1, 1)
        expected, found = (gradients_of_four_steps(ours) for ours in (False, True))
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for name, grad in theirs.items():
            torch.testing.assert_close(mine[name], grad, atol=1e-6, rtol=1e-5, msg=f"{name} in step {step}")
    assert all(step["decoder.layers.0.mlp.router.weight"].norm() > 1e-3 for step in expected)


@ranks(2)
@pytest.mark.parametrize("sizes", ["2, 1", "1, 2"])
def test_the_program_of_the_page_trains_stocks_gpt_and_our_own_reads_its_weights(
    rank: int, world: int, sizes: str
) -> None:
    stock("")
    text = program_of(PAGE).replace("TP, PP = 2, 1", f"TP, PP = {sizes}")
    names: dict[str, Any] = {"__name__": "page"}
    with on_this_device(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
        monkeypatch.setattr(torch.cuda, "current_device", torch.cuda.current_device)  # the page sets it
        exec(compile(text, str(PAGE), "exec"), names)
        tokens, labels = next(names["iterator"])
        reports = names["get_forward_backward_func"]()(
            forward_step_func=names["forward_step"], data_iterator=iter([(tokens, labels)]), model=[names["model"]],
            num_microbatches=1, seq_length=16, micro_batch_size=4, forward_only=True,
        )  # fmt: skip
    if reports:
        assert float(reports[0]["lm loss"]) == pytest.approx(float(names["whole"](tokens, labels).mean()), abs=1e-5)
        assert names["losses"][0] - names["losses"][-1] > 0.5


STATES = {  # of a distributed optimizer, the kinds that any layout can read; of one that is not, in bf16
    "fully_reshardable": (True, False),
    "replicated": (False, False),
    "replicated, bf16": (False, True),
    "fully_reshardable, bf16": (True, True),
}


@ranks(2)
@pytest.mark.parametrize("name", STATES)
def test_optimizer_states_that_stock_has_saved_are_read(rank: int, world: int, tmp_path: Path, name: str) -> None:
    sharded, bf16 = STATES[name]
    layout, directory = Layout(sharded=sharded, bf16=bf16), shared(tmp_path)
    with on_this_device(), contextlib.nullcontext() if torch.cuda.is_available() else OnTheCPU():
        stock(".parallel_state").initialize_model_parallel(1, 1)
        torch.manual_seed(0)
        module = layout.model(True)
        ddp = stock(".distributed")
        model = ddp.DistributedDataParallel(
            module.config, ddp.DistributedDataParallelConfig(use_distributed_optimizer=sharded), module
        )
        settings = dict(optimizer="adam", lr=0.01, adam_eps=1e-4, weight_decay=0.0, clip_grad=0.0)
        settings["use_distributed_optimizer"] = sharded
        settings |= dict(bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32)
        theirs = stock(".optimizer").get_megatron_optimizer(stock(".optimizer").OptimizerConfig(**settings), [model])
        for step in range(3):
            if step == 2:
                tree = {"model": module.sharded_state_dict()}
                kind = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
                tree["optimizer"] = theirs.sharded_state_dict(tree["model"], metadata=kind)
                stock(".dist_checkpointing").save(tree, str(directory))
                named = [] if sharded else module.named_parameters()
                masters = {name: getattr(param, "main_param", param).detach().clone() for name, param in named}
            model.zero_grad_buffer()
            theirs.zero_grad()
            *given, labels = batch_of(step, rank)
            model(*given, labels=labels).mean().backward()
            model.finish_grad_sync()
            theirs.step()
        expected = {name.removeprefix("module."): param.detach() for name, param in module.named_parameters()}
    for tp in (2, 1):  # two slices, and two copies with shards of the state
        mcore.mpu.initialize_model_parallel(tp)
        shape: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64)
        shape |= dict(max_sequence_length=16, share_embeddings_and_output_weights=False)
        config = TransformerConfig(**shape, tensor_model_parallel_size=tp)
        config.bf16 = bf16
        inner: Any = GPTModel(config)
        inner = mcore.transformer.module.Float16Module(config, inner) if bf16 else inner
        ours = mcore.distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
        wrapped = mcore.DistributedDataParallel(config, ours, inner)
        settings["use_distributed_optimizer"] = True
        optimizer = mcore.optimizer.get_megatron_optimizer(mcore.optimizer.OptimizerConfig(**settings), [wrapped])
        asked = {"model": module_tree(inner), "optimizer": optimizer.sharded_state_dict(is_loading=True)}
        loaded = mcore.dist_checkpointing.load(asked, directory)
        inner.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        for name, entries in optimizer.state_by_parameter().items():
            for entry in entries:
                assert float(entry["step"]) == 2.0
                if bf16 and not sharded and tp == 1:
                    part = slice(entry["offset"], entry["offset"] + entry["numel"])
                    assert torch.equal(entry["master"], masters[name].flatten()[part])
        before = {name: param.detach().clone() for name, param in inner.named_parameters()}
        optimizer.zero_grad()
        for part in range(2) if tp == 2 else [rank]:
            tokens, _, _, labels = batch_of(2, part)
            (wrapped(tokens, labels).mean() / tp).backward()
        mcore.distributed.finalize_model_grads([wrapped])
        optimizer.step()
        moved = 0.0
        for name, param in inner.named_parameters():
            wanted = expected[name.removeprefix("module.")]
            if getattr(param, "tensor_model_parallel", False) and tp > 1:
                wanted = wanted.chunk(2, param.partition_dim)[rank]
            torch.testing.assert_close(param.detach(), wanted, atol=4e-3 if bf16 else 2e-6, rtol=0, msg=name)
            moved = max(moved, float((param - before[name]).detach().abs().max()))
        assert moved > 5e-3
        mcore.mpu.destroy_model_parallel()


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
        for module in (schedules, theirs):
            module.destroy_num_microbatches_calculator()
            module.init_num_microbatches_calculator(1, rampup, 32, 2, 2, False)
        for consumed in range(0, 160, 7):
            for module in (schedules, theirs):
                module.update_num_microbatches(consumed, consistency_check=False)
            assert schedules.get_num_microbatches() == theirs.get_num_microbatches(), (rampup, consumed)
            assert schedules.get_current_global_batch_size() == theirs.get_current_global_batch_size()
    for module in (schedules, theirs):
        module.destroy_num_microbatches_calculator()
