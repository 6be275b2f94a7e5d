"""EvaluationLoader: batches of an evaluation dealt to replicas so that every row counts once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F


class EvaluationLoader:
    """The batches that one process would get, dealt to the replicas in turn.

    accelerate fills the last batches with rows from the beginning, so that an evaluation depends on the number of
    ranks. Here a batch is the same on any number of ranks. A replica that has fewer batches than another one runs a
    batch that does not count, because forwards of a sharded or split model are collective.

    Attributes:
        counted: Rows of the current batch that count, 0 for a batch that only keeps the replicas in step.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.counted = 0

    @staticmethod
    def of(loader: Any) -> Any:
        """Return the loader that counts rows once; ``loader`` itself if accelerate has not dealt it by batches."""
        from accelerate.data_loader import BatchSamplerShard

        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, BatchSamplerShard) or sampler.split_batches or sampler.batch_size is None:
            return loader
        return loader if sampler.drop_last else EvaluationLoader(loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        dealt = self.loader.batch_sampler
        return math.ceil(dealt.total_length / dealt.num_processes)

    def __iter__(self) -> Iterator[Any]:
        dealt, rows = self.loader.batch_sampler, len(self.loader.dataset)
        full, even, number = dealt.batch_size, dealt.even_batches, dealt.process_index
        dealt.even_batches = False
        try:
            for batch in self.loader:
                self.counted = min(full, rows - number * full)
                number += dealt.num_processes
                yield batch
        finally:
            dealt.even_batches = even
        self.counted = 0
        while number < dealt.num_processes * len(self):
            number += dealt.num_processes
            yield self.loader.collate_fn([self.loader.dataset[row % rows] for row in range(full)])

    def rows_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the rows of a batch's value that count. A loss is repeated for the rows of a full batch."""
        rows = value.reshape(1) if value.dim() == 0 else value
        is_filled = self.counted == 0 or len(rows) == self.loader.batch_sampler.batch_size
        return rows[: self.counted] if is_filled else rows


def concatenated(rows: torch.Tensor, gather: Any, ranks: list[int]) -> torch.Tensor:
    """Return the rows of these ranks, one after another. Collective over the world.

    Args:
        rows: [rows, ...], with another number of rows on each rank.
        gather: Gathers a tensor of equal shapes over the world, along the first dimension.
        ranks: The ranks whose rows are wanted.
    """
    sizes = gather(torch.tensor([len(rows)], device=rows.device)).tolist()
    most = max(sizes)
    padded = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, most - len(rows)])
    parts = gather(padded.contiguous()).split(most)
    return torch.cat([parts[rank][: sizes[rank]] for rank in ranks])
