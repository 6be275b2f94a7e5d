"""One real step of a configuration on this rank, and what it held: the reference that plans are compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from core import parallel_state
from core.context_parallel import split_sequence
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.moe import auxiliary_loss_scale
from core.optimizer import MegatronOptimizer, get_megatron_optimizer
from core.pipeline_parallel import PipelineRunner, build_gpt_stages, gpt_activations, gpt_forward_step, wrap_stages
from core.plan.live_memory import LiveMemory
from core.plan.state_bytes import GATHERED, GRADIENTS, MASTERS, MOMENTS, PARAMETERS, POOL
from core.training.config import JobConfig
from core.training.job import start_groups
from core.training.model_config import ddp_config, optimizer_config, transformer_config
from core.training.plan import plan_job

VOCABULARY = 256


class Job:
    """A GPT in its wrapper with its optimizer, as core.training.job makes them."""

    def __init__(self, config: JobConfig, world: int) -> None:
        self.plan = plan_job(config, world)
        self.length = config.model.sequence_length
        start_groups(config, self.plan)
        self.groups = parallel_state.get_process_groups()
        self.model_config = transformer_config(config, VOCABULARY)
        stages = build_gpt_stages(self.model_config, self.plan.layout, self.groups)
        self.chunks = wrap_stages(self.model_config, ddp_config(config), stages, self.groups)
        self.optimizer = get_megatron_optimizer(optimizer_config(config.optimizer, config.model.dtype), self.chunks)
        self.runner = None
        if self.plan.layout.pp > 1:
            shape = gpt_activations(self.model_config, self.plan.micro_batch_size, self.length)
            self.runner = PipelineRunner(
                self.chunks, self.plan.layout, gpt_forward_step, shape, schedule=config.parallel.schedule_name
            )
        batches = torch.randint(0, VOCABULARY, (self.plan.num_microbatches, self.plan.micro_batch_size, self.length))
        cp, place = self.groups.size("cp"), self.groups.rank("cp")
        self.batches = [split_sequence(batch, 1, cp, place).contiguous() for batch in batches]

    def compute(self) -> None:
        """Forwards and backwards of a step."""
        if self.runner is not None:
            self.runner.step([{"tokens": batch, "labels": batch} for batch in self.batches], finalize=False)
            return
        (model,) = self.chunks
        weight = 1.0 / len(self.batches)
        for number, batch in enumerate(self.batches, 1):
            last = number == len(self.batches)
            with nullcontext() if last else model.no_sync(), auxiliary_loss_scale(weight):
                (model(batch, labels=batch).mean() * weight).backward()

    def step(self) -> None:
        """A whole step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.compute()
        finalize_model_grads(self.chunks)
        self.optimizer.step()


def state_of(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> Counter[str]:
    """Bytes by kind that wrapper and optimizer hold after a step."""
    held: Counter[str] = Counter()
    for chunk in chunks:
        for buffer in chunk.engine.buffers:
            held[GRADIENTS] += buffer.grad_data.nbytes
            held[POOL] += 0 if buffer.pool is None else buffer.pool.nbytes
        unsharder = chunk.engine.unsharder
        if unsharder is not None:
            held[PARAMETERS] += sum(unit.shard.nbytes for unit in unsharder.units)
            held[GATHERED] += 0
        else:
            storages = {param.untyped_storage().data_ptr(): param.untyped_storage() for param in chunk.parameters()}
            mapped = {id(buffer.param_data): buffer for buffer in chunk.engine.buffers if buffer.param_data is not None}
            if mapped:
                held[PARAMETERS] += sum(buffer.param_data.nbytes for buffer in mapped.values())
            else:
                held[PARAMETERS] += sum(storage.nbytes() for storage in storages.values())
    for masters in optimizer.masters:
        held[MASTERS] += masters.kept.nbytes
        held[MOMENTS] += sum(kept.nbytes for segment in masters.segments for kept in segment.moments.values())
        for segment in masters.segments:
            state = optimizer.state[segment.master]
            held[MOMENTS] += sum(
                value.nbytes for key, value in state.items() if key != "step" and key not in segment.moments
            )
    return held


def peak_of(run: Callable[[], object], known: Iterable[torch.Tensor], *, alone: bool) -> int:
    """The most bytes of tensors that are alive at once while a function runs, beside those of `known` tensors.

    alone: True if no other rank is asked for anything. Torch's profiler then counts what is allocated. It does not see
    what threads of gloo free, so otherwise the storages themselves are counted.
    """
    if not alone:
        with LiveMemory(known) as live:
            run()
        return max(live.peak.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        highest = max(highest, alive)
    return highest
