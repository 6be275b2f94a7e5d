"""Runs that are planned, really run on this rank, and what they hold: the reference that plans are compared with."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from core import parallel_state
from core.booster.mixed_precision.fp8 import use_fp8_linears
from core.context_parallel import split_sequence
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.hugging_face import read_plan, split_model, split_stages, stage_activations, use_chunked_loss
from core.hugging_face.read.transformers_plans import checkpoint_each_layer
from core.hugging_face.run.loss.deferred_logits import loss_follows
from core.hugging_face.run.loss.parallel_loss import ParallelCausalLoss
from core.moe import auxiliary_loss_scale
from core.optimizer import MegatronOptimizer, get_megatron_optimizer
from core.pipeline_parallel import PipelineRunner, build_gpt_stages, gpt_activations, gpt_forward_step, wrap_stages
from core.pipeline_parallel.runner import MicrobatchLoss
from core.tensor_parallel.random import model_parallel_manual_seed
from core_plan.job.config import JobConfig
from core_plan.job.model_config import ddp_config, optimizer_config, transformer_config
from core_plan.job.plan import plan_job
from core_plan.live_memory import LiveMemory
from core_plan.model_run import ModelRun
from core_plan.run_memory import Run
from core_plan.state_bytes import GATHERED, GRADIENTS, MASTERS, MOMENTS, PARAMETERS, POOL
from core_train.job import start_groups

VOCABULARY = 256


class PlannedJob:
    """A model in its wrapper with its optimizer, and its batches on this rank."""

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    batches: Sequence[Tensor]
    runner: PipelineRunner | None

    def compute(self) -> None:
        """Forwards and backwards of a step."""
        raise NotImplementedError

    def clear(self) -> None:
        """Make gradients zero."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def step(self) -> None:
        """A whole step."""
        self.clear()
        self.compute()
        finalize_model_grads(self.chunks)
        self.optimizer.step()

    def known(self) -> list[Tensor]:
        """Tensors between steps: parameters, gradients, pools, batches, pipelines' buffers, peers' memory."""
        found = [*self.batches]
        for stage in self.runner._built[2] if self.runner is not None and self.runner._built else ():
            infos = itertools.chain(*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            buffers = (getattr(info, "buffer", None) for info in infos)
            found += [buffer for buffer in buffers if isinstance(buffer, Tensor)]
        for chunk in self.chunks:
            engine = chunk.engine
            channels = [*engine.collectives.channels]
            found += [buffer.grad_data for buffer in engine.buffers]
            found += [buffer.pool.memory for buffer in engine.buffers if buffer.pool is not None]
            if not engine.params.units:
                found += [*chunk.parameters(), *chunk.buffers()]
            else:  # ranks of one host use each other's shards where they lie
                units = engine.params.units
                found += [memory for unit in units for memory in (unit.shard, unit.mapped) if memory is not None]
                channels += {id(c.group): c for unit in units if (c := unit.channel) is not None}.values()
            found += [member.tensor for channel in channels for member in channel.members]
        return found

    def held(self) -> Counter[str]:
        """Bytes by kind between steps; call it after one."""
        return state_of(self.chunks, self.optimizer)

    def _accumulates(self, number: int) -> AbstractContextManager[None]:
        """All backwards of a step but the last leave reductions out."""
        return nullcontext() if number == len(self.batches) else self.chunks[0].no_sync()


class GptJob(PlannedJob):
    """A GPT, as core_train.job makes it."""

    def __init__(self, config: JobConfig, world: int) -> None:
        self.plan = plan_job(config, world)
        self.length = config.model.sequence_length
        start_groups(config, self.plan)
        self.groups = parallel_state.get_process_groups()
        model_parallel_manual_seed(config.run.seed, self.groups)
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
        if self.runner is not None:
            self.runner.step([{"tokens": batch, "labels": batch} for batch in self.batches], finalize=False)
            return
        (model,) = self.chunks
        weight = 1.0 / len(self.batches)
        for number, batch in enumerate(self.batches, 1):
            with self._accumulates(number), auxiliary_loss_scale(weight):
                (model(batch, labels=batch).mean() * weight).backward()


class ModelJob(PlannedJob):
    """A Hugging Face model, as fine-tuning makes it."""

    def __init__(self, config: ModelRun, run: Run) -> None:
        self.config = config
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tp,
            pipeline_model_parallel_size=config.pp,
            context_parallel_size=config.cp,
            expert_model_parallel_size=config.ep,
            get_embedding_ranks=run.layout.embedding_ranks if config.pp > 1 else None,
        )
        source: Any = run.source
        from transformers import AutoModelForCausalLM

        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config.configuration, dtype=source.dtype).train()
        model.config.use_cache = False
        if config.recompute:
            checkpoint_each_layer(model)
        if config.use_fp8:
            use_fp8_linears(model)
        shape = source.micro_batch_size, source.sequence_length
        self.runner = None
        plan = read_plan(model).with_vocabulary(config.make_vocab_size_divisible_by) if config.tp > 1 else None
        options: Any = {"parallel_output": config.tp > 1, "sequence_parallel": config.sequence_parallel, "plan": plan}
        if config.pp > 1:
            stages = split_stages(model, run.layout, **options)
            use_chunked_loss(stages[-1], config.logits_chunk)
            self.chunks = wrap_stages(source.config, run.ddp, stages)
            activations = stage_activations(self.chunks[0], *shape)
            self.runner = PipelineRunner(self.chunks, run.layout, self.stage_step, activations, schedule=run.schedule)
        else:
            split_model(model, **options)
            use_chunked_loss(model, config.logits_chunk)
            self.chunks = [DistributedDataParallel(None, run.ddp, model)]
        self.optimizer = get_megatron_optimizer(run.optimizer, self.chunks)
        vocabulary = config.configuration.get_text_config().vocab_size
        self.last: Any = self.chunks[-1].module
        own = getattr(self.last, "loss_function", None)
        multiple = config.make_vocab_size_divisible_by
        whole = ParallelCausalLoss(parallel_state.get_process_groups().tp, vocabulary, multiple=multiple)
        self.loss = own if config.logits_chunk and isinstance(own, ParallelCausalLoss) else whole
        self.batches = [torch.randint(3, 250, shape) for _ in range(run.microbatches)]

    def arguments(self, ids: Tensor) -> dict[str, Any]:
        """Arguments of the model."""
        given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self.config.documents:
            given["position_ids"] = torch.arange(ids.shape[1] // 2).repeat(len(ids), 2)
        return given

    def stage_step(self, chunk: Any, ids: Tensor, hidden: Any) -> Any:
        """The forward of one stage: hidden states, or of the last one the loss."""
        with loss_follows(self.last):
            output = chunk(received=hidden, **self.arguments(ids))
        if isinstance(output, Tensor):
            return output
        return MicrobatchLoss(self.loss(output.logits.float(), labels=ids, num_items_in_batch=1.0))

    def compute(self) -> None:
        if self.runner is not None:
            self.runner.step(self.batches, finalize=False)
            return
        model: Any = self.chunks[0]
        for number, ids in enumerate(self.batches, 1):
            with self._accumulates(number):
                if self.config.sequence_parallel is not None:
                    loss = model(**self.arguments(ids), labels=ids).loss
                else:
                    given = self.arguments(ids)
                    with loss_follows(self.last):  # no name holds the logits during backward
                        loss = self.loss(model(**given).logits.float(), labels=ids, num_items_in_batch=1.0)
                loss.backward()


def state_of(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> Counter[str]:
    """Bytes by kind that wrapper and optimizer hold on the device after a step."""
    held: Counter[str] = Counter()
    for chunk in chunks:
        for buffer in chunk.engine.buffers:
            held[GRADIENTS] += buffer.grad_data.nbytes
            held[POOL] += 0 if buffer.pool is None else buffer.pool.memory.nbytes
        units = chunk.engine.params.units
        if units:
            held[PARAMETERS] += sum(unit.shard.nbytes for unit in units if unit.tier is None)
            held[GATHERED] += 0
        else:
            mapped = [buffer.param_data for buffer in chunk.engine.buffers if buffer.param_data is not None]
            held[PARAMETERS] += sum(values.nbytes for values in mapped)
            others = chunk.engine.plan.frozen if mapped else dict(chunk.named_parameters())
            storages = {param.untyped_storage().data_ptr(): param.untyped_storage() for param in others.values()}
            held[PARAMETERS] += sum(storage.nbytes() for storage in storages.values())
    for masters in (masters for masters in optimizer.masters if masters.tier is None):
        held[MASTERS] += masters.kept.nbytes
        held[MOMENTS] += sum(kept.nbytes for segment in masters.segments for kept in segment.moments.values())
        for segment in masters.segments:
            state = optimizer.state[segment.master]
            held[MOMENTS] += sum(
                value.nbytes for key, value in state.items() if key != "step" and key not in segment.moments
            )
    return held


def files_of(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> Counter[str]:
    """Bytes by kind that they hold in files, after a step."""
    held: Counter[str] = Counter()
    for chunk in chunks:
        held[GRADIENTS] += sum(memory.nbytes for buffer in chunk.engine.buffers for memory in buffer.offloaded)
        units = chunk.engine.params.units
        held[PARAMETERS] += sum(unit.shard.nbytes for unit in units if unit.tier is not None)
    for masters in (masters for masters in optimizer.masters if masters.tier is not None):
        held[MASTERS] += masters.kept.nbytes
        held[MOMENTS] += sum(memory.nbytes for memory in masters.offloaded.values())
    return held


def peak_of(run: Callable[[], object], known: Iterable[torch.Tensor], *, alone: bool) -> int:
    """The most bytes of tensors that are alive at once while a function runs, without those of `known` tensors.

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
