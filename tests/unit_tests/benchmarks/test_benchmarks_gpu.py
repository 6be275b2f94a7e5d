"""`python -m benchmarks gpu`: its arithmetic, refusal, gates and a tiny run on the CPU; never a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import gpu, gpu_clock, gpu_fusion, gpu_optimizer, gpu_steps
from benchmarks.__main__ import main
from benchmarks.gpu_clock import CudaWatch, Row, Watch, in_turns, rows_of, table
from benchmarks.gpu_steps import CONTROL, MODELS, PLAIN, Setting, WrongLosses
from benchmarks.optimizer_arms import CoreArm, WrongWeights
from core_train import mfu
from tests.unit_tests.torch_calls import added_in_place

CPU = torch.device("cpu")


# -- times ------------------------------------------------------------------------------------------------------------


class FakeGpu:
    """A device that takes 5 ms for each call and 100 ms for what comes before it, some time after it was queued."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.synchronized = 0

    def new_event(self) -> Any:
        gpu = self

        class Event:
            def record(self) -> None:
                gpu.queued.append(self)

            def elapsed_time(self, other: Any) -> float:
                return other.ms - self.ms

        return Event()

    def synchronize(self) -> None:
        self.synchronized += 1
        now = 0.0
        for item in self.queued:
            if isinstance(item, float):
                now += item
            else:
                item.ms = now
        self.queued.clear()


def test_on_cuda_a_lap_lies_between_two_events_and_only_the_last_call_is_waited_for() -> None:
    device = FakeGpu()
    watch = CudaWatch(device.new_event, device.synchronize)
    seen = []

    def call() -> None:
        seen.append(device.synchronized)
        device.queued.append(5.0)

    assert watch.laps(call, 3, before=lambda: device.queued.append(100.0)) == pytest.approx([5e-3] * 3)
    assert seen == [1, 1, 1] and device.synchronized == 2


def test_on_the_cpu_what_comes_before_a_lap_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def takes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(gpu_clock.time, "perf_counter", lambda: now[0])
    assert Watch().laps(lambda: takes(2.0), 2, before=lambda: takes(50.0)) == [2.0, 2.0]


def test_arms_take_turns_whose_first_lap_is_not_counted() -> None:
    called: list[str] = []
    laps = {"a": iter(range(100)), "b": iter(range(100, 200))}

    class Counting(Watch):
        def laps(self, call: Any, count: int, before: Any = gpu_clock.nothing) -> list[float]:
            before()
            return [float(call()) for _ in range(count)]

    calls = {name: lambda name=name: (called.append(name), next(laps[name]))[1] for name in laps}
    prepared: list[str] = []
    seconds = in_turns(calls, Counting(), rounds=2, laps=2, before={"b": lambda: prepared.append("b")})
    assert seconds == {"a": [[1.0, 2.0], [4.0, 5.0]], "b": [[101.0, 102.0], [104.0, 105.0]]}
    turns = [called[start] for start in range(0, 12, 3)]
    assert sorted(turns[:2]) == sorted(turns[2:]) == ["a", "b"] and prepared == ["b", "b"]


def test_a_row_has_the_median_the_ratio_of_medians_and_the_ratios_by_round() -> None:
    base, arm = rows_of(
        {"x": [[1e-3, 3e-3], [2e-3, 2e-3]], "y": [[2e-3, 2e-3], [4e-3, 4e-3]]}, "x", {"y": {"MFU": 0.5}}
    )
    assert (base.name, base.ms, base.ratio, base.extra) == ("x", pytest.approx(2.0), 1.0, {})
    assert arm.ms == pytest.approx(3.0) and arm.ratio == pytest.approx(1.5) and arm.extra == {"MFU": 0.5}
    assert (arm.ratio_low, arm.ratio_high) == (pytest.approx(1.25), pytest.approx(1.75))  # of 1 and 2
    lines = table([base, arm], "arms").splitlines()
    assert lines[0].split() == ["arms", "ms", "(quartiles)", "ratio", "by", "round", "MFU"]
    assert lines[2].split() == ["y", "3.000", "(2.000..4.000)", "1.500", "(1.250..1.750)", "0.500"]
    assert table([Row("z", 1, 1, 1, 1, 1, 1, {})], "t").splitlines()[1].split()[0] == "z"


# -- floating point operations ----------------------------------------------------------------------------------------


def test_a_steps_operations_are_those_that_torch_counts() -> None:
    setting = Setting(MODELS["test"], CPU, autocast=False)
    model, batch = setting.model(), setting.batches(1)[0]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(*batch).backward()
    elements = gpu_steps.matrix_numel(model)
    assert elements == 4 * (16 * 48 + 16 * 16 + 2 * 16 * 64) + 16 * 32
    assert gpu_steps.step_flops(elements, setting.workload) == counter.get_total_flops()


def test_a_tied_output_counts_as_a_matrix_and_the_embedding_does_not() -> None:
    from core.models.gpt import GPTModel
    from core.transformer.transformer_config import TransformerConfig

    model = GPTModel(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=20))
    assert gpu_steps.matrix_numel(model) == 8 * 24 + 8 * 8 + 2 * 8 * 32 + 20 * 8


def test_the_peak_is_the_given_one_or_that_of_the_longest_name_and_mfu_is_a_share_of_it() -> None:
    assert mfu.peak_tflops("NVIDIA H200", None) == 989.5
    assert mfu.peak_tflops("NVIDIA H100 PCIe", None) == 756.5
    assert mfu.peak_tflops("NVIDIA H200", 800.0) == 800.0
    assert mfu.peak_tflops("some other", None) is None
    assert gpu.rates(4 * 10**12, 0.5, 16.0) == {"TFLOP/s": 8.0, "MFU": 0.5}
    assert gpu.rates(4 * 10**12, 0.5, None) == {"TFLOP/s": 8.0, "MFU": "-"}


def test_the_optimizers_share_counts_bytes_that_must_move() -> None:
    problem = gpu_optimizer.problem_of(MODELS["test"], "bf16, fp32 gradients and masters", CPU)
    # the gradient twice; moments and master read and written; the parameter written: 8 + 16 + 8 + 2, over 8 of a copy
    assert gpu_optimizer.share_of_copy(problem, 34.0, 8.0) == 1.0 and gpu_optimizer.share_of_copy(problem, 68, 8) == 0.5


# -- gates ------------------------------------------------------------------------------------------------------------


def test_an_arm_whose_losses_are_others_is_refused_and_so_is_a_control_that_passes() -> None:
    assert gpu_steps.check("arm", [2.0, 1.0], [2.0, 1.001], 1e-2) == pytest.approx(0.001 / 1.001)
    with pytest.raises(WrongLosses, match=r"arm: losses \[2.0, 1.1\] are 1.0e-01 from \[2.0, 1.0\], 1e-02 allowed"):
        gpu_steps.check("arm", [2.0, 1.1], [2.0, 1.0], 1e-2)
    with pytest.raises(WrongLosses):
        gpu_steps.check("arm", [2.0, float("nan")], [2.0, 1.0], 1e-2)
    assert gpu_steps.check_control([2.0, 1.5], [2.0, 1.0], 1e-2) == 0.5
    with pytest.raises(WrongLosses, match="the gate at 1e-02 catches nothing"):
        gpu_steps.check_control([2.0, 1.0], [2.0, 1.0], 1e-2)


@pytest.mark.parametrize("dtypes", gpu_fusion.DTYPES)
def test_a_weight_gradient_that_is_added_twice_is_refused(dtypes: str) -> None:
    for shape in gpu_fusion.shapes_of(MODELS["test"]):
        backward = gpu_fusion.pair(shape, dtypes, CPU)["fused"]
        assert backward.layer.weight.grad is backward.buffer
        assert added_in_place(backward) is (not shape.embedding or dtypes != "bf16")

        def twice(backward: Any = backward) -> None:
            backward()
            backward()

        with pytest.raises(gpu_fusion.WrongGradient, match="of 2 backwards is 1.0e.00 of its norm"):
            gpu_fusion.check("wrong", backward, gpu_fusion.TOLERANCES[dtypes], twice)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) == 1
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1
    assert f"needs a CUDA device, and torch {torch.__version__} finds none" in error and "--device cpu" in error


def test_a_tiny_run_on_the_cpu_goes_through_every_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_optimizer, "NAMES", gpu_optimizer.NAMES[1:3])
    file = tmp_path / "gpu.json"
    assert main(["gpu", "--device", "cpu", "--rounds", "1", "--laps", "1", "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    assert list(results) == list(gpu.SECTIONS)
    deviations = results["check"]["deviations"]
    strategies = [f"core {name}{more}" for name in ("no_shard", "optim", "optim_grads") for more in ("", " overlapped")]
    assert [name for name in deviations if name.startswith("core ")] == strategies
    assert all(deviations[name] <= gpu.CHECK_TOLERANCE / 10 for name in (PLAIN, *strategies))
    assert deviations[CONTROL] > 10 * gpu.CHECK_TOLERANCE, "the gate would hardly tell a wrong arm"
    assert [row["name"] for row in results["wrapper"]["rows"]] == [PLAIN, *strategies]
    assert results["wrapper"]["rows"][0]["ratio"] == 1.0
    assert len(results["fusion"]) == 6 * 3 and results["sanitizer"] == {"outcome": "not run"}
    for found in results["optimizer"]:
        assert [row["name"] for row in found["rows"]][:3] == [gpu_optimizer.COPY, gpu_optimizer.TORCH, "core fused"]
    printed = capsys.readouterr().out
    assert "(caught)" in printed and "WRONG" not in printed and "MFU" in printed


def test_a_wrong_arm_is_named_and_the_command_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gpu_steps.wrapped

    def wrong(setting: Setting, strategy: str, *, overlap: bool) -> Any:
        if strategy == "optim":
            return gpu_steps.plain(setting, gradient_factor=0.5)
        return whole(setting, strategy, overlap=overlap)

    class HalfTheRate(CoreArm):
        def step(self) -> None:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
            super().step()

    monkeypatch.setattr(gpu_steps, "wrapped", wrong)
    monkeypatch.setattr(gpu_optimizer, "CoreArm", HalfTheRate)
    monkeypatch.setattr(gpu_optimizer, "NAMES", gpu_optimizer.NAMES[:1])
    monkeypatch.setattr(gpu, "own_gpt", lambda *given, **named: (_ for _ in ()).throw(WrongWeights("never reached")))
    arguments = ["--device", "cpu", "--rounds", "1", "--laps", "1", "--sections", "check", "optimizer"]
    assert main(["gpu", *arguments]) == 1
    out, error = capsys.readouterr()
    assert "WRONG: core optim: losses" in out and "WRONG: core fused: weights are" in out
    assert error.strip() == "wrong: check, optimizer"
