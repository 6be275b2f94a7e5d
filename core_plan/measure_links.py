"""Measured links between ranks: collectives by size and by number of ranks, for a device file."""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from core_plan.measure_clock import Clock, of_all

# torch 2.13 renames the flat collectives; 2.11 has only the old name.
gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SENT = {True: (2**10, 2**16, 2**20, 2**24, 2**27), False: (2**10, 2**16, 2**20, 2**22)}  # bytes; True on a GPU

COMMUNICATORS = 8  # created at once to measure the memory of each


def _all_reduce(whole: Tensor, group: Any) -> None:
    dist.all_reduce(whole, group=group)


def _all_gather(whole: Tensor, group: Any) -> None:
    part = whole.chunk(dist.get_world_size(group))[0].clone()
    gather_flat(whole, part, group=group)


def _all_to_all(whole: Tensor, group: Any) -> None:
    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)


def _send(whole: Tensor, group: Any) -> None:
    """Send to the neighbour and back; half of the ranks send first."""
    rank, peer = dist.get_rank(group), dist.get_rank(group) ^ 1
    if peer < dist.get_world_size(group):
        for receives in (rank % 2, 1 - rank % 2):
            if receives:
                dist.recv(whole, group=group, group_src=peer)
            else:
                dist.send(whole, group=group, group_dst=peer)


# Name -> (call with a tensor of all ranks' parts, number of times these bytes leave one of n ranks per call).
COLLECTIVES: dict[str, tuple[Callable[[Tensor, Any], None], Callable[[int], float]]] = {
    "all_reduce": (_all_reduce, lambda n: 2 * (n - 1) / n),
    "all_gather": (_all_gather, lambda n: (n - 1) / n),
    "all_to_all": (_all_to_all, lambda n: (n - 1) / n),
    "send": (_send, lambda n: 1.0),
}


def collective_lines(clock: Clock) -> dict[str, list[list[float]]]:
    """Return [ranks, latency, bytes per second] by collective, with all groups of that many ranks active at once."""
    world = dist.get_world_size()
    found: dict[str, list[list[float]]] = {kind: [] for kind in COLLECTIVES}
    for ranks in sorted({n for n in (2, 4, world) if n <= world and world % n == 0}):
        groups: list[Any] = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        group = groups[dist.get_rank() // ranks]
        for kind, (call, share) in COLLECTIVES.items():
            if kind == "send" and ranks > 2:
                continue
            samples = []
            for nbytes in SENT[clock.device.type == "cuda"]:
                whole = torch.ones(max(ranks, nbytes // 4 // ranks * ranks), device=clock.device)
                taken = clock.seconds(partial(call, whole, group)) / (2 if kind == "send" else 1)
                samples.append((whole.nbytes * share(ranks), taken))
            fitted = line(samples)
            found[kind].append([ranks, fitted["latency_s"], fitted["bytes_per_s"]])
        dist.destroy_process_group(group)
    return found


def communicator_bytes(clock: Clock) -> int:
    """Return the bytes of a communicator of all ranks after it has sent 64 KiB, as median of ranks. Collective.

    GPU memory, or resident memory of the process on a CPU.
    """
    whole = torch.ones(2**14, device=clock.device)
    dist.all_reduce(whole)
    before = _held_bytes(clock.device)
    made: list[Any] = [dist.new_group() for _ in range(COMMUNICATORS)]
    for group in made:
        dist.all_reduce(whole, group=group)
    after = _held_bytes(clock.device)
    for group in made:
        dist.destroy_process_group(group)
    return max(0, int(statistics.median(of_all((after - before) / COMMUNICATORS))))


def _held_bytes(device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wire(clock: Clock) -> dict[str, float]:
    """Return latency and bytes per second of the process group, over the collectives that layers call."""
    ranks = dist.get_world_size()
    samples = []
    for nbytes in SENT[clock.device.type == "cuda"]:
        whole = torch.ones(max(ranks, nbytes // 4 // ranks * ranks), device=clock.device)
        for call in (_all_gather, _all_to_all):
            samples.append((whole.nbytes * (ranks - 1) / ranks, clock.seconds(partial(call, whole, None))))
    return line(samples)


def line(samples: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Fit latency and speed to (bytes, seconds). Relative errors are minimized, so that small messages count too."""
    nbytes, seconds = zip(*samples, strict=True)
    slope, latency = map(float, np.polyfit(nbytes, seconds, 1, w=[1 / s for s in seconds]))
    return {"latency_s": max(latency, 1e-7), "bytes_per_s": 1 / max(slope, 1e-15)}
