"""ProcessGroups: this rank's process groups in one typed object, and their creation."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from core.groups.agree import backends_of
from core.groups.group_options import NO_OPTIONS, GroupOptions
from core.groups.rank_grid import GRADIENT_KINDS, KINDS, MODEL_AXES, STAGE_CROSSING
from core.watch.waiting import waiting

__all__ = ["ProcessGroups", "world_chain", "world_groups"]

# Control group -> the group with the same ranks; for CPU tensors if the backend sends only device memory.
CONTROL_GROUPS = {f"{name}_gloo": name for name in ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")}
FIELDS = (*KINDS, *CONTROL_GROUPS)


class ProcessGroups:
    """The process groups that a rank belongs to.

    The fields are the kinds of ``core.groups.rank_grid`` and the control groups (dp_gloo, ...). Pass any of them by
    keyword; an unknown name raises ValueError. A missing field is ``None``, and ``require`` raises an error that
    names it. ``core.parallel_state.ProcessGroupCollection`` adds the Megatron interface.

        groups = ProcessGroups(dp=data_group, dp_cp=data_group, tp=tensor_group)
        groups.size("tp"), groups.rank("dp_cp"), groups.require("pp")
    """

    _created: tuple[ProcessGroup, ...] = ()

    def __init__(self, **groups: ProcessGroup | None) -> None:
        for name, group in groups.items():
            setattr(self, name, group)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIELDS:
            self.__dict__.setdefault("_places", {}).pop(name, None)
        elif name != "_created":
            raise ValueError(f"Unknown attribute: {name}; the process groups are {', '.join(FIELDS)}.")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> ProcessGroup | None:
        if name in FIELDS:
            return None
        raise AttributeError(f"ProcessGroups has no {name!r}; the process groups are {', '.join(FIELDS)}.")

    def __repr__(self) -> str:
        sizes = (f"{name}[{self.size(name)}]" for name in FIELDS if getattr(self, name) is not None)
        return f"ProcessGroups({', '.join(sizes)})"

    @property
    def created(self) -> tuple[ProcessGroup, ...]:
        """Groups that ``build`` created for this object, in order. A group shared by several fields counts once."""
        return self._created

    def require(self, name: str) -> ProcessGroup:
        """Return group ``name``. Raises RuntimeError, with the name, if this rank does not have that group."""
        group = self._field(name)
        if group is None:
            raise RuntimeError(
                f"The process group '{name}' is needed and not set on this rank; pass ProcessGroups({name}=...) or "
                f"call core.parallel_state.initialize_model_parallel (ranks outside an embedding group have none)."
            )
        return group

    def control(self, name: str) -> ProcessGroup:
        """Return the group for agreements among the ranks of group ``name``: its control group, else the group
        itself.
        """
        return getattr(self, f"{name}_gloo", None) or self.require(name)

    def size(self, name: str) -> int:
        """Return the number of ranks in group ``name``, or 1 if this object has no such group."""
        return self._place(name)[1]

    def rank(self, name: str) -> int:
        """Return this rank's index in group ``name``, or 0 if this object has no such group."""
        return self._place(name)[0]

    def ranks(self, name: str) -> list[int]:
        """Return the global ranks of group ``name``, ascending. Raises RuntimeError if there is no such group."""
        return dist.get_process_group_ranks(self.require(name))

    def with_other_ranks(self) -> list[ProcessGroup]:
        """Return the groups of more than one rank, each once, except the default group."""
        groups = {id(group): group for name in FIELDS if (group := self._field(name)) and self.size(name) > 1}
        return [group for group in groups.values() if group is not dist.group.WORLD]

    def destroy(self) -> None:
        """Destroy the groups that ``build`` created, once. Groups that were passed in belong to the caller."""
        created = self._created
        self.__dict__.clear()
        _destroy(created)

    def _place(self, name: str) -> tuple[int, int]:
        """Return (rank, size), cached because torch takes microseconds and wrapping asks for every parameter."""
        places: dict[str, tuple[int, int]] = self.__dict__.setdefault("_places", {})
        if name not in places:
            group = self._field(name)
            places[name] = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        return places[name]

    def _field(self, name: str) -> ProcessGroup | None:
        if name not in FIELDS:
            raise ValueError(f"Unknown attribute: {name}; the process groups are {', '.join(FIELDS)}.")
        return getattr(self, name)

    @classmethod
    def build(
        cls,
        members: Mapping[str, Sequence[int]],
        *,
        timeout: timedelta | None = None,
        control_groups: bool = True,
        options: Mapping[str, GroupOptions] | None = None,
    ) -> ProcessGroups:
        """Create this rank's groups on top of the initialized default process group.

        Every rank of the world calls it, with its own ``members`` from ``rank_grid.group_ranks``. Creating a group only
        waits for its members; the call returns when all ranks have finished. All ranks process the kinds in the same
        order, so no deadlock is possible. Kinds with equal ranks and options share one group, but gradients never share
        with activations (Note [Gradient groups]). 'intra_dist_opt' is the default group if it has all ranks of the
        world and no other kind does. If creation fails, the groups created so far are destroyed before the error is
        raised.

        Args:
            members: Ranks of this rank's group, by kind.
            timeout: Timeout of every group. Defaults to the backend's.
            control_groups: Also set the *_gloo fields. These are separate groups even on gloo, because agreements use
                them while gradients are in flight.
            options: Stream priority and communicator settings by kind. Only used with NCCL.
        """
        options = options or {}
        backends = {name.lower() for name in backends_of().values()}  # of the default group
        shared: dict[tuple[Any, ...], ProcessGroup] = {}
        groups = cls()
        build = _next_build()
        everyone = waiting(COMING, range(dist.get_world_size()), computes=True)
        with _named_groups(build) as create, everyone:
            try:
                for name, is_control, ranks in _kinds(members, control_groups):
                    as_gloo = backends == {"gloo"} or is_control
                    option = options.get(name, NO_OPTIONS) if "nccl" in backends else NO_OPTIONS
                    # See Note [Gradient groups]; a group of one rank sends nothing.
                    of_gradients = len(ranks) > 1 and name in GRADIENT_KINDS
                    key = (tuple(ranks), as_gloo, option, of_gradients)
                    if key in shared:
                        group = shared[key]
                    elif name == "intra_dist_opt" and len(ranks) == dist.get_world_size() and option == NO_OPTIONS:
                        group = dist.group.WORLD
                    else:
                        group = shared[key] = create(name, list(ranks), "gloo" if as_gloo else None, timeout, option)
                    setattr(groups, name, group)
                _await_all_ranks(build, timeout)
            except BaseException:
                _destroy(tuple(shared.values()))
                raise
        groups._created = tuple(shared.values())
        return groups


COMING = "all ranks in initialize_model_parallel"
# Each chain whose groups are all there reaches every rank of the model once.
CHAINS = (("intra_dist_opt", "inter_dist_opt"), ("mp", "dp_cp"), (*MODEL_AXES, "dp_cp"))


def world_chain(groups: ProcessGroups) -> tuple[str, ...]:
    """Return groups that together reach every rank of the model once, or most ranks if some groups are missing."""
    return max(CHAINS, key=lambda chain: math.prod(map(groups.size, chain)))


def world_groups(groups: ProcessGroups) -> list[ProcessGroup]:
    """Return the groups of ``world_chain`` with several ranks, for agreements."""
    return [groups.control(name) for name in world_chain(groups) if groups.size(name) > 1]


def control_of_stage(groups: ProcessGroups) -> list[ProcessGroup]:
    """Return the control groups that together reach every rank of this pipeline stage."""
    names = ["dp_cp", *(axis for axis in MODEL_AXES if axis not in STAGE_CROSSING)]
    return [groups.control(name) for name in names if groups.size(name) > 1]


def _kinds(members: Mapping[str, Sequence[int]], control: bool) -> Iterator[tuple[str, bool, Sequence[int]]]:
    """Yield (name, True for a control group, ranks) of every group to create, in the order that all ranks share."""
    for name, ranks in members.items():
        yield name, False, ranks
    for name, kind in CONTROL_GROUPS.items() if control else ():
        if kind in members:
            yield name, True, members[kind]


def _destroy(groups: Sequence[ProcessGroup]) -> None:
    """Destroy groups, last created first. Groups that were destroyed with the default group are skipped."""
    for group in reversed(groups):
        with contextlib.suppress(ValueError):  # torch's "Invalid process group specified"
            dist.destroy_process_group(group)


REFUSAL = "refusal"  # takes the place of the sizes of a rank whose arguments are invalid
_build_count = itertools.count()


def _next_build() -> int:
    """Return the number of this build on this job's store, which is the same on all ranks and used once.

    The count is in the store, because the store outlives a default group: with an old name gloo would read the
    addresses of a destroyed group. Every rank counts separately, so no rank waits.
    """
    if dist.get_backend() == "fake":  # a fake store holds nothing, so no names can collide
        return next(_build_count)
    store = dist.group.WORLD.get_group_store()
    return int(store.add(f"core.groups.process_groups/builds/{dist.get_rank()}", 1))


def _await_all_ranks(build: int, timeout: timedelta | None) -> None:
    """Wait until every rank has created its groups.

    Without this wait a rank could destroy its groups while another rank still connects to them. The other rank would
    fail with "Connection closed by peer".
    """
    if dist.get_backend() == "fake":
        return
    store = dist.group.WORLD.get_group_store()
    key = f"core.groups.process_groups/built/{build}"
    if store.add(key, 1) == dist.get_world_size():
        store.set(f"{key}/by all", "")
    with waiting(COMING, range(dist.get_world_size())):
        store.wait([f"{key}/by all"], *([timeout] if timeout else []))


@contextlib.contextmanager
def refusal_reported() -> Iterator[None]:
    """Report an error in this rank's arguments to ranks that wait in ``refuse_other_sizes``. Waits for no rank."""
    try:
        yield
    except (ValueError, RuntimeError, TypeError, OSError) as error:
        if dist.get_backend() != "fake":
            _come_with({REFUSAL: f"{type(error).__name__}: {error}"})
        raise


def _come_with(sizes: Mapping[str, object]) -> tuple[dist.Store, str, str]:
    """Store this rank's split of the job. Return the store, the place in it, and the stored text."""
    place = f"core.groups.process_groups/sizes/{_next_build()}"
    store, mine = dist.group.WORLD.get_group_store(), json.dumps(dict(sizes))
    store.set(f"{place}/{dist.get_rank()}", mine)
    store.add(f"{place}/{mine}", 1)
    if store.add(f"{place}/all", 1) == dist.get_world_size():
        store.set(f"{place}/come", "")
    return store, place, mine


def refuse_other_sizes(sizes: Mapping[str, object], timeout: timedelta | None) -> None:
    """Reject ranks that split the job differently, before any group is created. Collective over the world.

    Such ranks would wait for each other in different groups until the timeout. Each rank counts itself under its sizes
    in the job's store; the sizes of all ranks are read only if the counts differ. Raises ValueError on all ranks with
    the first rank and size that differ.
    """
    if dist.get_backend() == "fake":
        return
    world = dist.get_world_size()
    store, place, mine = _come_with(sizes)
    with waiting(COMING, range(world)):
        store.wait([f"{place}/come"], *([timeout] if timeout else []))
    if store.add(f"{place}/{mine}", 0) == world:
        return
    rows = {rank: json.loads(store.get(f"{place}/{rank}")) for rank in range(world)}
    for rank, row in rows.items():
        if REFUSAL in row:
            raise ValueError(f"rank {rank} came to initialize_model_parallel with other arguments: {row[REFUSAL]}")
    rank = next(rank for rank in rows if rows[rank] != rows[0])
    name = next(name for name in rows[0] if rows[rank].get(name) != rows[0][name])
    raise ValueError(
        f"rank {rank} came to initialize_model_parallel with {name}={rows[rank].get(name)}, and rank 0 with "
        f"{name}={rows[0][name]}. Give all ranks the same sizes and order"
    )


# Note [Gradient groups]
# A communicator pairs the n-th collective of one rank with the n-th of another. A bucket of gradients is launched
# during backward, as soon as the rank's own gradients are complete. Backward also uses communicators for activations
# (the experts' all-to-all, ring attention). On a shared communicator, ranks could pair a bucket with such an exchange.
# So groups for gradients share communicators with each other, but not with groups for activations over equal ranks.
# Control groups are for agreements, which all ranks reach between two backward passes; they may share with the groups
# for activations.


# Note [Names of groups]
# new_group(use_local_synchronization=True) lets only the members of a group take part in its creation. The members meet
# in the store under the group's name. torch makes that name from the ranks and the NUMBER OF GROUPS of this process.
# Ranks differ in that number if one of them is in an embedding group or made a group of its own. They would then wait
# for each other under different names until the timeout. So our groups get names that follow from the build, the kind
# and the ranks alone.
#
# torch splits the communicator of a default group that is bound to a device eagerly, and a split needs every rank of
# the world. The binding is lifted while our groups are created, so that their communicators start on first use.


@contextlib.contextmanager
def _named_groups(build: int) -> Iterator[Any]:
    name = ""
    world = dist.group.WORLD
    device = world.bound_device_id
    torch_name = distributed_c10d._process_group_name

    def create(
        kind: str, ranks: list[int], backend: str | None, timeout: timedelta | None, options: GroupOptions
    ) -> ProcessGroup:
        nonlocal name
        digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()[:16]
        # A control group has a kind of its own, so build, kind and ranks distinguish all groups.
        name = f"core.{build}.{kind}.{digest}"
        group = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=options.nccl(),
            use_local_synchronization=True,
            group_desc=f"core:{kind}",
        )
        if group.group_name != name:
            dist.destroy_process_group(group)
            raise RuntimeError(
                f"torch {torch.__version__} named the group '{kind}' {group.group_name!r} instead of {name!r}; without "
                f"our name ranks can wait for each other forever. Use torch 2.11 to 2.13."
            )
        return group

    try:
        distributed_c10d._process_group_name = lambda ranks, use_hashed_name: name
        if device is not None:
            world.bound_device_id = None
        yield create
    finally:
        distributed_c10d._process_group_name = torch_name
        if device is not None:
            world.bound_device_id = device
