"""CutModel: names, slices and ties of a model that is cut, against slices by hand; and one `configure` for ZeRO."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin, MoeHybridParallelPlugin
from core.booster.plugin.low_level_zero_model import LowLevelZeroModel
from core.booster.plugin.zero_plugin_base import ZeroPluginBase
from core.hugging_face.cut_model import CutModel, Cutting, cut_model
from tests.unit_tests.hugging_face.models import small
from tests.unit_tests.ranks import ranks

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CPU = torch.device("cpu")


def tied_model() -> Any:
    return small("llama", torch.float64, vocab_size=96, tie_word_embeddings=True)


def cut_by(**options: Any) -> CutModel:
    cutting = Cutting(**options)
    parallel_state.initialize_model_parallel(cutting.tp_size, cutting.pp_size)
    return cut_model(tied_model(), cutting, parallel_state.get_process_groups(), CPU)


def test_every_zero_plugin_configures_by_the_same_calls() -> None:
    for plugin in (LowLevelZeroPlugin, GeminiPlugin, HybridParallelPlugin, MoeHybridParallelPlugin):
        for call in ("configure", "_broadcast", "_cast", "_wrap", "_adopt"):
            assert getattr(plugin, call) is getattr(ZeroPluginBase, call), (plugin, call)


class Chunk:
    entered = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.entered += 1
        yield


class TwoChunks(LowLevelZeroModel):
    wrapped = (Chunk(), Chunk())  # type: ignore[assignment]


def test_contexts_of_all_chunks_decorate_functions_too() -> None:
    linear = torch.nn.Linear(1, 1)
    model = TwoChunks(CutModel(linear, [linear]), [linear], None, None, outputs_fp32=False)

    @model.no_sync()
    def entered() -> list[int]:
        return [chunk.entered for chunk in model.wrapped]  # type: ignore[attr-defined]

    assert (entered(), entered()) == ([1, 1], [2, 2])


# Functions of core/hugging_face that a cut enters, and calls of functions of core. Both may only fall; the aim is 60.
MOST_FUNCTIONS, MOST_CALLS = 99, 2_750


@ranks(2)
def test_a_cut_with_its_proof_enters_few_functions(rank: int, world: int) -> None:
    """Whoever debugs a cut walks through all of them."""
    entered: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        path, name = frame.f_code.co_filename, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        if event == "call" and "/core/" in path and not name.endswith(">"):  # comprehensions are parts of a function
            entered[path.rpartition("/core/")[2], name] += 1

    parallel_state.initialize_model_parallel(2)
    model, groups = tied_model(), parallel_state.get_process_groups()
    sys.setprofile(count)
    try:
        cut_model(model, Cutting(tp_size=2, parallel_output=True), groups, CPU)
    finally:
        sys.setprofile(None)
    functions = sorted(name for name in entered if name[0].startswith("hugging_face/"))
    assert len(functions) <= MOST_FUNCTIONS, (len(functions), functions)
    assert sum(entered.values()) <= MOST_CALLS, (sum(entered.values()), entered.most_common(20))


@ranks(2)
def test_whole_tensors_become_slices_and_slices_whole_tensors_by_any_name(rank: int, world: int) -> None:
    whole = {name: value.clone() for name, value in tied_model().state_dict().items()}
    cut = cut_by(tp_size=2)
    by_hand = {"model.layers.1.self_attn.q_proj.weight": 0, "model.layers.0.mlp.down_proj.weight": 1, EMBEDDING: 0}
    for name, dim in by_hand.items():
        expected = whole[name].chunk(2, dim)[rank]
        assert torch.equal(cut.parameters[name], expected), name
        assert torch.equal(cut.slice_of(name, whole[name]), expected), name
        assert torch.equal(cut.whole_of(name, 3 * expected), 3 * whole[name]), name
    assert torch.equal(cut.parameters["model.norm.weight"], whole["model.norm.weight"])
    assert cut.names_of(HEAD) == (EMBEDDING, HEAD) and HEAD not in cut.parameters
    assert torch.equal(cut.slice_of(HEAD, whole[HEAD]), whole[EMBEDDING].chunk(2)[rank])
    held = dict(cut.shell.named_parameters())
    assert all(param.is_meta and param.shape == whole[name].shape for name, param in held.items())
    assert held.keys() == cut.parameters.keys() and cut.layout is None and not cut.unread and cut.adapters is None


@ranks(2)
def test_stages_name_a_tied_parameter_alike(rank: int, world: int) -> None:
    cut = cut_by(pp_size=2)
    assert cut.layout is not None and cut.layout.layers_per_stage == (1, 1)
    assert EMBEDDING in cut.parameters and HEAD not in cut.parameters
    layers = {name.split(".")[2] for name in cut.parameters if name.startswith("model.layers.")}
    assert layers == {str(rank)} and ("model.norm.weight" in cut.parameters) == (rank == 1)
    parallel_state.destroy_model_parallel()
    with torch.device("meta"):
        empty = tied_model()
    parallel_state.initialize_model_parallel(1, 2)
    cut = cut_model(empty, Cutting(pp_size=2), parallel_state.get_process_groups(), CPU)
    assert cut.unread == set(empty.state_dict()) | {EMBEDDING, HEAD} | set(cut.shell.state_dict())
    assert not any(param.is_meta for param in cut.parameters.values())
