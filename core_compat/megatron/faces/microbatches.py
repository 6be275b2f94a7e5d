"""Number of microbatches per step. The global batch may grow with the number of consumed samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class MicrobatchCalculator:
    """Computes the number of microbatches per step from the global batch.

        calculator = MicrobatchCalculator(
            64, micro_batch_size=2, data_parallel_size=4, rampup=(16, 16, 10_000)
        )
        calculator.update(consumed_samples)      # before a step
        for _ in range(calculator.get()): ...    # 2 at first, 8 after 10,000 samples

    Attributes:
        global_batch_size: Samples per step on all data ranks.
        micro_batch_size: Samples per microbatch on one data rank.
        data_parallel_size: Number of data ranks.
        decrease: Round a batch down to a multiple that the data ranks can share. If False, it must be divisible.
        rampup: (first batch, increment, samples) for growth to global_batch_size in equal steps.
        current_global_batch_size: Samples of the current step, before rounding.
        current_running_global_batch_size: Samples of the current step, after rounding.
        num_micro_batches: Microbatches of the current step.

    Raises:
        ValueError: If the sizes do not fit together.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int
    decrease: bool = False
    rampup: Sequence[int] | None = None
    current_global_batch_size: int = 0
    current_running_global_batch_size: int = 0
    num_micro_batches: int = 0

    def __post_init__(self) -> None:
        if self.rampup is not None:
            first, increment, samples = self.rampup
            if not 0 < first <= self.global_batch_size or increment < 1 or samples < 0:
                raise ValueError(f"rampup_batch_size {self.rampup} does not grow to {self.global_batch_size}")
            if (self.global_batch_size - first) % increment:
                raise ValueError(
                    f"rampup_batch_size: {self.global_batch_size} - {first} is not divisible by {increment}"
                )
        self.update(0, consistency_check=False)

    def update(self, consumed_samples: int, consistency_check: bool = True) -> None:
        """Set the batch for a number of consumed samples.

        Args:
            consumed_samples (int): Samples of all earlier steps.
            consistency_check (bool, optional): Reject a batch that is not divisible.

        Raises:
            ValueError: If the batch is not divisible, or smaller than one microbatch.
        """
        self.current_global_batch_size = self._batch_at(consumed_samples)
        share = self.micro_batch_size * self.data_parallel_size  # samples of one microbatch of all data ranks
        exact = self.current_global_batch_size % share == 0
        if not exact and not self.decrease and (consistency_check or self.rampup is None):
            raise ValueError(
                f"global batch size {self.current_global_batch_size} is not divisible by micro batch size "
                f"{self.micro_batch_size} times data parallel size {self.data_parallel_size}"
            )
        self.num_micro_batches = self.current_global_batch_size // share
        self.current_running_global_batch_size = self.num_micro_batches * share
        if self.num_micro_batches < 1:
            raise ValueError(f"global batch size {self.current_global_batch_size} is less than one microbatch, {share}")

    def get(self) -> int:
        """Return the number of microbatches of a step."""
        return self.num_micro_batches

    def _batch_at(self, consumed_samples: int) -> int:
        if self.rampup is None:
            return self.global_batch_size
        first, increment, samples = self.rampup
        steps = (self.global_batch_size - first) // increment
        if steps == 0 or consumed_samples > samples:
            return self.global_batch_size
        done = int(consumed_samples / (samples / steps)) if samples else steps
        return min(first + done * increment, self.global_batch_size)
