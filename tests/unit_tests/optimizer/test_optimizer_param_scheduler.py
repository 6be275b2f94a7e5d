"""The schedule against closed formulas, written out here a second time; its edges; and loading."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core import parallel_state
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import make_net, wrap

NUMBERS: dict[str, Any] = {
    "init_lr": 0.1,
    "max_lr": 1.0,
    "min_lr": 0.2,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 50,
    "lr_decay_style": "linear",
    "start_wd": 0.0,
    "end_wd": 0.4,
    "wd_incr_steps": 20,
    "wd_incr_style": "linear",
}

# After a warm-up to 1.0 at 10, down to 0.2 at 50; n counts from 0.
FORMS: dict[str, Callable[[int], float]] = {
    "constant": lambda n: 1.0,
    "linear": lambda n: 1.0 - 0.8 * (n - 10) / 40,
    "cosine": lambda n: 0.6 + 0.4 * math.cos(math.pi * (n - 10) / 40),
    "inverse-square-root": lambda n: max(0.2, (10 / n) ** 0.5),
}
# A plateau until 34, then down in 16.
WSD_FORMS: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - 0.8 * r,
    "cosine": lambda r: 0.6 + 0.4 * math.cos(math.pi * r),
    "exponential": lambda r: 0.2 + 0.8 * (2 * math.exp(-r * math.log(2)) - 1),
    "minus_sqrt": lambda r: 0.2 + 0.8 * (1 - r**0.5),
}


def groups(*own: dict[str, Any]) -> Any:
    return SimpleNamespace(param_groups=[dict(each) for each in own or ({},)])


def scheduler(optimizer: Any = None, **changes: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(optimizer or groups(), **{**NUMBERS, **changes})


def rates(made: OptimizerParamScheduler, steps: int, index: int = 0) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(made.optimizer.param_groups[index]["lr"])
        made.step(1)
    return found


@pytest.mark.parametrize("style", FORMS)
def test_each_decay_follows_its_formula_at_every_step(style: str) -> None:
    found = rates(scheduler(lr_decay_style=style), 70)
    for n, lr in enumerate(found):
        if n <= 10:
            expected = 0.1 + 0.9 * n / 10
        elif n > 50 and style != "constant":
            expected = 0.2
        else:
            expected = FORMS[style](n)
        assert lr == pytest.approx(expected, rel=1e-12), f"after {n} samples"


@pytest.mark.parametrize("style", WSD_FORMS)
def test_each_wsd_decay_follows_its_formula_after_the_plateau(style: str) -> None:
    found = rates(scheduler(lr_decay_style="WSD", wsd_decay_steps=16, lr_wsd_decay_style=style), 70)
    for n, lr in enumerate(found):
        expected = 0.1 + 0.9 * n / 10 if n <= 10 else 1.0 if n <= 34 else WSD_FORMS[style]((n - 34) / 16)
        assert lr == pytest.approx(0.2 if n > 50 else expected, rel=1e-12), f"after {n} samples"
    assert found[50] == pytest.approx(0.2, rel=1e-12) and found[51] == 0.2


def test_weight_decay_rises_by_its_formula() -> None:
    for style, rise in {"linear": lambda r: r, "cosine": lambda r: (1 - math.cos(math.pi * r)) / 2}.items():
        made = scheduler(wd_incr_style=style)
        for n in range(30):
            decay = made.optimizer.param_groups[0]["weight_decay"]
            assert decay == pytest.approx(0.4 * rise(min(n / 20, 1.0)), rel=1e-12, abs=1e-15), (style, n)
            made.step(1)
    assert scheduler(wd_incr_style="constant", start_wd=0.3, end_wd=0.3).get_wd() == 0.3
    assert scheduler(wd_incr_steps=0).get_wd() == 0.4


@pytest.mark.parametrize("style", [*FORMS, "WSD"])
def test_edges_of_warm_up_and_decay(style: str) -> None:
    wsd = {"wsd_decay_steps": 50, "lr_wsd_decay_style": "linear"} if style == "WSD" else {}
    without = rates(scheduler(lr_decay_style=style, lr_warmup_steps=0, **wsd), 60)
    assert without[0] == 1.0, "no warm-up: the first step has the full rate"
    last, after = without[50], without[51]
    assert after == (1.0 if style == "constant" else 0.2)
    if style in ("linear", "cosine", "WSD"):
        assert last == pytest.approx(0.2, rel=1e-12)
    if style == "WSD":
        return
    whole = rates(scheduler(lr_decay_style=style, lr_warmup_steps=50), 60)
    assert whole[50] == 1.0 and whole[25] == pytest.approx(0.55) and whole[51] == after


@pytest.mark.parametrize("style", [*FORMS, "WSD"])
def test_the_rate_is_a_function_of_the_samples_seen_and_not_of_the_steps(style: str) -> None:
    wsd = {"wsd_decay_steps": 16, "lr_wsd_decay_style": "minus_sqrt"} if style == "WSD" else {}
    one, other = (scheduler(lr_decay_style=style, **wsd) for _ in range(2))
    for increment in (3, 8, 1, 14, 0, 11, 20):
        one.step(increment)
    other.step(57)
    assert one.optimizer.param_groups == other.optimizer.param_groups


def test_groups_have_multipliers_and_limits_of_their_own() -> None:
    optimizer = groups(
        {"max_lr": 1.0, "min_lr": 0.2, "default_config": True},
        {"lr_mult": 3.0, "wd_mult": 0.0},
        {"max_lr": 0.5, "min_lr": 0.0, "lr_mult": 2.0},
        {"start_wd": 0.3, "end_wd": 0.5, "wd_mult": 2.0},
    )
    made = scheduler(optimizer)
    made.step(30)
    lrs = [group["lr"] for group in optimizer.param_groups]
    assert lrs == pytest.approx([0.6, 1.8, 0.5, 0.6], rel=1e-12)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.0, 0.4, 1.0])
    made.step(21)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.6, 0.0, 0.2])
    assert get_canonical_lr_for_logging(optimizer.param_groups) == 0.2
    assert get_canonical_lr_for_logging([{"lr": 1.0}]) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"min_lr": 2.0},
        {"min_lr": -0.1},
        {"init_lr": 1.5},
        {"init_lr": -1.0},
        {"lr_decay_steps": 0},
        {"lr_warmup_steps": 51},
        {"lr_warmup_steps": -1},
        {"lr_decay_style": "exponential"},
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear", "wsd_decay_steps": 41},
        {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"},
        {"lr_decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "sqrt"},
        {"start_wd": 0.5},
        {"start_wd": -0.5},
        {"wd_incr_style": "constant"},
        {"wd_incr_style": "step"},
        {"wd_incr_steps": -1},
    ],
)
def test_numbers_that_make_no_schedule_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="|".join([*changes, "wsd_decay_steps is None"])):
        scheduler(**changes)


def test_other_mistakes_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="both True"):
        scheduler(override_opt_param_scheduler=True)
    with pytest.raises(ValueError, match="param group 'head': init_lr 0.1 and max_lr 0.05"):
        scheduler(groups({"name": "head", "max_lr": 0.05, "min_lr": 0.0}))
    with pytest.raises(ValueError, match="configured lr 0.5 and the scheduler's max_lr is 1.0"):
        scheduler(groups({"name": "all", "max_lr": 0.5, "default_config": True}))
    made = scheduler()
    with pytest.raises(ValueError, match="would go back"):
        made.step(-1)
    made.optimizer.param_groups.append({})
    with pytest.raises(ValueError, match="2 param groups and had 1"):
        made.step(1)
    with pytest.raises(ValueError, match="no 'num_steps'"):
        made.load_state_dict({})


def test_loading_twice_changes_nothing() -> None:
    saved = scheduler(lr_decay_style="cosine")
    saved.step(33)
    state = saved.state_dict()
    loaded = scheduler(groups({"lr": 77.0, "max_lr": 1.0}), lr_decay_style="cosine")
    loaded.step(5)
    for _ in range(2):
        loaded.load_state_dict(state)
        assert loaded.num_steps == 33 and loaded.state_dict() == state
        assert loaded.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"]
    loaded.step(4)
    saved.step(4)
    assert loaded.optimizer.param_groups[0]["lr"] == saved.optimizer.param_groups[0]["lr"]


def test_which_numbers_hold_after_loading_is_said_by_the_two_options() -> None:
    saved = scheduler()
    saved.step(30)
    state = saved.state_dict()
    changes = {"max_lr": 2.0, "lr_decay_steps": 90, "lr_decay_style": "cosine"}
    own: Any = {"max_lr": 0.5, "min_lr": 0.2}
    follows = scheduler(groups({"max_lr": 2.0, "min_lr": 0.2}, own), **changes)
    follows.load_state_dict(state)
    assert follows.state_dict() == state
    lrs = [group["lr"] for group in follows.optimizer.param_groups]
    assert lrs == pytest.approx([0.6, 0.35]), "the group that had the configured rate follows, the other keeps its own"

    keeps = scheduler(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=False, **changes)
    keeps.load_state_dict(state)
    fresh = scheduler(**changes)
    fresh.step(30)
    assert keeps.optimizer.param_groups == fresh.optimizer.param_groups
    assert keeps.optimizer.param_groups[0]["lr"] != pytest.approx(0.6)

    strict = scheduler(use_checkpoint_opt_param_scheduler=False, **changes)
    with pytest.raises(ValueError, match=r"max_lr \(saved 1.0, configured 2.0\)"):
        strict.load_state_dict(state)
    assert strict.num_steps == 0
    equal = scheduler(use_checkpoint_opt_param_scheduler=False)
    equal.load_state_dict(state)
    assert equal.num_steps == 30
    # A state without the numbers that Megatron does not save.
    equal.load_state_dict({k: v for k, v in state.items() if k not in ("init_lr", "wsd_decay_steps")})


def test_saved_numbers_that_contradict_the_configured_groups_change_nothing() -> None:
    state = {**scheduler().state_dict(), "min_lr": 0.7, "num_steps": 9}
    made = scheduler(groups({"max_lr": 0.5}))
    with pytest.raises(ValueError, match="min_lr 0.7 and max_lr 0.5"):
        made.load_state_dict(state)
    assert made.num_steps == 0 and made.min_lr == 0.2


@ranks(2)
def test_a_run_with_another_rate_takes_it_though_the_loaded_optimizer_holds_the_old_one(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float32), use_distributed_optimizer=True)
    old = get_megatron_optimizer(OptimizerConfig(lr=1.0, min_lr=0.2, weight_decay=0.4), [ddp])
    first = scheduler(old, start_wd=0.4, wd_incr_style="constant")
    first.step(20)
    new = get_megatron_optimizer(OptimizerConfig(lr=2.0, min_lr=0.2, weight_decay=0.4), [ddp])
    options = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": False}
    second = scheduler(new, max_lr=2.0, start_wd=0.4, wd_incr_style="constant", **options)
    new.load_state_dict(old.state_dict())
    second.load_state_dict(first.state_dict())
    assert {group["lr"] for group in new.param_groups} == {2.0 - 1.8 * 10 / 40}
    assert {group["max_lr"] for group in new.param_groups} == {2.0}
    decays = sorted(group["weight_decay"] for group in new.param_groups)
    assert decays == [0.0, 0.4]
