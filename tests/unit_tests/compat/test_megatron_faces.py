"""Faces with Megatron's signatures do what ours do, and refuse by name what they cannot."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import core.compat.megatron as mcore
from core import parallel_state
from core.compat.megatron.faces import gpt, groups, hyper_comm_grid, layers, modules, packed, schedules, specs
from core.compat.megatron.faces.configs import ModelParallelConfig, TransformerConfig
from core.compat.megatron.faces.timers import Timers
from core.groups.rank_grid import RankGrid
from core.tensor_parallel import broadcast_data
from tests.unit_tests.ranks import ranks

SHAPE: dict[str, Any] = dict(
    num_layers=2, hidden_size=16, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0
)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_rank_generator_numbers_ranks_as_the_order_says() -> None:
    dense = hyper_comm_grid.RankGenerator(tp=2, ep=1, dp=2, pp=4, cp=1, order="tp-cp-ep-dp-pp")
    assert dense.get_ranks("tp")[:2] == [[0, 1], [2, 3]]
    assert dense.get_ranks("dp")[:3] == [[0, 2], [1, 3], [4, 6]]
    assert dense.get_ranks("pp")[:2] == [[0, 4, 8, 12], [1, 5, 9, 13]]
    assert dense.get_ranks("tp-dp") == RankGrid(16, tp=2, pp=4).groups("tp-dp")
    experts = hyper_comm_grid.RankGenerator(tp=1, ep=2, dp=2, pp=1, cp=1, order="tp-cp-ep-dp-pp", rank_offset=8)
    assert experts.get_ranks("ep") == [[8, 9], [10, 11]] and experts.get_ranks("dp") == [[8, 10], [9, 11]]
    with pytest.raises(ValueError, match="make a grid for each"):
        hyper_comm_grid.RankGenerator(tp=1, ep=2, dp=1, pp=1, cp=2, order="tp-cp-ep-dp-pp")


@ranks(4)
def test_hyper_comm_grid_makes_the_groups_of_a_rank_grid(rank: int, world: int) -> None:
    grid = hyper_comm_grid.HyperCommGrid([2, 1, 2], ["tp", "cp", "dp"])
    assert grid.get_rank_enum("tp") == [[0, 1], [2, 3]] and grid.get_rank_enum(["tp", "dp"]) == [[0, 1, 2, 3]]
    made = grid.create_pg("dp")
    assert dist.get_process_group_ranks(made) == [rank % 2, rank % 2 + 2] and grid.get_pg(["dp"]) is made
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=grid.create_pg(["cp", "tp"]))
    assert float(total) == (1.0 if rank < 2 else 5.0)
    with pytest.raises(KeyError, match="has already been created"):
        grid.create_pg("dp")
    with pytest.raises(KeyError, match="has not been created"):
        grid.get_pg("cp")
    with pytest.raises(RuntimeError, match="does not fit"):
        hyper_comm_grid.HyperCommGrid([8], ["tp"])
    grid.destroy()


@ranks(2)
def test_initialize_model_parallel_takes_the_spelling_of_both_versions(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"create_all_gather_group=True\) is not supported"):
        mcore.mpu.initialize_model_parallel(create_all_gather_group=True)
    with pytest.raises(ValueError, match="does not support gtp_remat=2"):
        mcore.mpu.initialize_model_parallel(gtp_remat_size=2)
    with pytest.raises(ValueError, match="does not support use_sharp=True"):
        mcore.mpu.initialize_model_parallel(use_sharp=True)
    assert mcore.mpu.is_unitialized()
    mcore.mpu.initialize_model_parallel(1, 2, order="tp-cp-pp-ep-dp", expert_gtp_remat_size=1)
    pp = mcore.mpu.get_pipeline_model_parallel_group()
    assert groups.is_pp_first_stage(pp) is (rank == 0) and groups.is_pp_last_stage(pp) is (rank == 1)
    assert groups.get_pp_next_rank(pp) == 1 - rank == groups.get_pp_prev_rank(pp)
    assert (groups.get_pp_first_rank(pp), groups.get_pp_last_rank(pp), groups.get_pg_size(pp)) == (0, 1, 2)
    assert (groups.get_pg_rank(pp), groups.get_pg_rank(None), groups.get_pg_size(None)) == (rank, 0, 1)


# -- layers ------------------------------------------------------------------------------------------------------------


@ranks(2)
def test_split_layers_and_loss_take_megatrons_arguments(rank: int, world: int) -> None:
    mcore.mpu.initialize_model_parallel(2)
    layers.model_parallel_cuda_manual_seed(7, tp_rank=rank, ep_rank=0, etp_rank=None)
    config = ModelParallelConfig()  # its size is the group's, as in Megatron
    options: dict[str, Any] = dict(config=config, init_method=nn.init.normal_)
    assert layers.VocabParallelEmbedding(10, 4, **options).weight.shape == (5, 4)
    with pytest.raises(ValueError, match="tensor_model_parallel_size is 4 and the tensor-parallel group has 2 ranks"):
        layers.RowParallelLinear(8, 8, config=ModelParallelConfig(tensor_model_parallel_size=4), init_method=None)
    column = layers.ColumnParallelLinear(
        4, 8, **options, bias=False, gather_output=False, is_expert=False, tp_comm_buffer_name="fc1"
    )
    wide, _ = column(torch.ones(3, 4))
    whole, _ = column(torch.ones(3, 4), runtime_gather_output=True)
    assert wide.shape == (3, 4) and torch.equal(whole[:, 4 * rank : 4 * rank + 4], wide)
    for refused in ({"output_dtype": torch.float64}, {"disable_grad_reduce": True}, {"grad_output_buffer": []}):
        with pytest.raises(ValueError, match=f"{next(iter(refused))}=.* is not supported"):
            layers.ColumnParallelLinear(4, 8, **options, **refused)
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([1, 9, 4])
    loss = layers.vocab_parallel_cross_entropy(logits[:, 5 * rank : 5 * rank + 5], target)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, target, reduction="none"))
    part = torch.arange(2.0).requires_grad_() + 2 * rank
    gathered = layers.all_gather_last_dim_from_tensor_parallel_region(part.unsqueeze(0))
    assert gathered.tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert layers.reduce_scatter_last_dim_to_tensor_parallel_region(gathered).tolist() == [[4.0 * rank, 4.0 * rank + 2]]
    group = parallel_state.get_tensor_model_parallel_group()
    exchanged = layers.all_to_all(group, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
    assert exchanged.tolist() == [float(rank), 10.0 + rank]
    assert layers.VocabUtility.vocab_range_from_global_vocab_size(10, rank, 2) == (5 * rank, 5 * rank + 5)
    chunk = layers.split_tensor_into_1d_equal_chunks(torch.arange(6.0).view(2, 3))
    assert layers.gather_split_1d_tensor(chunk).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@ranks(2)
def test_an_experts_layers_exchange_nothing_and_reduce_over_their_copies(rank: int, world: int) -> None:
    mcore.mpu.initialize_model_parallel(2, expert_model_parallel_size=1, expert_tensor_parallel_size=2)
    layers.model_parallel_cuda_manual_seed(7)
    config = ModelParallelConfig(tensor_model_parallel_size=2)
    options: dict[str, Any] = dict(config=config, init_method=nn.init.normal_, is_expert=True, bias=False)
    up, down = layers.ColumnParallelLinear(4, 6, **options), layers.RowParallelLinear(6, 4, **options)
    tokens = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    part, _ = down(up(tokens)[0])
    torch.testing.assert_close(part, tokens @ up.weight.T @ down.weight.T)
    part.sum().backward()
    torch.testing.assert_close(tokens.grad, (torch.ones(5, 4) @ down.weight @ up.weight).detach())
    assert not up.weight.allreduce and not down.weight.allreduce
    assert up.weight.shape == (3, 4) and up.tp_group is mcore.mpu.get_expert_tensor_parallel_group()
    with pytest.raises(ValueError, match="no bias behind a sum"):
        layers.RowParallelLinear(6, 4, **{**options, "bias": True})

    mcore.mpu.destroy_model_parallel()
    mcore.mpu.initialize_model_parallel(1, expert_model_parallel_size=2)
    layers.model_parallel_cuda_manual_seed(7)
    config = ModelParallelConfig(expert_model_parallel_size=2)
    other = layers.ColumnParallelLinear(4, 6, config=config, init_method=nn.init.normal_, is_expert=True)
    weights = [torch.empty_like(other.weight) for _ in range(2)]
    dist.all_gather(weights, other.weight.detach())
    assert not torch.equal(*weights), "experts of two ranks are drawn apart"
    settings = mcore.distributed.DistributedDataParallelConfig()
    model = mcore.DistributedDataParallel(config, settings, nn.Sequential(other))
    other(torch.full((1, 4), float(rank + 1)))[0].sum().backward()
    mcore.distributed.finalize_model_grads([model])
    # The mean over the two data ranks' tokens: this expert saw its own alone.
    assert torch.equal(other.weight.grad, torch.full((6, 4), (rank + 1) / 2))


@ranks(2)
def test_broadcast_data_gives_the_first_ranks_tensors(rank: int, world: int) -> None:
    mcore.mpu.initialize_model_parallel(2)
    data = {"tokens": torch.arange(6).view(2, 3), "mask": torch.ones(2, dtype=torch.int64)} if rank == 0 else None
    found = broadcast_data(["tokens", "mask"], data, torch.int64)
    assert found["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["mask"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="cast them"):
        broadcast_data(["tokens"], data, torch.int32)


# -- models ------------------------------------------------------------------------------------------------------------


def new_gpt(**given: Any) -> gpt.GPTModel:
    return gpt.GPTModel(TransformerConfig(**SHAPE), specs.get_gpt_layer_local_spec(), 32, 16, **given)


def test_packed_documents_do_not_see_each_other() -> None:
    for positions in ("rope", "learned_absolute"):
        model = new_gpt(position_embedding_type=positions)
        first, second = torch.randint(32, (1, 5)), torch.randint(32, (1, 7))
        counted = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0)
        ends = packed.PackedSeqParams("thd", cu_seqlens_q=torch.tensor([0, 5, 12], dtype=torch.int32))
        together = model(torch.cat([first, second], 1), counted, None, packed_seq_params=ends)
        apart = [model(part, torch.arange(part.shape[1]).unsqueeze(0), None) for part in (first, second)]
        torch.testing.assert_close(together, torch.cat(apart, 1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cu_seqlens_kv": torch.tensor([0, 6, 12])}, r"cu_seqlens_kv is \[0, 6, 12\] and cu_seqlens_q \[0, 5, 12\]"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 13])}, r"\[0, 5, 13\] for 12 tokens"),
        ({"cu_seqlens_q": None}, "says where documents end"),
        ({"qkv_format": "sbhd"}, "'sbhd'; documents of a row are 'thd'"),
        ({"local_cp_size": 2}, "splits each document for itself"),
    ],
)
def test_packed_documents_that_would_be_misread_are_refused(given: dict[str, Any], says: str) -> None:
    fields = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 5, 12]), **given}
    with pytest.raises(ValueError, match=f"packed_seq_params: .*{says}"):
        new_gpt()(torch.zeros(1, 12, dtype=torch.long), None, None, packed_seq_params=packed.PackedSeqParams(**fields))


def test_padding_behind_packed_documents_changes_nothing_before_it() -> None:
    model, row = new_gpt(position_embedding_type="rope"), torch.randint(32, (1, 9))
    ends = packed.PackedSeqParams("thd", cu_seqlens_q=torch.tensor([0, 4, 9]))
    wide = torch.cat([row, torch.randint(32, (1, 3))], 1)
    alone, padded = (model(tokens, None, None, packed_seq_params=ends) for tokens in (row, wide))
    torch.testing.assert_close(padded[:, :9], alone, atol=1e-6, rtol=1e-5)


def test_a_mask_that_is_not_causal_is_refused() -> None:
    tokens = torch.randint(32, (1, 6))
    causal = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
    model = new_gpt()
    assert torch.equal(model(tokens, None, causal), model(tokens, None, None))
    causal[..., 4, 0] = True
    with pytest.raises(ValueError, match="is not the causal one"):
        model(tokens, None, causal)
    with pytest.raises(ValueError, match=r"GPTModel.forward\(decoder_input=...\) is not supported"):
        model(tokens, None, None, torch.zeros(6, 1, 16))


def test_a_spec_that_says_otherwise_than_the_config_is_refused() -> None:
    config = TransformerConfig(**SHAPE)
    for spec, says in (
        (specs.get_gpt_layer_local_spec(qk_layernorm=True), "says qk_layernorm=True and the config False"),
        (specs.get_gpt_layer_local_spec(num_experts=4), "says num_moe_experts=4 and the config None"),
        (modules.ModuleSpec(module=nn.Linear), "must come from get_gpt_layer_local_spec"),
    ):
        with pytest.raises(ValueError, match=says):
            gpt.GPTModel(config, spec, 32, 16)
    with pytest.raises(ValueError, match="multi_latent_attention=True"):
        specs.get_gpt_layer_local_spec(multi_latent_attention=True)
    with pytest.raises(ValueError, match="rotary_percent"):
        new_gpt(rotary_percent=0.5)
    specs._say_no_transformer_engine.cache_clear()
    with pytest.warns(UserWarning, match="TransformerEngine layer was asked for"):
        specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specs.get_gpt_layer_with_transformer_engine_spec()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {(0, None): range(0, 6), (1, None): range(6, 12)}),
        ({"virtual_pipeline_model_parallel_size": 3}, {(0, 1): range(4, 6), (1, 2): range(10, 12)}),
        ({"num_layers_in_first_pipeline_stage": 4}, {(0, None): range(0, 4), (1, None): range(4, 12)}),
        ({"num_layers_in_last_pipeline_stage": 5}, {(0, None): range(0, 7), (1, None): range(7, 12)}),
    ],
)
def test_layers_of_a_stage_are_counted_over_the_model(options: dict[str, int], expected: dict[Any, range]) -> None:
    config = TransformerConfig(**{**SHAPE, "num_layers": 12}, pipeline_model_parallel_size=2, **options)
    for (rank, chunk), layers_here in expected.items():
        assert groups.layers_of_stage(config, rank, chunk) == layers_here
    config.num_layers = 11
    if "num_layers_in_first_pipeline_stage" not in options and "num_layers_in_last_pipeline_stage" not in options:
        with pytest.raises(ValueError, match="do not divide"):
            groups.layers_of_stage(config, 0, 0 if options else None)


def test_the_ends_of_a_pipeline_may_count_as_layers() -> None:
    shape: dict[str, Any] = {**SHAPE, "num_layers": 11, "pipeline_model_parallel_size": 2}
    config = TransformerConfig(**shape, account_for_embedding_in_pipeline_split=True)
    assert [groups.layers_of_stage(config, rank, None) for rank in (0, 1)] == [range(0, 5), range(5, 11)]
    config.virtual_pipeline_model_parallel_size = 3
    assert [groups.get_num_layers_to_build(config, chunk, 0) for chunk in range(3)] == [1, 2, 2]
    uneven = TransformerConfig(**shape, num_layers_in_first_pipeline_stage=4, num_layers_in_last_pipeline_stage=8)
    with pytest.raises(ValueError, match=r"\[4, 8\] places 12 layers, and the model has 11"):
        groups.layers_of_stage(uneven, 0, None)
    uneven.account_for_loss_in_pipeline_split = True
    with pytest.raises(ValueError, match="need num_layers_in_first_pipeline_stage and .* to be None"):
        groups.layers_of_stage(uneven, 0, None)


def test_float16_module_casts_and_keeps_names_of_the_whole_model() -> None:
    from core.checkpoint.global_slices import global_slices
    from core.groups.process_groups import ProcessGroups

    config = TransformerConfig(**SHAPE, bf16=True)
    inner = gpt.GPTModel(config, specs.get_gpt_layer_local_spec(), 32, 16, share_embeddings_and_output_weights=True)
    module = modules.Float16Module(config, inner)
    logits = module(torch.randint(32, (1, 4)), None, None)
    assert logits.dtype == torch.float32 and inner.embedding.word_embeddings.weight.dtype == torch.bfloat16
    assert module(torch.randint(32, (1, 4)), None, None, fp32_output=False).dtype == torch.bfloat16
    names = {piece.name for piece in global_slices(module, ProcessGroups()).values()}
    assert names == {piece.name for piece in global_slices(inner, ProcessGroups()).values()}
    assert modules.unwrap_model([module]) == [inner] and modules.get_model_config(module) is config
    with pytest.raises(RuntimeError, match="no module .* 'colour'"):
        modules.get_attr_wrapped_model(module, "colour")
    with pytest.raises(ValueError, match="set one of the two"):
        modules.Float16Module(TransformerConfig(**SHAPE), inner)


def test_specs_build_what_they_name() -> None:
    spec = modules.ModuleSpec(module=("torch.nn", "Linear"), params={"bias": False})
    built = modules.build_module(spec, 3, 4)
    assert isinstance(built, nn.Linear) and built.bias is None and built.weight.shape == (4, 3)
    assert modules.build_module(torch.relu) is torch.relu
    assert modules.IdentityOp(1, a=2)(5, 6) == 5 and modules.IdentityFuncOp()(1)(7, 8) == 7


# -- microbatches and timers -------------------------------------------------------------------------------------------


def test_the_batch_grows_and_must_divide() -> None:
    schedules.destroy_num_microbatches_calculator()
    with pytest.raises(RuntimeError, match="call init_num_microbatches_calculator"):
        schedules.get_num_microbatches()
    schedules.init_num_microbatches_calculator(0, [8, 8, 120], 32, 2, 2)
    found = []
    for consumed in (0, 39, 40, 80, 120, 121):
        schedules.update_num_microbatches(consumed)
        found.append((schedules.get_num_microbatches(), schedules.get_current_global_batch_size()))
    assert found == [(2, 8), (2, 8), (4, 16), (6, 24), (8, 32), (8, 32)]
    with pytest.raises(RuntimeError, match="already"):
        schedules.init_num_microbatches_calculator(0, None, 8, 2, 2)
    with pytest.raises(ValueError, match="global batch size 10 is not divisible"):
        schedules.reconfigure_num_microbatches_calculator(0, None, 10, 2, 2)
    schedules.reconfigure_num_microbatches_calculator(0, None, 10, 2, 2, decrease_batch_size_if_needed=True)
    assert (schedules.get_num_microbatches(), schedules.get_current_running_global_batch_size()) == (2, 8)
    assert (schedules.get_current_global_batch_size(), schedules.get_micro_batch_size()) == (10, 2)
    schedules.destroy_num_microbatches_calculator()


@ranks(2)
def test_timers_report_over_ranks(rank: int, world: int) -> None:
    timers = Timers(log_level=1, log_option="minmax")
    timers("forward", log_level=1).start(barrier=True)
    timers("forward").stop()
    timers("forward").seconds = 0.5 + rank
    timers("hidden", log_level=2).start()
    text = timers.get_all_timers_string(reset=False)
    assert text is not None and "forward: (500.00, 1500.00) ms" in text and "hidden" not in text
    assert timers("forward").elapsed() == 0.5 + rank and timers("forward").elapsed() == 0.0
    with pytest.raises(RuntimeError, match="is not started"):
        timers("forward").stop()
