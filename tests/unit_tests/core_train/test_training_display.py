"""What a run shows: the progress line, stopping on request, and the page about it."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

import pytest

from core_plan.job.config import JobConfig
from core_train import progress
from core_train.commands import convert, generate
from core_train.progress import LiveLine, PlainLines, duration, make_progress
from core_train.step_log import StepLog, StepRecord

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


def test_plain_lines_are_the_first_the_last_and_every_tenth() -> None:
    stream = io.StringIO()
    with make_progress(25, 10, stream) as shown:
        for step in range(1, 26):
            shown.show(record(step))
    lines = stream.getvalue().splitlines()
    assert isinstance(shown, PlainLines)
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[0] == "step 1/25  loss 2.500  |g| 0.50  8,192 tokens/s  exposed 3.1 ms  0:12 left"


def test_a_skipped_step_says_so() -> None:
    assert "|g| skipped" in progress.line(record(1, grad_norm=None), 2, 0.0)


def test_the_time_left_follows_recent_steps_and_not_a_slow_one() -> None:
    remaining = progress.RemainingTime(100)
    remaining.after(record(1, step_ms=60_000.0))
    for step in range(2, 51):
        seconds = remaining.after(record(step, step_ms=200.0))
    assert seconds == pytest.approx(10.0)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.6, "1:02"), (3725, "1:02:05")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_terminal_gets_a_live_line_and_one_without_rich_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    live = make_progress(3, 1, Terminal())
    assert isinstance(live, LiveLine)
    with live:
        live.show(record(2))
        assert "loss 2.500" in live.bar.tasks[0].description and live.bar.tasks[0].completed == 2
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    assert isinstance(make_progress(3, 1, Terminal()), PlainLines)


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


def test_a_log_that_goes_on_keeps_the_steps_before_and_forgets_those_after(tmp_path: Path) -> None:
    with StepLog(tmp_path) as log:
        for step in range(1, 6):
            log.add(record(step))
    path = tmp_path / "steps.jsonl"
    path.write_text(path.read_text()[:-20])  # a crash has cut the last line
    with StepLog(tmp_path, after_step=3) as log:
        log.add(record(4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert [kept.step for kept in log.records] == [1, 2, 3, 4]
    with StepLog(tmp_path, after_step=9) as log:
        pass
    assert [kept.step for kept in log.records] == [1, 2, 3, 4]
    with StepLog(tmp_path) as log:
        pass
    assert path.read_text() == "", "a run that begins has no records"
