"""Every kind of seam over tensor parallelism: where it is dropped, doubled or rescaled, the check does not say equal.

Seams of a split sequence are mutated in test_sequence, those of experts in test_experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core import parallel_state
from core.distributed.guard.finite import ReplicaDriftError
from core.hugging_face.run import seams
from core.hugging_face.run.seams import SeamForward
from tests.families.check import Verdict, check_on_rank
from tests.unit_tests.hugging_face.models import grad_times
from tests.unit_tests.ranks import ranks

HEAD = 8  # features of rotated keys in a tiny copy
copy, reduce = seams.copy_to_tensor_model_parallel_region, seams.reduce_from_tensor_model_parallel_region
gather, scatter = seams.gather_from_tensor_model_parallel_region, seams.scatter_to_tensor_model_parallel_region


def dropped(value: Tensor, group: Any) -> Tensor:
    return value


def times(factor: float, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args) * factor


def for_tails(function: Callable[..., Any]) -> Callable[..., Any]:
    """A mutation of the copy of an output's last features alone."""
    return lambda value, group: (function if value.shape[-1] == HEAD else copy)(value, group)


def no_elsewhere(self: SeamForward, ids: Tensor) -> tuple[Tensor, Tensor]:
    local, elsewhere = LOCAL_ROWS(self, ids)
    return local, torch.zeros_like(elsewhere)


def other_heads(self: SeamForward) -> tuple[int, int]:
    first, count = RANK_HEADS(self)
    return 0, count


def bias_on_all(self: SeamForward) -> Any:
    return contextlib.nullcontext()  # the module adds it itself


def where_divided(mutation: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A mutation of what a module gets whose input is divided by the number of ranks."""

    def call(self: SeamForward, *args: Any, **kwargs: Any) -> Any:
        if self.seam.before == "divide":
            args = (mutation(args[0]), *args[1:])
        return CALL(self, *args, **kwargs)

    return call


CALL = SeamForward.__call__
LOCAL_ROWS, RANK_HEADS, SELECTED = SeamForward._local_rows, SeamForward._rank_heads, SeamForward._selected
COPY, REDUCE = "copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"
GATHER, SCATTER = "gather_from_tensor_model_parallel_region", "scatter_to_tensor_model_parallel_region"
# What is mutated -> (family, where, name, what takes its place).
MUTATIONS: dict[str, tuple[str, Any, str, Any]] = {
    "copy dropped": ("llama", seams, COPY, dropped),
    "copy's gradient doubled": ("llama", seams, COPY, grad_times(2.0, copy)),
    "copy's gradient halved": ("llama", seams, COPY, grad_times(0.5, copy)),
    "sum dropped": ("llama", seams, REDUCE, dropped),
    "sum doubled": ("llama", seams, REDUCE, times(2.0, reduce)),
    "sum's gradient halved": ("llama", seams, REDUCE, grad_times(0.5, reduce)),
    "gather's gradient doubled": ("llama", seams, GATHER, grad_times(2.0, gather)),
    "gather rescaled": ("llama", seams, GATHER, times(0.5, gather)),
    "rows of other ranks counted": ("llama", SeamForward, "_local_rows", no_elsewhere),
    "scatter rescaled": ("glm", seams, SCATTER, times(2.0, scatter)),
    "scatter's gradient halved": ("glm", seams, SCATTER, grad_times(0.5, scatter)),
    "copied tail dropped": ("deepseek_v2", seams, COPY, for_tails(dropped)),
    "copied tail's gradient doubled": ("deepseek_v2", seams, COPY, for_tails(grad_times(2.0, copy))),
    "other ranks' heads selected": ("falcon", SeamForward, "_rank_heads", other_heads),
    "selection's gradient doubled": ("falcon", SeamForward, "_selected", grad_times(2.0, SELECTED)),
    "other ranks' heads of an argument": ("bloom", SeamForward, "_rank_heads", other_heads),
    "division by tp dropped": ("longcat_flash", SeamForward, "__call__", where_divided(lambda value: value * 2.0)),
    "division of the gradient dropped": (
        *("longcat_flash", SeamForward, "__call__"),
        where_divided(grad_times(2.0, lambda value: value)),
    ),
    "a whole bias added on every rank": ("gpt2", SeamForward, "_without_bias", bias_on_all),
}


def verdict_on(family: str) -> Verdict:
    import transformers

    kind = transformers.CONFIG_MAPPING[family]
    layers = {"gpt2": "n_layer", "bloom": "n_layer", "longcat_flash": "num_layers"}.get(family, "num_hidden_layers")
    values = {layers: 2 if family == "deepseek_v2" else 1}
    if family == "longcat_flash":
        values["zero_expert_num"] = 4  # experts that are the identity; a tiny copy has none
    return check_on_rank(family, kind, 2, values)


@ranks(2, timeout_s=180.0)
@pytest.mark.parametrize("family", sorted({mutation[0] for mutation in MUTATIONS.values()}))
def test_a_seam_that_is_dropped_doubled_or_rescaled_is_seen(rank: int, world: int, family: str) -> None:
    assert verdict_on(family).answer == "equal"
    for what, (where, owner, name, wrong) in MUTATIONS.items():
        if where != family:
            continue
        parallel_state.destroy_model_parallel()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, wrong)
            try:
                verdict = verdict_on(family)
            except ReplicaDriftError:  # the first step names the parameter
                continue
        assert verdict.answer in ("wrong", "refused"), (what, verdict)
