"""The overlap and communication benchmarks: their arithmetic, what they refuse, and tiny runs; never a time."""

import math
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import communication, overlap
from benchmarks.communication import CASES, Case, judge, line_of, measure, off_by, theory
from benchmarks.overlap import LAYERS, WIDTH, Point, check_losses, draw_curves, measure_ratio, reference_losses, table
from core import parallel_state
from core.groups import agree
from tests.unit_tests.ranks import ranks

LARGE, SMALL = 61_440 * 4, 1_536 * 4  # bytes of a parameter
DENSE = 8 * LARGE


@pytest.mark.parametrize(
    ("name", "world", "nbytes", "collectives"),
    [
        ("no_shard", 2, 2 * DENSE, 4),  # each of 2 sends 2/2 of it
        ("no_shard", 4, 4 * 1.5 * DENSE, 4),
        ("optim", 3, 3 * (2 / 3 + 2 / 3) * DENSE, 8),
        ("optim_grads, 3 microbatches, the last", 2, 2 * DENSE, 8),
        ("optim_grads, 3 microbatches, every", 2, 2 * (3 / 2 + 1 / 2) * DENSE, 16),
        ("optim, 2 instances", 4, 4 * (1 / 2 + 1 / 2 + 1 / 2) * DENSE, 12),  # scatter, halves across, gather
        ("no_shard, tied embedding, pp 2", 2, 2 * LARGE, 1),
        ("no_shard, tied embedding, pp 2", 4, 4 * (DENSE + LARGE) + 4 * LARGE, 4),
        ("optim, tied embedding, pp 2", 4, 4 * (DENSE + LARGE) + 4 * LARGE / 2, 8),
        ("no_shard, sequence parallel, tp 2", 4, 4 * (DENSE + SMALL) + 4 * SMALL, 5),
        ("optim, sequence parallel, tp 2", 4, 4 * (DENSE + SMALL) + 2 * SMALL, 8.5),
        ("no_shard, experts, ep 2", 2, 2 * DENSE, 4),  # an expert lies on one rank
        ("no_shard, experts, ep 2", 4, 4 * 1.5 * DENSE + 4 * DENSE, 8),
    ],
)
def test_the_theory_of_a_step(name: str, world: int, nbytes: float, collectives: float) -> None:
    case = next(case for case in CASES if case.name == name)
    found = theory(case, world)
    assert found.nbytes == pytest.approx(nbytes) and found.collectives == collectives


def row(nbytes: float, collectives: float, written: float | None) -> dict[str, object]:
    counted = {"nbytes": nbytes, "collectives": collectives, "written": written}
    expected = {"nbytes": 2e6, "collectives": 4}
    good = {"nbytes": 2e6, "collectives": 4, "written": None}
    return {
        "case": "c",
        "ranks": 2,
        "memory": good,
        "memory theory": expected,
        "sockets": counted,
        "sockets theory": expected,
    }


def test_a_count_more_than_a_percent_off_is_named() -> None:
    assert judge([row(2e6, 4, 2.01e6), row(2.019e6, 4, None)]) == []
    assert judge([row(2.03e6, 4, 2.03e6)]) == ["c, 2 ranks, sockets: nbytes counted 2.03e+06, theory 2e+06"]
    assert judge([row(2e6, 5, 2e6)]) == ["c, 2 ranks, sockets: collectives counted 5, theory 4"]
    assert judge([row(2e6, 4, 4e6)]) == ["c, 2 ranks: counted 2e+06 bytes, the kernel wrote 4e+06"]
    assert off_by(0, 0) == 0 and off_by(1, 0) == math.inf
    assert "+1.00%" in line_of(row(2e6, 4, 2.02e6)) and line_of(row(2e6, 4, None)).endswith("-")


@ranks(2)
def test_the_core_counts_what_the_theory_says_and_the_kernel_writes(rank: int, world: int) -> None:
    for case in (Case("optim", strategy="optim"), Case("no_shard, tied", pipeline=2)):
        for share in (True, False):
            with mock.patch.object(agree, "ROUNDED_TO", 1):  # agreements of 2 KB would weigh in a model so small
                found, written = measure(case, share_host_memory=share)
            expected = theory(case, world)
            assert found.collectives == expected.collectives
            assert found.nbytes == pytest.approx(expected.nbytes, rel=0.01)
            if written is not None and not share:
                assert written == pytest.approx(found.nbytes, rel=0.01)


def test_a_benchmark_without_a_case_to_run_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert communication.main(["--ranks", "3", "--cases", "optim, 2 instances"]) == 1


def test_the_wire_of_a_ratio_takes_backward_over_ratio_for_all_gradients() -> None:
    for name, ratio in overlap.RATIOS.items():
        wire = overlap.wire_for(ratio)
        sent = LAYERS * WIDTH * WIDTH * 4  # 2 (n - 1) / n = 1 over 2 ranks
        assert sent / wire.bytes_per_s == pytest.approx(LAYERS * overlap.BACKWARD_S / ratio), name


def test_losses_that_are_not_the_references_or_not_equal_are_refused() -> None:
    expected = reference_losses(3)
    assert expected[0] - expected[-1] > 1e-3 and len(set(expected)) == 3
    check_losses({"a": expected, "b": list(expected)}, expected)
    with pytest.raises(RuntimeError, match="b has losses"):
        check_losses({"a": expected, "b": [*expected[:2], expected[2] + 1e-7]}, expected)
    wrong = [expected[0], expected[1] + 1e-4, expected[2]]  # as if the gradient had another scale
    with pytest.raises(RuntimeError, match="a is 0.0001 away"):
        check_losses({"a": wrong}, expected)
    with pytest.raises(RuntimeError, match="too little to compare"):
        check_losses({"a": [1.0, 1.0]}, [1.0, 1.0])


def test_a_wrongly_scaled_step_has_losses_that_the_check_distinguishes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference_losses(3)
    monkeypatch.setattr(overlap, "LEARNING_RATE", 2 * overlap.LEARNING_RATE)  # a sum where a mean belongs
    with pytest.raises(RuntimeError, match="away from one process"):
        check_losses({"sum for mean": reference_losses(3)}, expected)


def test_a_points_values_are_medians_with_their_spread() -> None:
    point = Point(6, step_ms=[3.0, 9.0, 4.0], exposed_ms=[1.0, 2.0, 5.0], hidden=[0.5, 0.25, 1.0])
    values = point.values()
    assert (values["bucket_size"], values["buckets"]) == (6 * 128 * 128, 4)
    assert (values["step_ms"], values["step_ms_least"], values["step_ms_most"]) == (4.0, 3.0, 9.0)
    assert (values["exposed_ms"], values["hidden_share"]) == (2.0, 0.5)


@ranks(2)
def test_a_tiny_run_trains_the_same_at_every_point_and_names_the_best_and_the_advised(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    options = {"steps": 2, "turns": 1, "layers_a_bucket": [12, 24]}
    result = measure_ratio("1:4", options, rank)
    assert [point["buckets"] for point in result["points"]] == [2, 1]
    assert result["best"] in {12 * WIDTH * WIDTH, 24 * WIDTH * WIDTH}
    assert result["advised"] == 12 * WIDTH * WIDTH  # 24 ms earlier on the wire, for 3 ms of latency
    for point in result["points"]:
        assert 0 <= point["hidden_share"] <= 1 and point["step_ms_least"] <= point["step_ms"] <= point["step_ms_most"]
    halves, whole = (point["predicted_exposed_ms"] for point in result["points"])
    wire = result["wire"]
    alone_ms = 1e3 * (wire["latency_s"] + LAYERS * WIDTH * WIDTH * 4 / wire["bytes_per_s"])
    assert 0 < halves < whole <= alone_ms  # one bucket is launched when backward ends, of two one earlier
    text = table({**result, "fitted_wire": {"latency_s": 0.0031, "bytes_per_s": 2.5e6}})
    assert "fitted from the steps 3.10 ms, 2.5 MB/s" in text
    text = table({**result, "fitted_wire": None})
    assert "not fitted: too few buckets were seen to end" in text
    assert "advised" in text and len(text.splitlines()) == 5
    assert len(result["_trace"].buckets) == 2
    assert [span.name for span in result["_trace"].spans] == ["forward", "backward", "finalize", "optimizer"]


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [Point(layers, [5.0, 6.0], [1.0, 2.0], [0.5, 0.6]).values() for layers in (1, 2)]
    results = [{"ratio": "1:1", "points": points, "advised": 128 * 128}]
    draw_curves(tmp_path / "curve.png", results)
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_sizes_that_are_no_bucket_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        overlap.main(["--layers-a-bucket", "0"])
    assert "takes 1 to 24" in capsys.readouterr().err
