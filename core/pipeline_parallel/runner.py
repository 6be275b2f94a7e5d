"""PipelineRunner: one training step through a pipeline, from microbatches to fully reduced gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.distributed.finalize_model_grads import divisor_of_tokens
from core.distributed.reduce.grad_reducer import StepState
from core.groups.process_groups import ProcessGroups
from core.moe import auxiliary_loss_scale
from core.pipeline_parallel.chunk_sync import ChunkSync, func_of_chunk
from core.pipeline_parallel.forward_only import forward_only
from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.schedules import (
    actions_of,
    arrivals,
    build_schedule,
    check_microbatches,
    check_schedule,
    find_schedule,
)
from core.pipeline_parallel.stage import LOSS, LOSS_DTYPE, Stage, StageEvent, check_sent
from core.pipeline_parallel.stage_errors import StageErrors, placeholders
from core.watch.waiting import add_wait, calling, in_short, waiting


@dataclass(frozen=True, slots=True)
class MicrobatchLoss:
    """Return value of a forward step on the last stage. A plain tensor is equivalent to ``MicrobatchLoss(tensor)``.

    Attributes:
        value: 0-dim tensor with a graph: the mean over the microbatch, or the sum over ``num_tokens`` if given.
        num_tokens: Sum of the loss mask, which need not be an integer. Under context parallelism, ``value`` and
            ``num_tokens`` cover this rank's positions; the runner sums a microbatch's tokens over group 'cp'.
        report: Any object, which the step returns on the last stage.
    """

    value: Tensor
    num_tokens: Tensor | float | None = None
    report: Any = None


# (chunk, microbatch, hidden of the stage before, None on the first) -> hidden; MicrobatchLoss or a tensor on the last
ForwardStep = Callable[[nn.Module, Any, Any], Any]
Activations = Sequence[Tensor] | Callable[[int], Sequence[Tensor]]


@dataclass(slots=True)
class StepOutcome:
    """Loss of one step.

    ``loss`` and ``num_tokens`` are the same on all stages. ``losses`` and ``reports`` are filled on the last stage
    only.

    Attributes:
        loss: Unscaled mean over the microbatches, or over their tokens with calculate_per_token_loss.
        num_tokens: Number of tokens at this rank's positions, 0-dim fp64 because a loss mask may have weights. ``None``
            without calculate_per_token_loss.
        losses: One loss per microbatch. Like ``loss``, they cover full sequences, so they are equal on all
            context-parallel ranks.
        reports: One report per microbatch.
    """

    loss: Tensor
    num_tokens: Tensor | None
    losses: list[Tensor] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)


class PipelineRunner:
    """Runs training steps of this rank's pipeline chunks under one of torch's schedules.

    A step runs forward and backward of all microbatches and completes the gradients, so that the optimizer can follow.
    The runner wraps ``torch.distributed.pipelining`` and adds the data-parallel reduction, tied embeddings, losses per
    token and errors that name their stage.

        layout = plan_pipeline(config.num_layers, pp=2, microbatches=8)
        chunks = wrap_stages(config, ddp_config, build_gpt_stages(config, layout))
        activations = gpt_activations(config, 4, 128)
        runner = PipelineRunner(chunks, layout, gpt_forward_step, activations)
        for batches in data:
            for chunk in chunks:
                chunk.zero_grad_buffer()
            loss = runner.step(batches).loss
            optimizer.step()

    Args:
        chunks: This rank's chunks, in model order. Wrapped chunks overlap their reduction with the step.
        layout: Pipeline layout.
        forward_step: Called as forward_step(chunk, microbatch, hidden); see ForwardStep.
        activations: Meta tensors with the shape and dtype of a stage's output, or a function that maps the sending
            stage to them.
        schedule: A name from SCHEDULES.
        config (ModelParallelConfig, optional): Read for its callbacks and calculate_per_token_loss. Defaults to the
            first chunk's.
        pg_collection: Process groups with 'pp'. Defaults to those of the first chunk, or else of ``parallel_state``.

    Raises:
        ValueError: If the arguments contradict each other. Raised before any communication.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        layout: PipelineLayout,
        forward_step: ForwardStep,
        activations: Activations,
        *,
        schedule: str = "1F1B",
        config: Any = None,
        pg_collection: ProcessGroups | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.layout = layout
        self.forward_step = forward_step
        self.activations = activations
        self.kind = find_schedule(schedule)
        check_schedule(self.kind, layout)
        self.config: Any = config if config is not None else getattr(self.chunks[0], "config", None)
        self.groups = pg_collection or getattr(self.chunks[0], "groups", None) or parallel_state.get_process_groups()
        self.group = self.groups.require("pp")
        layout.check_ranks(self.groups)
        self.stage_numbers = layout.stages_of(self.groups.rank("pp"))
        if len(self.chunks) != len(self.stage_numbers):
            raise ValueError(
                f"pipeline rank {self.groups.rank('pp')} holds stages {list(self.stage_numbers)} and was given "
                f"{len(self.chunks)} chunks; give one module a stage, in this order"
            )
        params = (param for chunk in self.chunks for param in chunk.parameters())
        self.device = next((param.device for param in params), torch.device("cpu"))
        self.per_token = bool(getattr(self.config, "calculate_per_token_loss", False))
        self.param_syncs = self._param_syncs()
        self.owners = _owners_of_borrowed(self.chunks)
        self.syncs = [self._sync_of(position) for position in range(len(self.chunks))]
        self.events: list[StageEvent] = []  # events of the last step, in order
        self.errors = StageErrors(self.groups)
        self._built: tuple[Any, Any, list[Stage]] | None = None
        self.steps = 0
        self._begin([])

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(
        self,
        microbatches: Sequence[Any],
        *,
        finalize: bool = True,
        force_all_reduce: bool = False,
        activations: Activations | None = None,
    ) -> StepOutcome:
        """Run forward and backward of all microbatches, then the final reductions. Collective over the full model.

        Args:
            microbatches (Sequence[Any]): One entry per microbatch, equally many on every rank. Only the first and the
                last stage read them, so other stages may pass placeholders.
            finalize (bool): Call ``config.finalize_model_grads_func``, or ``finalize_model_grads`` if it is ``None``.
            force_all_reduce (bool): Passed to the finalize function.
            activations (Activations): Activations of this step, if they differ from the runner's.

        Raises:
            Exception: The error of any stage, after the last message of the step. Ranks of other stages raise a
                ValueError, TypeError, NotImplementedError or RuntimeError that names it. The step's gradients are
                dropped. If they were added to earlier ones, or data ranks share them, they are rejected until they are
                zeroed.
        """
        check_microbatches(self.kind, self.layout, len(microbatches))
        schedule, stages = self._schedule(len(microbatches), activations or self.activations)
        self._begin(microbatches)
        self.events.clear()
        self.steps += 1
        wrapped = [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]
        reducers = [chunk.reducer for chunk in wrapped]
        adds = any(reducer.state is not StepState.ACCUMULATING or reducer.gradients for reducer in reducers)
        try:
            for sync, stage in zip(self.syncs, stages, strict=True):
                sync.begin()
                stage.begin_step(len(microbatches))
            for param_sync in self.param_syncs[:2]:
                param_sync()
            # The target only numbers the microbatches: the last stage's output is its loss already.
            with (
                auxiliary_loss_scale(self._weight_of_a_loss()),
                calling(f"PipelineRunner.step with {len(microbatches)} microbatches", self.steps),
                self.errors.waits_ended(),
                waiting("the activations or gradients of a microbatch", self.group, computes=True),
            ):
                begun_s = time.perf_counter()
                schedule.step(target=torch.arange(len(microbatches), device="cpu"), losses=[], return_outputs=False)
                for stage in stages:
                    stage.end_step()
                worked_s = sum(event.end_s - event.start_s for event in self.events)
                add_wait(time.perf_counter() - begun_s - worked_s)
                error = self.errors.agreed()
        finally:
            for sync in self.syncs:
                sync.leave()
        func = getattr(self.config, "finalize_model_grads_func", None) or finalize_model_grads
        finish = partial(func, self.chunks, pg_collection=self.groups, force_all_reduce=force_all_reduce)
        if error is not None:
            self._give_up(wrapped, error, adds=adds, finish=finish if finalize else None)
            raise error
        outcome = self._outcome()
        if finalize:
            finish(outcome.num_tokens)
        self._begin([])
        return outcome

    def _give_up(
        self, wrapped: Sequence[DistributedDataParallel], error: Exception, *, adds: bool, finish: Any
    ) -> None:
        """Drop the gradients of a failed step.

        If they were added to earlier steps' gradients (``adds``), they cannot be dropped separately, and the optimizer
        raises until all gradients are zeroed. ``finish`` reduces the gradients if the other data ranks will do so, else
        it is ``None``.
        """
        self._begin([])
        if not adds and not any(chunk.reducer.model_orders for chunk in wrapped):
            for chunk in wrapped:
                chunk.zero_grad_buffer()
            return
        for chunk in wrapped:
            chunk.reducer.refusals = [
                f"a step of its pipeline has failed ({in_short(error)}), so its gradients are no sum over all "
                "microbatches. Call zero_grad_buffer() (or optimizer.zero_grad()) on all ranks, and continue"
            ]
        if finish is not None:
            with suppress(RuntimeError):  # it raises the same on all data ranks
                finish(torch.zeros((), dtype=torch.float64, device=self.device) if self.per_token else None)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any], *, activations: Activations | None = None) -> StepOutcome:
        """Compute the loss without gradients. Collective over the pipeline.

        Args:
            microbatches (Sequence[Any]): As in ``step``.
            activations (Activations, optional): As in ``step``.
        """
        check_microbatches(find_schedule("GPipe"), self.layout, len(microbatches))
        self._begin(microbatches)
        received = partial(self._received, activations or self.activations)
        runs = {stage: partial(self._run, i, received(stage + 1)) for i, stage in enumerate(self.stage_numbers)}
        with self.errors.waits_ended():
            forward_only(self.layout, runs, len(microbatches), received, self.group, self.device)
        error = self.errors.agreed()
        if error is not None:
            self._begin([])
            raise error
        outcome = self._outcome()
        self._begin([])
        return outcome

    def _begin(self, microbatches: Sequence[Any]) -> None:
        self.errors.begin()
        self.microbatches = microbatches
        self.losses: list[Tensor] = []
        self.reports: list[Any] = []
        self.tokens: list[Tensor | float | None] = []
        self.unfinished = [{i, *self.owners.get(i, ())} for i in range(len(self.chunks))]
        self.forwarded = [False] * len(self.chunks)

    def _run(self, position: int, sent: Sequence[Tensor], number: int, received: tuple[Tensor, ...]) -> Any:
        """Run one chunk's forward on one microbatch, or return placeholders shaped like the meta tensors ``sent`` if it
        fails.

        The last stage returns its scaled loss with shape [1].
        """
        stage = self.stage_numbers[position]
        with self.errors.kept("forward", stage, number):
            output = self._forward(position, number, received)
            if sent:
                check_sent(output, sent, stage)
            return output
        outputs = placeholders(sent or [LOSS], received, self.device)
        return outputs[0] if len(outputs) == 1 else outputs

    def _forward(self, position: int, number: int, received: tuple[Tensor, ...]) -> Any:
        if not self.forwarded[position]:
            self.forwarded[position] = True
            if position > 0 and position + 1 < len(self.param_syncs):
                self.param_syncs[position + 1]()
        hidden = None if not received else received[0] if len(received) == 1 else received
        is_last = self.stage_numbers[position] == self.layout.num_stages - 1
        with ExitStack() as stack:
            for lender, borrowers in self.owners.items():
                chunk = self.chunks[lender]
                if position in borrowers and isinstance(chunk, DistributedDataParallel):
                    stack.enter_context(chunk.reading())  # its parameters may be sharded
            output = self.forward_step(self.chunks[position], self.microbatches[number], hidden)
        if not is_last:
            return output
        loss = output if isinstance(output, MicrobatchLoss) else MicrobatchLoss(output)
        # Not a view: torch can then free its graph, and with it the microbatch's input, right after its backward.
        return torch.stack([self._record(loss, number).to(LOSS_DTYPE).reshape(())])

    def _record(self, loss: MicrobatchLoss, number: int) -> Tensor:
        value = loss.value
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"the forward step of the last stage gave {got} as the loss of microbatch {number}; expected one "
                "number: reduce it, or return MicrobatchLoss(sum, num_tokens)"
            )
        if self.per_token and loss.num_tokens is None:
            raise ValueError(
                "the config says calculate_per_token_loss, and the forward step of the last stage gave no num_tokens; "
                "return MicrobatchLoss(loss.sum(), num_tokens)"
            )
        if loss.num_tokens is not None and not self.per_token:
            value = value / self._share_of_tokens(loss.num_tokens)
        self.losses.append(value.detach().reshape(()).clone())
        self.tokens.append(loss.num_tokens)
        self.reports.append(loss.report)
        if not self.per_token:
            value = value / len(self.microbatches)
        grad_scale = getattr(self.config, "grad_scale_func", None)
        if grad_scale is not None and torch.is_grad_enabled():
            return grad_scale(value)
        for chunk in self.chunks if value.requires_grad else ():
            watch = chunk.reducer.scale_watch if isinstance(chunk, DistributedDataParallel) else None
            if watch is not None:
                watch.record_loss()
        return value

    def _share_of_tokens(self, num_tokens: Tensor | float) -> Tensor:
        """Return a microbatch's tokens over all context-parallel ranks, divided by the number of these ranks.

        The division compensates for the wrapper's mean over these ranks. Collective over group 'cp'.
        """
        tokens = torch.as_tensor(num_tokens, device=self.device)
        ranks = self.groups.size("cp")
        if ranks == 1:
            return divisor_of_tokens(tokens)
        total = tokens.detach().double().reshape(()).clone()
        self._add_over_context(total, "the number of a microbatch's tokens")
        return divisor_of_tokens(total) / ranks

    def _add_over_context(self, numbers: Tensor, what: str) -> None:
        group = self.groups.require("cp")
        with waiting(what, group):
            dist.all_reduce(numbers, group=group)

    def _weight_of_a_loss(self) -> Tensor:
        """Return the factor that ``_record`` applies to a microbatch's loss, for auxiliary losses of earlier stages."""
        share = 1.0 if self.per_token else 1.0 / len(self.microbatches)
        weight = torch.full((), share, dtype=LOSS_DTYPE, device=self.device)
        grad_scale = getattr(self.config, "grad_scale_func", None)
        return weight if grad_scale is None else grad_scale(weight)

    def _outcome(self) -> StepOutcome:
        """Broadcast the last stage's loss and tokens to all stages."""
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)  # losses, their tokens, this rank's tokens
        with calling("PipelineRunner.step", self.steps):
            if self.losses:
                totals[1:] = sum(
                    torch.as_tensor(n, device=self.device).double().sum() for n in self.tokens if n is not None
                )
                totals[0] = self._full_losses(totals[1])
            with waiting("the loss", self.group):
                dist.broadcast(totals, src=dist.get_global_rank(self.group, self.layout.last_rank), group=self.group)
        loss = totals[0] / (divisor_of_tokens(totals[1]) if self.per_token else len(self.microbatches))
        return StepOutcome(loss, totals[2] if self.per_token else None, self.losses, self.reports)

    def _full_losses(self, tokens: Tensor) -> Tensor:
        """Return the sum of the losses in fp64.

        Under context parallelism, update ``losses`` and ``tokens`` in place to cover full sequences.
        """
        ranks = self.groups.size("cp")
        losses = torch.stack(self.losses).double()
        if ranks > 1:
            numbers = torch.cat([losses, tokens.reshape(1)])
            self._add_over_context(numbers, "the losses")
            losses = numbers[:-1] if self.per_token else numbers[:-1] / ranks
            tokens.copy_(numbers[-1])
            self.losses = list(losses.to(self.losses[0].dtype))
        return losses.sum()

    # -- parts of a step ----------------------------------------------------------------------------------------------

    def _schedule(self, count: int, activations: Activations) -> tuple[Any, list[Stage]]:
        """Return torch's schedule, rebuilt only if the number of microbatches or the shapes change."""
        # The first stage receives nothing, so outputs are part of the key too.
        borders = [self._received(activations, stage + end) for stage in self.stage_numbers for end in (0, 1)]
        key = (count, [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in borders])
        if self._built is None or self._built[0] != key:
            stages = [self._stage(position, activations) for position in range(len(self.chunks))]
            schedule = build_schedule(self.kind, stages, count)
            orders = actions_of(schedule)
            if orders is not None:
                known = arrivals(orders.values())
                for stage in stages:
                    stage.arrived = known
                    stage.leaving, stage.leaving_back = stages[0].leaving, stages[0].leaving_back
            self._built = (key, schedule, stages)
        return self._built[1], self._built[2]

    def _stage(self, position: int, activations: Activations) -> Stage:
        number = self.stage_numbers[position]
        return Stage(
            self.chunks[position],
            number,
            self.layout,
            forward=partial(self._run, position, self._received(activations, number + 1)),
            received=self._received(activations, number),
            sent=self._received(activations, number + 1),
            errors=self.errors,
            before_last=self.syncs[position].last_backward,
            after_last=partial(self._backwards_done, position),
            events=self.events,
            group=self.group,
            device=self.device,
        )

    def _received(self, activations: Activations, stage: int) -> list[Tensor]:
        """Return meta tensors of a stage's inputs, or [] for the first stage and past the last."""
        if stage == 0 or stage == self.layout.num_stages:
            return []
        tensors = activations(stage - 1) if callable(activations) else activations
        return [
            torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.is_floating_point()) for t in tensors
        ]

    def _backwards_done(self, position: int) -> None:
        """Complete chunks whose own backwards, and those of chunks that borrow their weights, are done."""
        for sync, waits_for in zip(self.syncs, self.unfinished, strict=True):
            if position in waits_for:
                waits_for.remove(position)
                if not waits_for:
                    sync.complete()

    def _sync_of(self, position: int) -> ChunkSync:
        count = len(self.chunks)
        grad_sync = func_of_chunk(getattr(self.config, "grad_sync_func", None), "grad_sync_func", position, count)
        return ChunkSync(
            self.chunks[position],
            no_sync=func_of_chunk(getattr(self.config, "no_sync_func", None), "no_sync_func", position, count),
            # The first stage is the last one to finish: its buckets leave as they become ready, as Megatron's do.
            grad_sync=None if self.stage_numbers[position] == 0 else grad_sync,
            from_hooks=not self.kind.splits_backward and position not in self.owners,
        )

    def _param_syncs(self) -> list[Callable[[], Any]]:
        """Return each chunk's param_sync_func, or [] for one chunk, like Megatron's schedule."""
        funcs = getattr(self.config, "param_sync_func", None)
        count = len(self.chunks)
        if funcs is None or count == 1:
            return []
        made = [func_of_chunk(funcs, "param_sync_func", position, count) for position in range(count)]
        return [partial(f, c.parameters()) for f, c in zip(made, self.chunks, strict=True) if f is not None]


def _owners_of_borrowed(chunks: Sequence[nn.Module]) -> dict[int, list[int]]:
    """Map each chunk to other chunks that use one of its parameters (``borrowed_weights``), such as a tied
    embedding.
    """
    owners = {id(param): position for position, chunk in enumerate(chunks) for param in chunk.parameters()}
    borrowers: dict[int, list[int]] = {}
    for position, chunk in enumerate(chunks):
        for part in chunk.modules():
            for weight in getattr(part, "borrowed_weights", ()):
                owner = owners.get(id(weight), position)
                if owner != position:
                    borrowers.setdefault(owner, []).append(position)
    return borrowers
