"""Training on a device that is not the CPU, without a GPU: every value as on the CPU, and what lies on the host."""

import itertools
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from core.checkpoint import load_checkpoint, save_checkpoint
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Placement,
    finalize_model_grads,
    materialize,
)
from core.distributed.sharded.param_unit import ParamUnit
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core_plan.state_bytes import GRADIENTS, MASTERS, MOMENTS, PARAMETERS, state_bytes
from tests.unit_tests.second_device import device as second
from tests.unit_tests.second_device.conftest import Runner

CPU = torch.device("cpu")
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
pytestmark = [
    pytest.mark.skipif(second.why_not() is not None, reason=str(second.why_not())),
    pytest.mark.timeout(600),
]


def layers(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Buckets of different lengths."""
    torch.manual_seed(1)
    sizes = (8, 40, 16, 8, 24, 8)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, n), nn.Tanh(), nn.Linear(n, 8)) for n in sizes))
    return model.to(device, dtype)


def batch(step: int, device: torch.device) -> torch.Tensor:
    return torch.randn(
        4, 8, generator=torch.Generator("cpu").manual_seed(10 * step + dist.get_rank()), device="cpu"
    ).to(device)


# -- the engine -------------------------------------------------------------------------------------------------------

SMALL = {"bucket_size": 500}
OF_ALL = {"data_parallel_sharding_strategy": "optim_grads_params", **SMALL}
AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True, "main_grads_dtype": torch.bfloat16}
IN_16_BITS = {**AWARE, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
# name -> the wrapper's options, the optimizer's, dtype of the parameters, what is offloaded
Case = tuple[dict[str, Any], dict[str, Any], torch.dtype, dict[str, Any]]
ENGINE: dict[str, Case] = {
    **{
        f"{strategy}, {dtype}": ({"data_parallel_sharding_strategy": strategy, **SMALL}, {}, dtype, {})
        for strategy in STRATEGIES
        for dtype in (torch.float32, torch.bfloat16)
    },
    "overlap": (
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, **SMALL},
        *({}, torch.float32, {}),
    ),
    "fp32 gradients": ({"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}, {}, torch.bfloat16, {}),
    "rank order": ({"data_parallel_sharding_strategy": "optim_grads", "deterministic_reduction": True}, {},
                   torch.float32, {}),
    "guards": (
        {"check_for_nan_in_grad": True, "check_replicas": True, **SMALL},
        {"clip_grad": 0.1, "log_num_zeros_in_grad": True},
        *(torch.float32, {}),
    ),
    "8 bits": ({"use_distributed_optimizer": True, "grad_communication_dtype": torch.float8_e4m3fn}, {},
               torch.float32, {}),
    "scaled in the optimizer": ({"use_distributed_optimizer": True, "scale_in_optimizer": True}, {"clip_grad": 0.1},
                                torch.float32, {}),
    "fp16": ({"use_distributed_optimizer": True}, {"fp16": True, "initial_loss_scale": 256.0}, torch.float16, {}),
    "moments in 16 bits": ({"use_distributed_optimizer": True, **SMALL}, IN_16_BITS, torch.bfloat16, {}),
    "remainders": ({"use_distributed_optimizer": True}, {**AWARE, "store_param_remainders": True}, torch.bfloat16, {}),
    "offloaded": (
        {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **SMALL},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        *(torch.bfloat16, {}),
    ),
    "offloaded whole, with copies ahead": (
        SMALL, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "clip_grad": 0.1,
                "overlap_cpu_optimizer_d2h_h2d": True},
        *(torch.float32, {}),
    ),
    "offloaded, in 16 bits": (
        {**OF_ALL, "overlap_grad_reduce": True},
        {**IN_16_BITS, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "pin_cpu_params": False},
        *(torch.bfloat16, {}),
    ),
    "offloaded but for Muon": (
        {"use_distributed_optimizer": True, "keep_params_whole": True, "overlap_param_gather": True,
         "bucket_size": 100},
        {"optimizer": "muon", "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, "pin_cpu_grads": False},
        *(torch.float32, {}),
    ),
    "muon": ({"use_distributed_optimizer": True, "keep_params_whole": True, **SMALL}, {"optimizer": "muon"},
             torch.float32, {}),
    "sgd": ({}, {"optimizer": "sgd", "sgd_momentum": 0.9}, torch.float32, {}),
}  # fmt: skip
STATES, BOTH = {"offload_optim_frac": 0.6}, {"offload_optim_frac": 0.6, "offload_param_frac": 0.4}
GRADS = {"offload_optim_frac": 0.7, "offload_grad_frac": 0.5}
PARAMS = {"offload_param_frac": 0.5}
ON_HOST: dict[str, Case] = {
    **{
        f"{strategy}, {dtype}": (
            {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": True, **SMALL},
            {"clip_grad": 0.1},
            *(dtype, BOTH if strategy == "optim_grads_params" else STATES),
        )
        for strategy in STRATEGIES
        for dtype in (torch.float32, torch.bfloat16)
    },
    **{
        f"gradients, reduced {which}, {dtype}": (
            {"data_parallel_sharding_strategy": "optim_grads", "overlap_grad_reduce": overlap,
             "reduce_microbatches": which, **SMALL},
            *({"clip_grad": 0.1}, dtype, GRADS),
        )
        for which in ("every", "last")
        for dtype, overlap in ((torch.float32, True), (torch.bfloat16, False))
    },
    "gradients under guards": (
        {**OF_ALL, "check_for_nan_in_grad": True, "check_replicas": True},
        {"clip_grad": 0.1, "log_num_zeros_in_grad": True},
        *(torch.float32, {**GRADS, "offload_param_frac": 0.4}),
    ),
    "gradients with a norm of 3": (OF_ALL, {"clip_grad": 0.1, "grad_norm_type": 3.0}, torch.float32, GRADS),
    "gradients scaled in the optimizer": (
        {"data_parallel_sharding_strategy": "optim_grads", "scale_in_optimizer": True, **SMALL},
        *({"clip_grad": 0.1}, torch.float32, GRADS),
    ),
    "gradients, fp16": (OF_ALL, {"fp16": True, "initial_loss_scale": 256.0}, torch.float16, GRADS),
    "gradients, not pinned": (OF_ALL, {}, torch.bfloat16, {**GRADS, "pin_memory": False}),
    "parameters alone, fp32": (OF_ALL, {}, torch.float32, PARAMS),
    "parameters alone, bf16": (OF_ALL, {}, torch.bfloat16, PARAMS),
    "moments in 16 bits": (OF_ALL, IN_16_BITS, torch.bfloat16, BOTH),
    "no masters": (OF_ALL, {**IN_16_BITS, "main_params_dtype": torch.bfloat16}, torch.bfloat16, BOTH),
    "no masters, parameters alone": (OF_ALL, {**IN_16_BITS, "main_params_dtype": torch.bfloat16}, torch.bfloat16,
                                     PARAMS),
    "remainders": (OF_ALL, {**AWARE, "store_param_remainders": True}, torch.bfloat16, BOTH),
    "not pinned": (OF_ALL, {}, torch.bfloat16, {**BOTH, "pin_memory": False}),
    "rank order": ({**OF_ALL, "deterministic_reduction": True}, {}, torch.float32, BOTH),
}  # fmt: skip


def trained(case: Case, device: torch.device) -> tuple[list[Any], dict[str, torch.Tensor], Any]:
    """Losses and norms of two steps of two microbatches, the weights, and the state of the optimizer."""
    options, of_optimizer, dtype, offloaded = case
    placement = Placement(**offloaded) if offloaded and device != CPU else None
    config = DistributedDataParallelConfig(**options, placement=placement)
    model = DistributedDataParallel(None, config, layers(device, dtype))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**{"lr": 0.05, "bf16": dtype == torch.bfloat16, **of_optimizer}), [model]
    )
    reported: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        for number in range(2):
            x = batch(2 * step + number, device)
            loss = (model(x.to(dtype)).float() - x).square().mean()
            if number == 0:
                with model.no_sync():
                    optimizer.scale_loss(loss).backward()
            else:
                optimizer.scale_loss(loss).backward()
        finalize_model_grads([model])
        reported.append((float(loss.detach()), *optimizer.step()))
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    return reported, weights, optimizer.state_dict()["state"]


def bytes_held(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """Those of a plan for a GPU are those that are here, on both tiers."""
    parallel_state.initialize_model_parallel()
    placed: dict[str, Any] = {"no_shard": {}, "optim": STATES, "optim_grads": GRADS, "optim_grads_params": {**BOTH,
                              **GRADS}}[name]  # fmt: skip
    options: dict[str, Any] = {"data_parallel_sharding_strategy": name, "overlap_grad_reduce": True, **SMALL}
    config = DistributedDataParallelConfig(**options, placement=Placement(**placed) if placed else None)
    by_optimizer = {} if placed else {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.4}
    of_optimizer = OptimizerConfig(lr=0.05, bf16=dtype == torch.bfloat16, **by_optimizer)
    model = DistributedDataParallel(None, config, layers(device, dtype))
    optimizer: Any = get_megatron_optimizer(of_optimizer, [model])
    step(model, optimizer, 0)
    held: Counter[str] = Counter({GRADIENTS: sum(buffer.grad_data.nbytes for buffer in model.engine.buffers)})
    below: Counter[str] = Counter()
    of_grads = [bucket.memory.owned_grad for buffer in model.engine.buffers for bucket in buffer.buckets]
    in_between = name in ("optim_grads", "optim_grads_params")
    assert any(grad.is_cpu for grad in of_grads) == in_between and not all(grad.is_cpu for grad in of_grads)
    hosted = sum(masters.grad.is_cpu for masters in optimizer.masters)
    assert 0 < hosted < len(of_grads) and "masters and moments in the host's memory" in model.describe()
    get_megatron_optimizer(OptimizerConfig(lr=0.05, bf16=dtype == torch.bfloat16), [model])
    assert ("masters and moments in the host's memory" in model.describe()) == bool(placed), "an earlier choice stays"
    if not model.engine.params.units:
        of_buffers = [buffer.param_data for buffer in model.engine.buffers if buffer.param_data is not None]
        held[PARAMETERS] = sum(values.nbytes for values in of_buffers or model.parameters())
    for unit in model.engine.params.units:
        (held if unit.shard.device == device else below)[PARAMETERS] += unit.shard.nbytes
    for masters in optimizer.masters:
        tier = held if masters.grad.device == device else below
        tier[MASTERS] += masters.kept.nbytes
        tier[GRADIENTS] += masters.grad.nbytes if tier is below else 0
        for segment in masters.segments:
            tier[MOMENTS] += sum(optimizer.state[segment.master][key].nbytes for key in ("exp_avg", "exp_avg_sq"))
    planned = state_bytes(
        [(model.module, model.engine.plan)], config, of_optimizer, model.groups, on_cpu=False, one_host=True
    )
    for found, reported in ((held, planned.device), (below, planned.offloaded)):
        kinds = (PARAMETERS, GRADIENTS, MASTERS, MOMENTS)
        assert {kind: found[kind] for kind in kinds} == {kind: reported[kind] for kind in kinds}
    assert below[MOMENTS] > 0 and (below[PARAMETERS] > 0) == (name == "optim_grads_params")
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plan_for_a_gpu_counts_both_tiers_to_the_byte(run: Runner, name: str, dtype: torch.dtype) -> None:
    run(bytes_held, 2, name, dtype)


def equal_to_the_cpu(device: torch.device, cases: dict[str, Case], is_default: bool) -> list[str]:
    """The cases in which something differs. is_default: True if what is made without a device lies on this one."""
    parallel_state.initialize_model_parallel()
    different = []
    for name, case in cases.items():
        with device if is_default else nullcontext():
            reported, weights, state = trained(case, device)
        cpu_said, cpu_weights, cpu_state = trained(case, CPU)
        same = reported == cpu_said and all(torch.equal(cpu_weights[key], value) for key, value in weights.items())
        assert state.keys() == cpu_state.keys()
        if not same:
            different.append(name)
    parallel_state.destroy_model_parallel()
    return different


QUARTERS = {
    f"{name}, part {part + 1}": dict(itertools.islice(cases.items(), part, None, 4))
    for name, cases in (("engine", ENGINE), ("on_host", ON_HOST))
    for part in range(4)
}


@pytest.mark.parametrize("is_default", [False, True])
@pytest.mark.parametrize("cases", QUARTERS.values(), ids=QUARTERS)
@pytest.mark.in_suite(3)
def test_training_is_that_of_the_cpu_bit_for_bit(run: Runner, cases: dict[str, Case], is_default: bool) -> None:
    assert run(equal_to_the_cpu, 2, cases, is_default) == []


def with_copies(device: torch.device, layout: str) -> nn.Sequential:
    """Layers of which some parameters have copies on the other rank, as a rule of `layout` adds them."""
    model = layers(device)
    model[1][0].weight.sequence_parallel = model[1][2].bias.sequence_parallel = layout == "tp"
    model[4][0].weight.shared_embedding = layout == "pp"
    return model


LAYOUTS: dict[str, dict[str, int]] = {
    "tp": {"tensor_model_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "instances": {"num_distributed_optimizer_instances": 2},
}


def reduced_between_copies(device: torch.device, layout: str) -> list[Any]:
    """Weights after two steps on the CPU, with gradients on the device, and with gradients on the host."""
    parallel_state.initialize_model_parallel(**LAYOUTS[layout])
    found = []
    for where, placed in ((CPU, {}), (device, {}), (device, {"offload_optim_frac": 1.0, "offload_grad_frac": 1.0})):
        # Ranks of tp have other samples here, so that a sum of copies shows: the watch would say so.
        options: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads", "first_steps": "ignore", **SMALL}
        if layout == "instances":
            options["num_distributed_optimizer_instances"] = 2
        config = DistributedDataParallelConfig(**options, placement=Placement(**placed) if placed else None)
        by_tokens = SimpleNamespace(calculate_per_token_loss=True)
        model = DistributedDataParallel(by_tokens, config, with_copies(where, layout))
        optimizer: Any = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.5, clip_grad=0.1), [model])
        assert all(bucket.memory.owned_grad.is_cpu == bool(placed or where == CPU) for bucket in model.engine.buckets)
        for number in range(2):
            optimizer.zero_grad()
            for again in range(2):  # the second time the gradients are added to those that were reduced
                for microbatch in range(2):
                    model(batch(10 * number + 2 * again + microbatch, where)).square().mean().backward()
                finalize_model_grads([model], torch.tensor(3, device=where))
            model.scale_gradients(torch.tensor(2.0, device=where))
            optimizer.step()
        found.append({name: value.cpu() for name, value in model.state_dict().items()})
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_on_the_host_are_reduced_between_copies(run: Runner, layout: str) -> None:
    on_cpu, on_device, on_host = run(reduced_between_copies, 2, layout)
    for name, weight in on_cpu.items():
        assert torch.equal(on_host[name], on_device[name]), name
        torch.testing.assert_close(on_host[name], weight, rtol=0, atol=1e-7)


def mixed(device: torch.device) -> list[str]:
    """What the device says to tensors of the CPU."""
    here, there = torch.ones(4, device=device), torch.ones(4)
    said = []
    calls = (lambda: here + there, lambda: here.add_(there), lambda: here.equal(there), lambda: here.copy_(there))
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    dist.all_reduce(here)
    assert here.tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match="No backend|given a tensor of the CPU"):
        dist.distributed_c10d._get_default_group()._get_backend(device).allreduce([there])
    return said


def test_the_device_takes_no_tensor_of_the_cpu(run: Runner) -> None:
    """Otherwise the other tests here could not fail."""
    said = run(mixed, 2)
    assert len(said) == 3 and all("Expected all tensors to be on the same device" in words for words in said)


# -- GeminiPlugin ------------------------------------------------------------------------------------------------------

TINY_CHUNKS: dict[str, Any] = {"min_chunk_size_m": 0, "search_range_m": 0, "hidden_dim": 64}


def boosted(device: torch.device, precision: str, **options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=GeminiPlugin(precision=precision, initial_scale=2.0**8, **TINY_CHUNKS, **options))
    model = layers(device)  # moved before the optimizer is made: torch makes new parameters for such a device
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)  # type: ignore[assignment]
    return booster, model, optimizer


def losses_of(booster: Booster, model: Any, optimizer: Any, steps: range = range(3)) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        x = batch(step, next(model.parameters()).device)
        loss = (model(x).float() - x).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def chunk_bytes(model: Any) -> list[int]:
    """Of each chunk's shard of parameters, in 16 bits."""
    return [2 * unit.shard.numel() for unit in model.module.engine.params.units]


def placed(device: torch.device, precision: str, fractions: tuple[float, ...]) -> dict[Any, Any]:
    """For each placement of parameters and of states: losses, and bytes that training holds on the device."""
    found = {}
    for param, optim in itertools.product(fractions, repeat=2):
        before = second.library.bytes_now()
        pinned = bool(param or optim)
        booster, model, optimizer = boosted(
            device, precision, offload_param_frac=param, offload_optim_frac=optim, max_prefetch=1, pin_memory=pinned
        )
        losses = losses_of(booster, model, optimizer)
        found[param, optim] = losses, second.library.bytes_now() - before, chunk_bytes(model)
        engine = model.module.engine
        if param or optim:
            assert "in the host's memory" in model.module.describe()
        for unit in engine.params.units:
            assert unit.shard.is_cpu == (unit.tier is not None) and not unit.params[0].is_cpu
        del booster, model, optimizer, engine
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp16"])
@pytest.mark.in_suite(2)
def test_a_placement_changes_no_bit_and_takes_bytes_from_the_device(run: Runner, precision: str, world: int) -> None:
    fractions = (0.0, 0.25, 0.5, 0.75, 1.0) if precision == "bf16" else (0.0, 0.5, 1.0)
    found = run(placed, world, precision, fractions)
    losses, most, chunks = found[0.0, 0.0]
    assert len(set(losses)) == len(losses)
    for (param, optim), (others, held, _) in found.items():
        assert others == losses, (param, optim)
        if precision != "bf16":
            continue
        of_params = 2 * sum(chunks) // 2
        asked = param * of_params + optim * 6 * of_params  # masters and two moments in fp32 next to 16-bit parameters
        assert abs(most - held - asked) <= 7 * max(chunks), (param, optim, most - held, asked)
    if precision == "bf16":
        for first, second_ in itertools.pairwise(fractions):
            assert found[first, 0.5][1] > found[second_, 0.5][1] and found[0.5, first][1] > found[0.5, second_][1]


def budgeted(device: torch.device) -> dict[Any, Any]:
    """Losses, gathers and the highest point of the device, by budget."""
    found: dict[Any, Any] = {}
    for budget in (None, 60_000, 9_000, 8_000):
        before = second.library.bytes_now()
        booster, model, optimizer = boosted(
            device, "bf16", placement_policy="auto", memory_budget_bytes=budget, pin_memory=True
        )
        residents = model.module.engine.params.eviction
        assert residents.budget == (second.MEMORY if budget is None else budget)
        losses = losses_of(booster, model, optimizer, range(2))
        begun = residents.transfers
        second.library.take_bytes_most()
        losses += losses_of(booster, model, optimizer, range(2, 4))
        most = second.library.take_bytes_most() - before
        found[budget] = losses, residents.transfers - begun, most, model.memstats.non_model_bytes
        del booster, model, optimizer, residents
    with pytest.raises(ValueError, match="Increase memory_budget_bytes"):
        boosted(device, "bf16", placement_policy="auto", memory_budget_bytes=2_000)
    return found


def test_a_budget_is_what_the_device_has_or_what_is_configured(run: Runner) -> None:
    found = run(budgeted, 2)
    losses, transfers, most, _ = found[None]
    for one, (same, more, less, _) in found.items():
        assert same == losses, one
        assert more >= transfers and less <= most
        transfers, most = more, less
    assert found[8_000][1] > found[None][1] and found[8_000][2] < found[None][2]
    for budget in (60_000, 9_000, 8_000):  # what an operator makes for a moment is not counted
        assert found[budget][2] < budget


def ahead(device: torch.device) -> tuple[int, int]:
    """Copies to the device that were begun before their chunk was used, with max_prefetch of 0 and of 1."""
    counts = []
    for prefetch in (0, 1):
        booster, model, optimizer = boosted(device, "bf16", offload_param_frac=1.0, max_prefetch=prefetch)
        losses_of(booster, model, optimizer, range(1))
        with (
            mock.patch.object(
                ParamUnit, "start_all_gather", autospec=True, side_effect=ParamUnit.start_all_gather
            ) as launched,
            mock.patch.object(ParamUnit, "all_gather", autospec=True, side_effect=ParamUnit.all_gather) as gathered,
        ):
            losses_of(booster, model, optimizer, range(1, 2))
        counts.append(launched.call_count - gathered.call_count)
    return counts[0], counts[1]


@pytest.mark.parametrize("world", [1, 2])
def test_the_next_chunk_is_copied_while_one_is_used(run: Runner, world: int) -> None:
    never, often = run(ahead, world)
    assert never == 0 and often > 5


def saved_and_loaded(device: torch.device, folder: Path) -> None:
    """Files of a model whose shards lie on the host, in plugins and engines where they do not, and back."""
    on_host = {"offload_param_frac": 0.5, "offload_optim_frac": 1.0}
    booster, model, optimizer = boosted(device, "bf16", **on_host)
    losses_of(booster, model, optimizer)
    booster.save_model(model, folder / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)
    wanted = losses_of(booster, model, optimizer, range(3, 5))
    for options in ({}, on_host, {"offload_param_frac": 1.0}):
        again, other, other_optimizer = boosted(device, "bf16", **options)
        losses_of(again, other, other_optimizer, range(7, 8))
        again.load_model(other, folder / "model")
        again.load_optimizer(other_optimizer, folder / "optimizer")
        assert losses_of(again, other, other_optimizer, range(3, 5)) == wanted, options
    with model.gathered(), torch.no_grad():
        whole = {name: value.detach().clone() for name, value in model.unwrap().named_parameters()}
        assert all(value.device == device for value in whole.values())
        next(model.unwrap().parameters()).mul_(0.5)
    with model.gathered():
        first, *others = model.unwrap().named_parameters()
        assert torch.equal(first[1], 0.5 * whole[first[0]])
        assert all(torch.equal(value, whole[name]) for name, value in others)

    parallel_state.initialize_model_parallel()
    config = OptimizerConfig(lr=0.05, bf16=True)
    kinds: list[Any] = [Placement(offload_param_frac=0.5, offload_optim_frac=0.5), None]
    engines = []
    for placement in (kinds[0], kinds[1], kinds[0]):
        options = {**OF_ALL, "placement": placement}
        wrapped = DistributedDataParallel(
            None, DistributedDataParallelConfig(**options), layers(device, torch.bfloat16)
        )
        engines.append((wrapped, get_megatron_optimizer(config, [wrapped])))
    step(*engines[0], 0)
    for number in (0, 1):
        save_checkpoint(folder / f"engine-{number}", 1, [engines[number][0]], engines[number][1])
        load_checkpoint(folder / f"engine-{number}", [engines[number + 1][0]], engines[number + 1][1])
    for wrapped, optimizer in engines:
        step(wrapped, optimizer, 1)
    states = [wrapped.state_dict() for wrapped, _ in engines]
    assert all(torch.equal(states[0][name], state[name]) for state in states for name in state)
    parallel_state.destroy_model_parallel()


def step(model: DistributedDataParallel, optimizer: Any, number: int) -> None:
    first = next(model.parameters())
    x = batch(number, first.device).to(first.dtype)
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    finalize_model_grads([model])
    optimizer.step()


def test_checkpoints_go_to_the_host_and_back(run: Runner, tmp_path: Path) -> None:
    run(saved_and_loaded, 2, tmp_path)


def made_by_parts(device: torch.device) -> None:
    """A model of `materialize` that is moved takes no memory, and boosted no more than shards and a few modules."""

    def lazy(where: torch.device) -> nn.Module:
        with torch.device("meta"):
            module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
        return materialize(module, lambda part: nn.init.normal_(part.weight), device=where)  # type: ignore[arg-type]

    whole, layer = 16 * 64 * 64 * 2, 64 * 64 * 4
    second.library.take_bytes_most()
    before = second.library.bytes_now()
    lazy(CPU).to(device)
    assert second.library.take_bytes_most() - before < layer
    module = lazy(device)
    booster = Booster(plugin=GeminiPlugin(precision="bf16", offload_optim_frac=1.0, **TINY_CHUNKS))
    model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
    shards = whole // 2 + whole // 2  # of parameters and of gradients
    assert second.library.take_bytes_most() - before < shards + 5 * layer
    assert next(model.parameters()).device == device
    optimizer.zero_grad()
    x = torch.ones(2, 64, device=device)
    booster.backward(model(x).float().square().mean(), optimizer)
    optimizer.step()


def test_a_model_of_materialize_is_moved_without_its_memory(run: Runner) -> None:
    run(made_by_parts, 2)


def refused(device: torch.device) -> None:
    for options, words in (
        ({"offload_directory": "/tmp", "offload_optim_frac": 1.0}, "offload_directory is supported on CPUs only"),
        ({"pin_memory": True}, "pin_memory pins the host memory of tensors offloaded from a GPU, but nothing is"),
        ({"placement_policy": "auto", "gpu_margin_mem_ratio": 0.5}, "gpu_margin_mem_ratio is 0.5, and masters"),
    ):
        with pytest.raises(ValueError, match=words):
            GeminiPlugin(**options)
    parallel_state.initialize_model_parallel()
    for placement, words in (
        (Placement(offload_optim_frac=1.0, directory="/tmp"), "placement.directory is '/tmp', but .* 'npu'"),
        (Placement(offload_optim_frac=0.5, offload_grad_frac=1.0), "offload_grad_frac 1.0 and offload_optim_frac 0.5"),
    ):
        with pytest.raises(ValueError, match=words):
            DistributedDataParallel(None, DistributedDataParallelConfig(**OF_ALL, placement=placement), layers(device))
    placement = Placement(offload_optim_frac=1.0)
    model = DistributedDataParallel(None, DistributedDataParallelConfig(**OF_ALL, placement=placement), layers(device))
    with pytest.raises(ValueError, match="optimizer_cpu_offload keeps the optimizer's state on the CPU, and so"):
        get_megatron_optimizer(OptimizerConfig(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0), [model])
    parallel_state.destroy_model_parallel()


def test_what_is_not_for_a_device_is_refused(run: Runner) -> None:
    run(refused, 2)


def low_level(device: torch.device) -> dict[Any, list[float]]:
    found = {}
    for stage, offload in itertools.product((1, 2), (False, True)):
        booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="bf16", cpu_offload=offload, max_norm=0.1))
        model = layers(device)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
        model, optimizer, *_ = booster.boost(model, optimizer)  # type: ignore[assignment]
        found[stage, offload] = losses_of(booster, model, optimizer)
    return found


def test_low_level_zero_on_a_device(run: Runner) -> None:
    first, *others = run(low_level, 2).values()
    assert all(losses == first for losses in others) and first[0] > first[-1]
