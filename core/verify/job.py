"""A wrapped model, as one piece or in stages, and the steps that are run to examine its gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.distributed import DistributedDataParallel, finalize_model_grads
from core.distributed.finalize_model_grads import divisor_of_tokens
from core.distributed.guard.finite import ReplicaDriftError, check_replicas
from core.groups import agree
from core.interface.model import all_of
from core.moe import auxiliary_loss_scale
from core.pipeline_parallel import PipelineRunner
from core.verify.gathered import WrappedModel, first_tensor, piece_of
from core.verify.recording import Recorder
from core.watch.waiting import waiting

LossFn = Callable[[nn.Module, Any], Any]  # (model, part of the batch) -> mean loss, or (summed loss, number of tokens)
SplitFn = Callable[[Any], Any]  # a data rank's microbatch -> this context-parallel rank's part


class Job(ABC):
    """This rank's model, and how a step runs through it.

    Attributes:
        sees_loss: True if ``step`` returns the loss.
        inputs_to: Dtype to which the layout casts a batch, if any.
        scale: Loss scale in the gradients of ``step`` and ``backward``.
        token_weight: Factor of a token's loss in ``backward`` if the division by tokens comes later: the sum over
            tokens times a loss scale may overflow fp16.

    Args:
        model: This rank's chunks.
        microbatches: Number of microbatches.
        split_fn: Takes this context-parallel rank's part of a microbatch.
    """

    sees_loss = True
    inputs_to: torch.dtype | None = None  # dtype to which the layout casts a batch
    scale = 1.0
    token_weight = 1.0

    def __init__(self, model: WrappedModel, microbatches: int, split_fn: SplitFn | None) -> None:
        self.model = model
        self.groups = model.groups
        self.microbatches = microbatches
        self.split_fn = split_fn
        self.per_token = bool(getattr(model.chunks[0].config, "calculate_per_token_loss", False))

    @abstractmethod
    def step(self, batch: Any) -> float:
        """Run a complete step on the global batch, including the reductions, and return the global loss. Collective."""

    @abstractmethod
    def backward(self, batch: Any, recorder: Recorder | None = None) -> None:
        """Run all microbatches without any reduction, so that every rank keeps its own gradients."""

    def gradients(self) -> dict[tuple[int, str], Tensor]:
        """Return the reduced gradients by ``Held.key``, without the loss scale. Collective."""
        found = self.model.gradients()
        if self.scale == 1.0:
            return found
        return {key: in_full(grad, 1.0 / self.scale) for key, grad in found.items()}

    def biases(self) -> dict[tuple[int, str], Tensor]:
        """Return the routers' biases from before the next step, by ``Held.key``."""
        return {held.key: held.tensor.clone() for held in self.model.biases}

    def samples(self, batch: Any) -> int:
        """Return the number of samples in one microbatch."""
        axis = "dp" if self.groups.dp is not None else "dp_cp"
        return first_tensor(batch).shape[0] // (self.groups.size(axis) * self.microbatches)

    def parts(self, batch: Any) -> list[Any]:
        """Return this rank's microbatches of the global batch."""
        axis = "dp" if self.groups.dp is not None else "dp_cp"
        first = self.groups.rank(axis) * self.microbatches
        pieces = self.groups.size(axis) * self.microbatches
        parts = [piece_of(batch, pieces, number) for number in range(first, first + self.microbatches)]
        return parts if self.split_fn is None else [self.split_fn(part) for part in parts]

    def drift(self) -> str:
        """Return the message of the guard against drifting replicas; empty if it does not fire. Collective."""
        found = ""
        try:
            check_replicas([bucket for chunk in self.model.chunks for bucket in chunk.reducer.buckets], self.groups)
        except ReplicaDriftError as error:
            found = str(error)
        answers = agree.gather(found, None, "the guard against drifting copies")
        return next((text for text in answers.values() if text), "")

    def factor_of_gradients(self, tokens: float | None) -> float:
        """Return the factor of ``backward``'s gradients relative to the reference's.

        A rank's loss is the mean over its own positions, unless the division by tokens comes later.
        """
        return 1.0 if self.per_token else float(self.groups.size("cp"))

    def clear(self) -> None:
        """Zero all gradients."""
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()

    def global_loss(self, loss: float, tokens: float) -> float:
        """Combine the data ranks' losses. Collective over the data group."""
        data = self.groups.require("dp_cp")
        sums = torch.tensor([loss, tokens], dtype=torch.float64, device=self.model.device)
        with waiting("the loss of all data ranks", data):
            dist.all_reduce(sums, group=data)
        return float(sums[0] / (divisor_of_tokens(sums[1]) if self.per_token else dist.get_world_size(data)))


class PlainJob(Job):
    """Job of a model without pipeline stages."""

    def __init__(
        self, ddp: DistributedDataParallel, loss_fn: LossFn, microbatches: int, split_fn: SplitFn | None = None
    ) -> None:
        super().__init__(WrappedModel([ddp]), microbatches, split_fn)
        self.ddp = ddp
        self.called: nn.Module = ddp
        self.loss_fn = loss_fn

    def step(self, batch: Any) -> float:
        """See Job."""
        self.clear()
        loss, tokens = self._run(batch, reduce=True)
        if self.per_token:
            # In fp64: fp32, torch's choice for a Python number, is exact only up to 2**24 tokens.
            total = torch.tensor(tokens, dtype=torch.float64, device=self.model.device)
            finalize_model_grads([self.ddp], num_tokens=total)
        else:
            finalize_model_grads([self.ddp])
        return self.global_loss(loss, tokens)

    def backward(self, batch: Any, recorder: Recorder | None = None) -> None:
        """See Job."""
        self.clear()
        self._run(batch, reduce=False, around_backward=nullcontext if recorder is None else recorder.backward)

    def _run(
        self, batch: Any, *, reduce: bool, around_backward: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> tuple[float, float]:
        """Return this rank's loss and its number of tokens."""
        total, tokens = 0.0, 0.0
        parts = self.parts(batch)
        for number, part in enumerate(parts):
            last = reduce and number == len(parts) - 1
            with nullcontext() if last else self.ddp.no_sync():
                loss, count = split_loss(self.loss_fn(self.called, part), self.per_token)
                weight = self.token_weight if self.per_token else 1.0 / self.microbatches
                with auxiliary_loss_scale(weight * self.scale), around_backward():
                    in_full(loss, weight * self.scale).backward()
            total += float(loss.detach()) * weight
            tokens += count
        return total, tokens


class PipelineJob(Job):
    """Job of a pipeline's stages under its schedule; the runner's forward step computes the loss."""

    def __init__(self, runner: PipelineRunner, microbatches: int, split_fn: SplitFn | None = None) -> None:
        super().__init__(WrappedModel(runner.chunks), microbatches, split_fn)
        self.runner = runner
        self.per_token = runner.per_token

    def step(self, batch: Any) -> float:
        """See Job."""
        self.clear()
        outcome = self.runner.step(self.parts(batch))
        if outcome.num_tokens is None:
            return self.global_loss(float(outcome.loss), 0.0)
        tokens = float(outcome.num_tokens)
        return self.global_loss(float(outcome.loss) * tokens, tokens)

    def backward(self, batch: Any, recorder: Recorder | None = None) -> None:
        """See Job."""
        self.clear()
        with all_of(chunk.no_sync() for chunk in self.model.chunks):  # no reductions
            self.runner.step(self.parts(batch), finalize=False)


def in_full(tensor: Tensor, factor: float) -> Tensor:
    """Multiply a tensor by a factor, in fp32 at least, because the factor may overflow a 16-bit dtype."""
    return tensor if factor == 1.0 else tensor.to(torch.promote_types(tensor.dtype, torch.float32)) * factor


def split_loss(result: Any, per_token: bool) -> tuple[Tensor, float]:
    """Return (loss, number of tokens) from the result of a loss_fn.

    Raises:
        ValueError: If the result does not fit calculate_per_token_loss.
    """
    if per_token != isinstance(result, tuple):
        raise ValueError(
            "calculate_per_token_loss is set, so loss_fn must return (summed loss, number of tokens)"
            if per_token
            else "loss_fn returned a tuple, which needs calculate_per_token_loss=True; return the mean loss instead"
        )
    return (result[0], float(result[1])) if per_token else (result, 0.0)
