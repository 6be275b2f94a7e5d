"""Agreement of ranks on a step: one small maximum, from which the ranks of a data group decide alike.

It finds whether ranks are at the same step of the same model, which buckets got gradients after their launch, whether a
rank reports a problem, and whether some ranks left a parameter unused or froze it. If each backward is reduced, ranks
also agree before each one. A rank that ends its step is then paired with one that begins another backward, and both
raise.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from operator import attrgetter
from types import MappingProxyType

import torch.distributed as dist

from core.distributed.buffer.bucket import Bucket
from core.distributed.wire.packs import sample_of
from core.groups import agree
from core.groups.agree import SyncError


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """Buckets of one data group, and a group of the same ranks for their agreement once a step.

    On CUDA ``group`` is the control group, if any, so that reading the answer does not stop the stream. Without a
    control group (create_gloo_process_groups=False) every step waits for the device once.
    """

    name: str
    group: dist.ProcessGroup
    buckets: tuple[Bucket, ...]
    model: int  # number of the wrap on this group, the same on all its ranks


class Moment(IntEnum):
    """Next action of a rank after the agreement."""

    BACKWARD = 0  # continues with a backward, which has produced its first gradient
    END = 1  # launches the remaining buckets, after the last backward of the step
    FINISH = 2  # waits for the reductions
    DROP = 3  # drops the reductions


@dataclass(slots=True)
class StepAnswer:
    """Result of the agreement on a step, known to all ranks."""

    late: set[int] = field(default_factory=set)  # ids of buckets that got gradients after their launch on any rank
    whole: set[dist.ProcessGroup] = field(default_factory=set)  # data groups with a rank that wants full gradients
    continues: bool = False  # some ranks begin a backward while others end the step
    written: tuple[bool, bool] = (False, False)  # weights seem to differ; weights were loaded on some ranks alone


def agree_on_step(
    control: Sequence[ControlGroup],
    moment: Moment,
    backwards: int,
    launches: int,
    *,
    may_join: bool = False,
    problems: Sequence[str] = (),
    has_gradients: bool = True,
    begun_by_forward: bool = False,
    wants_whole: bool = False,
    gathers: Mapping[str, Sequence[str]] = MappingProxyType({}),
    loads: int = 0,
) -> StepAnswer:
    """Agree with the other ranks on the end of the step. A parameter counts as used if any rank has used it.

    Collective over the data groups. Raises SyncError on all ranks of a data group if one of them has a problem, or if
    they are at different steps.

    Args:
        backwards: Number of backwards that this rank has begun in this step, if each is reduced.
        launches: Number of bucket launches since the wrap.
        may_join: True if a rank that ends its step can add zeros to another rank's further backward.
        begun_by_forward: True if only a forward indicates that there is a step.
        gathers: Descriptions of the parameter gathers over each data group, in order.
        loads: Number of times that weights were loaded since the last step.
    """
    answer = StepAnswer()
    failure: SyncError | None = None  # raised at the end: ranks of the next group may wait for this one there
    for entry in control:
        finishes = entry.buckets if moment is Moment.FINISH else ()
        params = chain.from_iterable(bucket.params for bucket in finishes)
        trains = bytes(map(attrgetter("requires_grad"), params))
        used = bytes(chain.from_iterable(bucket.used for bucket in finishes))
        late = [moment is Moment.FINISH and bucket.attribute.has_late for bucket in entry.buckets]
        mine = {
            "moment": moment,
            "trains": zlib.crc32(trains),
            "unused": trains != used,
            "problem": bool(problems),
            "model": entry.model,
            "launches": launches,
            "has gradients": has_gradients,
            "begun by forward": begun_by_forward,
            "wants whole": wants_whole,
            "adds to shards": any(
                bucket.step.accumulated_shard is not None and bucket.sharded for bucket in entry.buckets
            ),
            "gathers": zlib.crc32(repr(gathers.get(entry.name, ())).encode()),
            # The first group has all ranks of the others.
            "weights": _sample(finishes, launches) if finishes and entry is control[0] else 0,
            "loads": loads,
        }
        what = f"the agreement of data group {entry.name}"
        least, largest = agree.bounds([*mine.values(), *late], entry.group, what)
        low, high = (dict(zip(mine, found, strict=False)) for found in (least, largest))
        if low["moment"] != high["moment"]:  # other differences follow from it
            joins = (low["moment"], high["moment"]) == (Moment.BACKWARD, Moment.END) and low["model"] == high["model"]
            answer.continues |= may_join and joins and entry is control[0]
            if not answer.continues:
                error = _unequal_backwards(entry, moment, backwards)
                failure = failure or error
            continue
        found: SyncError | None = None  # by a collective, so ranks that already have a failure must take part
        if low["trains"] != high["trains"]:
            found = unequal_copies(members_of(entry.buckets), entry.group, f"data group {entry.name!r}")
        elif high["problem"]:
            reported = agree.gather(problems, entry.group, "the problems of other ranks")
            found = next(SyncError(f"rank {rank}: {theirs[0]}") for rank, theirs in reported.items() if theirs)
        elif low["gathers"] != high["gathers"]:
            found = unequal_gathers(entry.name, entry.group, gathers.get(entry.name, ()))
        elif (text := _contradiction(entry, low, high)) is not None:
            found = SyncError(text)
        failure = failure or found
        if entry is control[0]:
            answer.written = low["weights"] != high["weights"], low["loads"] != high["loads"]
        if high["unused"]:
            share_used(members_of(entry.buckets), entry.group)
        if high["wants whole"]:
            answer.whole.update(bucket.groups.data for bucket in entry.buckets)
        flags = zip(entry.buckets, largest[len(mine) :], strict=True)
        answer.late.update(id(bucket) for bucket, is_late in flags if is_late)
    if failure is not None:
        raise failure
    return answer


def _sample(buckets: Sequence[Bucket], launches: int) -> int:
    """Hash a few elements of the parameters, others in each step. Returns 0 on a device, to avoid a wait."""
    turn = launches // max(1, len(buckets))
    full = [bucket for bucket in buckets if bucket.memory.param_data is not None or bucket.memory.param_shard is None]
    return sample_of(full[turn % len(full)].params, turn) if full and full[0].device.type == "cpu" else 0


def _contradiction(entry: ControlGroup, low: dict[str, int], high: dict[str, int]) -> str | None:
    """Return why the ranks of a data group cannot end this step together, from the agreed facts. Pure."""
    if low["model"] != high["model"]:
        name = next((bucket.contracts[-1].name for bucket in reversed(entry.buckets)), "no parameter")
        return (
            f"the gradients of model {entry.model} (that of {name!r}) were mixed with those of another model "
            f"on other ranks of data group {entry.name!r}, and both are lost. Call finalize_model_grads for "
            "all models in one order on every rank"
        )
    if high["begun by forward"] and not high["has gradients"]:
        return (
            f"no rank of data group {entry.name!r} had a gradient since the last finalize_model_grads, only a "
            "forward; its gradients are lost. Call it once a step, and run evaluations under torch.no_grad()"
        )
    if high["wants whole"] and high["adds to shards"]:
        return (
            f"force_all_reduce=True came on a rank of data group {entry.name!r} in a step that adds to "
            "gradients which an earlier finalize_model_grads has left sharded; ask for it in each one since "
            "zero_grad, or in none"
        )
    if low["launches"] != high["launches"]:
        return (
            f"the ranks of data group {entry.name!r} have launched {low['launches']} to {high['launches']} reductions; "
            "they disagree on which step this is, and gradients of two steps may have been mixed. Did one "
            "rank skip a backward or a zero_grad_buffer()? Restart from the last checkpoint"
        )
    return None


def _unequal_backwards(entry: ControlGroup, moment: Moment, backwards: int) -> SyncError:
    does = {Moment.BACKWARD: f"begins backward {backwards + 1}", Moment.DROP: "drops its step (zero_grad)"}
    mine = does.get(moment, f"ends its step after {backwards}")
    answers = agree.gather(mine, entry.group, "the number of backwards")
    ranks = f"the ranks of data group {entry.name!r} {list(answers)}"
    drops = any("drops" in theirs for theirs in answers.values())
    listed = ", ".join(f"rank {r} {theirs.split(' after')[0] if drops else theirs}" for r, theirs in answers.items())
    if drops:
        return SyncError(
            f"{ranks} do not drop a step together: {listed}. When reductions have begun a step is dropped on all "
            "ranks, or on none. zero_grad_buffer() on all of them drops it"
        )
    return SyncError(
        f"{ranks} have different numbers of backwards in this step: {listed}. reduce_microbatches='every' needs as "
        "many on every rank if all ranks gather parameters, or if experts have other ranks: give ranks without data a "
        "microbatch whose loss is multiplied by 0, or set reduce_microbatches='last'. zero_grad_buffer() on all ranks "
        "drops the step"
    )


def unequal_gathers(name: str, group: dist.ProcessGroup, gathers: Sequence[str]) -> SyncError:
    """Return the error for ranks that have gathered parameters in different orders. Collective."""
    answers = agree.gather(list(gathers), group, "the order in which parameters were gathered")
    return SyncError(
        f"the ranks of data group {name!r} have gathered sharded parameters in different orders, so that they "
        f"may have computed with other parameters' values: {agree.first_difference(answers)}. All ranks must use the "
        "modules in one order, as often; put what only some ranks run inside `with model.gathered():`, on all ranks"
    )


Member = tuple[Bucket, int]  # a parameter by its position: `bucket.params[index]`


def members_of(buckets: Sequence[Bucket]) -> list[Member]:
    """Return all parameters of these buckets, in launch order."""
    return [(bucket, i) for bucket in buckets for i in range(len(bucket.params))]


def share_used(members: Sequence[Member], group: dist.ProcessGroup) -> None:
    """Mark a parameter as used on all ranks of a group if any of them has used it. Collective."""
    _, used = agree.bounds([bucket.used[i] for bucket, i in members], group, "the parameters that are used")
    for (bucket, i), flag in zip(members, used, strict=True):
        bucket.used[i] = flag


def unequal_copies(
    members: Sequence[Member], group: dist.ProcessGroup, group_name: str, alike: Sequence[int] = ()
) -> SyncError:
    """Return the error for copies that only some ranks of a group train or have used. Collective.

    A copy on another stage may have another name. ``alike`` has 1 for each member that must have been used on all ranks
    or on none.
    """
    mine = [
        (bucket.contracts[i].name, bucket.params[i].requires_grad, not must or bucket.used[i] == 1)
        for (bucket, i), must in zip(members, alike or bytes(len(members)), strict=True)
    ]
    answers = agree.gather(mine, group, f"the copies of {group_name}")
    ranks = list(answers)
    copies = next(column for column in zip(*answers.values(), strict=True) if len({about[1:] for about in column}) > 1)
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
