"""TuneTrainer: steps of a Hugging Face model on windows of documents, with a loss on what is learned alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from core.booster.plugin.low_level_zero_model import LowLevelZeroModel
from core.finetune.torch_plugins import TorchModel
from core.finetune.windows import IDS, LABELS, POSITIONS, UNLEARNED
from core.groups import agree
from core.hugging_face import gather_logits, stage_activations
from core.hugging_face.deferred_logits import loss_follows
from core.hugging_face.parallel_loss import ParallelCausalLoss, refuse_use_of_split_logits
from core.hugging_face.stages import stage_of
from core.interface.whole import note
from core.pipeline_parallel import PipelineRunner
from core.pipeline_parallel.runner import MicrobatchLoss
from core.training.errors import ConfigError
from core.training.step_trace import Span, StepTrace
from core.training.trainer import Batch, Trainer

TokensLoss = Callable[..., torch.Tensor]


def following(labels: torch.Tensor) -> torch.Tensor:
    """For each token the label of the next one; the last has none."""
    return F.pad(labels, (0, 1), value=UNLEARNED)[..., 1:]


def loss_of_whole_logits(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: float) -> torch.Tensor:
    """The sum of the losses of learned tokens / num_items_in_batch. logits: [..., tokens, vocabulary]."""
    target = following(labels).flatten()
    total = F.cross_entropy(logits.flatten(0, -2), target, ignore_index=UNLEARNED, reduction="sum")
    return total / num_items_in_batch


def tokens_loss(model: nn.Module) -> TokensLoss:
    """The loss of a model's logits: its own where they are split, cut over the sequence, or computed in chunks."""
    own = next((part.loss_function for part in model.modules() if hasattr(part, "loss_function")), None)
    return own if isinstance(own, ParallelCausalLoss) else loss_of_whole_logits


def loss_of_windows(
    model: nn.Module, arguments: Mapping[str, Any], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the sum of the losses of learned tokens, their number) of a whole model, or of one that is split."""
    logits = model(**arguments).logits
    own = torch.promote_types(logits.dtype, torch.float32)
    total = tokens_loss(model)(logits.to(own), labels=labels, num_items_in_batch=1.0)
    return total, (labels[..., 1:] != UNLEARNED).sum()


@dataclass(frozen=True)
class Microbatch:
    """One microbatch on its way through a pipeline. weight: of a token's loss. reports: True to keep the logits."""

    arguments: Mapping[str, torch.Tensor]
    labels: torch.Tensor
    loss: TokensLoss
    weight: float
    reports: bool = False


def tuning_step(chunk: nn.Module, microbatch: Microbatch, hidden: torch.Tensor | None) -> Any:
    """One microbatch through one stage; on the last stage the weighted sum of its tokens' losses."""
    with nullcontext() if microbatch.reports else loss_follows(stage_of(chunk).model):
        output = chunk(received=hidden, **microbatch.arguments)
    if not stage_of(chunk).part.post_process:
        return output
    summed = microbatch.loss(output.logits.float(), labels=microbatch.labels, num_items_in_batch=1.0)
    report = None
    if microbatch.reports:
        report = gather_logits(refuse_use_of_split_logits(stage_of(chunk).model, output).logits)
    return MicrobatchLoss(summed * microbatch.weight, report=report)


class TuneTrainer(Trainer):
    """Trains a wrapped model on windows; every token that is learned counts alike, wherever it lies.

    model: boosted. runner: of the pipeline, where there is one.
    """

    def __init__(
        self, *arguments: Any, model: LowLevelZeroModel, packing: bool, runner: PipelineRunner | None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.model = model
        self.packing = packing
        self.runner = runner
        self.loss = tokens_loss(model.parts()[-1])

    def finalize_gradients(self) -> None:
        """As Trainer's; torch's own wrappers are done when backward is."""
        if not isinstance(self.model, TorchModel):
            super().finalize_gradients()

    def batch(self, tokens: Any, indices: np.ndarray) -> Batch:
        """Ids, labels and positions [windows, tokens] of int64."""
        windows = torch.from_numpy(tokens[indices].astype(np.int64)).to(self.device)
        return windows[:, IDS], windows[:, LABELS], windows[:, POSITIONS]

    def counted_tokens(self, batch: Batch) -> int:
        """Number of tokens that are learned."""
        return int((batch[1] != UNLEARNED).sum())

    def learned(self, indices: np.ndarray) -> int:
        """Number of tokens of a global batch that are learned."""
        return int((self.tokens.train[indices, LABELS] != UNLEARNED).sum())

    def run_batches(
        self, batches: Sequence[Batch], indices: np.ndarray, loss_scale: float, trace: StepTrace
    ) -> torch.Tensor:
        """Forward and backward; the sum of this rank's tokens' losses.

        The gradient is that of the mean over all learned tokens of the global batch, which ranks have unequally many
        of. The wrapper takes the mean over data ranks, so each weighs its sum by their number.
        """
        weight = loss_scale * self.plan.dp / self.learned(indices)
        if self.runner is not None:
            # The runner takes the mean over microbatches.
            parts = [self.microbatch(batch, weight * len(batches)) for batch in batches]
            for batch in batches:
                note(loss_of_windows, self.arguments(batch), batch[1], per_token=True)
            outcome = self.runner.step(parts, finalize=False)
            trace.spans.extend(Span(event.work, event.start_s, event.end_s) for event in self.runner.events)
            return outcome.loss / weight
        (model,) = self.chunks
        total = torch.zeros(1 + len(self.metric_names), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else model.no_sync():
                with trace.span("forward"):
                    sums = self.summed_loss(batch).reshape(-1)
                    total += sums.detach()
                with trace.span("backward"):
                    (sums[0] * weight).backward()
        return total

    def token_losses(self, batch: Batch) -> torch.Tensor:
        """As `summed_loss`, without gradients."""
        if self.runner is not None:
            return self._evaluated(batch, reports=False).loss
        return self.summed_loss(batch).double()

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """The sum over learned tokens, in fp32, of a model that is whole on this rank."""
        if torch.is_grad_enabled():
            note(loss_of_windows, self.arguments(batch), batch[1], per_token=True)
        with loss_follows(self.model.parts()[0]):
            logits = self.chunks[0](**self.arguments(batch)).logits
        return self.loss(logits.float(), labels=batch[1], num_items_in_batch=1.0)

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Arguments of the model's forward."""
        ids, _, positions = batch
        return {"input_ids": ids, "use_cache": False, **({"position_ids": positions} if self.packing else {})}

    def microbatch(self, batch: Batch, weight: float, *, reports: bool = False) -> Microbatch:
        """A batch for the pipeline."""
        return Microbatch(self.arguments(batch), batch[1], self.loss, weight, reports)

    def _evaluated(self, batch: Batch, *, reports: bool) -> Any:
        assert self.runner is not None, "only called with a pipeline"
        shape = stage_activations(self.chunks[0], *batch[0].shape)
        return self.runner.evaluate([self.microbatch(batch, 1.0, reports=reports)], activations=shape)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """[windows, tokens, vocabulary]; None where another stage of the pipeline has them."""
        batch = ids, ids, positions
        if self.runner is not None:
            reports = self._evaluated(batch, reports=True).reports
            return reports[0] if reports else None
        return gather_logits(self.model(**self.arguments(batch)).logits)

    @torch.no_grad()
    def check_documents_are_apart(self, tokens: int = 8) -> None:
        """ConfigError unless a document's output is independent of what stands before it in its window. Collective.

        Not every family keeps packed documents apart by their positions, and none says so. Two windows differ in their
        first document: what that changes in the second one is compared with what it changes where both are one.
        """
        if not self.packing:
            return
        ids = torch.arange(2 * tokens, device=self.device).unsqueeze(0) % 7 + 1
        other = ids.clone()
        other[:, :tokens] = other[:, :tokens] % 5 + 3
        apart = torch.cat([torch.arange(tokens), torch.arange(tokens)]).unsqueeze(0).to(self.device)
        together = torch.arange(2 * tokens, device=self.device).unsqueeze(0)
        for chunk in self.chunks:
            chunk.eval()
        try:
            changes = []
            for positions in (apart, together):
                one, two = self.logits(ids, positions), self.logits(other, positions)
                if one is None or two is None:  # another stage has them
                    changes.append(0.0)
                else:
                    changes.append(float((one - two)[:, tokens:].abs().max()))
        except TypeError as error:
            raise ConfigError(
                f"the model takes no position_ids, by which packed documents are kept apart ({error}); use "
                "--data.no-packing"
            ) from error
        finally:
            for chunk in self.chunks:
                chunk.train()
        changed = agree.gather(changes, None, "what packed documents change")
        seen, leaked = (max(parts) for parts in zip(*changed.values(), strict=True))
        # Experts multiply other rows together when other tokens stand before: that rounds differently.
        rounding = 1e-3 if next(self.chunks[0].parameters()).dtype == torch.float32 else 0.05
        if seen > rounding * leaked:
            raise ConfigError(
                f"the model does not keep packed documents apart: another document before one changes its output by "
                f"{seen:.2g} (and by {leaked:.2g} where both are one); use --data.no-packing"
            )
