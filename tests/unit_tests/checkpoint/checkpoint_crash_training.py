"""A small GPT that trains, saves, is killed in a save and goes on, on two ranks forked from one process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.unit_tests.checkpoint.checkpoint_crash import LIMIT_S, LOST_A_PEER, WORLD, exit_of

STEPS, SAVE_EVERY = 6, 2


@dataclass(frozen=True)
class KilledTraining:
    """Rank `victim` dies at `point` of the second save, that of step 4."""

    point: str
    victim: int
    asynchronous: bool
    strategy: str  # of the sharding of optimizer and gradients


@dataclass(frozen=True)
class Resumed:
    """What became of it."""

    killed: KilledTraining
    exits: list[int]  # of the run that was killed
    exits_after: list[int]  # of the run that went on
    started_at: list[int]  # the step it went on from, by rank
    equal: bool  # parameters and optimizer state at the end to those of an unbroken run, in every bit


def run_trainings(killed: list[KilledTraining], folder: str, send: Callable[[Resumed], None]) -> None:
    """To be called in a process that has nothing else to do."""
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    unbroken: dict[str, list[str]] = {}
    for number, case in enumerate(killed):
        if case.strategy not in unbroken:
            place = Path(folder) / f"unbroken {case.strategy}"
            assert _run(place, case, is_killed=False) == [0] * WORLD
            unbroken[case.strategy] = _ends(place)
        place = Path(folder) / f"case {number}"
        exits = _run(place, case, is_killed=True)
        exits_after = _run(place, case, is_killed=False)
        ends = _ends(place)
        started = [int((place / f"start-{rank}").read_text()) for rank in range(WORLD)]
        send(Resumed(case, exits, exits_after, started, ends == unbroken[case.strategy]))
        shutil.rmtree(place)


def _ends(place: Path) -> list[str]:
    return [(place / f"end-{rank}").read_text() for rank in range(WORLD) if (place / f"end-{rank}").exists()]


def _run(place: Path, case: KilledTraining, *, is_killed: bool) -> list[int]:
    place.mkdir(exist_ok=True)
    store = place / f"store-{is_killed}"
    return [exit_of(child) for child in [_forked(case, rank, place, store, is_killed) for rank in range(WORLD)]]


def _forked(case: KilledTraining, rank: int, place: Path, store: Path, is_killed: bool) -> int:
    child = os.fork()
    if child:
        return child
    status = LOST_A_PEER
    try:
        signal.alarm(int(LIMIT_S))
        _train(case, rank, place, store, is_killed)
        status = 0
    except BaseException:
        if not is_killed:
            traceback.print_exc()
    finally:
        os._exit(status)


def _train(case: KilledTraining, rank: int, place: Path, store: Path, is_killed: bool) -> None:
    import torch
    import torch.distributed as dist

    from core import parallel_state
    from core.checkpoint import (
        CheckpointNotFound,
        CheckpointSaver,
        load_checkpoint,
        pending_save,
        save_checkpoint,
        save_points,
        saver,
    )
    from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from core.models import GPTModel
    from core.optimizer import OptimizerConfig, get_megatron_optimizer
    from core.tensor_parallel import model_parallel_manual_seed
    from core.transformer.transformer_config import TransformerConfig
    from tests.unit_tests.checkpoint.kill_points import kill_at

    saver.LOCK_LIMIT_S = pending_save.AFTER_THE_END_S = 0.5
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=LIMIT_S / 2)
    )
    parallel_state.initialize_model_parallel()
    model_parallel_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=32, max_sequence_length=8, hidden_dropout=0.1
    )
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=case.strategy)
    model = DistributedDataParallel(config, ddp_config, GPTModel(config))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, weight_decay=0.1), [model])
    start = 0
    with contextlib.suppress(CheckpointNotFound):
        start = load_checkpoint(place / "root", [model], optimizer).step
    (place / f"start-{rank}").write_text(str(start))
    with CheckpointSaver(place / "root", asynchronous=case.asynchronous, keep_last=1, file_bytes=5000) as open_saver:
        for step in range(start + 1, STEPS + 1):
            tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(10 * step + rank))
            model.zero_grad_buffer()
            model(tokens[:, :-1], labels=tokens[:, 1:]).mean().backward()
            finalize_model_grads([model])
            optimizer.step()
            open_saver.step_edge()
            if is_killed and step == 2 * SAVE_EVERY:
                open_saver.wait()
                save_points.set_hook(kill_at(case.point, case.victim))
            if step % SAVE_EVERY == 0:
                save_checkpoint(place / "root", step, [model], optimizer, saver=open_saver)
    values = {name: param.detach() for name, param in model.module.named_parameters()}
    for name, entries in optimizer.state_dict()["state"].items():
        values |= {f"{name}.{n}.{key}": value for n, entry in enumerate(entries) for key, value in entry.items()}
    lines = [f"{name} {torch.as_tensor(value).flatten().tolist()}\n" for name, value in sorted(values.items())]
    (place / f"end-{rank}").write_text("".join(lines))  # of a float's digits, repr gives as many as tell it apart


def process_main(killed: list[KilledTraining], folder: str, pipe: Any) -> None:
    """The body of the process that forks."""
    import torch

    torch.set_num_threads(1)
    run_trainings(killed, folder, pipe.send)
    pipe.send(None)
