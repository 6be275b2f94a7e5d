"""The example of a vision loop: torch's DDP and core's wrapper print the same, and what TensorBoard shows."""

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from core import parallel_state
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_docs import ROOT

EXAMPLE = ROOT / "examples" / "train_vision.py"
LINE = re.compile(r"^epoch (\d+): loss (\S+), accuracy of the average (\S+)$", re.MULTILINE)


def loaded(path: Path) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def epochs(example: Any, *flags: str) -> list[tuple[int, float, float]]:
    """What the example prints on this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        example.main(flags)
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in LINE.findall(printed.getvalue())]


@ranks(2)
def test_both_wrappers_train_the_vision_example_alike_and_stop_early(rank: int, world: int, tmp_path: Path) -> None:
    example = loaded(EXAMPLE)
    tensorboard = find_spec("tensorboard") is not None
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*BatchNorm")
        patch.setattr(dist, "init_process_group", lambda backend: None)  # the test has a group already
        end = dist.destroy_process_group
        patch.setattr(dist, "destroy_process_group", lambda group=None: None if group is None else end(group))
        ours = epochs(example, *(["--tensorboard", str(tmp_path)] if tensorboard else []))
        assert not parallel_state.model_parallel_is_initialized()
        theirs = epochs(example, "--wrapper", "torch")
    if rank == 1:
        assert ours == theirs == []
        return
    assert [epoch for epoch, *_ in ours] == [epoch for epoch, *_ in theirs] == list(range(1, len(ours) + 1))
    for one, other in zip(ours, theirs, strict=True):
        assert one[1:] == pytest.approx(other[1:], abs=2e-3)
    assert ours[-1][1] < 0.2 * ours[0][1] and ours[-1][2] > 0.9 and 3 <= len(ours) < 8  # stopped
    assert bool(list(tmp_path.glob("events.out.tfevents.*"))) == tensorboard


@pytest.mark.parametrize(("name", "flag"), [("train_vision", "--tensorboard"), ("train_hf", "--save")])
def test_a_directory_that_cannot_be_written_is_refused_before_the_ranks_start(
    name: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        loaded(EXAMPLE.with_stem(name)).main([flag, "/proc/nowhere"])
    said = " ".join(capsys.readouterr().err.split())
    assert f"error: {flag} /proc/nowhere: /proc is no directory that this user may write to" in said


@pytest.mark.nightly
def test_the_command_of_the_example_runs() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run([*command, "--epochs", "1"], capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(LINE.findall(done.stdout)) == 1 and "BatchNorm" not in done.stderr  # no warning
