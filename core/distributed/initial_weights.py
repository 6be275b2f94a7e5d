"""Do the ranks of a data group start from the same weights? Small parameters are compared, and sent, many at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.collectives import Collectives, agree_max, control_device, gather_objects
from core.distributed.fingerprint import LayoutMismatch, checksum

SMALL_NUMEL = 2**16  # a larger parameter is not worth a copy
PACK_NUMEL = 2**20  # elements of small ones that are copied together


def packs_of(params: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut parameters into lists of one dtype: a large one alone, small ones up to PACK_NUMEL elements together.

    Goes by sizes and dtypes only, so ranks with the same model get the same lists.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for param in params:
        by_dtype.setdefault(param.dtype, []).append(param)
    for alike in by_dtype.values():
        pack: list[torch.Tensor] = []
        filled = 0
        for param in alike:
            numel = param.numel()
            if numel > SMALL_NUMEL:
                yield [param]
                continue
            pack.append(param)
            filled += numel
            if filled > PACK_NUMEL:
                yield pack
                pack, filled = [], 0
        if pack:
            yield pack


def check_equal_weights(
    named: Mapping[str, nn.Parameter],
    group: dist.ProcessGroup,
    group_name: str,
    stored: Sequence[torch.Tensor] = (),
) -> None:
    """Raise LayoutMismatch on every rank of a data group if two of them hold other values, naming the first parameter.

    stored: buffers in which the parameters that train lie already; the others are looked at in packs.
    A few integers a buffer or pack travel; the same for each parameter only when they differ. Collective over `group`.
    """
    loose = [param for param in named.values() if not param.requires_grad] if stored else named.values()
    with torch.inference_mode():  # a view of each that autograd keeps no account of
        sums = [*map(checksum, stored), *(checksum(_flat(pack)) for pack in packs_of(loose))]
    if not _differing(sums, group):
        return
    ranks = dist.get_process_group_ranks(group)
    sums = [checksum(param) for param in named.values()]
    first = next(iter(_differing(sums, group)), None)
    if first is None:
        raise LayoutMismatch(
            f"the ranks {ranks} of data group {group_name!r} start with other values; load the same checkpoint on all "
            "of them, or wrap with initial_weights='broadcast'. Which parameter differs cannot be said: the checksums "
            "of each are equal, those of many together are not"
        )
    values = gather_objects(sums[first], group)
    other = next((r for r, v in zip(ranks, values, strict=True) if v != values[0]), ranks[0])
    raise LayoutMismatch(
        f"parameter {list(named)[first]!r} starts with other values on rank {other} than on rank {ranks[0]} of data "
        f"group {group_name!r} {ranks}. Seed all data ranks alike, load the same checkpoint, or wrap with "
        "initial_weights='broadcast'"
    )


@torch.no_grad()
def broadcast_weights(params: Sequence[nn.Parameter], group: dist.ProcessGroup, collectives: Collectives) -> None:
    """Copy the parameters of the group's first rank to the others. Collective over `group`."""
    for pack in packs_of(params):
        if len(pack) == 1 and pack[0].is_contiguous():
            collectives.broadcast(pack[0].data, group)
            continue
        flat = _flat(pack)
        collectives.broadcast(flat, group)
        if dist.get_rank(group) > 0:
            for param, part in zip(pack, flat.split([param.numel() for param in pack]), strict=True):
                param.data.copy_(part.view_as(param))


@torch.no_grad()
def _flat(pack: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(pack) == 1:
        return pack[0].reshape(-1)
    flat: torch.Tensor = torch._utils._flatten_dense_tensors(pack)  # a reshape of each in Python takes twice as long
    return flat


def _differing(sums: Sequence[tuple[int, int, int]], group: dist.ProcessGroup) -> list[int]:
    """Which of these are not the same on all ranks? The answer is."""
    mine = torch.tensor(sums, dtype=torch.int64, device=control_device(group)).view(len(sums), 3)
    bounds = torch.stack([mine, -mine])
    agree_max(bounds, group).wait()
    return (bounds[0] != -bounds[1]).any(dim=1).nonzero().view(-1).tolist()
