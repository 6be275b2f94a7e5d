"""`from core.integrations import Accelerator` in a loop of accelerate's trains like one process, in every strategy."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel
from core.groups.agree import SyncError
from core.integrations import LoopOptimizer
from tests.unit_tests.integrations.loops import (
    MAX_NORM,
    MICROBATCHES,
    STEPS,
    STRATEGIES,
    assert_equal_weights,
    config_of,
    launched,
    loss_of,
    on_one_process,
    optimizer_of,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch, make_net

pytest.importorskip("accelerate")


def prepared(strategy: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """(accelerator, model, optimizer, scheduler)."""
    from core.integrations import Accelerator

    config = config_of(strategy)
    options = {"cpu": True, "gradient_accumulation_steps": MICROBATCHES, "ddp_config": config} | options
    accelerator = Accelerator(**options)
    model = make_net(torch.float64, seed=3 if dist.get_rank() == 0 else 8)  # the first rank's weights count
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    optimizer, model, scheduler = accelerator.prepare(optimizer, model, scheduler)
    return accelerator, model, optimizer, scheduler


def train(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any, rank: int, begin: int = 0, steps: int = STEPS
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for number in range(MICROBATCHES * begin, MICROBATCHES * steps):
        with accelerator.accumulate(model):
            loss = loss_of(model, rank, number)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.scheduler.step()  # accelerate's own steps it once a rank
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    pairs = [sum(losses[at : at + MICROBATCHES]) / MICROBATCHES for at in range(0, len(losses), MICROBATCHES)]
    return pairs, norms


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_of_accelerates_trains_like_one_process(rank: int, world: int, strategy: str) -> None:
    with launched(rank, world):
        parts = prepared(strategy)
        accelerator, model, optimizer, _ = parts
        assert isinstance(model, DistributedDataParallel) and isinstance(optimizer.optimizer, LoopOptimizer)
        assert isinstance(optimizer, torch.optim.Optimizer) and accelerator.unwrap_model(model) is model.module
        losses, norms = train(*parts, rank)
        expected, wanted, wanted_norms = on_one_process(world, MAX_NORM)
        assert losses == pytest.approx(wanted, rel=1e-9) and norms == pytest.approx(wanted_norms, rel=1e-9)
        assert min(wanted_norms) > MAX_NORM, "nothing is clipped"
        assert_equal_weights(accelerator.get_state_dict(model), expected)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_job_that_is_saved_goes_on_as_one_that_did_not_stop(
    rank: int, world: int, strategy: str, tmp_path: Path
) -> None:
    with launched(rank, world):
        accelerator, model, optimizer, scheduler = prepared(strategy)
        train(accelerator, model, optimizer, scheduler, rank, steps=1)
        accelerator.save_state(str(tmp_path / "state"))
        accelerator.wait_for_everyone()
        saved = torch.load(tmp_path / "state" / "optimizer.bin", weights_only=True)
        assert [len(group["params"]) for group in saved["param_groups"]] == [2, 5]
        shapes = [tuple(saved["state"][number]["momentum_buffer"].shape) for number in range(7)]
        assert shapes == [tuple(param.shape) for param in make_net().parameters()]
        train(accelerator, model, optimizer, scheduler, rank, begin=1, steps=2)  # what is to be forgotten
        accelerator.load_state(str(tmp_path / "state"))
        train(accelerator, model, optimizer, scheduler, rank, begin=1)
        assert_equal_weights(accelerator.get_state_dict(model), on_one_process(world, MAX_NORM)[0])


@ranks(2)
def test_gradients_can_be_read_and_edited_after_backward_where_they_are_whole(rank: int, world: int) -> None:
    with launched(rank, world):
        accelerator, model, optimizer, _ = prepared("no_shard", gradient_accumulation_steps=1)
        reference = make_net()
        (sum(loss_of(reference, other, 0) for other in range(world)) / world).backward()
        accelerator.backward(loss_of(model, rank, 0))
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)  # torch's own, not the accelerator's
        nn.utils.clip_grad_value_(reference.parameters(), 0.01)
        optimizer.step()
        optimizer_of(reference).step()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
def test_values_are_clipped(rank: int, world: int, strategy: str) -> None:
    with launched(rank, world):
        accelerator, model, optimizer, _ = prepared(strategy, gradient_accumulation_steps=1)
        reference = make_net()
        plain = optimizer_of(reference)
        (sum(loss_of(reference, other, 0) for other in range(world)) / world).backward()
        nn.utils.clip_grad_value_(reference.parameters(), 0.05)
        plain.step()
        accelerator.backward(loss_of(model, rank, 0))
        accelerator.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        for name, value in accelerator.get_state_dict(model).items():
            torch.testing.assert_close(value, reference.state_dict()[name])


@ranks(2)
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks_and_the_scheduler_waits(rank: int, world: int) -> None:
    with launched(rank, world):
        accelerator, model, optimizer, scheduler = prepared("optim", gradient_accumulation_steps=1)
        before = accelerator.get_state_dict(model)
        before = {name: value.clone() for name, value in before.items()}
        accelerator.backward(loss_of(model, rank, 0) * (float("inf") if rank == 1 else 1.0))
        optimizer.step()
        scheduler.step()
        assert accelerator.optimizer_step_was_skipped and scheduler.get_last_lr() == [0.2, 0.1]
        assert all(torch.equal(value, before[name]) for name, value in accelerator.get_state_dict(model).items())
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, rank, 0))
        optimizer.step()
        scheduler.step()
        assert not accelerator.optimizer_step_was_skipped
        assert scheduler.get_last_lr() == pytest.approx([0.2 * 0.8**2, 0.1 * 0.8**2])  # once a rank, as accelerate does


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
def test_fp16_trains_and_skips_an_overflow_of_one_rank_on_both(rank: int, world: int, strategy: str) -> None:
    with launched(rank, world):
        from accelerate.utils import GradScalerKwargs

        from core.integrations import Accelerator

        handler = GradScalerKwargs(init_scale=4096.0, growth_interval=2)
        options: dict[str, Any] = {"cpu": True, "mixed_precision": "fp16", "kwargs_handlers": [handler]}
        accelerator = Accelerator(**options, ddp_config=config_of(strategy))
        net, reference = make_net(torch.float32), make_net(torch.float32)
        model, optimizer = accelerator.prepare(net, optimizer_of(net))
        plain, scales = optimizer_of(reference), []
        for step in range(4):
            before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
            optimizer.zero_grad()
            loss = loss_of(model, rank, step, torch.float32)
            accelerator.backward(loss * (float("inf") if step == 1 and rank == 1 else 1.0))
            norm = float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
            optimizer.step()
            if step != 1:
                plain.zero_grad()
                (sum(loss_of(reference, other, step, torch.float32) for other in range(world)) / world).backward()
                assert norm == pytest.approx(
                    float(nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)), rel=0.02
                )
                plain.step()
            assert accelerator.optimizer_step_was_skipped == (step == 1)
            after = accelerator.get_state_dict(model)
            assert all(torch.equal(after[name], value) == (step == 1) for name, value in before.items())
            scales.append(accelerator.scaler.get_scale())
        assert scales == [4096.0, 2048.0, 2048.0, 4096.0]
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(after[name], value, atol=0.01, rtol=0.02)


class ByNorm(torch.optim.SGD):
    """Moves each parameter by its own norm, and does not say so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] * (1 + float(param.norm())))


class SaysByNorm(ByNorm):
    """The same, and says it."""

    needs_shapes = True
    couples_parameters = False


@ranks(2)
def test_an_optimizer_that_does_not_say_what_it_sees_trains_where_parameters_are_whole(rank: int, world: int) -> None:
    reference = make_net()
    plain = ByNorm(reference.parameters(), lr=0.05)
    for step in range(STEPS):
        plain.zero_grad()
        (sum(loss_of(reference, other, step) for other in range(world)) / world).backward()
        plain.step()
    unknown = "ByNorm does not say .*ByNorm.needs_shapes = False.*ByNorm.couples_parameters = False"
    cut = "parameter .* is updated by SaysByNorm, which needs it whole.*keep_params_whole='all'"
    cases: tuple[tuple[str, bool | str, type[ByNorm], str], ...] = (
        ("no_shard", False, ByNorm, ""),
        ("optim", "all", ByNorm, unknown),
        ("optim", True, SaysByNorm, cut),
        ("optim", "all", SaysByNorm, ""),
        ("optim_grads_params", "all", SaysByNorm, ""),
    )
    for strategy, whole, cls, refused in cases:
        with launched(rank, world):
            from core.integrations import Accelerator

            config = replace(config_of(strategy), keep_params_whole=whole)  # type: ignore[arg-type]
            accelerator, net = Accelerator(cpu=True, ddp_config=config), make_net()
            user = cls(net.parameters(), lr=0.05)
            if refused:
                with pytest.raises(ValueError, match=refused):
                    accelerator.prepare(net, user)
                continue
            model, optimizer = accelerator.prepare(net, user)
            for step in range(STEPS):
                optimizer.zero_grad()
                accelerator.backward(loss_of(model, rank, step))
                optimizer.step()
            assert_equal_weights(accelerator.get_state_dict(model), reference)


@ranks(2)
def test_what_cannot_be_obeyed_is_refused_by_name(rank: int, world: int) -> None:
    with launched(rank, world):
        from accelerate import ParallelismConfig
        from accelerate.utils import DistributedDataParallelKwargs

        accelerator, model, optimizer, _ = prepared("optim", gradient_accumulation_steps=1)
        with pytest.raises(NotImplementedError, match="join_uneven_inputs: a rank without batches"):
            accelerator.join_uneven_inputs([model])
        accelerator.backward(loss_of(model, rank, 0))
        with pytest.raises(SyncError, match=r"clip with accelerator.clip_grad_norm_ or fabric.clip_gradients in loops"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(ValueError, match="was given 2 parameters and the sharded optimizer trains 7"):
            accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0)
        with pytest.raises(ValueError, match="norm_type is 1.0, but the norm of sharded gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0, 1.0)
        other = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="in no model that was prepared"):
            accelerator.prepare(torch.optim.SGD(other.parameters(), lr=0.1))
        with pytest.raises(ValueError, match="lacks 1 of the model's trainable parameters, the first 'bias'"):
            accelerator.prepare(other, torch.optim.SGD([other.weight], lr=0.1))
        for name, value in (("bucket_cap_mb", 5), ("comm_hook", "fp16"), ("comm_wrapper", "bf16")):
            with pytest.raises(ValueError, match=f"DistributedDataParallelKwargs\\({name}="):
                prepared("no_shard", kwargs_handlers=[DistributedDataParallelKwargs(**{name: value})])
        idle = {"dim": 1, "check_reduction": True, "static_graph": True, "comm_state_option": {"matrix_rank": 2}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prepared("no_shard", kwargs_handlers=[DistributedDataParallelKwargs(**idle)])
            prepared("no_shard", kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
        found = [str(each.message) for each in caught if "changes nothing here" in str(each.message)]
        assert len(found) == (len(idle) if rank == 0 else 0), found
        assert all(any(f"({name}=" in text for text in found) for name in idle) == (rank == 0)
        for name in ("dp_shard_size", "tp_size", "cp_size", "sp_size"):
            with pytest.raises(ValueError, match=rf"ParallelismConfig\({name}=2\) is accelerate's own wrapping; "):
                prepared("no_shard", parallelism_config=ParallelismConfig(**{name: 2}))


def test_a_plugin_that_shards_or_splits_is_refused_with_what_to_write_instead() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    from core.integrations import Accelerator

    full = r'data_parallel_sharding_strategy="optim_grads_params"'
    with pytest.raises(ValueError, match=rf"fsdp_plugin .*FSDP.*{full}"):
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    for name, instead in {
        "deepspeed_plugin": full,
        "deepspeed_plugins": full,
        "megatron_lm_plugin": "HybridParallelPlugin",
        "torch_tp_plugin": "HybridParallelPlugin",
    }.items():
        with pytest.raises(ValueError, match=f"{name} .*{instead}"):
            Accelerator(cpu=True, **{name: object()})
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"ACCELERATE_USE_{name}", "true")
            with pytest.raises(ValueError, match=f"ACCELERATE_USE_{name}=true"):
                Accelerator(cpu=True)
    with pytest.raises(TypeError, match=r"ddp_config is 'optim'; expected a core.distributed.Dist"):
        Accelerator(cpu=True, ddp_config="optim")


@ranks(2)
def test_a_split_model_is_refused_because_batches_are_dealt_out_by_rank(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with launched(rank, world), pytest.raises(ValueError, match="distributes batches to 2 ranks, but .* group of 1"):
        prepared("no_shard")


def test_on_one_process_everything_is_accelerates_own() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        from core.integrations import Accelerator

        accelerator = Accelerator(cpu=True)
        model = nn.Linear(2, 1)
        prepared_model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert prepared_model is model and not isinstance(optimizer.optimizer, LoopOptimizer)


def test_another_name_is_refused_with_those_that_there_are() -> None:
    import core.integrations

    with pytest.raises(AttributeError, match="no attribute 'Lightning'; known are Accelerator, Trainer"):
        _ = core.integrations.Lightning


class Halves(nn.Module):
    """Uses one part on all ranks, one on rank 0 alone, and one in the first step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.one, self.first = (nn.Linear(5, 3) for _ in range(3))

    def forward(self, inputs: torch.Tensor, *, one: bool, first: bool) -> torch.Tensor:
        found: torch.Tensor = self.all(inputs)
        return found + (self.one(inputs) if one else 0) + (self.first(inputs) if first else 0)


@ranks(2)
def test_parameters_that_a_step_does_not_use_train_as_where_torchs_ddp_searches_for_them(rank: int, world: int) -> None:
    """As with accelerate alone: no decay and no momentum where no rank has a gradient. The search is warned of."""
    from accelerate import Accelerator as Alone
    from accelerate.utils import DistributedDataParallelKwargs

    from core.integrations import Accelerator

    found: dict[Any, dict[str, torch.Tensor]] = {}
    for kind in (Accelerator, Alone):
        with launched(rank, world), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handler = DistributedDataParallelKwargs(find_unused_parameters=True)
            accelerator = kind(cpu=True, kwargs_handlers=[handler])
            torch.manual_seed(3)
            model = Halves().double()
            start = {name: value.clone() for name, value in model.state_dict().items()}
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
            model, optimizer = accelerator.prepare(model, optimizer)
            for step in range(3):
                inputs, targets = batch(rank, step, torch.float64)
                optimizer.zero_grad()
                output = model(inputs, one=rank == 0, first=step == 0)
                accelerator.backward((output - targets).square().mean())
                optimizer.step()
            found[kind] = {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
        searched = [each for each in caught if "find_unused_parameters=True" in str(each.message)]
        assert len(searched) == (kind is Accelerator and rank == 0)
    for name, value in found[Alone].items():
        assert (value - start[name]).abs().max() > 0.01, name
        torch.testing.assert_close(found[Accelerator][name], value)


@ranks(2)
@pytest.mark.parametrize("says", [None, False])
def test_batchnorm_evaluates_alike_on_all_ranks_as_with_accelerate_alone(
    rank: int, world: int, says: bool | None
) -> None:
    """Rank 0's statistics count, where no one asks for anything; `broadcast_buffers=False` of its handler is obeyed."""
    from accelerate import Accelerator as Alone
    from accelerate.utils import DistributedDataParallelKwargs

    from core.integrations import Accelerator

    found = {}
    for kind in (Accelerator, Alone):
        with launched(rank, world):
            handlers = [] if says is None else [DistributedDataParallelKwargs(broadcast_buffers=says)]
            accelerator = kind(cpu=True, kwargs_handlers=handlers)
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for step in range(3):
                accelerator.backward(loss_of(model, rank, step))
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                found[kind] = float(loss_of(model, 0, 9))
    assert found[Accelerator] == pytest.approx(found[Alone], rel=1e-9)
    everyone = accelerator_values(found[Accelerator], world)
    assert (everyone[0] == everyone[1]) == (says is None)


def accelerator_values(value: float, world: int) -> list[float]:
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(world)]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return [float(each) for each in values]
