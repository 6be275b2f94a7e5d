"""Every task in every layout has the losses of TRL, or of Transformers' Trainer, on one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from core_train.finetune.arguments import load_config
from core_train.finetune.main import check_sizes, tune
from tests.unit_tests.core_train.finetune.jobs import STEPS, losses_of, make_model, of_peer, options
from tests.unit_tests.integrations.loops import _forget, alone, launched
from tests.unit_tests.ranks import ranks

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("trl")

CASES: dict[str, tuple[str, ...]] = {
    "sft": ("sft",),
    "sft packed": ("sft", "--packing"),
    "sft lora": ("sft", "--use_peft"),
    "sft lora and head": ("sft", "--use_peft", "--lora_modules_to_save", "lm_head"),
    "dpo": ("dpo",),
    "dpo precomputed": ("dpo", "--precompute_ref_log_probs"),
    "dpo lora": ("dpo", "--use_peft"),
    "reward": ("reward",),
    "reward lora": ("reward", "--use_peft"),
    "classification": ("classification",),
    "classification lora": ("classification", "--use_peft"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("finetune")
    make_model(made)
    make_model(made, "qwen3_moe", "experts")
    return made


def words_of(case: str, folder: Path) -> list[str]:
    return [*CASES[case.removesuffix(" of experts")], *(["--model", str(folder / "experts")] * ("experts" in case))]


@pytest.fixture
def expected(folder: Path, request: pytest.FixtureRequest) -> list[float]:
    """The peer's losses, computed once a case."""
    case = request.node.callspec.params["case"]
    file = folder / f"{case}.json"
    if not file.exists():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        task, *more = words_of(case, folder)
        file.write_text(json.dumps(of_peer(folder, folder / f"peer {case}", task, *more)))
        torch.set_num_threads(threads)
        _forget()
    found: list[float] = json.loads(file.read_text())
    return found


def assert_equal(folder: Path, case: str, layout: str, rank: int, world: int, expected: list[float]) -> None:
    dp = 2 if world == 4 or "--zero" in layout or "--ep" in layout else 1
    with launched(rank, world):
        task, *more = words_of(case, folder)
        config = load_config(options(folder, task, *more, *layout.split(), dp=dp))
        trainer: Any = tune(config, check_sizes(config, world))
    found, wide = losses_of(trainer), "bf16" in layout
    if getattr(trainer, "ref_model", None) is not None:  # split as the trained model
        sizes = [{n: p.shape for n, p in each.named_parameters()} for each in (trainer.ref_model, trainer.model)]
        assert "--tp" not in layout or sizes[0] == sizes[1]
    assert len(found) == STEPS and max(expected) - min(expected) > (0.1 if wide else 1e-2)
    assert found == pytest.approx(expected, abs=1e-2 if wide else 1e-5)
    if rank == 0:
        assert_saved_alike(Path(trainer.args.output_dir), folder / f"peer {case}", 1e-2 if wide else 1e-5)


def assert_saved_alike(found: Path, expected: Path, tolerance: float) -> None:
    """Transformers and peft read the same from our directory as from the peer's."""
    tensors, theirs = weights_in(found), weights_in(expected)
    assert tensors.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(tensors[name], value, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / "adapter_config.json").exists():
        adapters: dict[str, torch.Tensor] = peft.utils.load_peft_weights(str(folder), device="cpu")
        return adapters
    (kind,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, info = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


def is_possible(case: str, layout: str) -> bool:
    """The rest is refused: test_finetune_command.py."""
    return layout != "--pp 2" or CASES[case][0] in ("sft", "classification")


SP = "--sp 2 --sp_mode ring_attn"
PAIRS = [(case, layout) for case in CASES for layout in ("--tp 2", "--zero 3", "--pp 2") if is_possible(case, layout)]
OTHERS = [
    *(("sft", layout) for layout in (SP, "--tp 2 --sp_mode split_gather", "--zero 2 --offload")),
    *(("sft", layout) for layout in ("--tp 2 --precision bf16", "--zero 1 --precision bf16")),
    *(("sft lora", layout) for layout in (SP, "--tp 2 --sp_mode split_gather")),
    *((case, SP) for case in ("dpo", "reward", "classification")),
    *(("sft of experts", layout) for layout in ("--ep 2", "--tp 2", "--zero 3")),
    *(("dpo of experts", layout) for layout in ("--ep 2", "--tp 2")),
]


@ranks(2, timeout_s=150.0)
@pytest.mark.parametrize(("case", "layout"), [*PAIRS, *OTHERS])
@pytest.mark.in_suite(7)
def test_losses_are_those_of_one_process(
    rank: int, world: int, case: str, layout: str, folder: Path, expected: list[float]
) -> None:
    assert_equal(folder, case, layout, rank, world, expected)


@ranks(4, timeout_s=150.0)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.in_suite(1)
def test_losses_of_replicas_of_split_models_are_those_of_one_process(
    rank: int, world: int, case: str, folder: Path, expected: list[float]
) -> None:
    assert_equal(folder, case, "--tp 2", rank, world, expected)


@pytest.mark.nightly
@ranks(2, timeout_s=150.0)
@pytest.mark.parametrize("layout", ["--tp 2", "--zero 1"])
def test_fp16_has_the_losses_of_one_process_in_fp32_that_skips_as_many_updates(
    rank: int, world: int, layout: str, folder: Path
) -> None:
    with launched(rank, world):
        dp = 1 if "--tp" in layout else 2
        config = load_config(options(folder, "sft", *layout.split(), "--precision", "fp16", dp=dp))
        trainer = tune(config, check_sizes(config, world))
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    skipped = [step for step, norm in enumerate(norms) if math.isinf(norm)]
    assert 0 < len(skipped) < STEPS - 2, "the first scale overflows"
    with alone():
        expected = of_peer(folder, folder / f"peer fp16 {rank}", "sft", skipped=skipped)
    assert losses_of(trainer) == pytest.approx(expected, abs=1e-2)
    assert max(expected) - min(expected) > 0.1


@pytest.mark.nightly
@ranks(2, timeout_s=250.0)
@pytest.mark.parametrize(("case", "then"), [("sft", "sft"), ("sft", "dpo"), ("sft lora", "dpo"), ("reward", "reward")])
def test_trl_goes_on_from_a_saved_directory_as_from_its_own(
    rank: int, world: int, case: str, then: str, folder: Path, expected: list[float]
) -> None:
    """A program of the user's: SFTTrainer(DIR), DPOTrainer on adapters, RewardTrainer(DIR)."""
    with launched(rank, world):
        task, *more = CASES[case]
        config = load_config(options(folder, task, *more, "--tp", "2"))
        trainer = tune(config, check_sizes(config, world))
    found: list[float] = []
    wanted: list[float] = []
    with alone():
        for losses, directory in ((found, trainer.args.output_dir), (wanted, str(folder / f"peer {case}"))):
            losses += of_peer(folder, folder / f"next {rank}", then, "--model", directory)
    assert found == pytest.approx(wanted, abs=1e-5)
    start = expected[0] if then == task else math.log(2)
    assert abs(wanted[0] - start) > 0.1 if then == task else abs(wanted[0] - start) < 1e-3
    assert max(wanted) - min(wanted) > 1e-4, "nothing is learned"
