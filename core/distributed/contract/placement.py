"""Placement: which buckets are sharded, and which are offloaded. A user's options; pure arithmetic."""

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

    uses: numbers of buckets of parameters, in the order in which a step uses them. non_model_bytes: the most that
    forwards keep for backward in addition to parameters.
    """

    uses: tuple[int, ...]
    non_model_bytes: int


@dataclass(frozen=True)
class Placement:
    """Fractions of the bytes of buckets. A bucket counts once, and is taken or left as a whole.

    Buckets are ordered as a forward uses them (see memstats). What is taken is within half a bucket of what was asked.

    shard_param_frac: of parameters, under 'optim_grads_params', what is given up after its use. The rest, which is used
        first, stays whole from its first use to the next step.
    offload_param_frac: of shards of parameters, the part that is offloaded. The buckets that are used last; a gather
        brings them to the device. It may not be more than what is sharded.
    offload_optim_frac: of masters and moments, the part that is offloaded, and stepped where it lies.
    offload_grad_frac: of reduced gradients, where a rank keeps only its shard of them, the part that is
        offloaded. With a GPU it may not be more than offload_optim_frac.
    prefetch: buckets that are gathered before they are used, where a gather is a collective: 0, or 1 at most. None is
        1, and 0 under a budget.
    directory: on a CPU, where a rank's files of offloaded shards are made. They have no name, so that nothing is left
        behind when the job ends, however it ends. With a GPU they lie in the host's memory: None.
    pin_memory: with a GPU, pin that memory, which makes copies faster and takes it from the system.
    memory_budget_bytes: in the place of fractions: all shards of parameters, masters and moments are offloaded, and as
        many buckets are whole on the device as a rank's budget allows. The budget also holds gradients on the device,
        and what forwards keep for backward, which is counted. The bucket whose next use is farthest is given up.
    warmup_non_model_data_ratio: of the budget, what is left free in the first step. steady_cap_ratio: what may be used
        later.
    memstats: what the first step of an earlier run under a budget has found. Under a budget the first step is as the
        others then. With fractions it is the order in which a forward uses buckets; None is that of registration.
    """

    shard_param_frac: float = 1.0
    offload_param_frac: float = 0.0
    offload_optim_frac: float = 0.0
    # Ranks compare what repr shows.
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
                f"offload_param_frac is {self.offload_param_frac} and shard_param_frac {self.shard_param_frac}: a "
                "bucket that stays whole on the device cannot be offloaded; offload at most what is sharded"
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
                f"memstats is {stats!r}, and nothing reads it where all buckets lie alike; set a budget or a "
                "fraction, or leave it None"
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
        """ValueError for what ranks on this type of device cannot offload."""
        if not self.offloads:
            return
        if device_type == "cpu" and self.directory is None:
            raise ValueError(
                f"offload_param_frac is {self.offload_param_frac}, offload_optim_frac {self.offload_optim_frac} and "
                f"offload_grad_frac {self.offload_grad_frac}, and there is no directory for the files of what is "
                "offloaded; name one, or set them to 0"
            )
        if device_type != "cpu" and self.directory is not None:
            raise ValueError(
                f"placement names the directory {os.fspath(self.directory)!r} for files, and the parameters lie on "
                f"{device_type!r}, from which shards are offloaded to the host's memory; leave directory None"
            )
        if device_type != "cpu" and self.offload_grad_frac > self.offload_optim_frac:
            raise ValueError(
                f"placement has offload_grad_frac {self.offload_grad_frac} and offload_optim_frac "
                f"{self.offload_optim_frac}: with {device_type!r} gradients in the host's memory are stepped there; "
                "offload at least as much of masters and moments"
            )

    @property
    def offloads(self) -> bool:
        """True if something is offloaded."""
        return self.offload_param_frac > 0 or self.offload_optim_frac > 0 or self.offload_grad_frac > 0


def first_of(nbytes: Sequence[int], fraction: float) -> set[int]:
    """Indices of the first `fraction` of all bytes: those whose middle lies in it."""
    limit, reached, chosen = fraction * sum(nbytes), 0, set()
    for index, size in enumerate(nbytes):
        if reached + size / 2 < limit:
            chosen.add(index)
        reached += size
    return chosen
