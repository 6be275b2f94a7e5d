"""Stage: a model chunk as a stage of torch.distributed.pipelining."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.schedules import Arrivals, passed
from core.pipeline_parallel.stage_errors import StageErrors, not_finite
from core.tensor_parallel.deferred_weights import WeightWork, deferred_weight_gradients
from core.watch.waiting import PeerLost

Forward = Callable[[int, tuple[Tensor, ...]], Any]  # (microbatch, output of the previous stage) -> output or loss
LOSS_DTYPE = torch.float64  # holds any loss exactly; torch 2.11 compares it with what was declared
LOSS = torch.empty(1, dtype=LOSS_DTYPE, device="meta")


@dataclass(frozen=True, slots=True)
class StageEvent:
    """Timing of one stage's work on one microbatch. On an accelerator, the times are those of kernel launches.

    Attributes:
        work: 'forward' or 'backward', or 'input gradient' and 'weight gradient' if weight gradients are deferred.
        stage: Index of the stage.
        microbatch: Index of the microbatch.
        start_s: Start, in perf_counter seconds.
        end_s: End, in perf_counter seconds.
    """

    work: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


class Received(dict[int, Any]):
    """Map from a microbatch to torch's receive information, with memory allocated on demand.

    torch allocates memory for every microbatch of a step at once, and keeps it. Here it is allocated when a receive is
    posted. Before that, and after the stage has consumed the tensor, the buffer is a tensor on the meta device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Tensor | None] = []

    def __setitem__(self, microbatch: int, infos: Any) -> None:
        super().__setitem__(microbatch, infos)
        buffers = [getattr(info, "buffer", None) for info in infos]
        self.places = self.places or [
            None if buffer is None else torch.empty_like(buffer, device="meta", requires_grad=buffer.requires_grad)
            for buffer in buffers
        ]
        self.let_go(microbatch)

    def make(self, microbatch: int, device: torch.device) -> None:
        for info, place in zip(self[microbatch], self.places, strict=True):
            if place is not None:
                info.buffer = torch.empty_like(place, device=device, requires_grad=place.requires_grad)

    def let_go(self, microbatch: int) -> None:
        """Drop the reference to the memory. Autograd and the schedule keep it alive while they use it."""
        for info, place in zip(self[microbatch], self.places, strict=True):
            if place is not None:
                info.buffer = place


class Stage(PipelineStage):
    """Pipeline stage with declared shapes, so that torch does not run the model to infer them.

    Args:
        received: Meta tensors of the inputs.
        sent: Meta tensors of the outputs.
        before_last: Called before the backward that completes this stage's gradients.
        after_last: Called when this stage's gradients are complete.
        events: List to which the stage appends an event for each computation.
        errors: Keeps errors of backward until the end of the step.
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
        errors: StageErrors,
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
            output_args=(LOSS,) if is_last else tuple(sent),
            group=group,
            dw_builder=self._pop_weight_work,
        )
        self.inputs, self.gradients = Received(), Received()
        self.args_recv_info, self.grad_recv_info = self.inputs, self.gradients
        self.run_chunk = forward
        self.forms = list(received)
        self.errors = errors
        self.before_last = before_last
        self.after_last = after_last
        self.events = events
        self.microbatch = 0
        self.backwards_left = 0  # backwards of this step without complete weight gradients
        self.weight_work: WeightWork = []
        self.arrived: Arrivals | None = None  # None if torch waits for this stage's sends
        # (stage, microbatch) -> its sends of activations and of gradients in flight, for all stages of the rank
        self.leaving: dict[tuple[int, int], list[dist.Work]] = {}
        self.leaving_back: dict[tuple[int, int], list[dist.Work]] = {}
        self.posted: list[dist.P2POp] = []  # the last sends that torch waits for

    def begin_step(self, microbatches: int) -> None:
        self.backwards_left = microbatches
        self.weight_work = []
        self.leaving.clear()
        self.leaving_back.clear()

    def end_step(self) -> None:
        _let_go(self.leaving, list(self.leaving))
        _let_go(self.leaving_back, list(self.leaving_back))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a microbatch. Errors of the model are raised unchanged, without a dump of tensors."""
        self.microbatch = fwd_chunk_id
        if self.arrived is not None and not self.is_first:
            received = self.stage_index, fwd_chunk_id
            _let_go(self.leaving_back, [sent for sent in self.leaving_back if self.arrived.used(sent, received)])
            _let_go(self.leaving, [sent for sent in self.leaving if passed(sent, received)])
        with _unwrapped(), self._timed("forward", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.inputs.let_go(fwd_chunk_id)
        return output

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chunk on the current microbatch; the first stage takes its input from the data."""
        output = self.run_chunk(self.microbatch, args)
        if self.is_last:
            return output
        # Nothing else can have saved these tensors, so their values may be freed after the send.
        if isinstance(output, (tuple, list)):
            return tuple(_Leaving.apply(tensor) for tensor in output)
        return _Leaving.apply(output)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any) -> Any:
        """Run the backward of a microbatch, without weight gradients of linear layers unless ``full_backward`` is
        set.
        """
        if self.arrived is not None:
            used = self.arrived.outputs.get((self.stage_index, bwd_chunk_id), 0)
            _let_go(self.leaving, [sent for sent in self.leaving if sent[0] == self.stage_index and sent[1] < used])
        self.posted.clear()  # torch has waited for them, and keeps the list until the next ones
        if full_backward:
            if self.backwards_left == 1:
                self.before_last()
            with self._kept_backward(bwd_chunk_id, splits=False), _unwrapped(), self._timed("backward", bwd_chunk_id):
                super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, **kwargs)
            self._weights_done()
        else:
            timed = self._timed("input gradient", bwd_chunk_id)
            kept = self._kept_backward(bwd_chunk_id, splits=True)
            with kept, _unwrapped(), timed, deferred_weight_gradients() as self.weight_work:
                super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=False, **kwargs)
        self.gradients.let_go(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        kept = self.errors.kept("weight gradients", self.stage_index, bwd_chunk_id)
        with kept, _unwrapped(), self._timed("weight gradient", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        self._weights_done()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a microbatch's activations, into newly allocated memory."""
        self.inputs.make(fwd_chunk_id, self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of the gradients of sent activations, into newly allocated memory."""
        if not self.is_last:
            self.gradients.make(bwd_chunk_id, self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a microbatch's activations, or [] if this stage has started and waits for them itself.

        From here on backward needs only the graph of the sent tensors. Their values live as long as the send.
        """
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        for op in ops:
            op.tensor = op.tensor.detach()  # torch 2.11 sends the output itself
        if ops:
            _keep_graph_alone(self.fwd_cache[fwd_chunk_id][0])
        if self.arrived is None or not ops:
            self.posted = ops
            return ops
        self.leaving[self.stage_index, fwd_chunk_id] = _posted(ops)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of input gradients, or [] if this stage has started and waits for them itself.

        Later activations from the previous stage show that it has consumed the gradients.
        """
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if self.arrived is None or not ops:
            return ops
        self.leaving_back[self.stage_index, bwd_chunk_id] = _posted(ops)
        return []

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Set gradients from the next stage on the same rank. torch zeroes the memory if there is no gradient."""
        if any(gradient is None for gradient in next_stage_bwd_outputs):
            self.gradients.make(mb_index, self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    @contextmanager
    def _kept_backward(self, microbatch: int, *, splits: bool) -> Iterator[None]:
        """Keep an error of a microbatch's backward. The previous stage then receives placeholders.

        ``splits`` means that weight gradients follow.
        """
        failed = True
        with self.errors.kept("backward", self.stage_index, microbatch):
            yield
            failed = False
        if failed:
            self.fwd_cache.pop(microbatch, None)
            if splits:
                self.dw_runner[microbatch] = self._pop_weight_work()
            self.bwd_cache[microbatch] = tuple(
                not_finite(form, self.device) if form.requires_grad else None for form in self.forms
            )

    @contextmanager
    def _timed(self, work: str, microbatch: int) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.events.append(StageEvent(work, self.stage_index, microbatch, start_s, time.perf_counter()))

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Drop messages from this rank to itself, which torch 2.11 posts for V placements and gloo rejects."""
        mine = dist.get_rank()
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != mine]

    def _pop_weight_work(self) -> Callable[[], None]:
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


class _Leaving(torch.autograd.Function):
    """Copy of a tensor object with the same values, referenced only by the pipeline."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _keep_graph_alone(outputs: Iterable[Tensor]) -> None:
    """Shrink tensors to one element of memory. They keep the shape, which torch uses to check gradients."""
    for output in outputs:
        output.data = torch.empty((), dtype=output.dtype, device=output.device).expand(output.shape)


def _posted(ops: list[dist.P2POp]) -> list[dist.Work]:
    """Start sends the way torch starts the other rank's receives.

    NCCL carries a batch over the group's communicator and single messages over one for two ranks. Which of them torch
    uses depends on its version, and a send over one never matches a receive over the other.
    """
    return schedules._batch_p2p(ops)


def _let_go(leaving: dict[Any, list[dist.Work]], used: Iterable[Any]) -> None:
    """Wait for consumed sends, so that their memory can be freed."""
    for message in used:
        for work in leaving.pop(message):
            work.wait()


def check_sent(output: Any, expected: Sequence[Tensor], stage: int) -> None:
    """Raise ValueError unless a stage's output matches the meta tensors ``expected`` by the next stage.

    Otherwise the next stage would wait forever.
    """
    outputs = output if isinstance(output, (tuple, list)) else (output,)
    got = [(list(t.shape), t.dtype) if isinstance(t, Tensor) else t for t in outputs]
    declared = [(list(t.shape), t.dtype) for t in expected]
    if got != declared:
        raise ValueError(
            f"stage {stage} was declared to send {declared} and its forward gives {got}; all microbatches of a step "
            "have one shape, the one given as `activations`"
        )


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Re-raise the original error of the model, or of a wait in it, which torch wraps in another one."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, Exception) and not isinstance(error, PeerLost):
            raise error.__cause__ from None
        raise
