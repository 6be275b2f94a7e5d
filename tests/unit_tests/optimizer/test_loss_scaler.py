"""The loss scale step by step, against sequences worked out by hand."""

import math

import pytest
import torch

from core.optimizer import OptimizerConfig
from core.optimizer.loss_scaler import ConstantLossScaler, DynamicLossScaler, loss_scaler_of


def scales(scaler: DynamicLossScaler, overflows: str) -> list[float]:
    """The scale after each step; '1' is an overflow."""
    found = []
    for overflow in overflows:
        scaler.update(overflow == "1")
        found.append(scaler.value)
    return found


def test_hysteresis_is_used_up_over_several_overflows_and_then_every_one_backs_off() -> None:
    scaler = DynamicLossScaler(65536.0, growth_interval=1000, hysteresis=2)
    assert scales(scaler, "1000111") == [65536, 65536, 65536, 65536, 32768, 16384, 8192]


def test_a_growth_gives_all_lives_back() -> None:
    scaler = DynamicLossScaler(64.0, growth_interval=3, hysteresis=2)
    assert scales(scaler, "10001110001") == [64, 64, 64, 128, 128, 64, 32, 32, 32, 64, 64]


def test_good_steps_count_in_a_row() -> None:
    scaler = DynamicLossScaler(4.0, growth_interval=3, hysteresis=3)
    assert scales(scaler, "0010010001") == [4, 4, 4, 4, 4, 4, 4, 4, 8, 8]


def test_one_life_backs_off_at_once_and_factors_are_the_given_ones() -> None:
    scaler = DynamicLossScaler(90.0, growth_factor=3.0, backoff_factor=1 / 3, growth_interval=2, hysteresis=1)
    assert scales(scaler, "1100001") == pytest.approx([30, 10, 10, 30, 30, 90, 30])


def test_the_scale_stays_within_its_limits() -> None:
    scaler = DynamicLossScaler(8.0, min_scale=3.0, growth_interval=1, hysteresis=1, max_scale=20.0)
    assert scales(scaler, "1110000") == [4, 3, 3, 6, 12, 20, 20]
    unlimited = DynamicLossScaler(2.0**127, growth_interval=1)
    assert math.isfinite(scales(unlimited, "00")[-1])
    assert bool(torch.isfinite(unlimited.scale).all())


def test_a_saved_scaler_goes_on_as_if_nothing_had_happened() -> None:
    pattern = "1001000011010000001"
    straight = scales(DynamicLossScaler(1024.0, growth_interval=3), pattern)
    for cut in range(len(pattern)):
        first = DynamicLossScaler(1024.0, growth_interval=3)
        begun = scales(first, pattern[:cut])
        second = DynamicLossScaler(2.0, growth_interval=3)
        second.load_state_dict(first.state_dict())
        assert begun + scales(second, pattern[cut:]) == straight


def test_saved_tensors_load_and_a_saved_scale_below_the_minimum_is_raised_to_it() -> None:
    scaler = DynamicLossScaler(64.0, min_scale=4.0, hysteresis=2)
    saved = {"scale": torch.tensor([2.0]), "growth_tracker": torch.tensor([5]), "hysteresis_tracker": torch.tensor([1])}
    scaler.load_state_dict(saved)
    assert (scaler.value, scaler.good_steps, scaler.lives) == (4.0, 5, 1)
    with pytest.raises(ValueError, match="saved scale is nan"):
        scaler.load_state_dict({"scale": math.nan})


def test_a_constant_stays() -> None:
    scaler = ConstantLossScaler(128.0)
    for overflow in (True, False, True):
        scaler.update(overflow)
    scaler.load_state_dict({"scale": 3.0})
    assert scaler.scale.tolist() == [128.0]


def test_the_config_chooses() -> None:
    assert loss_scaler_of(OptimizerConfig()) is None
    assert loss_scaler_of(OptimizerConfig(bf16=True)) is None
    constant = loss_scaler_of(OptimizerConfig(fp16=True, loss_scale=8.0))
    assert isinstance(constant, ConstantLossScaler) and constant.value == 8.0
    config = OptimizerConfig(
        fp16=True, initial_loss_scale=2.0**10, min_loss_scale=0.5, loss_scale_window=7, hysteresis=3
    )
    dynamic = loss_scaler_of(config)
    assert isinstance(dynamic, DynamicLossScaler)
    assert (dynamic.value, dynamic.min_scale, dynamic.growth_interval, dynamic.hysteresis) == (1024, 0.5, 7, 3)
    assert (dynamic.growth_factor, dynamic.backoff_factor) == (2.0, 0.5)
    default = loss_scaler_of(OptimizerConfig(fp16=True))
    assert default is not None and default.value == 2.0**32


@pytest.mark.parametrize(
    "bad",
    [
        {"initial_scale": 0.0},
        {"initial_scale": math.inf},
        {"initial_scale": 1.0, "min_scale": 2.0},
        {"initial_scale": 4.0, "max_scale": 2.0},
        {"initial_scale": 1.0, "growth_factor": 1.0},
        {"initial_scale": 1.0, "backoff_factor": 1.0},
        {"initial_scale": 1.0, "growth_interval": 0},
        {"initial_scale": 1.0, "hysteresis": 0},
    ],
)
def test_numbers_that_make_no_sense_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="|".join(bad)):
        DynamicLossScaler(**bad)  # type: ignore[arg-type]


def test_the_config_refuses_bad_scales() -> None:
    for bad in ({"loss_scale": 0.0}, {"min_loss_scale": 2.0**40}, {"loss_scale_window": 0}, {"hysteresis": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            OptimizerConfig(fp16=True, **bad)  # type: ignore[arg-type]
