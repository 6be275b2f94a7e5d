"""The command: a plan on standard output, and refusals that do the arithmetic."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core_plan import ModelRun, plan_run, read_device
from core_plan.command import main
from core_plan.gpt_source import run_of_job
from core_plan.job.config_file import load_config
from core_plan.model_run import known_models
from core_plan.suggestions import advice, single_changes, suggestions_that_fit
from tests.unit_tests.forked_python import run_python

ROOT = Path(__file__).parents[3]
TINY = ["--model", str(ROOT / "configs" / "tiny.toml")]


def test_a_run_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--ranks", "4", "--tp", "2", "--pp", "2", "--global-batch", "8"]) == 0
    shown = capsys.readouterr().out
    assert "rank 0 (stage 0)  rank 2 (stage 1)" in shown
    assert "fits: rank" in shown


def test_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--model.num-layers", "24", "--model.hidden-size", "2048", "--model.num-attention-heads", "16"]
    large += ["--model.sequence-length", "4096", "--run.global-batch-size", "64", "--ddp.bucket-size", "40000000"]
    assert main([*TINY, *large, "--ranks", "8", "--tp", "1", "--device", "a100"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    changes = shown.partition("it would fit with one of these:\n")[2].splitlines()
    assert len(changes) == 3
    assert changes[0].split()[:2] == ["--micro-batch", "4"]


def test_what_would_fit_is_looked_for_on_all_axes() -> None:
    """Experts and sequence too; and more ranks are named only where the batch divides by them."""
    pytest.importorskip("trl")
    from core_train.finetune.arguments import load_config as tune_config
    from core_train.finetune.main import planned as planned_tuning

    experts = ModelRun("tiny:qwen3_moe", sequence_length=64, global_batch_size=4)
    device = replace(read_device("h100"), headroom=0.0)
    whole, least = (plan_run(run, 4, device).fullest.peak for run in (experts, replace(experts, ep=4)))
    assert least < whole
    found = [words for words, _ in suggestions_that_fit(experts, 4, replace(device, memory_bytes=least), most=99)]
    assert "--ep 4" in found
    tuned = tune_config(["--model", "tiny:qwen3_moe", "--data", "none.jsonl", "--use_cpu"])
    reported = [words for words, _, _ in single_changes(planned_tuning(tuned, 4), 4, 8)]
    assert {"--ep 4", "--sp 4 --sp_mode all_to_all"} <= {*reported}
    reported = [words for words, _, _ in single_changes(replace(experts, sequence_length=4096), 4, 1)]
    assert "--cp 4 --sequence-parallel all_to_all" in reported
    for batch, more in ((4, False), (64, True)):
        job = load_config(["--config", TINY[1], "--tp", "1", "--run.global-batch-size", str(batch)])
        changes = {" ".join(words.split()[:2]) for words, _, _ in single_changes(job, 4, 1)}
        assert {"--cp 4", "--pp 4", "--ddp.data-parallel-sharding-strategy optim_grads"} <= changes
        said = advice(job, plan_run(job, 4, replace(device, memory_bytes=1000)))
        assert said.startswith("no single change makes it fit; change several")
        assert ("more ranks" in said) is more


def test_a_dry_run_of_the_main_job_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    from core_train.main import main as train

    arguments = ["--config", TINY[1], "--run.device", "cpu"]
    assert train([*arguments, "--dry-run"]) == 0
    assert "fits: rank 0 holds most" in capsys.readouterr().out
    large = ["--model.hidden-size", "65536", "--model.num-layers", "40", "--model.vocab-size", "65536"]
    assert train([*arguments, *large, "--dry-run"]) == 1
    assert "does not fit: rank" in capsys.readouterr().out


def test_a_dry_run_prints_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """For a device by name; and for this machine, whose speed is not known, the traffic without seconds."""
    from core_train.main import main as train

    assert main([*TINY, "--ranks", "4", "--device", "h200"]) == 0
    planned = capsys.readouterr().out
    assert train(["--dry-run", "--config", TINY[1], "--run.ranks", "4", "--device", "h200"]) == 0
    assert capsys.readouterr().out == planned and "a step takes" in planned
    assert train(["--config", TINY[1], "--run.ranks", "4", "--run.device", "cpu", "--dry-run"]) == 0
    here = capsys.readouterr().out
    assert "a step takes" not in here
    assert [line.partition(" KiB")[0] for line in here.splitlines()[-5:]] == [
        line.partition(" KiB")[0] for line in planned.splitlines()[-5:]
    ]
    assert here.splitlines()[-1].endswith("KiB inside a machine")
    large = ["--model.hidden-size", "2048", "--model.num-layers", "300", "--run.ranks", "4"]
    assert train(["--config", TINY[1], *large, "--dry-run", "--device=a100"]) == 1
    assert "times the time of a step" in capsys.readouterr().out


def test_a_device_is_of_a_dry_run_alone_and_other_arguments_stay_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    from core_train import main as command

    words = ["--data.text", "a", "b", "--run.seed", "-5", "--logging.no-plots"]
    assert command._take_dry_run([*words[:3], "--device", "h100", "--dry-run", *words[3:]]) == (True, "h100", words)
    assert command._take_dry_run(words) == (False, None, words)
    for flags, reported in (
        (["--device", "h100"], "--device h100 is of a plan; add --dry-run"),
        (["--dry-run", "--device"], "--device: expected one argument"),
        (["--dry-run", "--device", "b900"], "--device b900 is unknown; expected a100"),
    ):
        assert command.main(["--config", TINY[1], *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reported in line


def test_what_cannot_fit_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A plan that is wrong by less than a quarter refuses nothing."""
    from core_plan import dry_run
    from core_plan.job.errors import ConfigError
    from core_train import main as command

    monkeypatch.chdir(tmp_path)
    flags = ["--config", TINY[1], "--run.device", "cpu", "--tp", "1", "--run.ranks", "2", "--logging.no-plots"]
    config = load_config(flags)
    monkeypatch.setattr(dry_run, "host_memory_bytes", lambda: 1 << 40)
    needed = 2 * plan_run(config, 2, dry_run.this_machine(config.run, 2)).fullest.peak
    started: list[int] = []
    monkeypatch.setattr(command, "start_ranks", lambda ranks: started.append(ranks) or 0)
    for where in (dry_run, command):
        monkeypatch.setattr(where, "host_memory_bytes", lambda: int(needed / 1.24))
    assert command.main(flags) == 0
    for where in (dry_run, command):
        monkeypatch.setattr(where, "host_memory_bytes", lambda: int(needed / 1.27))
    assert command.main([*flags, "--run.no-check-memory"]) == 0
    assert started == [2, 2]
    assert command.main(flags) == 2
    reported = capsys.readouterr().err
    assert "2 ranks of this machine would need" in reported
    assert "it would fit with --" in reported
    assert len(reported.splitlines()) == 1
    with pytest.raises(ConfigError, match="no-check-memory skips this check"):
        command.check_fit(config, 2, 2)


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 1",
        "--model.activation swiglu --model.dtype bfloat16 --tp 2",
        "--model.num-experts 4 --model.moe-layer-freq 1 --tp 1",
        "--model.dtype float64 --tp 1 --pp 2 --run.micro-batch-size 1",
        "--tp 1 --model.attention-dropout 0.1 --model.vocab-size 8000",
        "--tp 1 --ddp.data-parallel-sharding-strategy optim_grads_params --ddp.no-overlap-param-gather",
    ],
)
def test_a_job_far_below_the_memory_is_not_planned(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of thumb is above every plan, and the default job on a machine of 16 GiB is below it."""
    from core_plan import dry_run
    from core_plan.job.plan import plan_job
    from core_plan.job.sizes import most_bytes
    from core_train import main as command

    config = load_config(flags.split())
    plan = plan_job(config, 4)
    planned = plan_run(config, 4, dry_run.this_machine(config.run, 4)).fullest.peak
    in_flight = plan.num_microbatches if config.parallel.pp > 1 else 1
    assert planned < most_bytes(config, plan.micro_batch_size, in_flight)
    monkeypatch.setattr(command, "host_memory_bytes", lambda: 16 << 30)
    monkeypatch.setattr(dry_run, "refuse_what_cannot_fit", None)  # never called
    command.check_fit(load_config([]), 4, 4)


def test_a_hugging_face_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from core.hugging_face.read.tiny import tiny_of_bytes

    tiny_of_bytes("qwen3", 64).save_pretrained(tmp_path)
    flags = ["--ranks", "2", "--pp", "2", "--seq", "64", "--global-batch", "4"]
    tables = []
    for model in (tmp_path, tmp_path / "config.json"):
        assert main(["--model", str(model), *flags]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    assert "rank 0 (stage 0)  rank 1 (stage 1)" in tables[0]
    for more, words in (
        (["--tp", "3", "--ranks", "3", "--pp", "1", "--global-batch", "3"], "Sizes that fit this model: 1, 2, 4, 8"),
        (["--ep", "2", "--pp", "1"], "has no experts"),
        (["--pp", "5", "--ranks", "5"], "--pp 5"),
        (["--pp", "1", "--cp", "2"], "--sequence-parallel all_to_all or ring_attn"),
        (["--zero", "4"], "--zero is 4; expected 0 to 3"),
        (["--sequence-parallel", "ring"], "cuts the sequence over --tp, which is 1; give --tp 2 or more"),
        (["--sequence-parallel", "magic"], "expected one of split_gather"),
        (["--global-batch", "3", "--pp", "1"], "3 is not divisible by dp"),
        (["--seq", "65"], "longer than the model's positions, 64"),
        (["--lora.r", "8"], "--lora.r is no option of a Hugging Face model's plan"),
        (["--model", "nowhere.json"], "a Hugging Face model is given alone"),
    ):
        assert main(["--model", str(tmp_path), *flags, *more]) == 2, more
        assert words in capsys.readouterr().err, more


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ranks", "6", "--tp", "4"], "6 ranks are not divisible by tp 4"),
        (["--ranks", "8", "--tp", "8"], "--model.num-attention-heads 4 is not divisible by tp 8"),
        (["--ranks", "4", "--device", "b900"], "expected a100, h100, h200, laptop, mi300x"),
        (["--ranks", "4", "--device", "b900"], "core plan calibrate --out FILE"),
        (["--ranks", "3", "--tp", "1"], "--global-batch 8 is not divisible by dp"),
        (["--ranks", "5", "--advise"], "5 data ranks, by which a batch of 8 sequences is not divisible; use another"),
        (
            ["--ranks", "4", "--tp", "1", "--parallel.tp", "2"],
            "--parallel.tp is 2, and the plan's own option for it is 1",
        ),
        (["--ranks", "4", "--run.ranks=8"], "--run.ranks is 8, and the plan's own option for it is 4"),
        (["--ranks", "200000"], "--ranks is 200,000; at most 131,072 are planned"),
    ],
)
def test_what_cannot_be_built_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *flags]) == 2
    reported = capsys.readouterr().err.removeprefix("looking at all layouts of 5 ranks\n")  # the progress of --advise
    assert reported.startswith("error: ")
    assert words in reported
    assert len(reported.splitlines()) == 1


@pytest.mark.parametrize("more", [[], ["--advise"]])
@pytest.mark.parametrize("model", [TINY, ["--model", "tiny:llama"]])
def test_sizes_below_one_are_refused_by_name(
    model: list[str], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of both kinds of models, planned or advised on."""
    for name in ("ranks", "tp", "pp", "cp", "ep", "global-batch", "micro-batch", "seq"):
        for size in ("0", "-8"):
            assert main([*model, "--ranks", "4", *more, f"--{name}", size]) == 2
            assert capsys.readouterr().err == f"error: --{name} is {size}; expected an integer of at least 1\n"
    if model == TINY:
        assert main([*model, "--ranks", "4", *more, "--run.global-batch-size", "-8"]) == 2
        assert "error: --run.global-batch-size must be" in capsys.readouterr().err


SIXTEEN_THOUSAND = (
    "--model.num-layers 16 --model.hidden-size 1024 --model.num-attention-heads 16 --model.num-experts 64 "
    "--model.moe-layer-freq 1 --model.dtype bfloat16 --tp 8 --pp 16 --parallel.ep 64 --parallel.etp 1 "
    "--run.global-batch-size 4096 --run.micro-batch-size 1 --model.vocab-size 4096"
)


def test_sixteen_thousand_ranks() -> None:
    """A mixture of experts over all axes, and no rank of it runs."""
    plan = plan_run(load_config(SIXTEEN_THOUSAND.split()), 16384, "h200")
    assert [memory.rank for memory in plan.memories] == [1024 * place for place in range(16)]
    in_flight = [memory.highest.held["activations"] for memory in plan.memories]
    assert in_flight == sorted(in_flight, reverse=True)  # 1F1B keeps as many microbatches as stages follow
    assert plan.fits


def test_a_plan_of_sixteen_thousand_ranks_takes_seconds_and_little_memory(tmp_path: Path) -> None:
    """By a process of its own, which prints its processor time and its peak in KiB."""
    program = (
        "import resource, sys, torch; torch.set_num_threads(1); from core_plan.command import main; "
        "status = main(sys.argv[1:]); used = resource.getrusage(resource.RUSAGE_SELF); "
        "print(status, used.ru_utime + used.ru_stime, used.ru_maxrss)"
    )
    (tmp_path / "program.py").write_text(program)
    flags = [*SIXTEEN_THOUSAND.split(), "--ranks", "16384", "--device", "h200"]
    done = run_python(tmp_path / "program.py", *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    status, seconds, peak_kib = done.stdout.splitlines()[-1].split()
    assert status == "0"
    assert float(seconds) < 30
    assert int(peak_kib) < 2 * 2**20


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--ddp.data-parallel-sharding-strategy optim_grads", "zero 2"),
        ("--ddp.use-distributed-optimizer", "zero 1"),
        ("--model.recompute-granularity full", "recompute"),
    ],
)
def test_advice_keeps_what_is_sharded_or_computed_again_if_it_is_given(
    given: str, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*TINY, *["--seq", "64", "--global-batch", "4", "--ranks", "2", "--advise"]]
    assert main([*flags, *given.split()]) == 0
    layouts = [line for line in capsys.readouterr().out.splitlines() if re.match(r" *\d\. ", line)]
    assert layouts and all(f"  {kept} " in line for line in layouts)
    assert main(flags) == 0
    layouts = [line for line in capsys.readouterr().out.splitlines() if re.match(r" *\d\. ", line)]
    assert not all(f"  {kept} " in line for line in layouts)


def test_a_plan_begins_with_its_layout_and_says_what_a_gpu_does(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TINY, *["--seq", "64", "--global-batch", "8", "--micro-batch", "1", "--ranks", "4", "--tp", "2"]]
    assert main(flags) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"[\d.]+ [kM] parameters; tp 2 x dp 2; 4 microbatches of 1 a rank", first)
    (line,) = (line for line in lines if line.startswith("a step takes"))
    words = re.search(r"([\d,]+) tokens a second; each GPU ([\d,]+) tokens a second, ([\d.e-]+) TFLOP/s", line)
    assert words is not None
    assert int(words[2].replace(",", "")) == pytest.approx(int(words[1].replace(",", "")) / 4, abs=1)


@pytest.mark.parametrize(
    ("layout", "more"),
    [("--tp 1", ""), ("--tp 2", ""), ("--tp 1 --pp 2", ""), ("--tp 1 --ep 2", "--model.num-experts 4")],
)
def test_parameters_are_counted_once_in_any_layout(layout: str, more: str) -> None:
    """And MFU is the share of the peak that the model's operations are: 66.9 TFLOP/s of fp32 on an H100."""
    model = f"--model.num-layers 4 --model.vocab-size 256 {more}"
    one = run_of_job(load_config(f"{model} --tp 1".split()), 1)
    (whole,) = one.source.stages(one.layout, one.groups_of(0))
    plan = plan_run(load_config(f"{model} {layout}".split()), 4, "h100")
    assert plan.parameters == sum(parameter.numel() for parameter in whole.parameters())
    assert plan.time.flops_per_s / 4 == pytest.approx(plan.time.mfu * 66.9e12)


@pytest.mark.parametrize("more", [[], ["--advise"]])
def test_a_wrong_sharding_is_named(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny:llama", "--ranks", "2", "--zero", "5", *more]) == 2
    assert capsys.readouterr().err == "error: --zero is 5; expected 0 to 3\n"


PUBLISHED = {  # parameters, as their publishers count them
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # a router's biases are no parameters in transformers
}


def test_a_published_model_is_planned_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    assert known_models() == sorted([*PUBLISHED, "gpt-175b"])
    for name, parameters in PUBLISHED.items():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(ModelRun(name).configuration)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters, name
    layout = ["--ranks", "8", "--zero", "3", "--seq", "4096", "--global-batch", "8", "--dtype", "bfloat16"]
    assert main(["--model", "llama3-8b", *layout]) == 0
    assert capsys.readouterr().out.startswith("8.03 B parameters")
    for name in ("llama3-9b.json", "llama3-9b"):
        assert main(["--model", name, *layout]) == 2
        assert "llama3-8b, mixtral-8x7b" in capsys.readouterr().err
    assert main(["--model", "org/name", *layout]) == 2
    assert "run hf download org/name config.json --local-dir name, and give name" in capsys.readouterr().err
    layout = ["--ranks", "64", "--tp", "8", "--pp", "8", "--global-batch", "8", "--model.dtype", "bfloat16"]
    assert main(["--model", "gpt-175b", *layout, "--device", "a100"]) == 0
    assert capsys.readouterr().out.startswith("175 B parameters; tp 8 x pp 8 x dp 1; ")


def test_a_plan_as_json_has_the_numbers_of_the_plan_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    layout = [*TINY, "--ranks", "4", "--tp", "2", "--pp", "2", "--global-batch", "8"]
    assert main(layout) == 0
    words = capsys.readouterr().out
    assert main([*layout, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (
        reported["fits"]
        and reported["ranks"] == 4
        and [position["rank"] for position in reported["positions"]] == [0, 2]
    )
    for position in reported["positions"]:
        assert sum(position["bytes"].values()) == position["peak_bytes"]
    assert reported["peak_bytes"] == max(position["peak_bytes"] for position in reported["positions"])
    kinds = ("compute", "exchanges", "bubble", "slower_ranks", "gradients", "optimizer")
    assert sum(reported["step"][kind] for kind in kinds) == pytest.approx(reported["step"]["seconds"])
    assert f"a step takes {reported['step']['seconds']:.3g} s: {reported['step']['tokens_per_s']:,.0f} tokens" in words
    assert main([*layout, "--json", "--advise"]) == 2
    assert "--json is of one layout" in capsys.readouterr().err


def test_what_an_allocator_adds_is_kept_free(capsys: pytest.CaptureFixture[str]) -> None:
    """A tenth of a GPU by its file, which --headroom changes; nothing of a host."""
    config = load_config(["--tp", "1", "--model.num-layers", "2", "--model.hidden-size", "64"])
    device = read_device("h100")
    plan = plan_run(config, 1, device)
    assert (plan.room, plan.headroom) == (72_000_000_000, 8_000_000_000)
    assert plan_run(config, 1, "laptop").headroom == 0
    full = replace(device, memory_bytes=plan.fullest.peak)
    assert not plan_run(config, 1, full).fits
    assert plan_run(config, 1, replace(full, headroom=0.0)).fits
    flags = ["--ranks", "1", "--tp", "1", "--model.num-layers", "2", "--model.hidden-size", "64"]
    assert main([*flags, "--headroom", "0.25"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"headroom for the allocator +18.63 GiB\n", shown) and "of 55.88 GiB" in shown
    assert main([*flags, "--headroom", "0"]) == 0
    assert "headroom" not in capsys.readouterr().out
    assert main([*flags, "--headroom", "1"]) == 2
    assert "--headroom is 1; expected a share of the memory from 0 to below 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["empty.toml", "comment.toml", "config.json"])
def test_an_empty_file_is_no_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text("# nothing\n" if name == "comment.toml" else "")
    assert main(["--model", str(tmp_path / name), "--ranks", "1"]) == 2
    reported = capsys.readouterr().err
    assert str(tmp_path / name) in reported and ("is empty, so it is no model" in reported) == name.endswith("toml")
    assert len(reported.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--modle llama3-8b", "--modle is no option. Perhaps you meant --model"),
        ("--model llama3-8b --advice", "--advice is no option. Perhaps you meant --device or --advise"),
        (
            "--model llama3-8b --global-batch 3",
            "--global-batch 3 is not divisible by dp .* use 8, or other parallel",
        ),
        ("--model llama3-8b --tp 3", r"start 6 or 9 ranks \(--ranks\), or change a size"),
    ],
)
def test_refusals_name_options_of_this_command(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*flags.split(), "--ranks", "8"]) == 2
    said = capsys.readouterr().err
    assert re.search(words, said) and "--run." not in said and said.count("\n") == 1
