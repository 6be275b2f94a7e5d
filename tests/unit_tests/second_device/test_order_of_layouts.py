"""Layouts of a GPT on the second device: gradients equal the CPU's, and every access is in order."""

from pathlib import Path
from typing import Any

import pytest
import torch

import core
from tests.layouts.gpt import global_batch, groups_of, job_of, wrapper_config
from tests.layouts.layouts import Layout
from tests.unit_tests.second_device import device as second
from tests.unit_tests.second_device import left_out
from tests.unit_tests.second_device.conftest import Runner
from tests.unit_tests.second_device.order import RaceError, ordered

pytestmark = [
    pytest.mark.skipif(second.why_not() is not None, reason=str(second.why_not())),
    pytest.mark.timeout(600),
]
TP = {"tp": 2, "sp": True, "overlap": True, "microbatches": 2}
PP = {"pp": 2, "overlap": True, "microbatches": 4, "strategy": "optim"}
LAYOUTS = [
    Layout(**TP, fusion=True),
    Layout(**TP, recompute=True, model="modern", strategy="optim_grads_params"),
    Layout(**PP, schedule="1F1B"),
    Layout(**PP, schedule="Interleaved1F1B", vpp=2),
    Layout(**PP, schedule="InterleavedZeroBubble", vpp=2),
    Layout(**PP, schedule="ZBVZeroBubble", vpp=2),
    Layout(cp=2, cp_comm="p2p", overlap=True, model="modern"),
    Layout(cp=2, cp_comm="all_gather", overlap=True),
    Layout(cp=2, cp_comm="a2a", overlap=True),
    Layout(dp=2, ep=2, experts="alltoall", aux="seq_aux_loss", shared=True, overlap=True),
    Layout(dp=2, ep=2, experts="allgather", expert_bias=True, strategy="optim_grads", microbatches=2, overlap=True),
]


def gradients(device: torch.device, layout: Layout) -> dict[Any, torch.Tensor]:
    """Gradients of three steps, on the CPU: one that is watched less than the first two."""
    batch = {name: value.to(device) for name, value in global_batch(layout).items()}
    with groups_of(layout) as groups, device:
        job = job_of(layout, "fp64", groups, wrapper_config(layout))
        for _ in range(3):
            job.step(batch)
        return {key: grad.cpu() for key, grad in job.gradients().items()}


def compared(device: torch.device, layout: Layout) -> list[Any]:
    """Names of gradients that differ from the CPU's by more than rounding: kernels of attention differ."""
    here, there = gradients(device, layout), gradients(torch.device("cpu"), layout)
    assert here.keys() == there.keys() and here
    return [name for name, grad in here.items() if not torch.allclose(grad, there[name], rtol=1e-9, atol=1e-12)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.in_suite(3)
def test_a_layout_keeps_the_order_of_its_streams(run: Runner, layout: Layout) -> None:
    assert run(compared, 2, layout) == []


LONG = Layout(**{**PP, "pp": 4, "microbatches": 8}, schedule="Interleaved1F1B", vpp=2)
# On four ranks, where the groups of two axes cross.
CROSSED = [
    Layout(dp=2, tp=2, sp=True, overlap=True, microbatches=2, strategy="optim_grads_params"),
    Layout(dp=2, **PP, schedule="Interleaved1F1B", vpp=2),
    Layout(dp=2, pp=2, overlap=True, microbatches=4, strategy="optim_grads", schedule="1F1B"),
    Layout(tp=2, pp=2, overlap=True, microbatches=4, schedule="ZBVZeroBubble", vpp=2),
    Layout(dp=2, cp=2, cp_comm="p2p", overlap=True),
    Layout(dp=4, ep=2, experts="alltoall", overlap=True, strategy="optim"),
    LONG,
]


@pytest.mark.parametrize("layout", CROSSED, ids=str)
@pytest.mark.in_suite(1)
def test_a_layout_on_four_ranks_keeps_the_order_of_its_streams(run_on_four: Runner, layout: Layout) -> None:
    assert run_on_four(compared, 4, layout) == []


# Waits for a collective or a message, and the layout that needs them. Two stages talk over one communicator, so a wait
# for the next message received is one for those sent before it; four have others for either neighbour.
WAITS = {"Pending.wait": LAYOUTS[0], "Passing.wait": LAYOUTS[6], "_let_go": LONG}


def without(device: torch.device, name: str) -> list[str]:
    """For each wait of a function, the races if it is left out."""
    found = []
    for place in left_out.places(Path(core.__file__).parent, "core", ["wait"]):
        if place.function == name:
            with left_out.left_out(place):
                try:
                    with ordered():
                        gradients(device, WAITS[name])
                    found.append("")
                except RaceError as error:
                    found.append(str(error))
    return found


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.nightly
def test_a_wait_that_is_left_out_is_a_race(run: Runner, run_on_four: Runner, name: str) -> None:
    races = run_on_four(without, 4, name) if WAITS[name] is LONG else run(without, 2, name)
    assert races and all("in no order" in words and "c10d::" in words for words in races)
