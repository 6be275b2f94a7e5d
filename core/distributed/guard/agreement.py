"""Agreement: what all ranks of a data group tell each other once a step, in one small maximum.

Did gradients come after a bucket's launch? Does a rank report a problem? Do the frozen sets differ? Is everybody at the
same step? Has a rank left a parameter without a gradient? So all of them take the same branch, or raise the same error.
Where each backward is reduced, ranks also agree before each one, in the same collective. A rank that ends its step then
meets one that begins another backward.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from operator import attrgetter

import torch
import torch.distributed as dist

from core.agree import SyncError, control_device
from core.distributed.buffer.bucket import Bucket
from core.distributed.wire.collectives import agree_max, gather_objects
from core.waiting import waiting


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """The buckets of one data group, and a group of the same ranks for their agreement once a step.

    On CUDA `group` is the gloo twin where there is one, so that reading the answer does not stop the stream; without
    (create_gloo_process_groups=False) every step waits for the device once.
    """

    name: str
    group: dist.ProcessGroup
    buckets: tuple[Bucket, ...]
    model: int  # the number of the wrap on this group, the same on all its ranks


class Moment(IntEnum):
    """What a rank is about to do when it asks the others."""

    BACKWARD = 0  # its next backward has produced the first gradient
    END = 1  # it launches what is left; it has no further backward in this step
    FINISH = 2  # it waits for the reductions


class Agreement:
    """One small maximum a data group, in which every rank learns what happened on any rank.

    Is everybody at the same moment of the same step? And at its end, for each bucket: did gradients come after its
    launch? For all: does a rank report a problem? Do the frozen sets differ?

    backwards: how many this rank has begun in this step, where each is reduced; launches: of buckets, ever.
    """

    def __init__(
        self,
        control: Sequence[ControlGroup],
        moment: Moment,
        backwards: int,
        launches: int,
        *,
        problems: Sequence[str] = (),
        dirty: bool = True,
        unasked: bool = False,
        wants_whole: bool = False,
    ) -> None:
        self.control = control
        self.moment = moment
        self.backwards = backwards
        self.problems = problems
        self.flags: list[torch.Tensor] = []
        self.works: list[dist.Work | None] = []
        self.gathers: set[dist.ProcessGroup] = set()  # data groups of which a rank wants whole gradients, once known
        for entry in control:
            late, trains, used = [0] * len(entry.buckets), b"", b""
            if moment is Moment.FINISH:
                late = [int(bucket.has_late) for bucket in entry.buckets]
                params = chain.from_iterable(bucket.params for bucket in entry.buckets)
                trains = bytes(map(attrgetter("requires_grad"), params))
                used = bytes(chain.from_iterable(bucket.used for bucket in entry.buckets))
            digest = zlib.crc32(trains)
            flags = torch.tensor(
                [
                    moment,
                    -moment,
                    entry.model,
                    -entry.model,
                    int(bool(problems)),
                    int(trains != used),
                    digest,
                    -digest,
                    launches,
                    -launches,
                    int(dirty),
                    int(unasked),
                    int(wants_whole),
                    int(any(bucket.carried is not None for bucket in entry.buckets)),
                    *late,
                ],
                dtype=torch.int64,
                device=control_device(entry.group),
            )
            self.flags.append(flags)
            self.works.append(agree_max(flags, entry.group) if dist.get_world_size(entry.group) > 1 else None)

    def late_anywhere(self) -> set[int]:
        """Ids of the buckets that got gradients after their launch on any rank.

        Raises SyncError on all ranks of a data group alike if one reports a problem, if a parameter was frozen on some
        of them only, or if they are at different moments.
        """
        for entry, work in zip(self.control, self.works, strict=True):
            if work is not None:
                with waiting("the agreement of data group", entry.group, entry.name):
                    work.wait()
        late: set[int] = set()
        failure: SyncError | None = None  # raised at the end: ranks of the next group may wait for this one there
        for entry, flags in zip(self.control, self.flags, strict=True):
            moment, minus_moment, model, minus_model, problem, unused, *more = flags.tolist()
            digest, minus_digest, launches, minus_launches, dirty, unasked, whole, carries, *is_late = more
            if moment != -minus_moment:  # what else differs follows from it
                failure = self._unequal_backwards(entry)
                continue
            if unasked and not dirty:
                failure = SyncError(
                    f"no rank of data group {entry.name!r} had a gradient since the last finalize_model_grads, only a "
                    "forward; its gradients are lost. Call it once a step, and run evaluations under torch.no_grad()"
                )
            if whole and carries:
                failure = failure or SyncError(
                    f"force_all_reduce=True came on a rank of data group {entry.name!r} in a step that adds to "
                    "gradients which an earlier finalize_model_grads has left sharded; ask for it in each one since "
                    "zero_grad, or in none"
                )
            if whole:
                self.gathers.update(bucket.groups.data for bucket in entry.buckets)
            if launches != -minus_launches:
                failure = failure or SyncError(
                    f"the ranks of data group {entry.name!r} have launched {-minus_launches} to {launches} reductions; "
                    "they disagree on which step this is, and gradients of two steps may have been mixed. Did one "
                    "rank skip a backward or a zero_grad_buffer()? Restart from the last checkpoint"
                )
            if model != -minus_model:
                name = next((bucket.contracts[-1].name for bucket in reversed(entry.buckets)), "no parameter")
                failure = SyncError(
                    f"the gradients of model {entry.model} (that of {name!r}) were mixed with those of another model "
                    f"on other ranks of data group {entry.name!r}, and both are lost. Call finalize_model_grads for "
                    "all models in one order on every rank"
                )
            if problem:
                failure = self._reported(entry)
            if digest != -minus_digest:
                failure = unequal_copies(members_of(entry.buckets), entry.group, f"data group {entry.name!r}")
            if unused:
                share_used(members_of(entry.buckets), entry.group)
            late.update(id(bucket) for bucket, flag in zip(entry.buckets, is_late, strict=True) if flag)
        if failure is not None:
            raise failure
        return late

    def _reported(self, entry: ControlGroup) -> SyncError:
        ranks = dist.get_process_group_ranks(entry.group)
        everyone = gather_objects(self.problems, entry.group)
        rank, problems = next((rank, found) for rank, found in zip(ranks, everyone, strict=True) if found)
        return SyncError(f"rank {rank}: {problems[0]}")

    def _unequal_backwards(self, entry: ControlGroup) -> SyncError:
        ranks = dist.get_process_group_ranks(entry.group)
        words = (
            f"begins backward {self.backwards + 1}"
            if self.moment is Moment.BACKWARD
            else f"ends its step after {self.backwards}"
        )
        everyone = zip(ranks, gather_objects(words, entry.group), strict=True)
        return SyncError(
            f"the ranks of data group {entry.name!r} {ranks} have different numbers of backwards in this step: "
            + ", ".join(f"rank {rank} {does}" for rank, does in everyone)
            + ". reduce_microbatches='every' needs as many on every rank: give ranks without data a microbatch whose "
            "loss is multiplied by 0, or set reduce_microbatches='last'. zero_grad_buffer() on all ranks drops the step"
        )


Member = tuple[Bucket, int]  # a parameter by its place: `bucket.params[index]`


def members_of(buckets: Sequence[Bucket]) -> list[Member]:
    """Every parameter of these buckets."""
    return [(bucket, i) for bucket in buckets for i in range(len(bucket.params))]


def share_used(members: Sequence[Member], group: dist.ProcessGroup) -> None:
    """Count a parameter as used on every rank of a group where one of them has used it. Collective."""
    used = torch.tensor([bucket.used[i] for bucket, i in members], dtype=torch.int64, device=control_device(group))
    with waiting("the parameters that are used", group):
        agree_max(used, group).wait()
    for (bucket, i), flag in zip(members, used.tolist(), strict=True):
        bucket.used[i] = flag


def unequal_copies(
    members: Sequence[Member], group: dist.ProcessGroup, group_name: str, alike: Sequence[int] = ()
) -> SyncError:
    """The error for copies that only some ranks of a group train, or have used, naming the first. Collective.

    members: the copies in the order that all ranks share; a copy on another stage may have another name. alike: 1 for
    each member that must have been used on all ranks or on none.
    """
    mine = [
        (bucket.contracts[i].name, bucket.params[i].requires_grad, not must or bucket.used[i] == 1)
        for (bucket, i), must in zip(members, alike or bytes(len(members)), strict=True)
    ]
    ranks = dist.get_process_group_ranks(group)
    everyone = gather_objects(mine, group)
    copies = next(column for column in zip(*everyone, strict=True) if len({about[1:] for about in column}) > 1)
    by_rank = dict(zip(ranks, copies, strict=True))
    frozen = [rank for rank, (_, trains, _) in by_rank.items() if not trains]
    if 0 < len(frozen) < len(ranks):
        return SyncError(
            f"parameter {by_rank[frozen[0]][0]!r} is frozen on ranks {frozen} and trained on the other ranks of "
            f"{group_name} {ranks}; its copies would drift apart. Set requires_grad alike on all of them"
        )
    unused = [rank for rank, (*_, used) in by_rank.items() if not used]
    return SyncError(
        f"parameter {by_rank[unused[0]][0]!r} got no gradient on ranks {unused} and one on the other ranks of "
        f"{group_name} {ranks}, and no rule adds them; its copies would drift apart. If its gradient is partial there, "
        "declare it: declare_gradient(param, partial_over=...)"
    )
