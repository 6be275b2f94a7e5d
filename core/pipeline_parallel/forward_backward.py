"""Megatron's pipeline interface: ``get_forward_backward_func`` and forward_step_func(data_iterator, model)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from core import parallel_state
from core.groups.process_groups import ProcessGroups
from core.pipeline_parallel.gpt_stages import gpt_activations
from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.runner import MicrobatchLoss, PipelineRunner
from core.pipeline_parallel.schedules import find_schedule

# (data iterator, chunk) -> (output, loss function); loss function: output -> (loss, report) or (sum, tokens, report)
ForwardStepFunc = Callable[[Any, nn.Module], tuple[Tensor, Callable[[Tensor], tuple[Any, ...]]]]

RUNNER = "pipeline_runner"  # attribute of the first chunk that caches the runner between steps


def get_forward_backward_func(schedule: str | None = None) -> Callable[..., list[Any]]:
    """Return the function that runs forward and backward over a step's microbatches.

        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterator, model=chunks,
            num_microbatches=8, seq_length=1024, micro_batch_size=4,
        )

    Args:
        schedule (str): A name from SCHEDULES. Defaults to 1F1B, or to Interleaved1F1B if the model has several chunks.
    """

    def forward_backward(
        *,
        forward_step_func: ForwardStepFunc,
        data_iterator: Iterator[Any] | Sequence[Iterator[Any]] | None,
        model: nn.Module | Sequence[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        pg_collection: ProcessGroups | None = None,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """Run forward and backward of all microbatches. Collective over the pipeline.

        ``config.finalize_model_grads_func`` is called at the end if it is set. Otherwise call ``finalize_model_grads``
        yourself.

        Args:
            forward_step_func: Called for every chunk and microbatch. If its loss function returns (loss, report),
                losses are averaged over microbatches and multiplied by the context-parallel size. If it returns (sum,
                num_tokens, report), they are averaged over tokens.
            data_iterator: One iterator, or a list with one per chunk.
            model: One chunk, or a list of chunks.
            num_microbatches: Number of microbatches per step.
            seq_length: Length of the full sequence.
            micro_batch_size: Number of sequences per microbatch.
            decoder_seq_length: Must be ``None`` or equal to ``seq_length``.
            forward_only: Compute losses without gradients.
            pg_collection: Process groups. Defaults to those of the first chunk, or else of ``parallel_state``.
            force_all_reduce: Passed to the finalize function.

        Returns:
            The report of each microbatch on the last stage, and [] on other stages.
        """
        chunks = list(model) if isinstance(model, Sequence) else [model]
        if decoder_seq_length not in (None, seq_length):
            raise ValueError(
                f"decoder_seq_length is {decoder_seq_length} and seq_length {seq_length}; models with an encoder are "
                "not supported, leave it out"
            )
        iterators = list(data_iterator) if isinstance(data_iterator, (list, tuple)) else [data_iterator] * len(chunks)
        if len(iterators) != len(chunks):
            raise ValueError(f"{len(iterators)} data iterators for {len(chunks)} model chunks; give one for each")
        runner = _runner_of(chunks, schedule, pg_collection)
        runner.forward_step = DrawingStep(runner, forward_step_func, iterators)
        several = runner.layout.num_stages > 1  # one stage sends nothing, and may be any model
        runner.activations = gpt_activations(runner.config, micro_batch_size, seq_length) if several else []
        microbatches = [None] * num_microbatches
        if forward_only:
            return runner.evaluate(microbatches).reports
        finalize = getattr(runner.config, "finalize_model_grads_func", None) is not None
        return runner.step(microbatches, finalize=finalize, force_all_reduce=force_all_reduce).reports

    return forward_backward


def _runner_of(chunks: list[nn.Module], schedule: str | None, groups: ProcessGroups | None) -> PipelineRunner:
    name = schedule or ("1F1B" if len(chunks) == 1 else "Interleaved1F1B")
    kept: PipelineRunner | None = getattr(chunks[0], RUNNER, None)
    if kept is not None and kept.kind is find_schedule(name) and _same(kept.chunks, chunks):
        return kept
    pg = groups or getattr(chunks[0], "groups", None) or parallel_state.get_process_groups()
    pp = pg.size("pp")
    # The layers of a chunk are up to the model here.
    layout = PipelineLayout((0,) * (pp * len(chunks)), pp, find_schedule(name).placement)
    runner = PipelineRunner(chunks, layout, _no_step, (), schedule=name, pg_collection=pg)
    setattr(chunks[0], RUNNER, runner)
    return runner


def _same(kept: Sequence[nn.Module], given: Sequence[nn.Module]) -> bool:
    return len(kept) == len(given) and all(a is b for a, b in zip(kept, given, strict=True))


def _no_step(chunk: nn.Module, microbatch: Any, hidden: Any) -> Any:
    raise RuntimeError("the forward step is set by every call")


class DrawingStep:
    """Forward step of a runner whose user function draws microbatches from ``iterators``, one per chunk.

    ``position`` is the index of the running chunk.
    """

    def __init__(self, runner: PipelineRunner, func: ForwardStepFunc, iterators: list[Any]) -> None:
        self.runner = runner
        self.func = func
        self.iterators = iterators
        self.position_of = {id(chunk): position for position, chunk in enumerate(runner.chunks)}
        self.position = 0

    def __call__(self, chunk: nn.Module, _microbatch: Any, hidden: Any) -> Any:
        runner = self.runner
        self.position = self.position_of[id(chunk)]
        inner = _takes_input(chunk)
        inner.set_input_tensor(hidden)
        try:
            output, loss_func = self.func(self.iterators[self.position], chunk)
        except StopIteration:
            raise ValueError(
                f"the data iterator of model chunk {self.position} has no microbatch left for forward_step_func; a "
                "call draws num_microbatches from each iterator, so give it a new one each epoch, on all ranks alike"
            ) from None
        inner.set_input_tensor(None)
        if runner.stage_numbers[self.position] < runner.layout.num_stages - 1:
            return output
        loss = loss_func(output)
        if len(loss) == 2:
            return MicrobatchLoss(loss[0] * runner.groups.size("cp"), None, loss[1])
        return MicrobatchLoss(*loss)


def _takes_input(chunk: nn.Module) -> Any:
    part: Any = chunk
    while not hasattr(part, "set_input_tensor"):
        if not hasattr(part, "module"):
            raise ValueError(
                f"a model chunk is a {type(part).__name__} without set_input_tensor(hidden), which receives the "
                "previous stage's output; add the method to it"
            )
        part = part.module
    return part
