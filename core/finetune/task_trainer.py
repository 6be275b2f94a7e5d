"""TaskTrainer: steps of a classifier, a reward model or DPO; each text or pair of the global batch counts alike."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.finetune.config import ROWS, SCORED, TuneConfig
from core.finetune.task_records import UNITS
from core.finetune.trainer import TuneTrainer, following, tokens_loss
from core.finetune.windows import IDS, LABELS, MASK, UNLEARNED
from core.hugging_face.deferred_logits import loss_follows
from core.hugging_face.parallel_loss import ParallelCausalLoss
from core.hugging_face.plan import without_adapters
from core.interface.whole import note
from core.training.trainer import Batch


def sums_of_classes(logits: Tensor, labels: Tensor) -> Tensor:
    """[2]: the sum of the cross entropies, and how many texts are classified rightly. logits: [texts, classes]."""
    losses = F.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([losses, (logits.argmax(-1) == labels).sum().to(losses)])


def sums_of_margins(margins: Tensor) -> Tensor:
    """[3]: the sum of -log sigmoid(margin), how many margins are above 0, and their sum. margins: [pairs]."""
    return torch.stack([-F.logsigmoid(margins).sum(), (margins > 0).sum().to(margins), margins.detach().sum()])


def log_probabilities_of(logits: Tensor, labels: Tensor, loss: Any) -> Tensor:
    """[rows]: the sum over the learned tokens of each row. loss: a ParallelCausalLoss; another one for whole logits."""
    target = following(labels)
    if isinstance(loss, ParallelCausalLoss):
        return -loss.token_losses(logits, target).sum(-1)
    losses = F.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=UNLEARNED, reduction="none")
    return -losses.view_as(target).sum(-1)


class TaskTrainer(TuneTrainer):
    """Trains on windows of one row (a text) or two (a chosen and a rejected answer).

    references: of DPO: [windows, 2] of the windows to train on and to validate on, the log probabilities of the answers
    by the model that training begins from.
    """

    config: TuneConfig

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.task, self.beta = self.config.data.task, self.config.model.beta
        self.references: tuple[np.ndarray, np.ndarray] | None = None
        self.metric_names = ("accuracy",) if self.task == "classification" else ("accuracy", "margin")
        self.unit = UNITS[self.task]
        forward = inspect.signature(type(without_adapters(self.model.parts()[0])).forward).parameters
        self.options = {"use_cache": False} if "use_cache" in forward else {}

    def batch(self, tokens: Any, indices: np.ndarray) -> Batch:
        """Ids, labels and mask [rows, tokens of the longest] of int64, and of DPO the reference [windows, 2]."""
        rows = tokens[indices].reshape(len(indices) * ROWS[self.task], 3, -1)
        longest = int(rows[:, MASK].sum(-1).max())
        tensor = torch.from_numpy(rows[..., :longest].astype(np.int64)).to(self.device)
        batch = tensor[:, IDS], tensor[:, LABELS], tensor[:, MASK]
        if self.references is None:
            return batch
        reference = self.references[tokens is not self.tokens.train][indices]
        return *batch, torch.from_numpy(reference).to(self.device)

    def counted_tokens(self, batch: Batch) -> int:
        """Number of texts or pairs."""
        return len(batch[0]) // ROWS[self.task]

    def learned(self, indices: np.ndarray) -> int:
        """Number of texts or pairs of a global batch."""
        return len(indices)

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Arguments of the model's forward."""
        return {"input_ids": batch[0], "attention_mask": batch[2], **self.options}

    def summed_loss(self, batch: Batch) -> Tensor:
        """[1 + metrics]: the sum over texts or pairs, in fp32, and the sums of the metrics."""
        if torch.is_grad_enabled():
            note(self.loss_of_whole, batch, per_token=True)
        return self.sums(self.logits_of(batch), batch, self.loss)

    def logits_of(self, batch: Batch) -> Tensor:
        """As the model gives them, in fp32."""
        with loss_follows(self.model.parts()[0]):
            logits: Tensor = self.chunks[0](**self.arguments(batch)).logits.float()
        return logits

    def log_probabilities(self, batch: Batch) -> Tensor:
        """[windows, 2] of the chosen and the rejected answers."""
        return log_probabilities_of(self.logits_of(batch), batch[1], self.loss).view(-1, 2)

    def sums(self, logits: Tensor, batch: Batch, loss: Any) -> Tensor:
        """As `summed_loss`, of logits. loss: as in `log_probabilities_of`."""
        if self.task == "classification":
            return sums_of_classes(logits, batch[1][:, 0])
        if self.task in SCORED:
            scores = logits.view(-1, 2)
        else:
            scores = self.beta * (log_probabilities_of(logits, batch[1], loss).view(-1, 2) - batch[3])
        return sums_of_margins(scores[:, 0] - scores[:, 1])

    def loss_of_whole(self, model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        """(the summed loss, the number of texts or pairs) of a whole model, or of one that is split."""
        logits = model(**self.arguments(batch)).logits
        own = torch.promote_types(logits.dtype, torch.float32)
        return self.sums(logits.to(own), batch, tokens_loss(model))[0], self.counted_tokens(batch)
