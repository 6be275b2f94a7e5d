"""Start of a task: a directory of a model with a new head, and the log probabilities of DPO's reference."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from core.checkpoint.bounded_read import read_bytes
from core.finetune.config import SCORED, TuneConfig
from core.finetune.model import configuration_in, directory_of, drawn_names, model_class
from core.finetune.model_files import model_of_files, write_what_stays
from core.finetune.task_trainer import TaskTrainer
from core.groups import agree
from core.hugging_face.directory import check_files, read_configuration
from core.hugging_face.transformers_plans import transformers_package
from core.training.model_config import DTYPES
from core.training.token_file import write_whole
from core.watch.waiting import complete, waiting

STARTS = "starts"  # directory of the models with new heads, in that of all runs


def start_of(config: TuneConfig, classes: Sequence[str]) -> TuneConfig:
    """The job that begins from the directory that `make_start` writes; the job itself where the task has no head."""
    if config.data.task not in SCORED:
        return config
    folder = config.run.directory / STARTS / _digest_of(config, classes)
    return replace(config, model=replace(config.model, path=str(folder)))


def make_start(config: TuneConfig, tokenizer: Any, classes: Sequence[str]) -> None:
    """Write the directory's model with a head for these classes, or for a reward, unless it is there.

    Transformers makes it, whole, on one process: a head that the directory lacks is drawn under the run's seed.
    """
    base, path = directory_of(config), config.model.path
    folder = directory_of(start_of(config, classes))
    if folder == base or (folder / "config.json").is_file():
        return
    configuration = read_configuration(base)
    names = list(classes) or ["LABEL_0"]
    configuration.id2label = dict(enumerate(names))
    configuration.label2id = {name: number for number, name in enumerate(names)}
    configuration.get_text_config().pad_token_id = tokenizer.pad_token_id
    kind = model_class(configuration, path, config.data.task)
    check_files(base)
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        model = model_of_files(
            kind,
            base,
            partial(drawn_names, config.data.task),
            config=configuration,
            dtype=DTYPES[config.model.dtype],
        )
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model.save_pretrained(unfinished)
    write_what_stays(base, unfinished, configuration_in)
    try:
        unfinished.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(unfinished)


def _digest_of(config: TuneConfig, more: Sequence[str]) -> str:
    """A name of what a model's directory holds, by the sizes and times of its files, and of how it is read."""
    files = sorted(file for file in directory_of(config).iterdir() if file.is_file())
    found = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    made = [transformers_package().__version__, config.model.dtype, config.run.seed, config.data.task, *more]
    return hashlib.sha256(json.dumps([config.model.path, found, made]).encode()).hexdigest()[:16]


def use_reference(config: TuneConfig, trainer: TaskTrainer) -> None:
    """Give DPO's trainer its reference: log probabilities by the model that training begins from. Collective.

    They are computed once, before the first step, and kept with the windows; rank 0 reads and writes the file.
    """
    header = trainer.tokens.header
    sizes = header.train_windows, header.validation_windows
    file = config.data.cache / f"reference-{_digest_of(config, [header.digest])}.bin"
    kept = _read(file, sum(sizes)) if dist.get_rank() == 0 else None
    found = agree.gather(kept, None, "the reference's log probabilities")[0]
    if found is None:
        parts = [_log_probabilities(trainer, windows) for windows in (trainer.tokens.train, trainer.tokens.validation)]
        found = np.concatenate(parts)
        if dist.get_rank() == 0:
            body = found.tobytes()
            write_whole(file, hashlib.sha256(body).digest() + body)
    trainer.references = found[: sizes[0]], found[sizes[0] :]


def _read(file: Path, pairs: int) -> np.ndarray | None:
    """[pairs, 2] of a file that is whole; None otherwise."""
    try:
        content = read_bytes(file)
    except OSError:
        return None
    body = content[32:]
    if hashlib.sha256(body).digest() != content[:32] or len(body) != 8 * pairs:
        return None
    return np.frombuffer(body, dtype=np.float32).reshape(pairs, 2)


@torch.no_grad()
def _log_probabilities(trainer: TaskTrainer, windows: np.ndarray) -> np.ndarray:
    """[pairs, 2]: the sums over the tokens of each chosen and each rejected answer, on all ranks. Collective."""
    groups, plan = trainer.groups, trainer.plan
    found = torch.zeros((len(windows), 2), device=trainer.device)
    mine = np.arange(len(windows))[groups.rank("dp") :: plan.dp]
    for chunk in trainer.chunks:
        chunk.eval()
    # All data ranks run as many forwards: parameters and experts may be shared out.
    for start in range(0, -(-len(windows) // plan.dp), plan.micro_batch_size):
        part = mine[start : start + plan.micro_batch_size]
        sums = trainer.log_probabilities(trainer.batch(windows, part if len(part) else np.arange(1)))
        if len(part):
            found[torch.from_numpy(part)] = sums
    for chunk in trainer.chunks:
        chunk.train()
    if plan.dp > 1:
        with waiting("the reference's log probabilities", groups.require("dp")):
            work = dist.all_reduce(found, group=groups.require("dp"), async_op=True)
            complete(work) if found.is_cpu else work.wait()
    return found.cpu().numpy()
