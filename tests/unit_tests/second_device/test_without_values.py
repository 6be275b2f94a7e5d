"""Steps in every strategy on a device, without values: finds tensors of the CPU and kernels without a shape rule.

Tensors say that they are on CUDA, so branches for CUDA run too. The device itself is the second one, because autograd
needs an accelerator that torch was built with.
"""

import dataclasses
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore

from core import parallel_state
from core.distributed import Placement
from core.distributed.buffer.grad_placeholder import GradPlaceholder
from core.distributed.layout import model_plan
from core.groups import agree
from core.groups.rank_grid import size_options
from core.moe import token_dispatcher
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.norm import clip_grads
from core.verify.job import Job
from core_plan.fake_collectives import EvenLoads
from tests.layouts import gpt
from tests.layouts.gpt import global_batch, job_of, wrapper_config
from tests.layouts.layouts import Layout
from tests.unit_tests.second_device import device as second
from tests.unit_tests.second_device.conftest import Runner

pytestmark = [
    pytest.mark.skipif(second.why_not() is not None, reason=str(second.why_not())),
    pytest.mark.timeout(300),
]
OF = GradPlaceholder.of


class WithoutValues(FakeTensorMode):
    """FakeTensorMode in which the host reads False, 0.0 and 1, and comparisons come out equal."""

    avoid_device_init = True  # there is no CUDA to start, though torch has found a device

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 0.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.equal.default:
            return True
        return super().dispatch(func, types, args, kwargs)


def alone(values: Any, groups: Any, what: str) -> tuple[list[Any], list[Any]]:
    """Stand for the agreement with ranks that are not there."""
    found = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    return found, found


def placeholder(*arguments: Any) -> GradPlaceholder:
    """Make a placeholder, which has no values anyway: a subclass of Tensor cannot be a FakeTensor too."""
    with unset_fake_temporarily():
        return OF(*arguments)


@contextmanager
def alone_on_cuda() -> Iterator[None]:
    """Let tensors say that they are on CUDA, and replace what needs values of other ranks or addresses."""
    with ExitStack() as stack:
        for owner, name, value in (
            (FakeTensor, "is_cuda", True),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (GradPlaceholder, "of", placeholder),
            (clip_grads, "same_digest", lambda *_: True),
            (agree, "bounds", alone),
            (agree, "gather", lambda value, *_: {0: value}),
            (model_plan, "shared_params", lambda *_: {}),  # compares addresses, which are all 0
            (gpt, "DTYPES", {**gpt.DTYPES, "bf16": torch.bfloat16}),
            (token_dispatcher, "HOST_COUNTS", EvenLoads(0.5)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield


LAYOUTS = {
    "ddp": Layout(dp=2, overlap=True),
    "optim": Layout(dp=2, strategy="optim", overlap=True),
    "optim_grads": Layout(dp=2, strategy="optim_grads", microbatches=2),
    "tp and sp": Layout(tp=2, sp=True, fusion=True, overlap=True),
    "tp, modern": Layout(tp=2, sp=True, fusion=True, model="modern", recompute=True, strategy="optim"),
    "pp": Layout(pp=2, microbatches=4, schedule="1F1B"),
    "pp, zero bubble": Layout(pp=2, vpp=2, microbatches=4, schedule="InterleavedZeroBubble"),
    "ep, alltoall": Layout(dp=2, ep=2, experts="alltoall", aux="seq_aux_loss", shared=True),
    "ep, allgather": Layout(dp=2, ep=2, experts="allgather", expert_bias=True),
    "cp, ring": Layout(cp=2, cp_comm="p2p", model="modern"),
    "cp, all_gather": Layout(cp=2, cp_comm="all_gather"),
    "cp, a2a": Layout(cp=2, cp_comm="a2a"),
}
PLACED = {"optim": {"offload_optim_frac": 0.5}, "optim_grads": {"offload_optim_frac": 1.0, "offload_grad_frac": 0.5}}
# Sharded parameters change their class, which a FakeTensor cannot do.


def stepped(device: torch.device, name: str, dtype: str, offloads: bool = False) -> str:
    """The traceback of a step, "" without an error."""
    error = ""
    layout = LAYOUTS[name]
    dist.destroy_process_group()
    dist.Backend.backend_capability["fake"].append(second.NAME)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world)
    try:
        with alone_on_cuda():
            step(device, layout, dtype, Placement(**PLACED[name]) if offloads else None)
    except Exception:
        error = traceback.format_exc()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the pool's end asks for one
    return error


def step(device: torch.device, layout: Layout, dtype: str, placement: Placement | None) -> None:
    ends = layout.pipeline.embedding_ranks if layout.pipeline is not None else None
    parallel_state.initialize_model_parallel(
        **size_options(layout),
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        get_embedding_ranks=ends,
        create_gloo_process_groups=False,
    )
    config = dataclasses.replace(wrapper_config(layout), first_steps="ignore", placement=placement)
    with WithoutValues(), device:
        job: Job = job_of(layout, dtype, parallel_state.get_process_groups(), config)
        batch = {name: values.to(device) for name, values in global_batch(layout).items()}
        of_optimizer = OptimizerConfig(lr=0.1, clip_grad=0.1, bf16=dtype == "bf16")
        optimizer: Any = get_megatron_optimizer(of_optimizer, job.model.chunks)
        optimizer.zero_grad()
        job.step(batch)
        optimizer.step()


def with_a_tensor_of_the_cpu(device: torch.device) -> str:
    layer_norm = torch.nn.functional.layer_norm

    def wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        output = layer_norm(*arguments, **options)
        return output * torch.ones(output.shape, dtype=output.dtype, device="cpu")

    with mock.patch.object(torch.nn.functional, "layer_norm", wrong):
        return stepped(device, "ddp", "bf16")


@pytest.mark.parametrize("name", [*LAYOUTS, *(f"{name}, offloaded" for name in PLACED)])
@pytest.mark.in_suite(5)
def test_a_step_needs_no_tensor_of_the_cpu_and_no_kernel_without_shapes(run: Runner, name: str) -> None:
    layout = name.removesuffix(", offloaded")
    found = run(stepped, 1, layout, "bf16", layout != name)
    assert found == ""


def test_a_tensor_of_the_cpu_is_found(run: Runner) -> None:
    error = run(with_a_tensor_of_the_cpu, 1)
    assert "FakeTensorDeviceMismatchError: Expected all tensors to be on the same device" in error, error
