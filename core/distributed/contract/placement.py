"""Placement: options that select the sharded and the offloaded buckets. Pure arithmetic."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

from core.number_ranges import COUNT, Range, check_ranges, whole

FRACTIONS = ("shard_param_frac", "offload_param_frac", "offload_optim_frac", "offload_grad_frac")
OF_BUDGET = ("warmup_non_model_data_ratio", "steady_cap_ratio")
RANGES = {
    **dict.fromkeys(FRACTIONS + OF_BUDGET, Range(Real, 0, 1)),
    **{"memory_budget_bytes": COUNT, "prefetch": whole(0, 1)},
}


@dataclass(frozen=True)
class MemStats:
    """Statistics of the first step under a budget, the same on all ranks.

    Args:
        uses: Numbers of parameter buckets, in the order in which a step uses them.
        non_model_bytes: The most memory that forwards keep for backward, in addition to parameters.
    """

    uses: tuple[int, ...]
    non_model_bytes: int


@dataclass(frozen=True)
class Placement:
    """Options for keeping parameter buckets unsharded and for offloading shards, as fractions of bytes.

    A bucket is never divided, so each fraction is met within half a bucket. Buckets are ordered by their use in a
    forward (see ``memstats``).

    Args:
        shard_param_frac: Fraction of parameters that is freed after use, under 'optim_grads_params'. The rest, which is
            used first, stays gathered from its first use to the next step.
        offload_param_frac: Fraction of parameter shards that is offloaded, at most the sharded fraction. The buckets
            that are used last are chosen. A gather brings them to the device.
        offload_optim_frac: Fraction of master weights and moments that is offloaded, and updated in place.
        offload_grad_frac: Fraction of reduced gradients that is offloaded, if a rank keeps only its shard of them. With
            a GPU, at most offload_optim_frac.
        prefetch: Number of buckets that are gathered before they are used, if a gather is a collective: 0 or 1. None is
            1, and 0 under a budget.
        directory: On a CPU, the directory for a rank's files of offloaded shards. The files have no name, so nothing is
            left when the job ends or fails. None with a GPU, which offloads to host memory.
        pin_memory: With a GPU, pin the host memory. Copies are faster, and the system cannot swap this memory.
        memory_budget_bytes: Memory of a rank, instead of fractions. All shards of parameters, master weights and
            moments are offloaded, and as many buckets are gathered on the device as the budget allows. The budget
            includes gradients on the device and the measured memory that forwards keep for backward. The bucket whose
            next use is farthest is freed first.
        warmup_non_model_data_ratio: Fraction of the budget that is left free in the first step.
        steady_cap_ratio: Fraction of the budget that may be used later.
        memstats: Statistics of an earlier run's first step under a budget. Under a budget, the first step then runs
            like later ones. With fractions, they give the order in which a forward uses buckets; None is registration
            order.
    """

    shard_param_frac: float = 1.0
    offload_param_frac: float = 0.0
    offload_optim_frac: float = 0.0
    # Ranks compare reprs.
    directory: str | os.PathLike[str] | None = field(default=None, repr=False)
    memory_budget_bytes: int | None = None
    warmup_non_model_data_ratio: float = 0.8
    steady_cap_ratio: float = 1.0
    memstats: MemStats | None = None
    prefetch: int | None = None
    offload_grad_frac: float = 0.0
    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        self._check_budget()
        self._check_memstats()
        if self.offload_param_frac > self.shard_param_frac:
            raise ValueError(
                f"offload_param_frac ({self.offload_param_frac}) is larger than shard_param_frac "
                f"({self.shard_param_frac}), but only sharded buckets can be offloaded; lower offload_param_frac, or "
                "raise shard_param_frac"
            )
        if self.directory is not None and not self.offloads:
            raise ValueError(
                f"directory is {os.fspath(self.directory)!r}, and nothing is offloaded to it; set offload_param_frac, "
                "offload_optim_frac or offload_grad_frac, or leave it None"
            )

    def _check_memstats(self) -> None:
        stats = self.memstats
        if stats is not None and not isinstance(stats, MemStats):
            raise ValueError(
                f"memstats is {stats!r}; it is the MemStats that the first step of an earlier run has found"
            )
        if stats is not None and self.shard_param_frac == 1 and not self.offloads:
            raise ValueError(
                f"memstats is {stats!r}, but it has no effect if all buckets have the same placement; set "
                "memory_budget_bytes or a fraction, or leave memstats None"
            )

    def _check_budget(self) -> None:
        budget = self.memory_budget_bytes
        if budget is None:
            for name in OF_BUDGET:
                value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
                if value != default:
                    raise ValueError(
                        f"{name} is {value!r}, and without memory_budget_bytes nothing reads it; set a budget, or "
                        f"leave it {default}"
                    )
            return
        if self.prefetch:
            raise ValueError(
                f"prefetch is {self.prefetch}, and a budget of {budget} bytes has no room for a bucket that is "
                "not in use yet; set it to 0"
            )
        if self.shard_param_frac != 1 or self.offload_param_frac != 1 or self.offload_optim_frac != 1:
            raise ValueError(
                f"memory_budget_bytes is {budget}, under which all shards are offloaded, and shard_param_frac "
                f"is {self.shard_param_frac}, offload_param_frac {self.offload_param_frac}, offload_optim_frac "
                f"{self.offload_optim_frac}; set all three to 1"
            )

    def check_for(self, device_type: str) -> None:
        """Raise ValueError if ranks on this type of device cannot offload as requested."""
        if not self.offloads:
            return
        if device_type == "cpu" and self.directory is None:
            raise ValueError(
                f"offload_param_frac is {self.offload_param_frac}, offload_optim_frac {self.offload_optim_frac} and "
                f"offload_grad_frac {self.offload_grad_frac}, but no directory is set for the offloaded files; set "
                "directory, or set the fractions to 0"
            )
        if device_type != "cpu" and self.directory is not None:
            raise ValueError(
                f"placement.directory is {os.fspath(self.directory)!r}, but the parameters are on {device_type!r}, and "
                "offloading from there uses host memory; leave directory None"
            )
        if device_type != "cpu" and self.offload_grad_frac > self.offload_optim_frac:
            raise ValueError(
                f"placement has offload_grad_frac {self.offload_grad_frac} and offload_optim_frac "
                f"{self.offload_optim_frac}: with {device_type!r} gradients in the host's memory are stepped there; "
                "offload at least as much of masters and moments"
            )

    @property
    def offloads(self) -> bool:
        """True if any shards are offloaded."""
        return self.offload_param_frac > 0 or self.offload_optim_frac > 0 or self.offload_grad_frac > 0


def first_of(nbytes: Sequence[int], fraction: float) -> set[int]:
    """Return the indices of the first ``fraction`` of all bytes: items of these sizes whose middle is inside it."""
    limit, reached, chosen = fraction * sum(nbytes), 0, set()
    for index, size in enumerate(nbytes):
        if reached + size / 2 < limit:
            chosen.add(index)
        reached += size
    return chosen
