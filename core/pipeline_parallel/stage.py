"""Stage: one of our model chunks as a stage of torch.distributed.pipelining."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from core.pipeline_parallel.layout import PipelineLayout
from core.tensor_parallel.deferred_weights import WeightWork, deferred_weight_gradients

Forward = Callable[[int, tuple[Tensor, ...]], Any]  # (microbatch, what the stage before sent) -> output or loss
LOSS_DTYPE = torch.float64  # holds any loss exactly; torch 2.11 compares it with what was declared


@dataclass(frozen=True, slots=True)
class StageEvent:
    """What a stage did for one microbatch, and when, in perf_counter seconds; on an accelerator, when it was asked to.

    work: 'forward', 'backward', or where weight gradients are put off 'input gradient' and 'weight gradient'.
    """

    work: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


class Stage(PipelineStage):
    """A stage whose shapes are declared, so that torch infers nothing by running the model.

    forward: runs the chunk on one microbatch. received, sent: meta tensors of what comes in and goes out.
    before_last: called before the backward that completes this stage's gradients; after_last: when they are complete.
    events: a list that grows by one entry for each thing that the stage does.
    """

    def __init__(
        self,
        chunk: nn.Module,
        index: int,
        layout: PipelineLayout,
        *,
        forward: Forward,
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        before_last: Callable[[], None],
        after_last: Callable[[], None],
        events: list[StageEvent],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        is_last = index == layout.num_stages - 1
        super().__init__(
            chunk,
            index,
            layout.num_stages,
            device,
            input_args=tuple(received),
            output_args=(torch.empty(1, dtype=LOSS_DTYPE, device="meta"),) if is_last else tuple(sent),
            group=group,
            dw_builder=self._take_weight_work,
        )
        self.run_chunk = forward
        self.sent = list(sent)
        self.before_last = before_last
        self.after_last = after_last
        self.events = events
        self.microbatch = 0
        self.backwards_left = 0  # of this step, counted where weight gradients are done
        self.weight_work: WeightWork = []

    def begin_step(self, microbatches: int) -> None:
        """So many backwards will come."""
        self.backwards_left = microbatches
        self.weight_work = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Note which microbatch it is; an error of the model leaves as it is, without torch's dump of the tensors."""
        self.microbatch = fwd_chunk_id
        try:
            with self._timed("forward", fwd_chunk_id):
                return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The chunk on this microbatch; the first stage takes its input from the data."""
        output = self.run_chunk(self.microbatch, args)
        if not self.is_last:
            check_sent(output, self.sent, self.stage_index)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any) -> Any:
        """Backward; without weight gradients of linear layers unless `full_backward`."""
        if full_backward:
            if self.backwards_left == 1:
                self.before_last()
            with self._timed("backward", bwd_chunk_id):
                super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, **kwargs)
            self._weights_done()
        else:
            with self._timed("input gradient", bwd_chunk_id), deferred_weight_gradients() as self.weight_work:
                super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=False, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """The weight gradients that a backward left for later."""
        with self._timed("weight gradient", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self._weights_done()

    @contextmanager
    def _timed(self, work: str, microbatch: int) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.events.append(StageEvent(work, self.stage_index, microbatch, start_s, time.perf_counter()))

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Without messages to this rank itself, which torch 2.11 posts where a V turns around and gloo refuses."""
        mine = dist.get_rank()
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != mine]

    def _take_weight_work(self) -> Callable[[], None]:
        work, self.weight_work = self.weight_work, []

        def run() -> None:
            with torch.no_grad():
                for product in work:
                    product()

        return run

    def _weights_done(self) -> None:
        self.backwards_left -= 1
        if self.backwards_left == 0:
            self.after_last()


def check_sent(output: Any, expected: Sequence[Tensor], stage: int) -> None:
    """Raise ValueError unless a stage gives what the next expects, which would wait for bytes that never come."""
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    got = [(list(t.shape), t.dtype) if isinstance(t, Tensor) else t for t in outputs]
    declared = [(list(t.shape), t.dtype) for t in expected]
    if got != declared:
        raise ValueError(
            f"stage {stage} was declared to send {declared} and its forward gives {got}; all microbatches of a step "
            "have one shape, the one given as `activations`"
        )
