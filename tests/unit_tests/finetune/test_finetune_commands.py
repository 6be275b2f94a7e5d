"""The commands that the README and the page on fine-tuning show run as they stand, on a small model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("tyro")

from core.finetune.config import load_config
from core.finetune.model import check_model
from tests.unit_tests.test_docs import ROOT

COMMAND = re.compile(r"^    python (-m core\.finetune .*)$", re.MULTILINE)
README = COMMAND.findall((ROOT / "README.md").read_text())
PAGE = COMMAND.findall((ROOT / "docs" / "source" / "finetune.md").read_text().replace("\\\n", " "))
SHORT = ["--run.steps", "3", "--model.sequence-length", "64", "--data.limit", "20", "--run.validation-windows", "8"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", [*README, *PAGE])
def test_a_command_that_is_shown_trains_and_leaves_a_model(command: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "source" / "finetune.md").read_text(), re.DOTALL)
    (tmp_path / "chats.jsonl").write_text(blocks[0] * 7)
    texts = [{"text": f"text {n}", "label": ("yes", "no")[n % 2]} for n in range(20)]
    pairs = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": " 0"} for n in range(20)]
    for name, records in (("texts", texts), ("held", texts), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if "parquet" in command:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").Table.from_pylist([{"text": "print(2 + 2)"}] * 9)
        parquet.write_table(table, tmp_path / "code.parquet")
    check_model(load_config(["--model.sequence-length", "64", "--run.directory", str(tmp_path)]))
    next((tmp_path / "tiny").iterdir()).rename(tmp_path / "my-model")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, *command.replace("--checkpoint.resume", "").split(), *SHORT, "--run.device", "cpu"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3  loss" in done.stdout and "validation loss" in done.stdout
    run = tmp_path / "runs" / "latest"
    assert len((run / "steps.jsonl").read_text().splitlines()) == 3
    assert json.loads((run / "config.json").read_text())["run"]["steps"] == 3
    assert (run / "loss.png").stat().st_size > 1000
    adapter = "--lora.r" in command
    assert (run / "model" / ("adapter_config.json" if adapter else "config.json")).is_file()
    assert f"the {'adapter' if adapter else 'model'} is in runs/finetune/model/" in done.stdout


def test_readme_and_page_show_the_job_whole_and_with_adapters() -> None:
    assert len(README) == 1 and len(PAGE) == 11
    assert any("--lora.r" in command for command in PAGE) and any("--zero 3" in command for command in PAGE)
