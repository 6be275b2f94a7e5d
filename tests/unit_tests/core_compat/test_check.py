"""What `core compat-check` says of a program is what the program meets when it runs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from core.booster.plugin.hybrid_parallel_options import WITHOUT_EFFECT
from core_compat import megatron
from core_compat.check import ABSENT, GUARDED, OTHERWISE, OWN, SERVED, WARNED, check_program, main
from core_compat.megatron.faces import configs
from tests.unit_tests.core_compat.megatron_page import KINDS, PAGE
from tests.unit_tests.forked_python import run_python
from tests.unit_tests.test_docs import program_of

COMPAT = Path(__file__).parent
PROGRAM = """\
import torch
import megatron.core as mcore
from megatron.core import mpu, parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core import ModelParallelConfig
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel as DDP, DistributedDataParallelConfig
from megatron.core.optimizer import get_megatron_optimizer, OptimizerConfig, MegatronOptimizer
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.training import get_args, print_rank_0
try:
    from megatron.core.inference.engines import Engine
except ImportError:
    Engine = None
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, bogus=3)
mpu.get_nothing()
config = ModelParallelConfig(tp_comm_overlap=True, overlap_p2p_comm=True, hiden_size=8)
config = ModelParallelConfig(sequence_parallel=False, tp_comm_overlap=False, autocast_dtype=dtype)
config.tp_comm_overlap = 1
config.tp_comm_overlap = False
get_megatron_optimizer(OptimizerConfig(), full_param_layout=3)
ddp = DDP(config, DistributedDataParallelConfig(), model)
ddp.offload_grad_buffers()
get_megatron_optimizer(OptimizerConfig(lr=1e-3), [ddp], use_gloo_process_groups=False)
parallel_state._TENSOR_MODEL_PARALLEL_GROUP = None
mcore.parallel_state.get_tensor_model_parallel_rank()
StrictHandling.FASTEST
MegatronOptimizer(1)
mcore.enums.ModelType.encoder_or_decoder
"""
# line, verdict, name, a part of the sentence
EXPECTED = [
    (4, ABSENT, "megatron.core.datasets.gpt_dataset.GPTDataset", "write an iterator of dictionaries of tensors"),
    (9, OWN, "megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec",
     "keep megatron-core installed: build the model with Megatron's own"),
    (10, OWN, "megatron.core.transformer.TransformerConfig", "Megatron's own, or core.transformer.TransformerConfi"),
    (11, OTHERWISE, "megatron.core.optimizer.optimizer.FP32Optimizer", "ReplicatedOptimizer stands for it"),
    (12, ABSENT, "megatron.training.get_args", "stands for megatron.core alone: read options with argparse"),
    (12, ABSENT, "megatron.training.print_rank_0", "print where torch.distributed.get_rank() is 0"),
    (14, GUARDED, "megatron.core.inference.engines.Engine", "python -m core generate samples from a trained GPT"),
    (17, ABSENT, "initialize_model_parallel(bogus=...)", "there is no such argument"),
    (18, ABSENT, "megatron.core.mpu.get_nothing", "near to it are"),
    (19, ABSENT, "ModelParallelConfig(tp_comm_overlap=True)", "leave it at False: TransformerEngine's overlap"),
    (19, ABSENT, "ModelParallelConfig(hiden_size=...)", "there is no such argument"),
    (19, WARNED, "ModelParallelConfig(overlap_p2p_comm=True)", "it changes nothing here: torch's pipeline sends"),
    (20, OTHERWISE, "ModelParallelConfig(autocast_dtype=dtype)", "unless it is None, leave it at None"),
    (21, ABSENT, "ModelParallelConfig(tp_comm_overlap=1)", "leave it at False"),
    (23, ABSENT, "get_megatron_optimizer(full_param_layout=...)", "there is no such argument"),
    (23, ABSENT, "get_megatron_optimizer(...)", "it needs model_chunks too"),
    (25, ABSENT, "DistributedDataParallel.offload_grad_buffers(...)", "frees the gradient memory"),
    (26, OTHERWISE, "get_megatron_optimizer(use_gloo_process_groups=False)", "it has no part here, and is dropped"),
    (27, ABSENT, "megatron.core.parallel_state._TENSOR_MODEL_PARALLEL_GROUP = ...", "the engine does not read it"),
    (29, ABSENT, "megatron.core.dist_checkpointing.validation.StrictHandling.FASTEST", "StrictHandling has ASSUME_OK"),
    (30, ABSENT, "MegatronOptimizer(...)", "cannot be made by Megatron's arguments: call get_megatron_optimizer"),
    (31, OWN, "megatron.core.enums.ModelType.encoder_or_decoder", "nothing here reads a model's type"),
]  # fmt: skip


def test_everything_that_is_not_served_is_found_at_once_with_its_line_and_what_to_write() -> None:
    found = [finding for finding in check_program(PROGRAM) if finding.verdict != SERVED]
    assert len(found) == len(EXPECTED), found
    for line, verdict, what, why in EXPECTED:
        (finding,) = (each for each in found if (each.line, each.what) == (line, what))
        assert finding.verdict == verdict and why in finding.why, finding


def test_what_is_served_is_said_once_for_a_line() -> None:
    served = {(finding.line, finding.what) for finding in check_program(PROGRAM) if finding.verdict == SERVED}
    assert (17, "initialize_model_parallel(tensor_model_parallel_size)") in served
    assert (20, "ModelParallelConfig(sequence_parallel)") in served
    assert (24, "DistributedDataParallel(module)") in served  # by its place
    assert (28, "megatron.core.parallel_state.get_tensor_model_parallel_rank") in served
    assert (5, "megatron.core.ModelParallelConfig") in served
    assert not {line for line, _ in served} & {18, 21, 27, 29}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_field_that_nothing_obeys_is_judged_as_it_is_when_it_is_set(kind: Any) -> None:
    path = next(p for p in ("distributed", "optimizer", "model_parallel_config") if _has(p, kind))
    for value in ("12345", "missing_name"):
        lines = [f"from megatron.core.{path} import {kind.__name__}"]
        lines += [f"{kind.__name__}({name}={value})" for name in kind.rules]
        said = {each.line: each for each in check_program("\n".join(lines))[1:]}
        for line, name in enumerate(kind.rules, start=2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    configs._Written.__setattr__(kind.__new__(kind), name, 12345)
                    met = WARNED if caught else SERVED
                except ValueError:
                    met = ABSENT
            expected = {ABSENT: OTHERWISE}.get(met, met) if value == "missing_name" else met
            assert said[line].verdict == expected != SERVED, said[line]


def _has(path: str, kind: Any) -> bool:
    return kind.__name__ in megatron.SURFACE.all_names(path)


def test_the_program_of_the_page_has_nothing_absent_and_keeps_what_is_megatrons() -> None:
    found = [finding for finding in check_program(program_of(PAGE)) if finding.verdict != SERVED]
    own = ("models.gpt.GPTModel", "models.gpt.gpt_layer_specs.get_gpt_layer_local_spec")
    own += ("tensor_parallel.random.initialize_rng_tracker", "transformer.TransformerConfig")
    assert [(finding.verdict, finding.what) for finding in found] == [(OWN, f"megatron.core.{name}") for name in own]
    assert all(finding.why.startswith("keep megatron-core installed") for finding in found)
    assert found[2].why.endswith("core_compat.megatron has another of this name")


def test_an_import_of_megatron_next_to_ours_is_megatrons_unless_the_program_installs_ours() -> None:
    ours = "from core_compat.megatron import install, parallel_state\n"
    theirs = "from megatron.core.optimizer import get_megatron_optimizer\nget_megatron_optimizer(bogus=3)\n"
    for first in (ours, "from core_compat import megatron\n", "import core_compat.megatron as mcore\n"):
        assert {each.verdict for each in check_program(first + theirs)} - {SERVED} == {OWN}
    assert ABSENT in {each.verdict for each in check_program(f"{ours}install()\n{theirs}")}
    assert ABSENT in {each.verdict for each in check_program(theirs)}
    assert check_program("from core_compat.megatron.models.gpt import GPTModel")[0].verdict == ABSENT


def test_options_of_a_plugin_that_change_nothing_are_warned_of() -> None:
    given = ", ".join(f"{name}=12345" for name in WITHOUT_EFFECT)
    text = f"from colossalai.booster.plugin import HybridParallelPlugin\nHybridParallelPlugin(2, 1, {given}, zero=1)"
    found = {each.what: each.verdict for each in check_program(text) if each.verdict != SERVED}
    expected = {f"HybridParallelPlugin({name}=12345)": WARNED for name in WITHOUT_EFFECT}
    assert found == expected | {"HybridParallelPlugin(zero=...)": ABSENT}


def test_programs_that_run_here_in_other_tests_have_nothing_absent(capsys: pytest.CaptureFixture[str]) -> None:
    places = [COMPAT / "simple_gpt_loop.py", COMPAT / "colossalai_scripts"]
    assert main(list(map(str, places))) == 0
    out = capsys.readouterr().out
    assert "absent" not in out and out.count(" served\n") == 9


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        (b"import torch\nx = torch.ones(3)\n", 0, "nothing of megatron.core and colossalai is used"),
        (b"import megatron.training\n", 1, "line 1, absent: megatron.training: megatron.training is not here"),
        (b"from colossalai.amp import x\n", 1, "use Booster(mixed_precision=...), or the precision of a plugin"),
        (b"x = 1\ndef (:\n", 2, "train.py, line 2: invalid syntax"),
        (b"\xff", 2, "train.py, line 1: (unicode error) 'utf-8' codec"),
        (b"x = 1\0", 2, "train.py: source code string cannot contain null bytes"),
        (b"-" * 100_000 + b"1", 2, "train.py: "),
        (b"# coding: latin-1\nx = '\xe9'\n", 0, "nothing of megatron.core and colossalai is used"),
        (None, 2, "error: there is no program "),
    ],
)
def test_the_status_says_whether_a_program_can_run(
    text: bytes | None, status: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    if text is not None:
        file.write_bytes(text)
    assert main([str(file)]) == status
    assert says in " ".join(capsys.readouterr().out.split())


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("x = 1\ndef (:\n")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "train.py").write_text("from megatron.core import nothing\n")
    (tmp_path / "folder.py").mkdir()
    assert main([str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert "line 1, absent: megatron.core.nothing" in out
    assert out.endswith(
        f"error: {tmp_path}/broken.py, line 2: invalid syntax\nerror: {tmp_path}/gone.py: No such file or directory\n"
    )


def test_a_directory_without_python_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().out == f"error: there is no Python file in {tmp_path} or below it\n"


def test_the_command_is_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = run_python("-m", "core", "compat-check", tmp_path / "train.py", folder=tmp_path)
    assert done.returncode == 1 and done.stdout.endswith("served\n"), done.stderr
    for asked, status in (([], 2), (["--help"], 0)):
        assert main(asked) == status
        assert capsys.readouterr().out.startswith("usage: python -m core compat-check FILE.py")


def test_a_name_next_to_megatron_core_is_answered_with_a_sentence(tmp_path: Path) -> None:
    for line in ("import megatron.training", "from megatron.training import get_args", "import megatron.legacy.model"):
        (tmp_path / "train.py").write_text(f"import megatron.core\n{line}\n")
        done = run_python("-m", "core_compat.megatron", "train.py", folder=tmp_path, cwd=tmp_path)
        last = done.stderr.splitlines()[-1]
        assert done.returncode == 1 and "is not here; core_compat.megatron stands for megatron.core alone: " in last
