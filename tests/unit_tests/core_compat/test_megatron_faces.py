"""Faces with Megatron's signatures do what ours do, and refuse by name what they cannot."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import core_compat.megatron as mcore
from core import parallel_state, tensor_parallel
from core.checkpoint.global_slices import global_slices
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import RankGrid
from core.tensor_parallel import broadcast_data
from core_compat.megatron.faces import configs, groups, hyper_comm_grid, mappings, modules, schedules
from core_compat.megatron.faces.configs import ModelParallelConfig
from core_compat.megatron.faces.timers import Timers
from tests.unit_tests.ranks import ranks

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


@ranks(2)
def test_a_buffer_whose_storage_a_program_frees_says_what_to_do_instead(rank: int, world: int) -> None:
    """Programs that train and generate in turns free gradients in between."""
    mcore.mpu.initialize_model_parallel()
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    config = mcore.ModelParallelConfig()
    ddp_config = mcore.distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = mcore.distributed.DistributedDataParallel(config, ddp_config, model)
    for buffer in ddp.buffers:
        for memory in (buffer.grad_data, buffer.param_data):
            assert memory.storage().size() == memory.numel() == len(memory.storage())
            with pytest.raises(RuntimeError, match="cannot be resized to 0 elements: .* delete the wrapper and the op"):
                memory.storage().resize_(0)
    ddp(torch.ones(1, 4) * (rank + 1)).sum().backward()
    ddp.finish_grad_sync(force_all_reduce=True)
    assert model.weight.main_grad.unique().tolist() == [1.5] and ddp.buffers[0].grad_data.sum() == 1.5 * 8 + 2


# -- tensor parallelism ------------------------------------------------------------------------------------------------


@ranks(2)
def test_mappings_and_loss_take_megatrons_arguments(rank: int, world: int) -> None:
    mcore.mpu.initialize_model_parallel(2)
    mappings.model_parallel_cuda_manual_seed(7, tp_rank=rank, ep_rank=0, etp_rank=None)
    config = ModelParallelConfig(tensor_model_parallel_size=2)
    column = mcore.tensor_parallel.ColumnParallelLinear(4, 8, config=config, init_method=nn.init.normal_, bias=False)
    wide, _ = column(torch.ones(3, 4))
    assert wide.shape == (3, 4) and column.weight.tensor_model_parallel
    kind = mcore.tensor_parallel.ColumnParallelLinear
    assert isinstance(tensor_parallel.ColumnParallelLinear(4, 8, config=config, init_method=nn.init.normal_), kind)
    row = mcore.tensor_parallel.RowParallelLinear(
        8, 4, config=config, init_method=nn.init.ones_, bias=False, input_is_parallel=True, skip_bias_add=False,
        stride=1, keep_master_weight_for_test=False, is_expert=False, tp_comm_buffer_name="fc2", tp_group=None
    )  # fmt: skip
    assert row(torch.ones(3, 4))[0].tolist() == [[8.0] * 4] * 3 and not isinstance(row, kind)
    megatrons = {"embedding_activation_buffer": None, "grad_output_buffer": None, "disable_grad_reduce": False}
    kind(4, 8, config=config, init_method=nn.init.normal_, is_expert=False, tp_comm_buffer_name=None, **megatrons)
    for other in ({"is_expert": True}, {"disable_grad_reduce": True}, {"grad_output_buffer": []}):
        with pytest.raises(ValueError, match=rf"Linear\({next(iter(other))}=.*is not supported; leave it"):
            kind(4, 8, config=config, init_method=nn.init.normal_, **other)
    with pytest.raises(ValueError, match="use_te_rng_tracker=True.* is not supported.*one tracker has all"):
        mappings.get_cuda_rng_tracker(use_te_rng_tracker=True)
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    target = torch.tensor([1, 9, 4])
    loss = mappings.vocab_parallel_cross_entropy(logits[:, 5 * rank : 5 * rank + 5], target)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(logits, target, reduction="none"))
    part = torch.arange(2.0).requires_grad_() + 2 * rank
    gathered = mappings.all_gather_last_dim_from_tensor_parallel_region(part.unsqueeze(0))
    assert gathered.tolist() == [[0.0, 1.0, 2.0, 3.0]]
    reduced = mappings.reduce_scatter_last_dim_to_tensor_parallel_region(gathered)
    assert reduced.tolist() == [[4.0 * rank, 4.0 * rank + 2]]
    group = parallel_state.get_tensor_model_parallel_group()
    exchanged = mappings.all_to_all(group, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
    assert exchanged.tolist() == [float(rank), 10.0 + rank]
    assert mappings.VocabUtility.vocab_range_from_global_vocab_size(10, rank, 2) == (5 * rank, 5 * rank + 5)
    chunk = mappings.split_tensor_into_1d_equal_chunks(torch.arange(6.0).view(2, 3))
    assert mappings.gather_split_1d_tensor(chunk).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@ranks(2)
def test_broadcast_data_gives_the_first_ranks_tensors(rank: int, world: int) -> None:
    mcore.mpu.initialize_model_parallel(2)
    data = {"tokens": torch.arange(6).view(2, 3), "mask": torch.ones(2, dtype=torch.int64)} if rank == 0 else None
    found = broadcast_data(["tokens", "mask"], data, torch.int64)
    assert found["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["mask"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="cast them"):
        broadcast_data(["tokens"], data, torch.int32)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("from core_compat.megatron.models.gpt.gpt_model import GPTModel", "build the model with Megatron's own"),
        ("from core_compat.megatron.models.gpt import GPTModel", "or build core.models.gpt.GPTModel"),
        ("from core_compat.megatron.transformer import TransformerConfig", "configuration is Megatron's own, or core"),
        ("from core_compat.megatron.transformer.transformer_config import TransformerConfig", "configuration is Megat"),
        ("from core_compat.megatron.transformer.module import MegatronModule", "whose parallel_state is initialized"),
        ("from core_compat.megatron.transformer.spec_utils import ModuleSpec", "build the model with Megatron's own"),
        ("from core_compat.megatron.packed_seq_params import PackedSeqParams", "GPTModel takes document_ids"),
        ("from core_compat.megatron.enums import ModelType", "nothing here reads a model's type"),
        ("from core_compat.megatron.extensions.transformer_engine import TENorm", "import Megatron's own"),
    ],
)
def test_a_name_that_builds_models_says_who_builds_them(line: str, says: str) -> None:
    with pytest.raises(ImportError, match=f"megatron.core.* is not in core_compat.megatron: .*{says}"):
        exec(line)


def test_losses_that_megatrons_own_layers_attach_weigh_as_a_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaler:
        given: list[float] = []

        @staticmethod
        def set_loss_scale(scale: torch.Tensor) -> None:
            Scaler.given.append(float(scale))

    for path, name in schedules.ATTACHED.items():
        module = SimpleNamespace(**{name: Scaler})
        monkeypatch.setitem(sys.modules, f"megatron.core.transformer.{path}", module)
    chunk = nn.Linear(1, 1)
    chunk.config, chunk.groups = ModelParallelConfig(grad_scale_func=lambda loss: 8 * loss), ProcessGroups()
    schedules._weigh_losses_of_layers(chunk, 4, None)
    chunk.config = ModelParallelConfig(calculate_per_token_loss=True)
    schedules._weigh_losses_of_layers(chunk, 4, None)
    assert Scaler.given == [2.0, 2.0, 2.0, 1.0, 1.0, 1.0]


def test_a_model_whose_layers_need_megatrons_schedule_is_refused() -> None:
    for name in configs.OF_THE_SCHEDULE:
        default = configs.ModelParallelConfig.rules[name].defaults[0]
        config = SimpleNamespace(**{name: 2})
        with pytest.raises(ValueError, match=f"{name}=2 is obeyed by Megatron's own schedule .*leave it at {default}:"):
            mcore.DistributedDataParallel(config, None, nn.Linear(1, 1))


def test_float16_module_casts_and_keeps_names_of_the_whole_model() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            for number, layer in enumerate(self.layers, start=3):
                layer.layer_number = number

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](hidden))

    config = ModelParallelConfig(bf16=True)
    inner = Casts()
    module = modules.Float16Module(config, inner)
    output = module(torch.ones(1, 4))
    assert output.dtype == torch.float32 and inner.layers[0].weight.dtype == torch.bfloat16
    assert module(torch.ones(1, 4), fp32_output=False).dtype == torch.bfloat16
    names = [piece.name for piece in global_slices(module, ProcessGroups()).values()]
    assert names == [f"layers.{number}.{kind}" for number in (2, 3) for kind in ("weight", "bias")]
    assert modules.unwrap_model([module]) == [inner] and modules.get_model_config(module) is config
    with pytest.raises(RuntimeError, match="no module .* 'colour'"):
        modules.get_attr_wrapped_model(module, "colour")
    with pytest.raises(ValueError, match="set one of the two"):
        modules.Float16Module(ModelParallelConfig(), inner)


def test_a_class_that_is_never_made_says_what_to_call() -> None:
    with pytest.raises(NotImplementedError, match="cannot be made by Megatron's arguments: call get_megatron_optimize"):
        mcore.optimizer.MegatronOptimizer(None, None)


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
