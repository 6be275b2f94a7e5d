"""Trainer: one step of training, and the validation loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from core.context_parallel import split_sequence
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.groups.process_groups import ProcessGroups
from core.moe import auxiliary_loss_scale
from core.optimizer import MegatronOptimizer
from core.optimizer.optimizer_param_scheduler import OptimizerParamScheduler
from core.pipeline_parallel import PipelineRunner, gpt_activations
from core.watch.waiting import complete, waiting
from core_plan.job.config import JobConfig
from core_plan.job.plan import JobPlan
from core_train.mfu import flops_of_token
from core_train.sampler import GlobalBatchSampler, microbatches
from core_train.step_trace import Span, StepTrace
from core_train.tokens import Tokens, num_windows, window

Batch = tuple[torch.Tensor, ...]  # inputs, labels, ... [windows, tokens of this context rank]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step. Only the trace differs between ranks."""

    loss: float  # nats per byte, or per token if the text is unknown
    grad_norm: float | None
    lr: float
    updated: bool
    stop: bool  # some rank was asked to stop
    trace: StepTrace
    loss_scale: float = 1.0  # scale of the gradients


class Trainer:
    """A GPT, unsplit or in stages, trained on windows of one long text.

    Collective: every rank must call every method.

    Attributes:
        step: Number of steps done.
        windows: Number of windows to train on, and to validate on.
        flops_per_token: Operations of forward and backward.
    """

    def __init__(
        self,
        config: JobConfig,
        plan: JobPlan,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        tokens: Tokens,
        groups: ProcessGroups,
        device: torch.device,
        runner: PipelineRunner | None = None,
        *,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self.config = config
        self.plan = plan
        self.chunks = list(chunks)  # this rank's model, or its stages of a pipeline
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.tokens = tokens
        self.groups = groups
        self.device = device
        self.runner = runner  # runner of the pipeline, if any
        self.length = config.model.sequence_length
        self.windows = num_windows(tokens.train, self.length), num_windows(tokens.validation, self.length)
        self.sampler = GlobalBatchSampler(self.windows[0], config.run.global_batch_size, config.run.seed)
        self.step = 0
        self.flops_per_token = flops_of_token(config.model, config.model.vocab_size or tokens.header.vocab_size)

    def train_step(self, *, stop_requested: bool = False) -> StepResult:
        """Run one optimizer step on the next global batch."""
        trace = StepTrace(dist.get_rank(), self.step + 1)
        with trace.span("data"):
            indices = self.sampler.next_global_batch()
            parts = microbatches(indices, self.groups.rank("dp"), self.plan.dp, self.plan.micro_batch_size)
            batches = [self.batch(self.tokens.train, part) for part in parts]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        scale = float(self.optimizer.get_loss_scale())
        # the grad_scale_func of a pipeline knows the scale
        total = self._run_whole(batches, scale, trace) if self.runner is None else self._run_pipeline(batches, trace)
        with trace.span("finalize"):
            finalize_model_grads(self.chunks)
        trace.buckets = [event for chunk in self.chunks for event in chunk.step_report().events]
        lr = self.scheduler.get_lr({})
        with trace.span("optimizer"):
            updated, grad_norm, _ = self.optimizer.step()
            if updated:
                self.scheduler.step(increment=self.config.run.global_batch_size)
        trace.gathers = [event for chunk in self.chunks for event in chunk.param_sync.events()]
        with trace.span("loss"):
            rank_tokens = sum(labels.numel() for _, labels in batches)
            loss, stop = self._mean_over_ranks(total, rank_tokens, stop_requested)
        self.step += 1
        return StepResult(loss, grad_norm, lr, updated, stop, trace, scale)

    @torch.no_grad()
    def validation_loss(self, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Return the mean loss over windows spread evenly over the validation text.

        None if the text has no window, or if ``stop``, which all ranks call before each batch, returned True.
        """
        available = self.windows[1]
        count = min(available, self.config.run.validation_windows)
        if count == 0:
            return None
        indices = np.linspace(0, available - 1, count).astype(np.int64)
        mine = indices[self.groups.rank("dp") :: self.plan.dp]  # data ranks may have different numbers of them
        size = self.plan.micro_batch_size
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        rank_tokens = 0
        loss: float | None = None
        for chunk in self.chunks:
            chunk.eval()
        # Data ranks share experts, so all run equally many forwards; a rank without a window repeats the first one.
        for start in range(0, -(-count // self.plan.dp), size):
            if stop():
                break
            part = mine[start : start + size]
            batch = self.batch(self.tokens.validation, part if len(part) else indices[:1])
            losses = self.token_losses(batch)
            if len(part):
                total += losses
                rank_tokens += batch[1].numel()
        else:
            loss, _ = self._mean_over_ranks(total, rank_tokens, False)
        for chunk in self.chunks:
            chunk.train()
        return loss

    def _mean_over_ranks(self, total: torch.Tensor, rank_tokens: int, stop: bool) -> tuple[float, bool]:
        """Return the mean loss over all ranks' tokens, and whether any rank wants to stop, in one all-reduce.

        Tensor-parallel ranks contribute equal sums and counts, which leaves the ratio unchanged.
        """
        sums = torch.stack([total, total.new_tensor(float(rank_tokens)), total.new_tensor(float(stop))])
        with waiting("the mean loss", dist.group.WORLD):
            work = dist.all_reduce(sums, async_op=True)
            complete(work, None) if sums.is_cpu else work.wait()
        loss, tokens, stops = sums.tolist()
        return loss / tokens / self.tokens.header.bytes_per_token, stops > 0

    def _run_whole(self, batches: Sequence[Batch], loss_scale: float, trace: StepTrace) -> torch.Tensor:
        """Run forward and backward of a model that is not split into stages; return the sum of its tokens' losses."""
        (model,) = self.chunks
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        weight = loss_scale / len(batches)
        for number, (inputs, labels) in enumerate(batches, start=1):
            is_last = number == len(batches)
            with nullcontext() if is_last else model.no_sync():
                with trace.span("forward"):
                    losses = model(inputs, labels=labels)  # [windows, tokens]
                    total += losses.detach().double().sum()
                # The wrapper takes the mean over data and context ranks, which have equally many tokens, so this is
                # the mean over the global batch.
                with trace.span("backward"), auxiliary_loss_scale(weight):
                    (losses.mean() * weight).backward()
        return total

    def _run_pipeline(self, batches: Sequence[Batch], trace: StepTrace) -> torch.Tensor:
        """Run forward and backward of a pipeline; return the sum of its tokens' losses on all stages."""
        assert self.runner is not None, "only called with a runner"
        outcome = self.runner.step([_named(batch) for batch in batches], finalize=False)
        trace.spans.extend(Span(event.work, event.start_s, event.end_s) for event in self.runner.events)
        return outcome.loss * sum(labels.numel() for _, labels in batches)

    def token_losses(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the tokens' losses, without gradients."""
        inputs, labels = batch
        if self.runner is None:
            losses: torch.Tensor = self.chunks[0](inputs, labels=labels)
            return losses.double().sum()
        shape = gpt_activations(self.chunks[0].config, len(inputs), self.length)
        return self.runner.evaluate([_named((inputs, labels))], activations=shape).loss * labels.numel()

    def batch(self, tokens: np.ndarray, indices: np.ndarray) -> Batch:
        """Return inputs and labels [windows, sequence_length / cp] of int64 at this context rank's positions."""
        windows = torch.from_numpy(np.stack([window(tokens, int(index), self.length) for index in indices]))
        windows = windows.to(self.device)
        cp, cp_rank = self.groups.size("cp"), self.groups.rank("cp")
        # Labels are shifted before the split, so that the last token of a chunk keeps its label.
        parts = (split_sequence(whole, 1, cp, cp_rank) for whole in (windows[:, :-1], windows[:, 1:]))
        inputs, labels = (part.contiguous() for part in parts)
        return inputs, labels


def _named(batch: Batch) -> dict[str, torch.Tensor]:
    return {"tokens": batch[0], "labels": batch[1]}
