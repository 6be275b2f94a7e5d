"""Advice against the plans of all layouts: bounds, the order of those that are shown, and the fewest ranks."""

import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from core_plan import ModelRun, advise, plan_run, read_device
from core_plan.advice import EQUAL, Candidate, Search, in_order
from core_plan.choices import Choice, Sizes, choices, flags_of, stages_a_rank, uneven_stages, with_choice
from core_plan.command import main
from core_plan.job.config import JobConfig
from core_plan.job.config_file import load_config
from core_plan.job.errors import ConfigError

MODEL = "--model.num-layers 4 --model.hidden-size 64 --model.vocab-size 256 --model.num-attention-heads 4"
MODEL += " --model.ffn-hidden-size 128"
EXPERTS = " --model.num-experts 4 --model.moe-layer-freq 2 --model.dtype bfloat16 --ddp.bucket-size 20000"


def small(more: str = "", length: int = 64, batch: int = 8) -> JobConfig:
    return load_config(f"{MODEL} --model.sequence-length {length} --run.global-batch-size {batch} {more}".split())


def plans_of(search: Search, ranks: int) -> list[Candidate]:
    """Every layout that is considered and can be built, planned."""
    choices = [row.choice._replace(zero=zero) for row in search.rows(ranks) for zero in search.zeros]
    return [one for choice in choices if (one := search.plan(choice, ranks)) is not None]


@pytest.mark.parametrize(
    ("said", "ranks", "fixed"),
    [
        (small(), 4, {"tp": 2, "micro": 2}),
        (small(EXPERTS), 8, {"pp": 2, "tp": 1, "micro": 1, "vpp": 1}),
        (ModelRun("tiny:llama", sequence_length=64), 2, {"micro": 2, "tp": 1}),
        (ModelRun("tiny:qwen3", sequence_length=64), 2, {"cp": 2, "micro": 1}),
        pytest.param(small(), 4, {}, marks=pytest.mark.nightly),
        pytest.param(ModelRun("tiny:qwen3_moe", sequence_length=64), 8, {"micro": 1}, marks=pytest.mark.nightly),
    ],
)
def test_no_plan_is_faster_than_its_bound_nor_than_what_is_shown(
    said: JobConfig | ModelRun, ranks: int, fixed: dict[str, int]
) -> None:
    """With all the memory of a device, and with so little that half of the layouts do not fit."""
    device = replace(read_device("h100"), ranks_per_machine=2, headroom=0.0)
    search = Search(said, device, fixed)
    plans = plans_of(search, ranks)
    bounds = {row.choice: row.bound for row in search.rows(ranks)}
    zero = search.zeros[0]
    assert all(bounds[one.choice._replace(zero=zero)] <= one.seconds for one in plans)
    assert {one.choice.zero for one in plans} >= {0, 1}
    assert {getattr(one.choice, name) for one in plans for name in fixed} == {*fixed.values()}
    for room in (device.memory_bytes, sorted(one.peak for one in plans)[len(plans) // 2]):
        fitting = [one for one in plans if one.peak <= room]
        found = Search(said, replace(device, memory_bytes=room), fixed)
        (first, *_) = found.best(found.rows(ranks), ranks, 1)
        assert not found.ended
        assert first.peak <= room
        assert first.seconds <= EQUAL * EQUAL * min(one.seconds for one in fitting)


def test_no_layout_is_left_out_but_those_that_cannot_be_built() -> None:
    config = small(batch=2)
    found = {row.choice.axes[:3] for row in Search(config, read_device("h100"), {}).rows(4)}
    buildable = set()
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            for vpp in (1, 2):
                parallel = replace(config.parallel, tp=tp, pp=pp, vpp=vpp)
                try:
                    plan_run(replace(config, parallel=parallel, run=replace(config.run, micro_batch_size=1)), 4)
                except ConfigError:
                    continue
                buildable.add((tp, pp, 1))
    assert found == buildable
    assert {(choice.tp, choice.pp) for choice, _ in choices(Sizes.of(config), 4, {"tp": 2, "dp": 1})} == {(2, 2)}
    far = replace(read_device("h100"), ranks_per_machine=2)  # tp 4 would leave the machine
    assert {row.choice.tp for row in Search(config, far, {}).rows(4)} == {1, 2}
    assert {row.choice.tp for row in Search(config, far, {"tp": 4}).rows(4)} == {4}


def test_of_steps_that_take_as_long_the_one_that_holds_least_comes_first() -> None:
    """As long as the fastest, up to a percent; so none comes before one that is faster by more."""
    sizes = [(1.0, 9), (1.009, 5), (1.0099, 7), (1.011, 4), (1.02, 3), (1.03, 1), (2.0, 0)]
    rows: list[Any] = [
        SimpleNamespace(choice=Choice(1, 1, micro=place), peak=peak, seconds=seconds)
        for place, (seconds, peak) in enumerate(sizes)
    ]
    ordered = [(one.seconds, one.peak) for one in in_order(reversed(rows))]
    assert ordered == [(1.009, 5), (1.0099, 7), (1.0, 9), (1.02, 3), (1.011, 4), (1.03, 1), (2.0, 0)]
    assert in_order([rows[0]] * 2) == [rows[0]] * 2 and in_order(rows[:0]) == []


def test_what_is_shown_is_in_the_order_of_plans() -> None:
    config = small()
    found = advise(config, 4, most=3)
    assert len(found.candidates) == 3
    assert list(found.candidates) == in_order(found.candidates)
    for candidate in found.candidates:
        plan = plan_run(with_choice(config, candidate.choice), 4)
        assert (plan.time.seconds, plan.fullest.peak) == (candidate.plan.time.seconds, candidate.plan.fullest.peak)
    assert not found.candidates[0].reason
    assert all("more" in candidate.reason for candidate in found.candidates[1:])


def test_a_search_that_takes_too_long_reports_what_it_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Search.__module__], "MOST_PLANNED", 2)
    found = advise(small(), 4, most=3)
    assert 0 < len(found.candidates) <= 2
    assert "ended after 2 plans; other layouts may be faster" in found.describe()


def test_the_fewest_ranks_are_those_of_all_plans() -> None:
    """Of divisors of the ranks asked for, and of powers of two."""
    config = small("--model.num-layers 6 --model.hidden-size 256 --model.ffn-hidden-size 1024", batch=12)
    device = replace(read_device("h100"), ranks_per_machine=2, headroom=0.0)
    fixed = {"micro": 1, "recompute": 1}

    def least(ranks: int) -> int:
        return min(one.peak for one in plans_of(Search(config, device, {**fixed, "zero": 3}), ranks))

    of = {ranks: least(ranks) for ranks in (1, 2, 6)}
    assert of[6] < of[2] < of[1]
    for room, ranks, fewest in ((of[1], 2, 1), (of[1] - 1, 2, 2), (of[2], 4, 2), (of[2], 1, 2), (of[6], 6, 6)):
        search = Search(config, replace(device, memory_bytes=room), fixed)
        assert search.fewest(ranks) == fewest
    assert Search(config, replace(device, memory_bytes=1), {}).fewest(2) is None


def test_where_nothing_fits_the_fewest_ranks_are_reported() -> None:
    config = small(batch=4)
    device = replace(read_device("h100"), headroom=0.0)
    search = Search(config, device, {"micro": 1, "recompute": 1})
    on_one, on_two = (min(one.peak for one in plans_of(search, ranks)) for ranks in (1, 2))
    found = advise(config, 1, replace(device, memory_bytes=(on_one + on_two) // 2))
    assert (list(found.candidates), found.fewest) == ([], 2)
    assert found.describe().splitlines()[1:] == [
        "no layout fits on so many ranks",
        "the smallest number of ranks that fits is 2",
    ]
    found = advise(config, 2, replace(device, memory_bytes=1))
    assert found.fewest is None
    assert found.describe().splitlines()[1:] == [
        "no layout fits on so many ranks",
        "and none on any number of ranks that was tried up to 16,384",
    ]


def test_the_command_advises(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL.split(), "--seq", "64", "--global-batch", "4", "--ranks", "2", "--advise"]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert "layouts can be built" in shown
    assert "  1. tp 1  pp 1  cp 1  zero" in shown
    assert "times the time: " in shown
    assert "the smallest number of ranks that fits is 1" in shown
    options = shown.partition("the first by options: ")[2].splitlines()[0].split()
    assert main([*flags[:-1], *options]) == 0  # it is a layout that can be planned
    capsys.readouterr()
    assert main([*flags, "--tp", "2"]) == 0
    assert "tp 1" not in capsys.readouterr().out
    assert main([*flags, "--parallel.tp", "2", "--run.micro-batch-size=1"]) == 0  # as they are named in files
    shown = capsys.readouterr().out
    assert "  1. tp 2" in shown and "tp 1" not in shown
    assert "micro-batch 1" in shown and "micro-batch 2" not in shown
    assert main([*flags, "--tp", "3"]) == 2
    assert "tp 3" in capsys.readouterr().err


def test_a_ctrl_c_gives_the_best_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    planned: list[Candidate | None] = []
    plan = Search.plan

    def interrupted(self: Search, choice: Choice, ranks: int) -> Candidate | None:
        if len(planned) == 2:
            raise KeyboardInterrupt
        planned.append(plan(self, choice, ranks))
        return planned[-1]

    monkeypatch.setattr(Search, "plan", interrupted)
    flags = [*MODEL.split(), "--seq", "64", "--global-batch", "4", "--ranks", "2", "--advise"]
    assert main(flags) == 0
    shown = capsys.readouterr()
    assert "  1. tp 1" in shown.out and "  3. " not in shown.out
    assert shown.out.splitlines()[-1].startswith("interrupted: the best of the layouts that were planned before")
    assert shown.err.startswith("looking at all layouts of 2 ranks\n")
    assert "layouts; Ctrl-C gives the best so far" in shown.err and "the best of 1 planned so far: tp 1" in shown.err


def test_the_command_advises_on_hugging_face_models(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "tiny:llama", "--seq", "64", "--global-batch", "4", "--ranks", "2", "--micro-batch", "1"]
    assert main([*flags, "--recompute", "--zero", "1", "--advise"]) == 0
    shown = capsys.readouterr().out
    assert "  1. tp 1  pp 1  cp 1  zero 1  micro-batch 1  recompute" in shown
    assert "zero 0" not in shown and "zero 2" not in shown
    options = shown.partition("the first by options: ")[2].splitlines()[0].split()
    assert main([*flags, *options]) == 0
    seconds = shown.partition("  recompute ")[2].split()[0]
    assert f"a step takes {seconds} s" in capsys.readouterr().out
    assert main([*flags, "--tp", "3", "--advise"]) == 2
    assert "tp 3" in capsys.readouterr().err
    assert main([*flags, "--ep", "2", "--advise"]) == 2
    assert "experts" in capsys.readouterr().err


def test_what_some_layouts_refuse_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """A family that cannot be cut as far, and several stages a rank, whose gradients no microbatch may shard."""
    flags = ["--model", "tiny:llama", "--ranks", "3", "--seq", "64", "--global-batch", "3"]
    assert main([*flags, "--advise"]) == 0
    assert "  1. tp 1  pp 1" in capsys.readouterr().out
    interleaved = [*MODEL.split(), "--vpp", "2", "--seq", "64", "--global-batch", "8", "--ranks", "2", "--pp", "2"]
    assert main([*interleaved, "--tp", "1", "--advise"]) == 0
    shown = capsys.readouterr().out
    assert "  1. tp 1  pp 2" in shown
    assert "zero 2" not in shown and "zero 3" not in shown
    assert main([*interleaved, "--tp", "1", "--ddp.data-parallel-sharding-strategy", "optim_grads_params"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: reduce_microbatches='every'")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "given",
    [
        "",
        "--parallel.sequence-parallel True",
        "--parallel.dp 2 --parallel.layers-per-stage 1 3 --parallel.schedule GPipe",
        "--parallel.vpp 2 --parallel.pp 2 --model.recompute-granularity full",
        "--model.recompute-granularity selective --ddp.data-parallel-sharding-strategy optim_grads_params",
        "--ddp.no-use-distributed-optimizer --parallel.etp 2",
        "--ddp.data-parallel-sharding-strategy no_shard --model.num-experts 4 --parallel.etp 2",
        "--ddp.no-overlap-param-gather",
    ],
)
def test_options_added_to_a_command_come_to_the_layout(given: str) -> None:
    """Whatever the command says of the layout is taken back."""
    config = small(given)
    stages = Choice(1, 2, vpp=2), Choice(1, 3), Choice(2, 1, parts=True)
    plain = Choice(1, 1), Choice(2, 1, etp=2, micro=2), Choice(1, 2, recompute=True), Choice(4, 1, 1, 1, 4)
    for choice in (*plain, *stages):
        for zero in range(4):
            wanted = choice._replace(zero=zero)
            assert small(f"{given} {flags_of(config, wanted)}") == with_choice(config, wanted)


def test_options_take_a_mode_of_a_hugging_face_model_back(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "tiny:llama", "--seq", "64", "--global-batch", "4", "--ranks", "2", "--micro-batch", "1"]
    flags += ["--sequence-parallel", "split_gather"]
    said = ModelRun("tiny:llama", sequence_length=64, sequence_parallel="split_gather")
    assert "--sequence-parallel split_gather" in flags_of(said, Choice(2, 1))
    options = flags_of(said, Choice(1, 1))
    assert "--sequence-parallel none" in options
    assert main([*flags, *options.split()]) == 0
    capsys.readouterr()
    assert main([*flags, "--advise", "--sequence-parallel", "magic"]) == 2
    assert "expected one of split_gather" in capsys.readouterr().err


def test_stages_that_published_models_have_are_tried() -> None:
    """405B: 126 layers over 16 ranks, of one or eight stages. BLOOM: 70 over 12. DeepSeek-V3: 61 over 16."""
    assert uneven_stages(126, 16) == (7, *[8] * 14, 7)
    assert uneven_stages(126, 128) == (0, *[1] * 126, 0)
    assert uneven_stages(70, 12) == (5, *[6] * 10, 5)
    assert uneven_stages(61, 16) == (3, *[4] * 13, 3, 3)
    assert uneven_stages(96, 24) == ()
    sizes = Sizes.of(small())
    for layers, pp, counts in ((126, 16, [1, 2, 4, 8]), (96, 8, [1, 2, 3, 4]), (61, 16, [1])):
        assert stages_a_rank(sizes._replace(layers=layers), pp) == counts
    assert stages_a_rank(sizes._replace(layers=4), 1) == stages_a_rank(sizes._replace(frees_stages=False), 2) == [1]
    found = Search(small(length=8, batch=16), read_device("h100"), {"pp": 2, "tp": 1, "micro": 1}).rows(2)
    expected = set(itertools.product((1, 2, 3), (False, True)))
    assert {(one.choice.vpp, one.choice.parts) for one in found} == expected


def test_a_layout_of_ones_own_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL.split(), "--seq", "64", "--global-batch", "4", "--ranks", "2", "--advise"]
    assert main([*flags, "--compare", "tp=2,micro=1"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("tp 2 micro 1"))
    assert line.startswith("tp 2 micro 1 stands at place 3, as tp 2  pp 1  cp 1  zero ")
    assert "times the time: " in line
    assert main([*flags, "--compare", "tp=1"]) == 0
    assert "tp 1 stands at place 1" in capsys.readouterr().out
    assert main([*flags, "--compare", "tp=3"]) == 0
    assert "tp 3: no sizes of tp, pp and cp that the model allows, of which tp 3 is given," in capsys.readouterr().out
    for words in ("tp:2", "tp=x", "speed=1"):
        assert main([*flags, "--compare", words]) == 2
        assert f"--compare has '{words}'; expected NAME=NUMBER of " in capsys.readouterr().err


def test_one_wrong_size_is_named() -> None:
    with pytest.raises(ConfigError, match="^zero 5: expected 0 to 3$"):
        advise(small(), 2, fixed={"zero": 5})
    with pytest.raises(ConfigError, match="^micro 0: expected 1 to"):
        advise(small(), 2, fixed={"micro": 0})
