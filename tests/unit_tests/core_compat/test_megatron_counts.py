"""The counts of what is here do not fall: names, import lines, and the calls of a loop, made one after the other."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from tests.unit_tests.core_compat.megatron_counts import calls, count_names, import_lines, make_calls
from tests.unit_tests.ranks import ranks

# The rest is refused by a sentence of its own.
ABSENT = {
    "transformer.moe.router_replay.RouterReplay",
    "transformer.moe.router_replay.RouterReplayAction",
    "transformer.transformer_config.MLATransformerConfig",
    # What builds models, which is Megatron's own.
    "transformer.transformer_config.TransformerConfig",
    "transformer.moe.moe_layer.MoELayer",
    "transformer.moe.router.TopKRouter",
    "transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher",
}
REFUSED_CALLS = ("ddp.offload_grad_buffers", "optimizer.save_parameter_state", "optimizer.offload_to_cpu")


def test_names_are_at_megatrons_path() -> None:
    uses, at_path, same, absent, _ = count_names()
    assert uses == 3670 and set(absent) == ABSENT
    assert at_path / uses >= 0.90
    assert same / at_path >= 0.94


def test_import_lines_work_with_the_package_changed() -> None:
    works, fails = import_lines()
    assert len(works) >= 35 and len(works) + len(fails) == 50, fails


@ranks(1)
def test_a_loop_can_make_its_calls(rank: int, world: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    refused, space = make_calls(tmp_path)
    assert len(calls()) == 57 and [call.partition("(")[0] for call in refused] == list(REFUSED_CALLS)
    assert all(len(words) > 60 for words in refused.values()), "a refusal says what to do"
    assert space["update_successful"] is True and float(str(space["grad_norm"])) > 0.01
    assert len(space["reports"]) == 2 and space["loaded"]["iteration"] == 7 and space["loaded"]["args"].lr == 0.1
    assert torch.equal(space["loss"], space["losses"])
    assert space["line"].count("interval-time") == 1 and space["microbatches"] == 2 and space["equal"] is True
