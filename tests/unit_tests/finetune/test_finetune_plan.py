"""The plan of a fine-tuning job next to the job itself: its wrapper and optimizer to the byte, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tyro")

from benchmarks.plan_jobs import state_of
from core.finetune import job
from core.finetune.config import load_config
from core.finetune.main import main
from core.finetune.planned import PlannedTuning, most_bytes
from core.hugging_face.tiny import tiny_of_bytes
from core.plan import dry_run, plan_run
from core.plan.run_memory import plan_memory
from core.plan.state_bytes import GRADIENTS, MASTERS, MOMENTS, PARAMETERS, POOL
from tests.unit_tests.finetune.test_finetune_job import config_in, tuned
from tests.unit_tests.ranks import ranks

STATE = (PARAMETERS, GRADIENTS, POOL, MASTERS, MOMENTS)
SHORT = ["--run.steps", "1", "--run.validate-every", "0", "--run.micro-batch-size", "1"]


def uneven_model(folder: Path) -> list[str]:
    """Options for a model of three layers, from which no two stages of equal length can be made."""
    from transformers import AutoModelForCausalLM

    from core.finetune.model import byte_tokenizer

    directory = folder / "uneven"
    if not directory.exists():
        configuration = copy.deepcopy(tiny_of_bytes("llama", 96))
        configuration.num_hidden_layers = 3
        AutoModelForCausalLM.from_config(configuration).save_pretrained(directory)
        byte_tokenizer().save_pretrained(directory)
    return ["--model", str(directory)]


@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize(
    "flags",
    [
        "uneven --pp 2 --zero 2 --model.dtype bfloat16",
        "--tp 2 --zero 3",
        pytest.param("--lora.r 4 --tp 2 --optimizer.name sgd", marks=pytest.mark.nightly),
        "--lora.r 4 --zero 3 --model tiny:gpt2",
        "--ep 2 --model tiny:qwen3_moe --zero 1 --optimizer.name lion",
        pytest.param("--plugin low_level_zero --zero 2", marks=pytest.mark.nightly),
        "--plugin gemini --lora.r 2 --model.dtype bfloat16",
        pytest.param("--plugin gemini --tp 2", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.in_suite(2)
def test_what_a_job_holds_is_planned_to_the_byte(rank: int, world: int, flags: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    built: list[Any] = []
    build = job.build_trainer
    said = flags.removeprefix("uneven ").split()
    if said != flags.split():
        if rank == 0:
            uneven_model(tmp_path)
        job.dist.barrier()
        said = [*uneven_model(tmp_path), *said]
    config = config_in(tmp_path, *SHORT, *said)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "build_trainer", lambda *given: built.append(build(*given)) or built[0])
        tuned(config, rank, world)
    (trainer,) = built
    held = state_of(trainer.chunks, trainer.optimizer)
    run = PlannedTuning(config).run_on(world, on_cpu=True, one_host=True)
    (planned,) = plan_memory(run, [rank])
    assert {kind: planned.state.get(kind, 0) for kind in STATE} == {kind: held[kind] for kind in STATE}
    assert run.ddp == trainer.chunks[0].ddp_config
    assert run.optimizer == trainer.optimizer.config
    job.dist.barrier()


BATCH = ["--run.global-batch-size", "256", "--run.device", "cpu", "--logging.no-plots", "--tp", "1"]


def test_a_dry_run_writes_nothing_and_a_job_that_cannot_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from core.training import main as command

    monkeypatch.chdir(tmp_path)
    assert main(["--pp", "2", "--run.device", "cpu", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "rank 0 (stage 0)  rank 1 (stage 1)" in said and "fits: rank 0 holds most" in said
    monkeypatch.setattr(dry_run, "host_memory_bytes", lambda: 1 << 30)
    assert main([*BATCH, "--dry-run"]) == 1
    changes = capsys.readouterr().out.partition("it would fit with one of these:\n")[2].splitlines()
    assert [line.split()[0] for line in changes] == ["--model.gradient-checkpointing", "--run.micro-batch-size", "--pp"]
    started: list[int] = []
    monkeypatch.setattr(command, "start_ranks", lambda ranks: started.append(ranks) or 0)
    assert main(BATCH) == 2
    said = capsys.readouterr().err
    assert "2 ranks of this machine would hold" in said and len(said.splitlines()) == 1
    assert "it would fit with --model.gradient-checkpointing or --run.micro-batch-size" in said
    assert not list(tmp_path.iterdir()) and not started
    for flags in ([*BATCH, "--run.no-check-memory"], [*BATCH, "--run.micro-batch-size", "2"]):
        assert main(flags) == 0
    assert started == [2, 2]


def test_a_dry_run_prints_time_and_traffic_for_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tp", "2", "--zero", "2", "--run.ranks", "4"]
    assert main([*flags, "--dry-run", "--device", "a100"]) == 0
    said = capsys.readouterr().out
    assert said == plan_run(PlannedTuning(load_config(flags)), 4, "a100").describe() + "\n"
    assert "a step takes" in said and "dp_cp   reduce_scatter" in said


def test_a_dry_run_needs_no_weights_and_reports_what_the_file_says_wrongly(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A config.json, and a directory that holds nothing else, give the plan of a whole checkpoint."""
    tiny_of_bytes("llama", 256).save_pretrained(tmp_path)
    plans = []
    for model in ("tiny:llama", str(tmp_path), str(tmp_path / "config.json")):
        assert main(["--model", model, "--run.device", "cpu", "--dry-run"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1] == plans[2] and "layers" in plans[0]
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("intermediate_size", "intermediate_sise"))
    assert main(["--model", str(file), "--run.device", "cpu", "--dry-run"]) == 0
    assert "intermediate_sise (is it intermediate_size?)" in capsys.readouterr().out
    assert main(["--model", str(tmp_path), "--run.device", "cpu", "--tp", "3", "--run.ranks", "3", "--dry-run"]) == 2
    assert "--parallel.tp 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "3", "--run.ranks", "3", "--run.global-batch-size", "3"], "Sizes that fit this model: 1, 2, 4, 8"),
        (["--model", "nowhere"], "there is no nowhere; give a config.json, a directory with one, deepseek-v3, "),
        (["--model", "tiny:vit"], "has no causal language model"),
        (["--pp", "5", "--run.ranks", "5"], "stage 4 of [1, 1, 1, 1, 0] has no layer"),
        (["--plugin", "gemini", "--pp", "2"], "gemini has dp and tp only"),
        (["--lora.r", "4", "--lora.targets", "nobody"], "nobody"),
    ],
)
def test_a_dry_run_refuses_what_cannot_be_built(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*flags, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "flags",
    [
        *("--tp 1", "--model tiny:gpt2 --lora.r 8", "--model tiny:qwen3_moe --zero 3 --run.micro-batch-size 1"),
        *("--model tiny:gemma3 --pp 2", "--plugin low_level_zero --model tiny:llama --model.sequence-length 32"),
    ],
)
def test_the_rule_of_thumb_is_above_the_plan(flags: str) -> None:
    pytest.importorskip("peft")
    config = load_config([*flags.split(), "--run.device", "cpu"])
    plan = plan_run(PlannedTuning(config), 2, dry_run.this_machine(config.run, 2))
    assert plan.fullest.peak < most_bytes(config, 2)
