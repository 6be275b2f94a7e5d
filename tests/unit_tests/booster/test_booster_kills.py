"""kill -9 at every step that a save over an older one takes on the disk: one of the two is whole, and loads."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.booster import Booster
from core.checkpoint import CheckpointError
from tests.unit_tests import ranks

pytest.importorskip("safetensors")

FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole-safetensors": {"use_safetensors": True},
    "shards": {"shard": True, "size_per_shard": 1e-4},
    "shards-safetensors": {"shard": True, "size_per_shard": 1e-4, "use_safetensors": True},
}
CHANGES = [
    ("whole-safetensors", "whole-safetensors"),
    ("shards", "shards-safetensors"),
    ("shards-safetensors", "shards"),
]
STEPS = ("os.replace", "os.rename", "os.unlink", "os.rmdir", "os.mkdir", "os.fsync")


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    for param in model.parameters():
        param.data.fill_(value)
    return model


def save(path: Path, value: float, form: str) -> None:
    Booster(device="cpu").save_model(model_of(value), path, **FORMS[form])


def value_at(path: Path) -> float:
    """The one value that all parameters have, which were saved together."""
    model = model_of(0.0)
    Booster(device="cpu").load_model(model, path)
    (value,) = {number for param in model.parameters() for number in param.flatten().tolist()}
    return value


def killed_at(number: int, act: Callable[[], None]) -> bool:
    """Run `act` in a fork that is killed right before the n-th step it takes on the disk; False if it took fewer."""
    child = os.fork()
    if child == 0:
        seen = 0

        def watched(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal seen
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        for name in STEPS:
            setattr(os, name.partition(".")[2], watched(getattr(os, name.partition(".")[2])))
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"step {number}: status {code}"
    return code != 0


def sweep(before: str, after: str, folder: Path) -> tuple[int, set[float]]:
    """(kills, values found) of saves of 2.0 in one form over a save of 1.0 in another."""
    template = folder / "template"
    save(template, 1.0, before)
    found = set()
    number = 0
    while True:
        number += 1
        path = folder / f"case-{number}"
        shutil.copytree(template, path) if template.is_dir() else shutil.copy(template, path)
        was_killed = killed_at(number, lambda path=path: save(path, 2.0, after))
        value = value_at(path)
        if FORMS[after].get("shard"):  # by the path of its index too
            indices = {file.name for file in path.rglob("*.index.json") if file.is_file()}
            assert {value_at(path / name) for name in indices if name.startswith("model") == ("safe" in after)} <= {
                value
            }
        assert value in (1.0, 2.0), f"step {number}"
        found.add(value)
        save(path, 3.0, after)
        assert value_at(path) == 3.0, f"step {number}"
        hidden = [entry.name for entry in (path if path.is_dir() else folder).iterdir() if entry.name.startswith(".")]
        assert not hidden, f"step {number}: the next save has left {hidden}"
        if not was_killed:
            return number - 1, found


def sweeps(pairs: list[tuple[str, str]], folder: str, pipe: Any) -> None:
    """The body of a process that forks and has no threads."""
    torch.set_num_threads(1)
    for number, (before, after) in enumerate(pairs):
        place = Path(folder) / str(number)
        place.mkdir()
        try:
            pipe.send(sweep(before, after, place))
        except BaseException as error:
            pipe.send(f"{before} -> {after}: {type(error).__name__}: {error}")
            sys.exit(1)


@pytest.mark.parametrize("pairs", [CHANGES, pytest.param([(form, form) for form in FORMS], marks=pytest.mark.nightly)])
def test_a_save_that_is_killed_anywhere_leaves_the_old_weights_or_the_new(
    in_memory: Path, pairs: list[tuple[str, str]]
) -> None:
    context: Any = ranks._the_pool().context
    ours, theirs = context.Pipe()
    process = context.Process(target=sweeps, args=(pairs, str(in_memory), theirs))
    process.start()
    theirs.close()
    for before, after in pairs:
        assert ours.poll(120), f"{before} -> {after} does not end"
        answer = ours.recv()
        assert not isinstance(answer, str), answer
        kills, found = answer
        assert kills >= 3 and found == {1.0, 2.0}, f"{before} -> {after}: {kills} kills, found {found}"
    process.join(20)
    assert process.exitcode == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_in_any_file_is_refused_or_changes_nothing(form: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(path, 1.0, form)
    choose = random.Random(2)
    refused = 0
    for _ in range(150):
        file = choose.choice(sorted(path.iterdir())) if path.is_dir() else path
        intact = file.read_bytes()
        damaged = bytearray(intact)
        damaged[choose.randrange(len(intact))] ^= 1 << choose.randrange(8)
        file.write_bytes(damaged)
        try:
            assert value_at(path) == 1.0
        except (CheckpointError, ValueError, OSError):
            refused += 1
        file.write_bytes(intact)
    assert refused >= 140, "bits of the mark before a checksum alone make it a file of somebody else"
    assert value_at(path) == 1.0
