"""How many microbatches a step has: one number for the job, as Megatron's programs ask for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.compat.arguments import arguments

logger = logging.getLogger(__name__)


@dataclass
class NumMicroBatchesCalculator:
    """Microbatches of a step, from the batch of all data ranks.

    rampup: (first batch, increment, samples) to grow to global_batch_size in equal steps; None for no growth.
    decrease: round a batch down to what the data ranks can share; otherwise it must divide, or ValueError.
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

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Set the batch for a number of samples seen."""
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
        """Microbatches of a step."""
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


_of_the_job: list[NumMicroBatchesCalculator] = []  # none or one


def _the() -> NumMicroBatchesCalculator:
    if not _of_the_job:
        raise RuntimeError("there is no microbatch calculator; call init_num_microbatches_calculator first")
    return _of_the_job[0]


@arguments(
    "rank rampup_batch_size=None global_batch_size=None micro_batch_size=None data_parallel_size=None "
    "decrease_batch_size_if_needed>decrease=False !step_batch_size_schedule=None -seq_length=None",
    {"step_batch_size_schedule": "use rampup_batch_size, or reconfigure the calculator at each step"},
)
def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: list[int] | None,
    global_batch_size: int | None,
    micro_batch_size: int | None,
    data_parallel_size: int | None,
    decrease: bool,
) -> None:
    """Make the job's calculator anew."""
    if global_batch_size is None or micro_batch_size is None or data_parallel_size is None:
        raise ValueError("give global_batch_size, micro_batch_size and data_parallel_size")
    rampup = None if rampup_batch_size is None else [int(number) for number in rampup_batch_size]
    made = NumMicroBatchesCalculator(global_batch_size, micro_batch_size, data_parallel_size, decrease, rampup)
    _of_the_job[:] = [made]
    if rank == 0:
        logger.info("%d microbatches a step", made.num_micro_batches)


def init_num_microbatches_calculator(*args: object, **kwargs: object) -> None:
    """`reconfigure_num_microbatches_calculator` for the first time; RuntimeError where there is a calculator."""
    if _of_the_job:
        raise RuntimeError("there is a microbatch calculator already; call reconfigure_num_microbatches_calculator")
    reconfigure_num_microbatches_calculator(*args, **kwargs)


def destroy_num_microbatches_calculator() -> None:
    """Forget the job's calculator."""
    _of_the_job.clear()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Set the batch for a number of samples seen."""
    _the().update(consumed_samples, consistency_check, verbose)


def _reader(name: str) -> Callable[[], int]:
    return lambda: int(getattr(_the(), name))


get_num_microbatches = _reader("num_micro_batches")
get_micro_batch_size = _reader("micro_batch_size")
get_current_global_batch_size = _reader("current_global_batch_size")
get_current_running_global_batch_size = _reader("current_running_global_batch_size")
