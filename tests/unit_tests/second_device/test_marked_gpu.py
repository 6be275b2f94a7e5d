"""Tests that are marked `gpu` and need no kernel of CUDA, on the second device."""

from collections.abc import Callable

import pytest
import torch

from core import parallel_state
from tests.unit_tests.checkpoint.test_checkpoint_saver import check_snapshots
from tests.unit_tests.distributed.sharded.test_sharded_parameters_gpu import equal_bits, on_the_host
from tests.unit_tests.optimizer.step.test_cpu_offload import check_state_on_the_host
from tests.unit_tests.second_device import device as second
from tests.unit_tests.second_device.conftest import Runner
from tests.unit_tests.second_device.order import ordered
from tests.unit_tests.tensor_parallel import test_random, test_tensor_parallel_layers
from tests.unit_tests.transformer import test_gpt

pytestmark = [
    pytest.mark.skipif(second.why_not() is not None, reason=str(second.why_not())),
    pytest.mark.timeout(300),
]


def offloaded(device: torch.device) -> None:
    for overlap in (True, False):
        check_state_on_the_host(device, overlap)
        parallel_state.destroy_model_parallel()


def every_gpt(device: torch.device) -> None:
    for variant in test_gpt.VARIANTS:
        test_gpt.compare_with_the_cpu(device, variant)


def recomputed(device: torch.device) -> None:
    test_random.test_recomputation_drops_the_same_elements_and_leaves_the_streams_where_they_were(device)


def accumulated(device: torch.device) -> None:
    test_tensor_parallel_layers.test_16_bit_weights_add_their_gradient_to_an_fp32_buffer_unrounded(device)
    for dtype in (torch.float32, torch.bfloat16):
        test_tensor_parallel_layers.test_a_tied_weights_gradient_is_made_in_the_buffer_alone(device, dtype)


def sharded(device: torch.device) -> None:
    parallel_state.initialize_model_parallel()
    with ordered():
        equal_bits(device)


def sharded_on_the_host(device: torch.device) -> None:
    with ordered():
        on_the_host(device)


@pytest.mark.parametrize("check", [check_snapshots, offloaded, every_gpt, recomputed, accumulated])
def test_what_holds_on_a_gpu_holds_here(run: Runner, check: Callable[[torch.device], None]) -> None:
    run(check, 1)


@pytest.mark.parametrize("check", [sharded, pytest.param(sharded_on_the_host, marks=pytest.mark.nightly)])
def test_sharded_parameters_train_here_as_on_gpus(run: Runner, check: Callable[[torch.device], None]) -> None:
    run(check, 2)
