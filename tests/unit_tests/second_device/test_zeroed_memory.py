"""Zeroing that the engine leaves out shows in a gradient, because memory that nobody has written is NaN."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import core
from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests import poison
from tests.unit_tests.second_device import device as second
from tests.unit_tests.second_device import left_out
from tests.unit_tests.second_device.conftest import Runner
from tests.unit_tests.second_device.test_second_device import STRATEGIES, batch

pytestmark = [
    pytest.mark.skipif(second.why_not() is not None, reason=str(second.why_not())),
    pytest.mark.timeout(300),
]
PLACES = [
    place
    for place in left_out.places(Path(core.__file__).parent, "core", ["zero_"])
    if place.module.startswith("core.distributed.buffer") and "placeholder" not in place.module
    if place.function != "Bucket._follow_drops"  # no step here comes there
]


# The last ones read the gaps between parameters, and keep what a microbatch adds without reducing it.
CONFIGS: list[dict[str, Any]] = [
    *({"data_parallel_sharding_strategy": strategy} for strategy in STRATEGIES),
    {"data_parallel_sharding_strategy": "optim_grads", "grad_communication_dtype": torch.float8_e4m3fn},
    {"data_parallel_sharding_strategy": "optim_grads", "check_for_nan_in_grad": True},
    {"data_parallel_sharding_strategy": "optim_grads", "reduce_microbatches": "last"},
]


class Uneven(nn.Module):
    """Layers of odd sizes, with gaps between them in a buffer; the first one is left out of every second forward."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.other = nn.Linear(8, 8, device=device), nn.Linear(8, 8, device=device)
        self.odd = nn.Sequential(*(nn.Linear(8, 8, bias=bool(n % 2), device=device) for n in range(4)))
        self.scale = nn.Parameter(torch.ones(3, device=device))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        layer = self.one if self.calls % 4 < 2 else self.other
        return self.odd(layer(x)) * self.scale.sum()


def weights_of(device: torch.device, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights of steps in which gradients are dropped, edited and not there."""
    config = DistributedDataParallelConfig(**options, bucket_size=100)
    strategy = options["data_parallel_sharding_strategy"]
    drops = strategy in ("no_shard", "optim") or "reduce_microbatches" in options  # others have reduced it by then
    model = DistributedDataParallel(None, config, Uneven(device))
    optimizer: Any = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.05), [model])
    edited: Any = model.module.scale
    for number in range(4):
        if number < 3:
            optimizer.zero_grad()
        else:  # the last step adds to the gradients of the one before, except for one
            model.module.odd[1].bias.grad = None
        with model.no_sync():
            model(batch(2 * number, device)).square().mean().backward()
        if number == 1 and drops:
            edited.grad = None
        model(batch(2 * number + 1, device)).square().mean().backward()
        finalize_model_grads([model])
        if number == 2:
            edited.grad.zero_()
        elif number == 3 and strategy == "no_shard":
            edited.grad = None
        optimizer.step()
    with model.gathered():
        return {name: param.detach().cpu().clone() for name, param in model.module.named_parameters()}


def changed(device: torch.device, place: left_out.Place) -> list[str]:
    """The options whose weights change if a call is left out."""
    parallel_state.initialize_model_parallel()
    found = []
    for options in CONFIGS:
        with poison.pools():
            right = weights_of(device, options)
            with left_out.left_out(place):
                try:
                    wrong = weights_of(device, options)
                except RuntimeError as error:
                    found.append(f"{options}: {error}")
                    continue
        assert all(weight.isfinite().all() for weight in right.values())
        found += [str(options)] * any(not torch.equal(wrong[name], weight) for name, weight in right.items())
    parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place}:{place.line}")
@pytest.mark.in_suite(1)
def test_zeroing_that_is_left_out_changes_weights(run: Runner, place: left_out.Place) -> None:
    assert run(changed, 2, place)
