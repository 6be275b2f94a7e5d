"""What a run shows: the progress line, stopping on request, and the page about it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core_plan.job.config import JobConfig
from core_train.commands import convert, generate
from core_train.reporter import Reporter
from core_train.step_log import StepLog, StepRecord, duration, line

PAGE = Path(__file__).parents[3] / "docs" / "source" / "training.md"


def record(step: int, *, step_ms: float = 500.0, grad_norm: float | None = 0.5) -> StepRecord:
    return StepRecord(
        step=step,
        loss=2.5,
        grad_norm=grad_norm,
        lr=1e-3,
        loss_scale=1.0,
        updated=grad_norm is not None,
        step_ms=step_ms,
        tokens_per_s=8192.0,
        exposed_ms=3.14,
        hidden_share=0.9,
        bytes_sent=10,
        collectives=2,
        windows=step,
        elapsed_s=step * 0.5,
    )


def test_a_line_has_the_numbers_of_the_last_record() -> None:
    expected = "step 1/25  loss 2.500  |g| 0.50  8,192 tokens/s  exposed 3.1 ms  0:12 left"
    assert line([record(1)], 25) == expected
    assert "|g| skipped" in line([record(1, grad_norm=None)], 2)


def test_lines_are_printed_of_the_first_the_last_and_every_tenth_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = JobConfig()
    config = replace(config, run=replace(config.run, steps=25), logging=replace(config.logging, plots=False))
    sums = SimpleNamespace(exposed_ms=3.14, hidden_share=0.9, bytes_sent=10, collectives=2)
    trainer: Any = SimpleNamespace(
        step=0, device=torch.device("cpu"), flops_per_token=1.0, sampler=SimpleNamespace(consumed=1),
        chunks=[SimpleNamespace(step_report=lambda: sums)],
    )  # fmt: skip
    result: Any = SimpleNamespace(loss=2.5, grad_norm=0.5, lr=1e-3, loss_scale=1.0, updated=True, trace=None)
    plan: Any = SimpleNamespace(tokens_per_step=4096, world_size=1)
    reporter = Reporter(config, plan, tmp_path, 0, "nats per byte")
    for step in range(1, 26):
        trainer.step = step
        reporter.end_step()
        reporter.show_step(result, trainer)
    reporter.log.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]


def test_the_time_left_follows_recent_steps_and_not_a_slow_one() -> None:
    records = [record(1, step_ms=60_000.0), *(record(step, step_ms=200.0) for step in range(2, 51))]
    assert line(records, 100).endswith("0:10 left") and line(records[:3], 53).endswith("0:10 left")


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.6, "1:02"), (3725, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_every_command_and_file_on_the_page_is_understood(tmp_path: Path) -> None:
    pytest.importorskip("tyro")
    from core_plan.job.config_file import load_config

    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "wider.toml").write_text(next(text for kind, text in blocks if kind == "toml"))
    lines = [line for kind, text in blocks if kind == "sh" for line in text.replace("\\\n", " ").splitlines()]
    commands = [line for line in lines if "make" not in line and not line.startswith("#")]
    read = []
    for command in commands:
        words = shlex.split(command, comments=True)
        if words[1:3] == ["-m", "core"] and words[3] != "train":
            {"generate": generate, "convert": convert}[words[3]].read_arguments(words[4:])
            continue
        start = next(i for i, word in enumerate(words) if word in ("pretrain_gpt.py", "train"))
        flags = [word.replace("wider.toml", str(tmp_path / "wider.toml")) for word in words[start + 1 :]]
        flags = [word.replace("configs/", f"{PAGE.parents[2]}/configs/") for word in flags]
        if flags[:1] != ["--help"]:
            read.append(load_config(flags))
    assert len(read) == 8
    assert read[5].data.megatron is not None and read[6].data.dataset == "json" and read[7].data.streaming
    read = read[:5]
    assert read[-1].model.num_layers == 8 and read[-1].optimizer.lr == 1e-3 and read[-1].ddp.bucket_size == 1_000_000
    assert read[0] == JobConfig()


def write_log(folder: Path, steps: range = range(0), after_step: int = 0) -> list[int]:
    log = StepLog(folder, after_step=after_step)
    for step in steps:
        log.add(record(step))
    log.close()
    return [kept.step for kept in log.records]


def test_a_log_that_goes_on_keeps_the_steps_before_and_forgets_those_after(tmp_path: Path) -> None:
    write_log(tmp_path, range(1, 6))
    path = tmp_path / "steps.jsonl"
    path.write_text(path.read_text()[:-20])  # a crash has cut the last line
    assert write_log(tmp_path, range(4, 5), after_step=3) == [1, 2, 3, 4]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert write_log(tmp_path, after_step=9) == [1, 2, 3, 4]
    write_log(tmp_path)
    assert path.read_text() == "", "a run that begins has no records"
