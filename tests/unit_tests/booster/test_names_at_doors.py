"""A directory with a name too many, names too few, or more layers: what each door that loads it does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from core.hugging_face import PlanError, load_split
from core.pipeline_parallel.layout import PipelineLayout
from core_train.commands import convert
from tests.unit_tests.hugging_face.models import small
from tests.unit_tests.logged import logged
from tests.unit_tests.ranks import ranks

STRAY = "model.layers.0.mlp.stray.weight"
LACKING = "model.layers.1.input_layernorm.weight"
THIRD = "model.layers.2.input_layernorm.weight"
NAMED = {"stray": STRAY, "missing": LACKING, "layers": THIRD}


def write(directory: Path, fault: str) -> None:
    """A directory of two layers, or of four, whose config.json says what its files hold."""
    small("llama", torch.float32, num_hidden_layers=4 if fault == "layers" else 2).save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    if fault in ("stray", "both"):
        tensors[STRAY] = torch.ones(3)
    if fault in ("missing", "both"):
        del tensors[LACKING]
    save_file(tensors, file, {"format": "pt"})


PLUGINS: dict[str, Callable[[], Plugin]] = {
    "torch_ddp": TorchDDPPlugin,
    "torch_fsdp": TorchFSDPPlugin,
    "low_level_zero": lambda: LowLevelZeroPlugin(precision="fp32"),
    "gemini": lambda: GeminiPlugin(precision="fp32"),
    "hybrid tp": lambda: HybridParallelPlugin(2, 1, precision="fp32"),
    "hybrid pp": lambda: HybridParallelPlugin(1, 2, precision="fp32", num_microbatches=2),
}


@ranks(2)
@pytest.mark.parametrize("door", PLUGINS)
def test_load_model_refuses_names_on_one_side_and_goes_on_with_strict_false(
    rank: int, world: int, door: str, tmp_path: Path
) -> None:
    if rank == 0:
        for fault in (*NAMED, "both"):
            write(tmp_path / fault, fault)
    dist.barrier()
    booster = Booster(plugin=PLUGINS[door]())
    start = small("llama", torch.float32)
    with torch.no_grad():
        for param in start.parameters():
            param.add_(1.0)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    saved = small("llama", torch.float32).state_dict()
    model, *_ = booster.boost(start, torch.optim.SGD(start.parameters(), lr=0.1))
    for fault, name in NAMED.items():
        with pytest.raises(ValueError, match=rf"{name}.*with strict=False"):
            booster.load_model(model, tmp_path / fault)
        for key, value in booster.checkpoint_io.model_tensors(model):
            assert torch.equal(value, before[key]), (fault, key)
    for fault in ("missing", "both"):
        booster.load_model(model, tmp_path / fault, strict=False)
        for key, value in booster.checkpoint_io.model_tensors(model):
            assert torch.equal(value, (before if key == LACKING else saved)[key]), (fault, key)
    for fault in ("stray", "layers"):
        booster.load_model(model, tmp_path / fault, strict=False)
    first = load_file(tmp_path / "layers" / "model.safetensors")
    for key, value in booster.checkpoint_io.model_tensors(model):
        assert torch.equal(value, first[key]), key
    assert not torch.equal(first["lm_head.weight"], saved["lm_head.weight"])


@ranks(2)
def test_a_name_that_was_lacking_has_no_values_on_any_stage(rank: int, world: int, tmp_path: Path) -> None:
    if rank == 0:
        write(tmp_path / "both", "both")
    dist.barrier()
    with torch.device("meta"):
        model = type(start := small("llama", torch.float32))(start.config)
    booster = Booster(plugin=PLUGINS["hybrid pp"]())
    model, *_ = booster.boost(model)
    booster.load_model(model, tmp_path / "both", strict=False)
    with pytest.raises(RuntimeError, match=rf"1 of its tensors, the first '{LACKING}', have no values"):
        model.expect_values()


@ranks(2)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_load_split_reports_a_stray_name_and_refuses_a_missing_one(
    rank: int, world: int, tp: int, pp: int, tmp_path: Path
) -> None:
    if rank == 0:
        for fault in ("stray", "missing"):
            write(tmp_path / fault, fault)
    dist.barrier()
    parallel_state.initialize_model_parallel(tp, pp)
    layout = PipelineLayout((1, 1), 2) if pp == 2 else None
    transformers.logging.set_verbosity_warning()
    with logged("transformers") as messages:
        load_split(tmp_path / "stray", layout=layout)
    assert NAMED["stray"] in "".join(messages), messages
    with pytest.raises(PlanError, match=f"lacks 1 of the model's weights, the first '{NAMED['missing']}'"):
        load_split(tmp_path / "missing", layout=layout)


@pytest.mark.parametrize("fault", NAMED)
def test_the_converter_refuses_names_on_one_side(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "from", fault)
    if fault == "layers":  # its configuration is of the model that is wanted
        config = json.loads((tmp_path / "from" / "config.json").read_text())
        (tmp_path / "from" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    assert convert.main([str(tmp_path / "from"), str(tmp_path / "to")]) == 2
    assert NAMED[fault] in capsys.readouterr().err
    assert not (tmp_path / "to").exists()
