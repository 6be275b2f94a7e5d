"""The example of a vision loop: torch's DDP and core's wrapper print the same, and what TensorBoard shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.test_docs import ROOT

EXAMPLE = ROOT / "examples" / "train_vision.py"
LINE = re.compile(r"^epoch (\d+): loss (\S+), accuracy of the average (\S+)$", re.MULTILINE)


def epochs(*flags: str) -> list[tuple[int, float, float]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=150, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "BatchNorm" not in done.stderr  # no warning
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in LINE.findall(done.stdout)]


def test_both_wrappers_train_the_vision_example_alike_and_stop_early(tmp_path: Path) -> None:
    ours = epochs("--tensorboard", str(tmp_path))
    theirs = epochs("--wrapper", "torch")
    assert [epoch for epoch, *_ in ours] == [epoch for epoch, *_ in theirs] == list(range(1, len(ours) + 1))
    for one, other in zip(ours, theirs, strict=True):
        assert one[1:] == pytest.approx(other[1:], abs=2e-3)
    assert ours[-1][1] < 0.2 * ours[0][1] and ours[-1][2] > 0.9 and 3 <= len(ours) < 8  # stopped
    if pytest.importorskip("tensorboard"):
        assert list(tmp_path.glob("events.out.tfevents.*"))
