"""Planned bytes against those of really wrapped models: buffers and optimizer to the byte, activations within 5 %."""

import pytest
import torch

from core.plan.job_run import run_of_job
from core.plan.run_memory import plan_memory
from core.plan.state_bytes import GRADIENTS, MASTERS, MOMENTS, PARAMETERS, POOL
from core.plan.step_memory import RECEIVED
from core.training.config_file import load_config
from tests.unit_tests.plan.measured_step import Job, peak_of, state_of
from tests.unit_tests.ranks import ranks

MODEL = ["--model.num-layers", "4", "--model.hidden-size", "64", "--model.vocab-size", "256"]
MODEL += ["--model.sequence-length", "64", "--run.global-batch-size", "8", "--ddp.bucket-size", "20000"]
EXPERTS = ["--model.num-experts", "4", "--model.moe-layer-freq", "2"]
STATE = (PARAMETERS, GRADIENTS, POOL, MASTERS, MOMENTS)


def strategy(name: str) -> list[str]:
    if name == "no_shard":
        return ["--ddp.no-use-distributed-optimizer"]
    if name == "optim_grads_params":
        return ["--ddp.data-parallel-sharding-strategy", name, "--ddp.no-overlap-param-gather"]
    return ["--ddp.data-parallel-sharding-strategy", name]


LAYOUTS = {
    "replicated": [*strategy("no_shard"), "--tp", "1"],
    "optim": [*strategy("optim"), "--tp", "1"],
    "optim_grads": [*strategy("optim_grads"), "--tp", "1"],
    "optim_grads_params": [*strategy("optim_grads_params"), "--tp", "1"],
    "tp": ["--tp", "2"],
    "pp": ["--tp", "1", "--pp", "2"],
    "experts": [*EXPERTS, "--tp", "1", "--parallel.ep", "2"],
}


@ranks(2, timeout_s=120)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_state_is_planned_to_the_byte(rank: int, world: int, layout: str, dtype: str) -> None:
    config = load_config([*MODEL, *LAYOUTS[layout], "--model.dtype", dtype])
    (planned,) = plan_memory(run_of_job(config, world, on_cpu=True), [rank])
    torch.manual_seed(rank)
    job = Job(config, world)
    job.step()
    held = state_of(job.chunks, job.optimizer)
    assert {kind: planned.state.get(kind, 0) for kind in STATE} == {kind: held[kind] for kind in STATE}


ACTIVATIONS_OF = {
    "plain": ["--tp", "1"],
    "tp": ["--tp", "2"],
    "tp without sequence parallelism": ["--tp", "2", "--parallel.sequence-parallel", "False"],
    "recompute": ["--tp", "1", "--model.recompute-granularity", "full"],
    "ring": ["--tp", "1", "--cp", "2"],
    "pp": ["--tp", "1", "--pp", "2"],
    "experts": [*EXPERTS, "--tp", "1", "--parallel.ep", "2", "--model.moe-ffn-hidden-size", "64"],
}


@ranks(1, 2, timeout_s=120)
@pytest.mark.parametrize("layout", list(ACTIVATIONS_OF))
def test_activations_are_planned_within_five_percent(rank: int, world: int, layout: str) -> None:
    flags = ACTIVATIONS_OF[layout]
    if world == 1:
        flags = [{"2": "1"}.get(flag, flag) for flag in flags if flag not in ("--parallel.sequence-parallel", "False")]
    config = load_config([*MODEL, *flags])
    (planned,) = plan_memory(run_of_job(config, world, on_cpu=True), [rank])
    torch.manual_seed(rank)
    job = Job(config, world)
    job.step()  # what is made once is there
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    known = [tensor for chunk in job.chunks for buffer in chunk.engine.buffers for tensor in (buffer.grad_data,)]
    known += [tensor for chunk in job.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    measured = peak_of(job.compute, known, alone=layout in ("plain", "recompute"))
    made_once = planned.moments[0].held[RECEIVED]  # before the step that is measured
    in_step = sum(planned.highest.held.values()) - made_once
    assert in_step == pytest.approx(measured, rel=0.05), (in_step / measured, planned.highest)
