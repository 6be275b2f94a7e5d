"""MFU in the step line, and the trace of torch's profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tyro")

from benchmarks.gpu_steps import matrix_numel
from core.models.gpt import GPTModel
from core_plan.job.config import JobConfig, ModelOptions, ParallelOptions
from core_plan.job.model_config import transformer_config
from core_train.mfu import flops_of_token, peak_of
from tests.unit_tests.core_train.training_reference import TINY, losses_on_ranks, text_flags_in

SHAPES: list[dict[str, Any]] = [
    {},
    {"activation": "swiglu", "num_query_groups": 2, "ffn_hidden_size": 96},
    {"share_embeddings_and_output_weights": False, "vocab_size": 100},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_operations_are_counted_from_the_matrices_of_the_model(shape: dict[str, Any]) -> None:
    options = ModelOptions(num_layers=3, hidden_size=32, num_attention_heads=4, sequence_length=16, **shape)
    vocab_size = options.vocab_size or 64
    model = GPTModel(transformer_config(JobConfig(model=options, parallel=ParallelOptions(tp=1)), vocab_size))
    by_hand = 6 * matrix_numel(model) + 12 * 3 * 32 * 16
    assert flops_of_token(options, vocab_size) == by_hand
    wider = ModelOptions(num_layers=3, hidden_size=32, num_attention_heads=4, sequence_length=16, num_experts=8)
    dense = flops_of_token(ModelOptions(num_layers=3, hidden_size=32, num_attention_heads=4, sequence_length=16), 64)
    assert flops_of_token(wider, 64) == dense + 6 * 2 * 32 * 8, "two experts of half the width, and the router"


def test_a_peak_is_known_of_some_devices_in_16_bits_or_given() -> None:
    cpu = torch.device("cpu")
    assert peak_of(cpu, "bfloat16", None) is None and peak_of(cpu, "float32", 2.0) == 2.0


def test_the_step_line_has_the_mfu_where_the_peak_is_known_and_a_profile_has_named_parts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [
        *TINY,
        "--tp",
        "1",
        "--run.steps",
        "6",
        *text_flags_in(tmp_path / "tokens"),
        "--run.validation-windows",
        "4",
    ]
    losses_on_ranks(2, [*flags, "--logging.peak-tflops", "0.5", "--profile"], tmp_path / "with")
    losses_on_ranks(2, flags, tmp_path / "without")
    records = [json.loads(line) for line in (tmp_path / "with" / "run" / "steps.jsonl").read_text().splitlines()]
    configured = json.loads((tmp_path / "with" / "run" / "config.json").read_text())["model"]
    options = ModelOptions(**configured)
    for record in records:
        assert record["mfu"] == pytest.approx(flops_of_token(options, 256) * record["tokens_per_s"] / (2 * 0.5e12))
    lines = (tmp_path / "without" / "run" / "steps.jsonl").read_text().splitlines()
    assert all(json.loads(line)["mfu"] is None for line in lines)
    assert not (tmp_path / "without" / "run" / "profile.json").exists()
    events = json.loads((tmp_path / "with" / "run" / "profile.json").read_text())["traceEvents"]
    named = [event["name"] for event in events if str(event.get("name")).startswith("core::")]
    for part in ("core::forward", "core::backward", "core::finalize", "core::optimizer"):
        assert named.count(part) == 3, "steps 3 to 5"
    assert any(name.startswith("core::reduce_scatter") for name in named)
