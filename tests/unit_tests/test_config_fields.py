"""No option without effect: every field of a configuration is read by the code that it is for."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.distributed import DistributedDataParallelConfig
from core.model_parallel_config import ModelParallelConfig
from core.optimizer import OptimizerConfig
from core.transformer import TransformerConfig
from core_plan.job import config as training
from core_plan.job.model_config import optimizer_config, transformer_config
from core_train.finetune import arguments as finetune

ROOT = Path(__file__).parents[2]
MODEL_PARTS = (
    "distributed",
    "tensor_parallel",
    "context_parallel",
    "transformer",
    "models",
    "moe",
    "pipeline_parallel",
)
# A configuration, and the folders, in core/ or next to it, whose `config` is one: core/optimizer reads fp16 of its own
# config only.
READERS: dict[type, tuple[str, ...]] = {
    ModelParallelConfig: MODEL_PARTS,
    TransformerConfig: MODEL_PARTS,
    DistributedDataParallelConfig: ("distributed", "optimizer"),
    OptimizerConfig: ("optimizer",),
}
JOB = ("core_plan/job", "core_train/*.py")
for module, folders in ((training, JOB), (finetune, (*JOB, "core_train/finetune"))):
    READERS |= {
        kind: folders
        for kind in vars(module).values()
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind.__module__ == module.__name__
    }
# Options that are handed on, all that have an equal name, to a configuration whose fields are read.
HANDED_ON: dict[type, type] = {training.ModelOptions: TransformerConfig, training.OptimizerOptions: OptimizerConfig}
WITHOUT_EFFECT = {  # a warning names them, but for the default
    (DistributedDataParallelConfig, "align_param_gather"),
    (ModelParallelConfig, "use_cpu_initialization"),
    (TransformerConfig, "use_cpu_initialization"),
    (ModelParallelConfig, "has_cond_embedder"),
    (TransformerConfig, "has_cond_embedder"),
}
CHECKED = {"fp16", "bf16"}  # of a model: other words for params_dtype, judged by that


def names_read(node: ast.AST) -> Iterator[str]:
    """Attributes that are read in a piece of code, also by getattr with a constant."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load):
            yield part.attr
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "getattr":
            yield from (word.value for word in part.args[1:2] if isinstance(word, ast.Constant))


def fields_read(kind: type, folders: tuple[str, ...]) -> set[str]:
    """Names that the folders read, and what the properties of the configuration read that are read there."""
    parents = [parent for parent in kind.__mro__ if dataclasses.is_dataclass(parent)]
    own_files = {Path(inspect.getfile(parent)).resolve() for parent in parents}
    patterns = [name if name.endswith(".py") else f"{name}/**/*.py" for name in folders]
    rooms = [ROOT if name.startswith("core_") else ROOT / "core" for name in folders]
    found_files = {path for room, pattern in zip(rooms, patterns, strict=True) for path in room.glob(pattern)}
    files = found_files - own_files
    assert files, folders
    found = {name for path in files for name in names_read(ast.parse(path.read_text()))}
    trees = [ast.parse(path.read_text()) for path in own_files]
    methods = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    methods = [node for node in methods if node.name != "__post_init__"]  # which judges a value, and does not use it
    while more := {name for node in methods if node.name in found for name in names_read(node)} - found:
        found |= more
    return found


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_every_option_is_read_somewhere(kind: type) -> None:
    found = fields_read(kind, READERS[kind])
    found |= {field.name for field in dataclasses.fields(HANDED_ON[kind])} if kind in HANDED_ON else set()
    unread = [field.name for field in dataclasses.fields(kind) if field.name not in found]
    known = {name for owner, name in WITHOUT_EFFECT if owner is kind}
    known |= CHECKED if issubclass(kind, ModelParallelConfig) else set()
    assert set(unread) == known, "obey an option, or refuse it by name"


def test_options_of_equal_names_are_handed_on() -> None:
    job = training.JobConfig(model=training.ModelOptions(num_layers=3, qk_layernorm=True, vocab_size=400))
    made = transformer_config(job, 512)
    assert (made.num_layers, made.qk_layernorm, made.vocab_size) == (3, True, 512)  # the padded vocabulary wins
    assert optimizer_config(training.OptimizerOptions(lr=0.3, clip_grad=0.5), "float32").clip_grad == 0.5


def test_a_field_that_no_one_reads_is_found() -> None:
    @dataclasses.dataclass(frozen=True)
    class Widened(OptimizerConfig):
        colour_of_the_bicycle_shed: str = "red"

    assert "colour_of_the_bicycle_shed" not in fields_read(Widened, READERS[OptimizerConfig])
    assert {"lr", "clip_grad", "loss_scale"} <= fields_read(OptimizerConfig, READERS[OptimizerConfig])


@pytest.mark.parametrize(
    ("kind", "name"), sorted(WITHOUT_EFFECT, key=str), ids=lambda part: getattr(part, "__name__", part)
)
def test_an_option_that_nothing_obeys_is_named_in_a_warning(kind: type, name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name}=True changes nothing here"):
        kind(**{name: True})
