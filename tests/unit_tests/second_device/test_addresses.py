"""Which memory of a step keeps its address, as a CUDA graph of the step would need."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.second_device import device as second
from tests.unit_tests.second_device.conftest import Runner
from tests.unit_tests.second_device.test_second_device import SMALL, STRATEGIES, batch, layers

pytestmark = [
    pytest.mark.skipif(second.why_not() is not None, reason=str(second.why_not())),
    pytest.mark.timeout(300),
]
STAYS = {"reduced gradients", "master weights", "moments", "scalar state"}
# What stays where it is from the second step to the fifth.
STAYS_IN = {
    "no_shard": STAYS | {"parameters in forward", "gradients in backward", "parameters"},
    "optim": STAYS | {"parameters in forward", "gradients in backward", "parameters"},
    "optim_grads": STAYS | {"parameters in forward", "parameters"},
    "optim_grads_params": STAYS | {"shards of parameters"},
}


def recorder(found: dict[str, list[int]], name: str, address: Callable[[Any], int]) -> Callable[..., None]:
    return lambda owner, *_: found[name].append(address(owner))


def kept_addresses(device: torch.device, strategy: str, dtype: torch.dtype) -> tuple[set[str], set[str]]:
    """Names of the memory that keeps its addresses, and of the memory that does not."""
    parallel_state.initialize_model_parallel()
    found: dict[str, list[int]] = defaultdict(list)
    module = layers(device, dtype)
    for param in module.parameters():
        of_grad = recorder(found, "gradients in backward", lambda param: param.grad.data_ptr())
        param.register_post_accumulate_grad_hook(of_grad)  # before the wrapper's, which may give the memory back
    options: dict[str, Any] = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": True, **SMALL}
    model = DistributedDataParallel(None, DistributedDataParallelConfig(**options), module)
    for layer in (each for each in module.modules() if isinstance(each, nn.Linear)):
        layer.register_forward_pre_hook(recorder(found, "parameters in forward", lambda layer: layer.weight.data_ptr()))
    scaled = {"fp16": True, "initial_loss_scale": 256.0} if dtype == torch.float16 else {}
    optimizer: Any = get_megatron_optimizer(OptimizerConfig(lr=0.05, **scaled), [model])
    steps, kept = [], []
    for number in range(5):
        found.clear()
        optimizer.zero_grad()
        optimizer.scale_loss(model(batch(number, device).to(dtype)).float().square().mean()).backward()
        finalize_model_grads([model])
        found["reduced gradients"] = [bucket.memory.owned_grad.data_ptr() for bucket in model.engine.buckets]
        optimizer.step()
        units = model.engine.params.units
        if units:
            found["shards of parameters"] = [unit.shard.data_ptr() for unit in units]
        else:
            found["parameters"] = [param.data_ptr() for param in module.parameters()]
        found["master weights"] = [masters.kept.data_ptr() for masters in optimizer.masters]
        for value in (value for state in optimizer.state.values() for value in state.values()):
            found["moments" if value.dim() else "scalar state"].append(value.data_ptr())
            assert value.device == device
        steps.append(dict(found))
        kept += [torch.empty(128 * size, device=device) for size in range(1, 30, 3)]  # freed memory comes back no more
    parallel_state.destroy_model_parallel()
    stays = {name for name in steps[1] if all(step[name] == steps[1][name] for step in steps[1:])}
    return stays, set(steps[1]) - stays


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.in_suite(2)
def test_memory_of_a_step_keeps_the_addresses_of_the_table(run: Runner, strategy: str, dtype: torch.dtype) -> None:
    stays, moves = run(kept_addresses, 2, strategy, dtype)
    assert stays == STAYS_IN[strategy] and not stays & moves
    assert moves <= {"gradients in backward", "parameters in forward"}
