"""`python -m core verify` on a program of Megatron Core that does not import us: right layouts, and reported faults.

Faults with a number were reported to Megatron. Those that Megatron Core 0.16.1 has run as they are; those of other
releases and devices are planted at the same place. `benchmarks/notebook.md` shows the table.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.right_megatron import OnTheCPU, on_this_device
from core.verify.asked import asked_by
from core.verify.program import run_program
from tests.unit_tests.core_compat.test_megatron_stock import stock
from tests.unit_tests.peers import peer
from tests.unit_tests.ranks import ranks

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[3]
PROGRAM = str(Path(__file__).with_name("megatron_train.py"))
SHARDED, NO_ATTENTION = ("--sharded",), ("--cp", "2", "--without-attention")
STEPS = ("--steps", "2")
# Layout -> (options of the command, arguments of the program).
RIGHT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "dp 2": (STEPS, ()),
    "dp 2, distributed optimizer": (STEPS, SHARDED),
    "dp 2, a loss per token": ((), ("--loss", "per token", *SHARDED)),
    "dp 2, a masked loss": ((), ("--loss", "masked")),
    "dp 2, overlapped": (STEPS, ("--overlap", *SHARDED)),
    "tp 2": (STEPS, ("--tp", "2")),
    "pp 2, tied embedding": (STEPS, ("--pp", "2", "--tied")),
    "pp 2, distributed optimizer": (STEPS, ("--pp", "2", *SHARDED)),
    "cp 2, a loss per token": ((), ("--loss", "per token", *NO_ATTENTION)),
    "ep 2, a loss of the router": (STEPS, ("--ep", "2")),
}
# Fault -> (arguments of the program, words of the report).
WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "7452, finding 1: label smoothing": (("--tp", "2", "--loss", "smoothed"), "relative error of the loss"),
    "7452, finding 2: gathered logits": (("--tp", "2", "--gathered"), "relative error of the loss"),
    "7452, finding 8: norm without sinks": (
        ("--tp", "2", "--sinks"), "core_attention.softmax_offset' only the part of rank 0 counts"
    ),
    "7452, finding 9: means of cp ranks": (("--loss", "masked", *NO_ATTENTION), "relative error of the loss"),
    "6660: each microbatch doubles": (("--fault", "doubled"), "decoder.layers.0.mlp.linear_fc1"),
    "3693: a bucket is reduced early": (("--fault", "too early"), "decoder.layers.0.mlp.linear_fc1"),
    "7165: experts' factor": (("--ep", "2", "--fault", "experts"), "local_experts"),
    "no finalize_model_grads_func": (("--fault", "not reduced"), "not reduced over dp"),
    "no zero_grad_buffer": (("--fault", "not zeroed"), "zero_grad is not called"),
}  # fmt: skip


def verified(options: tuple[str, ...], arguments: tuple[str, ...]) -> tuple[int, str]:
    """Run the command in this process, and return its status and what this rank has printed."""
    stock("")
    printed = io.StringIO()
    with on_this_device(), OnTheCPU(), contextlib.redirect_stdout(printed):
        status = run_program(asked_by([*options, PROGRAM, *arguments]))
    return status, printed.getvalue()


@ranks(2)
@pytest.mark.parametrize("layout", RIGHT)
def test_a_right_program_of_megatron_core_gives_no_alarm(rank: int, world: int, layout: str) -> None:
    status, printed = verified(*RIGHT[layout])
    assert status == 0, printed
    assert rank or "first was right" in printed, printed


@ranks(2)
@pytest.mark.parametrize("fault", WRONG)
def test_a_reported_fault_of_megatron_core_is_found_and_placed(rank: int, world: int, fault: str) -> None:
    arguments, words = WRONG[fault]
    status, printed = verified((), arguments)
    assert status == 1, printed
    assert rank or words in printed, printed


@ranks(2)
def test_a_forward_step_that_draws_nothing_is_refused_with_advice(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="draws nothing from data_iterator, so its data is not known; draw each"):
        verified((), ("--no-data",))


@pytest.mark.timeout(600)
def test_the_same_programs_run_over_a_later_release() -> None:
    """0.19.2 has wheels for Python 3.12 only, but its modules load in earlier ones. It imports triton."""
    release, triton = peer("megatron-core==0.19.2", python="3.12"), peer("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "nightly", __file__]
    command += ["-k", "gives_no_alarm or found_and_placed"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (release, triton)))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0 and "." * (len(RIGHT) + len(WRONG)) in done.stdout, done.stdout[-3000:] + done.stderr
