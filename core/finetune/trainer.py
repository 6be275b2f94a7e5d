"""TuneTrainer: steps of a Hugging Face model on windows of documents, with a loss on what is learned alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from core import agree
from core.finetune.windows import IDS, LABELS, POSITIONS, UNLEARNED
from core.hugging_face.parallel_loss import ParallelCausalLoss
from core.training.errors import ConfigError
from core.training.step_trace import StepTrace
from core.training.trainer import Batch, Trainer


class TuneTrainer(Trainer):
    """Trains a wrapped model on windows; every token that is learned counts alike, wherever it lies."""

    def __init__(self, *arguments: Any, packing: bool, vocab_size: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.packing = packing
        self.loss = ParallelCausalLoss(self.groups.tp, vocab_size)

    def batch(self, tokens: Any, indices: np.ndarray) -> Batch:
        """Ids, labels and positions [windows, tokens] of int64."""
        windows = torch.from_numpy(tokens[indices].astype(np.int64)).to(self.device)
        return windows[:, IDS], windows[:, LABELS], windows[:, POSITIONS]

    def counted_tokens(self, batch: Batch) -> int:
        """How many tokens are learned."""
        return int((batch[1] != UNLEARNED).sum())

    def run_batches(
        self, batches: Sequence[Batch], indices: np.ndarray, loss_scale: float, trace: StepTrace
    ) -> torch.Tensor:
        """Forward and backward; the sum of this rank's tokens' losses.

        The gradient is that of the mean over all learned tokens of the global batch, which ranks have unequally many
        of. The wrapper takes the mean over data ranks, so each weighs its sum by their number.
        """
        (model,) = self.chunks
        learned = int((self.tokens.train[indices, LABELS] != UNLEARNED).sum())
        weight = loss_scale * self.plan.dp / learned
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else model.no_sync():
                with trace.span("forward"):
                    loss = self.summed_loss(batch)
                    total += loss.detach().double()
                with trace.span("backward"):
                    (loss * weight).backward()
        return total

    def token_losses(self, batch: Batch) -> torch.Tensor:
        """The sum of the tokens' losses, without gradients."""
        return self.summed_loss(batch).double()

    def summed_loss(self, batch: Batch) -> torch.Tensor:
        """The sum over learned tokens, in fp32."""
        ids, labels, positions = batch
        return self.loss(self.logits(ids, positions).float(), labels=labels, num_items_in_batch=1.0)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[windows, tokens, vocabulary / tp]."""
        packed = {"position_ids": positions} if self.packing else {}
        logits: torch.Tensor = self.chunks[0](input_ids=ids, use_cache=False, **packed).logits
        return logits

    @torch.no_grad()
    def check_documents_are_apart(self, tokens: int = 8) -> None:
        """ConfigError unless a document's output is the same whatever stands before it in its window. Collective.

        Not every family keeps packed documents apart by their positions, and none says so. Two windows differ in their
        first document: what that changes in the second one is compared with what it changes where both are one.
        """
        if not self.packing:
            return
        (model,) = self.chunks
        ids = torch.arange(2 * tokens, device=self.device).unsqueeze(0) % 7 + 1
        other = ids.clone()
        other[:, :tokens] = other[:, :tokens] % 5 + 3
        apart = torch.cat([torch.arange(tokens), torch.arange(tokens)]).unsqueeze(0).to(self.device)
        together = torch.arange(2 * tokens, device=self.device).unsqueeze(0)
        model.eval()
        try:
            changes = []
            for positions in (apart, together):
                outputs = [self.logits(each, positions)[:, tokens:].float() for each in (ids, other)]
                changes.append((outputs[0] - outputs[1]).abs().max())
        except TypeError as error:
            raise ConfigError(
                f"the model takes no position_ids, by which packed documents are kept apart ({error}); use "
                "--data.no-packing"
            ) from error
        finally:
            model.train()
        told = agree.gather([float(change) for change in changes], None, "what packed documents change")
        seen, leaked = (max(parts) for parts in zip(*told.values(), strict=True))
        if seen > 0.05 * leaked:
            raise ConfigError(
                f"the model does not keep packed documents apart: another document before one changes its output by "
                f"{seen:.2g} (and by {leaked:.2g} where both are one); use --data.no-packing"
            )
