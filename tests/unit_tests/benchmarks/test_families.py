"""The census of families: what it says of one that is right and of one that is wrong, and all of them in nightly."""

from unittest import mock

import pytest

pytest.importorskip("transformers")

from benchmarks.families import PRECISIONS, table_of, verdict_on_rank
from core import parallel_state
from core.hugging_face.run.sequence import OVER_CONTEXT
from core.tensor_parallel import mappings
from tests.families.tiny import all_families
from tests.unit_tests.hugging_face.models import grad_times
from tests.unit_tests.ranks import ranks

LLAMA = "llama/LlamaConfig"


@ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp64"])
@pytest.mark.in_suite(1)
def test_a_right_family_is_equal_and_a_wrong_gradient_is_seen(rank: int, world: int, precision: str) -> None:
    verdict = verdict_on_rank(LLAMA, all_families()[LLAMA], world, precision)
    assert verdict.answer == "equal", verdict
    parallel_state.destroy_model_parallel()
    wrong = grad_times(2.0, mappings.reduce_from_tensor_model_parallel_region)
    with mock.patch("core.hugging_face.run.seams.reduce_from_tensor_model_parallel_region", wrong):
        verdict = verdict_on_rank(LLAMA, all_families()[LLAMA], world, precision)
    assert verdict.answer == "wrong" and "off" in verdict.why, verdict


def test_the_table_counts_answers_and_gives_reasons() -> None:
    rows = {"a/A": {"answer": "equal", "why": ""}, "b/B": {"answer": "refused", "why": "no head"}}
    assert table_of(rows, 2, "bf16") == (
        "At tp 2, bf16: 1 equal, 1 refused.\n\n| class | answer | |\n| --- | --- | --- |\n| `b/B` | refused | no head |"
    )


@pytest.mark.nightly
@ranks(2, 4, timeout_s=3600.0)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_family_is_equal_or_refused_by_name(rank: int, world: int, precision: str) -> None:
    for name, kind in all_families().items():
        verdict = verdict_on_rank(name, kind, world, precision)
        assert verdict.answer in ("equal", "refused") or name in NOT_BUILT, verdict
        parallel_state.destroy_model_parallel()


@pytest.mark.nightly
@ranks(2, timeout_s=3600.0)
@pytest.mark.parametrize("sp", ["split_gather", "all_to_all", "ring_attn"])
def test_every_family_over_a_sequence_is_equal_or_refused_by_name(rank: int, world: int, sp: str) -> None:
    for name, kind in all_families().items():
        verdict = verdict_on_rank(name, kind, 1 if sp in OVER_CONTEXT else world, "fp64", sp)
        assert verdict.answer in ("equal", "refused") or name in NOT_BUILT, verdict
        parallel_state.destroy_model_parallel()


NOT_BUILT = ("llama4/Llama4Config",)  # transformers 5.24 reads an output of it that it does not make
