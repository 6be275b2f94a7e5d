"""Trainer: one step of training, and the validation loss. What a user's own loop would look like, with a clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

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
from core_plan.job.config import JobConfig, RunConfig
from core_plan.job.plan import BatchPlan, JobPlan
from core_train.mfu import flops_of_token
from core_train.sampler import GlobalBatchSampler, microbatches
from core_train.step_trace import Span, StepTrace
from core_train.token_file import TokenFile, num_windows, window

Batch = tuple[torch.Tensor, ...]  # inputs, labels, ... [windows, tokens of this context rank]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step, the same on every rank but for the trace."""

    loss: float  # in the trainer's unit
    grad_norm: float | None
    lr: float
    updated: bool
    stop: bool  # some rank was asked to stop
    trace: StepTrace
    loss_scale: float = 1.0  # scale of the gradients
    metrics: Mapping[str, float] = field(default_factory=dict)  # means of what else the job counts


class Trainer:
    """Parts of a run that a step needs. Collective: every rank must call every method.

    Subclasses define a batch, and the losses of a model for a batch.
    """

    unit = "nats per token"  # unit of the displayed losses
    flops_per_token: float | None = None  # operations, forward and backward; None where they are not counted
    dtype = "float32"  # dtype of the parameters
    tokens_per_unit = 1.0  # a loss that is shown is the mean of the tokens' losses over this
    metric_names: tuple[str, ...] = ()  # names of the sums after the sum of the losses, if any

    def __init__(
        self,
        config: RunConfig,
        plan: BatchPlan,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        tokens: Any,
        groups: ProcessGroups,
        device: torch.device,
        *,
        scheduler: OptimizerParamScheduler,
        windows: tuple[int, int],
    ) -> None:
        """tokens: the data; its `header` describes it. windows: how many there are to train on, and to validate on."""
        self.config = config
        self.plan = plan
        self.chunks = list(chunks)  # this rank's model, or its stages of a pipeline
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.tokens = tokens
        self.groups = groups
        self.device = device
        self.windows = windows
        self.sampler = GlobalBatchSampler(windows[0], config.run.global_batch_size, config.run.seed)
        self.step = 0  # steps done
        self.validation_metrics: dict[str, float] = {}  # metrics of the last validation

    def train_step(self, *, stop_requested: bool = False) -> StepResult:
        """One optimizer step over the next global batch."""
        trace = StepTrace(dist.get_rank(), self.step + 1)
        with trace.span("data"):
            indices = self.sampler.next_global_batch()
            parts = microbatches(indices, self.groups.rank("dp"), self.plan.dp, self.plan.micro_batch_size)
            batches = [self.batch(self.tokens.train, part) for part in parts]
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        scale = float(self.optimizer.get_loss_scale())
        total = self.run_batches(batches, indices, scale, trace)
        with trace.span("finalize"):
            self.finalize_gradients()
        trace.buckets = [event for chunk in self.chunks for event in chunk.step_report().events]
        lr = self.scheduler.get_lr({})
        with trace.span("optimizer"):
            updated, grad_norm, _ = self.optimizer.step()
            if updated:
                self.scheduler.step(increment=self.config.run.global_batch_size)
        trace.gathers = [event for chunk in self.chunks for event in chunk.param_sync.events()]
        with trace.span("loss"):
            rank_tokens = sum(self.counted_tokens(batch) for batch in batches)
            loss, stop, metrics = self._mean_over_ranks(total, rank_tokens, stop_requested)
        self.step += 1
        return StepResult(loss, grad_norm, lr, updated, stop, trace, scale, metrics)

    def finalize_gradients(self) -> None:
        """Wait for the gradients of a step, and finalize them."""
        finalize_model_grads(self.chunks)

    def batch(self, tokens: Any, indices: np.ndarray) -> Batch:
        """The tensors of some windows, on this rank's device; labels are the second."""
        raise NotImplementedError

    def run_batches(
        self, batches: Sequence[Batch], indices: np.ndarray, loss_scale: float, trace: StepTrace
    ) -> torch.Tensor:
        """Run forward and backward of this rank's microbatches.

        Args:
            batches: The microbatches.
            indices: Windows of the global batch.
            loss_scale: Factor of each loss.
            trace: Recorder of the step, if any.

        Returns:
            Sum of the tokens' losses. With `metric_names` [1 + metrics], with the metrics' sums.
        """
        raise NotImplementedError

    def token_losses(self, batch: Batch) -> torch.Tensor:
        """As `run_batches` of one microbatch, without gradients."""
        raise NotImplementedError

    def counted_tokens(self, batch: Batch) -> int:
        """Number of tokens of a batch that have a loss."""
        return batch[1].numel()

    @torch.no_grad()
    def validation_loss(self, stop: Callable[[], bool] = lambda: False) -> float | None:
        """Mean loss over windows spread evenly over the validation text; None when it holds no window.

        stop: asked before each batch, with the same answer on all ranks; True ends the validation without a loss.
        """
        available = self.windows[1]
        count = min(available, self.config.run.validation_windows)
        if count == 0:
            return None
        indices = np.linspace(0, available - 1, count).astype(np.int64)
        mine = indices[self.groups.rank("dp") :: self.plan.dp]  # data ranks may have different numbers of them
        size = self.plan.micro_batch_size
        total = torch.zeros(1 + len(self.metric_names), dtype=torch.float64, device=self.device)
        rank_tokens = 0
        loss: float | None = None
        for chunk in self.chunks:
            chunk.eval()
        # Experts are shared by data ranks: all of them run as many forwards, the last of some with a window for show.
        for start in range(0, -(-count // self.plan.dp), size):
            if stop():
                break
            part = mine[start : start + size]
            batch = self.batch(self.tokens.validation, part if len(part) else indices[:1])
            losses = self.token_losses(batch)
            if len(part):
                total += losses
                rank_tokens += self.counted_tokens(batch)
        else:
            loss, _, self.validation_metrics = self._mean_over_ranks(total, rank_tokens, False)
        for chunk in self.chunks:
            chunk.train()
        return loss

    def _mean_over_ranks(
        self, total: torch.Tensor, rank_tokens: int, stop: bool
    ) -> tuple[float, bool, dict[str, float]]:
        """Average the loss over all ranks in one all-reduce of the world.

        Tensor-parallel ranks contribute equal sums and counts, which leaves the ratio unchanged.

        Args:
            total: Sum of the losses, or [1 + metrics] with the metrics' sums.
            rank_tokens: Number of tokens on this rank.
            stop: True if this rank wants to stop.

        Returns:
            The loss in `unit` over all ranks' tokens, whether any rank wants to stop, and the means of the metrics.
        """
        sums = torch.cat([total.reshape(-1), total.new_tensor([float(rank_tokens), float(stop)])])
        with waiting("the mean loss", dist.group.WORLD):
            work = dist.all_reduce(sums, async_op=True)
            complete(work, None) if sums.is_cpu else work.wait()
        loss, *metrics = (sums[:-2] / sums[-2]).tolist()
        named = dict(zip(self.metric_names, metrics, strict=True))
        return loss / self.tokens_per_unit, bool(sums[-1] > 0), named


class GptTrainer(Trainer):
    """Trainer of a GPT, unsplit or in stages, on windows of one long text."""

    unit = "nats per byte"

    def __init__(
        self,
        config: JobConfig,
        plan: JobPlan,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        tokens: TokenFile,
        groups: ProcessGroups,
        device: torch.device,
        runner: PipelineRunner | None = None,
        *,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self.length = config.model.sequence_length
        windows = num_windows(tokens.train, self.length), num_windows(tokens.validation, self.length)
        super().__init__(config, plan, chunks, optimizer, tokens, groups, device, scheduler=scheduler, windows=windows)
        self.runner = runner  # runner of the pipeline, if any
        self.tokens_per_unit = tokens.header.bytes_per_token
        self.unit = tokens.header.loss_unit
        self.flops_per_token = flops_of_token(config.model, config.model.vocab_size or tokens.header.vocab_size)
        self.dtype = config.model.dtype

    def run_batches(
        self, batches: Sequence[Batch], indices: np.ndarray, loss_scale: float, trace: StepTrace
    ) -> torch.Tensor:
        """Forward and backward; the sum of this rank's tokens' losses."""
        if self.runner is None:
            return self._run_whole(batches, loss_scale, trace)
        return self._run_pipeline(batches, trace)  # its grad_scale_func knows the scale

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
        """The same through the stages of a pipeline; all of them learn the sum."""
        assert self.runner is not None, "only called with a runner"
        outcome = self.runner.step([_named(batch) for batch in batches], finalize=False)
        trace.spans.extend(Span(event.work, event.start_s, event.end_s) for event in self.runner.events)
        return outcome.loss * sum(labels.numel() for _, labels in batches)

    def token_losses(self, batch: Batch) -> torch.Tensor:
        """The sum of the tokens' losses, without gradients."""
        inputs, labels = batch
        if self.runner is None:
            losses: torch.Tensor = self.chunks[0](inputs, labels=labels)
            return losses.double().sum()
        shape = gpt_activations(self.chunks[0].config, len(inputs), self.length)
        return self.runner.evaluate([_named((inputs, labels))], activations=shape).loss * labels.numel()

    def batch(self, tokens: np.ndarray, indices: np.ndarray) -> Batch:
        """Inputs and labels [windows, sequence_length / cp] of int64: this context rank's positions."""
        windows = torch.from_numpy(np.stack([window(tokens, int(index), self.length) for index in indices]))
        windows = windows.to(self.device)
        cp, cp_rank = self.groups.size("cp"), self.groups.rank("cp")
        # Labels are shifted before the split, so that the last token of a chunk keeps its label.
        parts = (split_sequence(whole, 1, cp, cp_rank) for whole in (windows[:, :-1], windows[:, 1:]))
        inputs, labels = (part.contiguous() for part in parts)
        return inputs, labels


def _named(batch: Batch) -> dict[str, torch.Tensor]:
    return {"tokens": batch[0], "labels": batch[1]}
