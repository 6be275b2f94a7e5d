"""The main job on ranks of the tests' pool, and what its losses must be: a plain loop in one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.models.gpt import GPTModel
from core_plan.job.config import JobConfig
from core_plan.job.config_file import load_config, to_json
from core_plan.job.model_config import transformer_config
from core_plan.job.plan import plan_job
from core_train.job import train
from core_train.sampler import GlobalBatchSampler
from core_train.tokens import num_windows, open_tokens, prepare_tokens, window
from tests.unit_tests.ranks import run_on_ranks

ROOT = Path(__file__).parents[3]
TINY = ["--config", str(ROOT / "configs" / "tiny.toml"), "--run.device", "cpu"]
REPLICATED = ["--ddp.no-use-distributed-optimizer", "--ddp.no-overlap-param-gather"]
CPU = torch.device("cpu")

_known_losses: dict[tuple[str, int], list[float]] = {}


def text_flags_in(cache: Path) -> list[str]:
    """Flags for a small text: this repository's own source."""
    return ["--data.text", str(ROOT / "core_train"), "--data.cache", str(cache)]


def records_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]


def read_losses(directory: Path) -> list[float]:
    return [record["loss"] for record in records_of(directory)]


def train_on_ranks(rank: int, world: int, flags: list[str]) -> None:
    config = load_config(flags)
    train(config, plan_job(config, world), CPU, prepares_data=rank == 0)


def losses_on_ranks(world: int, flags: list[str], directory: Path, timeout_s: float = 60.0) -> list[float]:
    where = ["--run.directory", str(directory), "--run.name", "run", "--logging.no-plots"]
    run_on_ranks(train_on_ranks, world, {"world": world, "flags": [*flags, *where]}, timeout_s=timeout_s)
    return read_losses(directory / "run")


def learning_rate(config: JobConfig, step: int) -> float:
    """Of step 0, 1, ...: linear up to step warmup_steps - 1, from there a cosine down to the last step."""
    options, top = config.optimizer, config.optimizer.warmup_steps - 1
    if step <= top:
        return options.lr * (step + 1) / options.warmup_steps
    progress = (step - top) / (config.run.steps - 1 - top)
    return options.min_lr + (options.lr - options.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def losses_of_a_plain_loop(config: JobConfig, steps: int) -> list[float]:
    """One process, the whole batch at once, torch's own optimizer and clipping; nothing of the engine.

    Kept for who asks with the same configuration: many layouts have the losses of one loop.
    """
    key = (to_json(config), steps)
    if key not in _known_losses:
        _known_losses[key] = _train_in_a_plain_loop(config, steps)
    return _known_losses[key]


def _train_in_a_plain_loop(config: JobConfig, steps: int) -> list[float]:
    tokens = open_tokens(config.data, prepare_tokens(config.data))
    length, options = config.model.sequence_length, config.optimizer
    model = GPTModel(transformer_config(config, tokens.header.vocab_size))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
    )
    sampler = GlobalBatchSampler(num_windows(tokens.train, length), config.run.global_batch_size, config.run.seed)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        batch = torch.from_numpy(np.stack([window(tokens.train, int(i), length) for i in sampler.next_global_batch()]))
        optimizer.zero_grad()
        loss = model(batch[:, :-1], labels=batch[:, 1:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        optimizer.step()
        losses.append(float(loss.detach()) / tokens.header.bytes_per_token)
    return losses
