"""Plans of Hugging Face models against models that are really split, wrapped and stepped."""

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.plan_jobs import ModelJob, peak_of
from core.hugging_face.run.sequence import OVER_TENSOR
from core_plan import plan_run
from core_plan.command import main
from core_plan.device import read_device
from core_plan.hugging_face_source import run_of_model
from core_plan.job.errors import ConfigError
from core_plan.live_memory import BACKWARD, EIGHT_BITS, FORWARD, Work
from core_plan.model_run import ModelRun
from core_plan.run_memory import parts_of_stages, plan_memory
from core_plan.state_bytes import GRADIENTS, MASTERS, MOMENTS, PARAMETERS, POOL
from core_plan.step_time import model_flops, work_seconds
from tests.unit_tests.ranks import ranks

STATE = (PARAMETERS, GRADIENTS, POOL, MASTERS, MOMENTS)
SHAPE = {"sequence_length": 64, "global_batch_size": 4}
# No one looked at these while the plan was written; that they are right says that it copies nothing of a family.
NEVER_TUNED = ("olmo2", "phi3", "starcoder2")
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"recompute": True},
    "gpt2": {"zero": 0},
    "qwen3_moe": {"dtype": "bfloat16", "zero": 2},
    **{family: {} for family in NEVER_TUNED},
    "phi3": {"logits_chunk": 40},
    "llama fp8": {"dtype": "bfloat16", "use_fp8": True},
    "llama tp": {"tp": 2, "micro_batch_size": 2, "logits_chunk": 24, "make_vocab_size_divisible_by": 64},
    "gpt2 tp": {"tp": 2, "documents": True, "make_vocab_size_divisible_by": 40},
    "qwen3 pp": {"pp": 2, "micro_batch_size": 1},
    "llama pp vpp": {"pp": 2, "vpp": 2, "micro_batch_size": 1},
    "gpt2 pp zero": {"pp": 2, "zero": 2, "micro_batch_size": 1, "layers_per_stage": (1, 3)},
    "mixtral ep": {"ep": 2, "zero": 1},
    "qwen3 zero": {"zero": 3},
    "llama split_gather": {"tp": 2, "sequence_parallel": "split_gather", "logits_chunk": 50},
    "llama split_gather again": {"tp": 2, "sequence_parallel": "split_gather", "recompute": True},
    "qwen3 ring_attn": {"cp": 2, "sequence_parallel": "ring_attn"},
    "llama all_to_all": {"cp": 2, "sequence_parallel": "all_to_all"},
}
OF_ONE = [name for name in LAYOUTS if " " not in name or name.endswith("fp8")]


def compare(name: str, rank: int, world: int) -> None:
    """State to the byte, activations within 5 percent."""
    layout = {**SHAPE, **LAYOUTS[name]}
    said = ModelRun(f"tiny:{name.split()[0]}", **layout)
    run = run_of_model(said, world, on_cpu=True)
    (planned,) = plan_memory(run, [rank])
    job = ModelJob(said, run)
    job.step()
    held = job.held()
    assert {kind: planned.state.get(kind, 0) for kind in STATE} == {kind: held[kind] for kind in STATE}
    if said.zero == 3:  # what is whole for a moment is of the wrapper, which other tests compare
        return
    job.clear()
    measured = peak_of(job.compute, job.known(), alone=world == 1)
    in_step = sum(planned.highest.held.values())
    if said.ep > 1:  # the plan gives all experts as many tokens, which holds for the ranks together
        both = torch.tensor([float(measured)])
        torch.distributed.all_reduce(both)
        measured = int(both) // world
    if said.sequence_parallel in OVER_TENSOR:  # gloo's thread may hold both tensors of an exchange for a moment
        measured -= min(max(0, measured - in_step), 2 * run.source.sent_bytes())
        assert in_step == pytest.approx(measured, rel=0.002), (in_step / measured, planned.highest)
    assert in_step == pytest.approx(measured, rel=0.05), (in_step / measured, planned.highest)


@ranks(1, timeout_s=120)
@pytest.mark.parametrize("name", OF_ONE)
@pytest.mark.in_suite(4)
def test_one_rank_is_planned(rank: int, world: int, name: str) -> None:
    compare(name, rank, world)


@ranks(2, timeout_s=120)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in OF_ONE])
@pytest.mark.in_suite(4)
def test_a_layout_is_planned(rank: int, world: int, name: str) -> None:
    compare(name, rank, world)


LLAMA = {
    "model_type": "llama",
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128},
}


def refusal(model: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that says why a model is not planned."""
    assert main(["--model", model, "--ranks", "1", "--seq", "32", *flags]) == 2
    said = capsys.readouterr()
    (line,) = (line for line in said.err.splitlines() if line.startswith("error: "))  # transformers may warn before it
    assert said.err.splitlines()[-1] == line and not said.out
    return line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"hidden_size": "64"}, "Field 'hidden_size' expected int, got str"),
        ({"hidden_size": None}, "Field 'hidden_size' expected int, got NoneType"),
        ({"num_hidden_layers": 1.5}, "Field 'num_hidden_layers' expected int, got float"),
        ({"torch_dtype": "bfloat17"}, "'torch' has no attribute 'bfloat17'"),
        ({"num_attention_heads": 0}, "ZeroDivisionError: "),
        ({"num_key_value_heads": 0}, "ZeroDivisionError: "),
        ({"hidden_size": -64}, "negative dimension -64"),
        ({"intermediate_size": 10**18}, "Storage size calculation overflowed"),
        ({"hidden_size": 10**30}, "makes no model of it"),
        ({"hidden_act": "nope"}, "does not know 'nope'"),
        ({"rope_scaling": {"rope_type": "nope", "factor": 2.0}}, "does not know 'nope'"),
        ({"vocab_size": 0}, "its vocab_size is 0; expected at least 1"),
        ({"num_hidden_layers": 0}, "its configuration says num_hidden_layers 0; expected 1 to 65,536"),
        ({"num_hidden_layers": 10**5}, "says num_hidden_layers 100000; expected 1 to"),
        (5, "expected a JSON object, got 5"),
        (None, "expected a JSON object, got None"),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused_in_a_line(
    content: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, **content} if isinstance(content, dict) else content))
    for flags in ([], ["--advise"]):
        said = refusal(str(file), capsys, *flags)
        assert str(file) in said and words in said


@pytest.mark.parametrize(
    ("model", "flags", "words"),
    [
        ("llama4", ["--ranks", "2", "--pp", "2"], "llama4.*: a step of it fails on tensors without values"),
        ("longcat_flash", [], "its configuration says .* layers, and its model has"),
        ("cwm", [], "tiny:cwm: .*bos_token_id"),
    ],
)
def test_a_family_that_is_not_planned_is_refused_in_a_line(
    model: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(words, refusal(f"tiny:{model}", capsys, *flags))


@pytest.mark.parametrize("family", ["vit", "t5"])
def test_a_family_without_a_causal_model_is_refused_in_a_line(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"error: {family}: transformers makes no model of it: " in refusal(f"tiny:{family}", capsys)


def test_an_error_of_ones_own_is_not_taken_for_one_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("own")

    monkeypatch.setattr("core_plan.model_run.list_of_layers", fails)
    with pytest.raises(KeyError, match="own"):
        main(["--model", "tiny:llama", "--ranks", "1", "--seq", "32"])


def test_layers_that_run_again_are_planned_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert main(["--model", "tiny:llama", "--ranks", "1", "--seq", "32", "--recompute"]) == 0
    assert "FutureWarning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "said",
    [
        ModelRun("tiny:llama", tp=2, pp=2, recompute=True, **SHAPE),
        ModelRun("tiny:qwen3_moe", ep=2, cp=2, pp=2, sequence_parallel="ring_attn", **SHAPE),
    ],
)
def test_figures_of_several_sizes_are_those_of_each(said: ModelRun) -> None:
    """Though one split model runs for all of them."""
    found = []
    for shared, size in ((said, 1), (said, 3), (replace(said), 1), (replace(said), 3)):
        one = shared.in_layout(micro_batch_size=size, global_batch_size=12)
        found.append(parts_of_stages(run_of_model(one, said.tp * said.pp * said.cp * said.ep)))
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_products_in_8_bits_run_at_their_own_speed() -> None:
    """Those of all linear layers whose sizes are multiples of 16, which the vocabulary is not."""
    planned = ModelRun("tiny:llama", **SHAPE, dtype="bfloat16", use_fp8=True)
    run = run_of_model(planned, 1)
    (parts,) = parts_of_stages(run).values()
    weights = [module.weight for module in planned.whole.model.modules() if isinstance(module, torch.nn.Linear)]
    fit = sum(weight.numel() for weight in weights if weight.shape[0] % 16 == weight.shape[1] % 16 == 0)
    tokens = run.source.micro_batch_size * SHAPE["sequence_length"]
    assert model_flops(parts)[EIGHT_BITS] == 3 * 2 * fit * tokens > model_flops(parts)[torch.bfloat16] > 0
    seconds = work_seconds({Work(10**15, 0, EIGHT_BITS): 1}, read_device("h100"))
    assert seconds == pytest.approx(10**15 / (0.63 * 1978.9e12), rel=1e-3)


@pytest.mark.parametrize(
    ("more", "device", "words"),
    [
        ({"dtype": "float32"}, "h100", "--use-fp8 gives products in bf16, and --dtype is float32"),
        ({"tp": 2}, "h100", "got tp 2 x pp 1 x cp 1; set"),
        ({"pp": 2}, "h100", "got tp 1 x pp 2 x cp 1; set"),
        ({}, "a100", "a100 has no products in 8 bits: its file has no matmul_flops of float8_e4m3fn"),
    ],
)
def test_products_in_8_bits_are_refused_where_there_are_none(more: dict[str, Any], device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        plan_run(ModelRun("tiny:llama", **{**SHAPE, "dtype": "bfloat16", "use_fp8": True, **more}), 2, device)


def test_a_later_stage_does_not_send_what_the_embedding_does() -> None:
    plan = plan_run(ModelRun("tiny:llama", tp=2, pp=2, **SHAPE), 4)
    first, later = (plan.parts[stage][0].sent for stage in (0, 1))
    assert first[FORWARD].keys() == {("tp", "all_reduce")}
    assert later == {FORWARD: {}, BACKWARD: {}}
