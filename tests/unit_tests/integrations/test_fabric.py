"""`from core.integrations import FabricStrategy` in a loop of Fabric's trains like one process, in every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.optimizer import GradScaler
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
from tests.unit_tests.reference import make_net

pytest.importorskip("lightning_fabric")


def set_up(strategy: Any, world: int, plugins: Any = None, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """(fabric, model, optimizer, scheduler)."""
    from lightning_fabric import Fabric

    from core.integrations import FabricStrategy

    config = config_of(strategy)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=FabricStrategy(config), plugins=plugins)
    fabric.launch()
    model = make_net(dtype, seed=3 if dist.get_rank() == 0 else 8)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return fabric, *fabric.setup(model, optimizer), scheduler


def train(
    fabric: Any, model: Any, optimizer: Any, scheduler: Any, rank: int, begin: int = 0
) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in range(begin, STEPS):
        optimizer.zero_grad()
        parts = []
        for part in range(MICROBATCHES):
            with fabric.no_backward_sync(model, enabled=part < MICROBATCHES - 1):
                loss = loss_of(model, rank, MICROBATCHES * step + part) / MICROBATCHES
                fabric.backward(loss)
                parts.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)))
        optimizer.step()
        scheduler.step()
        losses.append(sum(parts))
    return losses, norms


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_of_fabrics_trains_like_one_process_and_goes_on_from_its_checkpoint(
    rank: int, world: int, strategy: str, tmp_path: Path
) -> None:
    with launched(rank, world):
        parts = set_up(strategy, world)
        losses, norms = train(*parts, rank)
        expected, wanted, wanted_norms = on_one_process(world, MAX_NORM)
        assert losses == pytest.approx(wanted, rel=1e-9) and norms == pytest.approx(wanted_norms, rel=1e-9)
        fabric, model, optimizer, scheduler = parts
        assert_equal_weights(fabric.strategy.get_module_state_dict(model._forward_module), expected)
        path = str(tmp_path / "state.pt")
        fabric.save(path, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        dist.barrier()
        again = set_up(strategy, world)
        again[0].load(path, {"model": again[1], "optimizer": again[2], "scheduler": again[3]})
        for held in (parts, again):
            train(*held, rank, begin=STEPS - 1)
        states = [held[0].strategy.get_module_state_dict(held[1]._forward_module) for held in (parts, again)]
        for name, value in states[0].items():
            assert torch.equal(value, states[1][name]), name
            assert not torch.equal(value, expected.state_dict()[name]), f"{name} has not moved"


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
def test_fp16_autocast_skips_an_overflow_of_one_rank_on_both(rank: int, world: int, strategy: str) -> None:
    with launched(rank, world):
        from lightning_fabric.plugins import MixedPrecision

        theirs = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=2)
        precision = MixedPrecision("16-mixed", "cpu", scaler=theirs)
        fabric, model, optimizer, _ = set_up(strategy, world, precision, torch.float32)
        scaler = fabric.strategy.precision.scaler
        assert isinstance(scaler, GradScaler) and scaler.get_growth_interval() == 2
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step, torch.float32)
            fabric.backward(loss * (float("inf") if step == 1 and rank == 1 else 1.0))
            before = {n: v.clone() for n, v in fabric.strategy.get_module_state_dict(model._forward_module).items()}
            optimizer.step()
            after = fabric.strategy.get_module_state_dict(model._forward_module)
            assert all(torch.equal(after[n], v) == (step == 1) for n, v in before.items())
            scales.append(scaler.get_scale())
        assert scales == [4096.0, 2048.0, 2048.0, 4096.0]


@ranks(2)
def test_what_speaks_to_torchs_ddp_is_refused_by_name(rank: int, world: int) -> None:
    from core.integrations import FabricStrategy

    with pytest.raises(ValueError, match="was given bucket_cap_mb, static_graph, which speak to torch's DDP"):
        FabricStrategy(static_graph=True, bucket_cap_mb=5)
    with launched(rank, world):
        fabric, model, optimizer, _ = set_up("optim", world)
        loss = loss_of(model, rank, 0) * (float("nan") if rank == 1 else 1.0)
        fabric.backward(loss)
        with pytest.raises(RuntimeError, match="norm is nan, so it cannot be clipped; .* error_if_nonfinite=False"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
