"""Conversion of a sharded optimizer's state to torch's format, with full tensors by parameter index, and back.

Full states are gathered one parameter at a time: each rank that owns elements of the parameter sends them to the others
of its shard group, so gathering needs memory for one parameter. The key ``master`` is next to the moments if masters
are separate from the parameters (16-bit training). torch's optimizers keep that key and do not use it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as tree

from core.booster.checkpoint_io.checks import match_groups, packed_groups
from core.distributed.wire.collectives import Collectives
from core.groups import agree
from core.optimizer.adopted_optimizer import AdoptedOptimizer
from core.optimizer.optimizer_state import MASTER, PLACE, Entry, cut_entry, elements_of, plain_numbers
from core.watch.waiting import store_barrier, waiting

ALL_RANKS = (
    "The state of a sharded optimizer is in shards on all ranks, and its state_dict() is collective: call it on all of "
    "them, and write the file on rank 0"
)
OWN_OPTIONS = ("params", "param_names", "fused", "foreach")  # group options that a load does not replace


class StatePiece(NamedTuple):
    """Piece of one parameter's state on one rank: elements [start, end) of some keys, and other values unchanged."""

    rank: int  # within the shard group
    start: int
    end: int
    dtypes: dict[str, torch.dtype]
    values: dict[str, Any]


# -- out ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def full_states(engine: AdoptedOptimizer) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (index, full state) of each parameter that has been updated, in order.

    This is collective if the optimizer is sharded, so every rank must exhaust the iterator. Tensors have the
    parameter's shape and are on the gradients' device. Raises ``PeerLost`` within seconds if other ranks do not
    join.
    """
    for group, _ in _names_by_group(engine):
        with waiting("the state of a sharded optimizer", group, advice=ALL_RANKS):
            store_barrier("the state of a sharded optimizer", dist.get_process_group_ranks(group))
    mine = engine.state_by_parameter()
    pieces = _pieces_of_all_ranks(engine, mine)
    group_of = {name: group for group, names in _names_by_group(engine) for name in names}
    for number, param in enumerate(itertools.chain.from_iterable(engine.user_params)):
        name = engine.names.get(id(param), "")
        # torch's optimizers create the state of a parameter only if it is empty.
        found = pieces.get(name, [])
        if not found or not (found[0].values or set(found[0].dtypes) - {MASTER}):
            continue
        state: dict[str, Any] = dict(found[0].values)
        for key, dtype in found[0].dtypes.items():
            whole = torch.zeros(param.numel(), dtype=dtype, device=engine.meter.device)
            for entry in mine.get(name, []):
                whole[entry["offset"] : entry["offset"] + entry["numel"]].copy_(entry[key])
            for piece in found if name in group_of else ():
                part = whole[piece.start : piece.end]
                Collectives().broadcast(part, group_of[name], f"the state of {name}", piece.rank)
            state[key] = whole.view(param.shape)
        yield number, state


def on_host(value: Any) -> Any:
    """Copy the tensors in a tree of values to host memory."""
    return tree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)


def of_all_stages(items: Iterator[Any], group: dist.ProcessGroup | None) -> Iterator[Any]:
    """Yield the items of all pipeline stages on each of them, in host memory, one item per stage at a time.

    Collective over the pipeline ``group``. Without one the items are unchanged.
    """
    if group is None or dist.get_world_size(group) == 1:
        yield from items
        return
    while True:
        answers = agree.gather(on_host(next(items, None)), group, "the tensors of all stages")
        found = [item for item in answers.values() if item is not None]
        if not found:
            return
        yield from found


def _names_by_group(engine: AdoptedOptimizer) -> list[tuple[dist.ProcessGroup, list[str]]]:
    """Return shard groups with the names of the parameters sharded over them, in the same order on all ranks."""
    found: dict[dist.ProcessGroup, list[str]] = {}
    for masters in engine.masters:
        if masters.bucket.shard_range == (0, masters.bucket.layout.numel):  # the full state is here
            continue
        found.setdefault(masters.bucket.groups.shard, []).extend(engine.names[id(p)] for p in masters.bucket.params)
    return list(found.items())


def _pieces_of_all_ranks(engine: AdoptedOptimizer, mine: Mapping[str, Sequence[Entry]]) -> dict[str, list[StatePiece]]:
    pieces = {name: [_piece(0, entry) for entry in entries] for name, entries in mine.items()}
    for group, names in _names_by_group(engine):
        rank = dist.get_rank(group)
        here = {name: [_piece(rank, entry) for entry in mine.get(name, [])] for name in names}
        pieces.update((name, []) for name in names)
        for theirs in agree.gather(here, group, "the pieces of states").values():
            for name, found in theirs.items():
                pieces.setdefault(name, []).extend(found)
    return pieces


def _piece(rank: int, entry: Entry) -> StatePiece:
    dtypes = {key: entry[key].dtype for key in sorted(elements_of(entry))}
    values = {  # step counts, and factors of rows and columns
        key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for key, value in entry.items()
        if key not in dtypes and key not in PLACE
    }
    return StatePiece(rank, entry["offset"], entry["offset"] + entry["numel"], dtypes, values)


# -- in -------------------------------------------------------------------------------------------------------------


def own_part(engine: AdoptedOptimizer, number: int, state: Mapping[str, Any]) -> Entry:
    """Return a copy of this rank's elements of a parameter's full state in torch's format. Does not communicate.

    Raises ValueError if a tensor's shape does not match the parameter, for an elementwise algorithm.
    """
    param = list(itertools.chain.from_iterable(engine.user_params))[number]
    name = engine.names.get(id(param), f"number {number}")
    shards = (piece for masters in engine.masters for piece in masters.shards if piece.param is param)
    offset, numel = next(((piece.offset, piece.numel) for piece in shards), (0, 0))
    entry = cut_entry(state, param, offset, numel)
    elements = elements_of(entry)
    for key, value in state.items():
        if key in elements:
            entry[key] = entry[key].clone()
        elif isinstance(value, torch.Tensor) and value.dim() > 0 and engine.scope == "element":
            raise ValueError(
                f"{key!r} of {name!r} has shape {list(value.shape)} in the checkpoint, and the parameter "
                f"{list(param.shape)}; it is of another model, or of another algorithm"
            )
    return entry


def load_parts(engine: AdoptedOptimizer, parts: Mapping[int, Entry]) -> None:
    """Load parts from ``own_part`` by parameter index. The state of a parameter without a part starts fresh."""
    entries: dict[str, Entry] = {}
    for number, param in enumerate(itertools.chain.from_iterable(engine.user_params)):
        name = engine.names.get(id(param))
        if name is not None:
            entries[name] = parts.get(number, {"offset": 0, "numel": param.numel()})
    engine.load_state_by_parameter(entries)


def update_groups(engine: AdoptedOptimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Copy saved options into the groups in place, because schedulers keep references to them."""
    for group, other in zip(engine.param_groups, saved, strict=True):
        group.update({key: value for key, value in other.items() if key not in OWN_OPTIONS})


# -- both -----------------------------------------------------------------------------------------------------------


def full_state_dict(engine: AdoptedOptimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """Return the full state in torch's format on every rank, in separate memory. Collective."""
    state = {
        number: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
        for number, found in full_states(engine)
    }
    return {"state": state, "param_groups": plain_numbers(_groups(engine, names))}


def _groups(engine: AdoptedOptimizer, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    return packed_groups(engine.param_groups, [[names.get(param) for param in params] for params in engine.user_params])


def load_full_state_dict(
    engine: AdoptedOptimizer, names: Mapping[nn.Parameter, str], state_dict: Mapping[str, Any]
) -> None:
    """Load a full state from ``full_state_dict`` or from a torch optimizer over the same parameters.

    Raises ValueError if groups, names or shapes do not match.
    """
    numbers = match_groups(state_dict["param_groups"], _groups(engine, names))
    found = {numbers[int(number)]: state for number, state in state_dict["state"].items()}
    load_parts(engine, {number: own_part(engine, number, state) for number, state in found.items()})
    update_groups(engine, state_dict["param_groups"])
