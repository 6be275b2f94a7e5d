"""Optimizer state by parameter name and element range, independent of buckets, segments, strategy and storage dtypes.

An entry covers a range of a flattened parameter's elements. A parameter has one or several entries over disjoint
ranges. State that covers more than a rank needs, such as state saved by the replicated optimizer, loads into a shard.

    {"param_groups": [{"lr": ..., ...}],
     "state": {"layer.weight": [{"offset": 0, "numel": 6, "step": ..., "exp_avg": ..., "master": ...}], ...}}

Per-element values are tensors of shape [numel]: views of the live state if it is stored in fp32 or bf16, and fp32
copies for remainders. Loading converts them to the storage format of this optimizer.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from core.optimizer.masters.master_weights import BucketMasters, Segment, is_per_element
from core.optimizer.masters.param_shards import ParamShard
from core.optimizer.masters.scratch import Scratch

MASTER = "master"  # an entry's master weights, unless the parameters are the masters
ELEMENTS = "elements"  # key of a loaded part: the set of its per-element keys
OTHERS = "not_per_element"  # key of an entry: keys that have a per-element size but are not per element
PLACE = ("offset", "numel", ELEMENTS, OTHERS)  # keys of an entry that are not state
GROUP_NAME = "name"  # identifies a group in a saved state

Entry = dict[str, Any]


def segment_entries(segment: Segment, state: Mapping[str, Any]) -> Iterator[tuple[ParamShard, Entry]]:
    """Yield each shard of a segment with its entry, from the inner optimizer's state for the segment's master."""
    for shard in segment.shards:
        low, high = shard.start - segment.start, shard.end - segment.start
        elements: Entry = {}
        numbers: Entry = {}
        master = None if segment.storage is None else segment.storage.saved(low, high)
        if master is not None:
            elements[MASTER] = master
        for key, value in state.items():
            if key in segment.moments:
                elements[key] = segment.moments[key][low:high]
            elif is_per_element(key, value, segment.master):
                elements[key] = value.reshape(-1)[low:high]
            else:
                numbers[key] = value
        yield shard, _entry(shard.offset, shard.numel, elements, numbers)


def cut_entry(state: Mapping[str, Any], param: torch.Tensor, offset: int, numel: int) -> Entry:
    """Return the entry for elements [offset, offset + numel) of a flattened parameter, from state in torch's format.

    The entry's per-element tensors are views of ``state``.
    """
    elements, numbers = {}, {}
    for key, value in state.items():
        if is_per_element(key, value, param):
            elements[key] = value.reshape(-1)[offset : offset + numel]
        else:
            numbers[key] = value
    return _entry(offset, numel, elements, numbers)


def _entry(offset: int, numel: int, elements: Entry, numbers: Entry) -> Entry:
    """Build an entry from flat per-element values, [numel], and other values in the optimizer's own shape.

    OTHERS is recorded because sizes cannot separate the two: a factor over a row of shape [1, n] has n numbers, as many
    as the row itself.
    """
    entry: Entry = {"offset": offset, "numel": numel, **elements, **numbers}
    others = sorted(elements_of(entry) - elements.keys())
    return entry | {OTHERS: others} if others else entry


def elements_of(entry: Entry) -> set[str]:
    """Return the keys of an entry's per-element values."""
    tensors = {key: value for key, value in entry.items() if isinstance(value, torch.Tensor) and key != "step"}
    sized = {key for key, value in tensors.items() if value.shape == (entry["numel"],)}
    return sized.difference(entry.get(OTHERS, ()))


def needed_part(name: str, shard: ParamShard, saved: Entry | Sequence[Entry]) -> Entry:
    """Return the state that a shard needs, cut from saved entries, with per-element keys under ELEMENTS.

    Raises ValueError, naming the parameter, if the entries do not cover the shard.
    """
    entries = sorted([saved] if isinstance(saved, Mapping) else saved, key=lambda entry: entry["offset"])
    first, last = shard.offset, shard.offset + shard.numel
    parts: list[Entry] = []
    reached = first
    for entry in entries:
        start, end = entry["offset"], entry["offset"] + entry["numel"]
        if start <= reached < end:
            until = min(end, last)
            parts.append(_part(entry, reached - start, until - start))
            reached = until
        if reached == last:
            return _joined(parts)
    covered = ", ".join(f"[{entry['offset']}, {entry['offset'] + entry['numel']})" for entry in entries)
    raise ValueError(
        f"the saved optimizer state of {name!r} covers elements {covered or 'none'} and this rank needs [{first}, "
        f"{last}): it was saved by another rank, or with other data-parallel sizes or another bucket_size (or "
        "num_buckets). Load this rank's own file with the bucket_size= of the run that saved it, or a checkpoint of "
        "core.checkpoint, which loads at any layout"
    )


def _part(entry: Entry, low: int, high: int) -> Entry:
    elements = elements_of(entry)
    part = {key: value[low:high] if key in elements else value for key, value in entry.items() if key not in PLACE}
    return {ELEMENTS: elements, **part}


def _joined(parts: list[Entry]) -> Entry:
    if len(parts) == 1:
        return parts[0]
    elements = parts[0][ELEMENTS]
    return {
        key: torch.cat([part[key] for part in parts]) if key in elements else value for key, value in parts[0].items()
    }


def needed_parts(
    entries: Mapping[str, Any], all_masters: Sequence[BucketMasters], names: Mapping[int, str]
) -> dict[int, Entry]:
    """Return the saved state that each shard of this rank needs, by id(shard).

    ``names`` maps id(parameter) to its name in ``entries``. Raises ValueError if a parameter or elements are missing.
    """
    parts: dict[int, Entry] = {}
    for shard in (shard for masters in all_masters for segment in masters.segments for shard in segment.shards):
        name = names[id(shard.param)]
        if name not in entries:
            raise ValueError(
                f"the saved optimizer state lacks {name!r}, one of {len(names)} parameters here and "
                f"{len(entries)} in it; was it saved by another model or another rank?"
            )
        parts[id(shard)] = needed_part(name, shard, entries[name])
    return parts


def load_parts(
    parts: Mapping[int, Entry], all_masters: Sequence[BucketMasters], inner: torch.optim.Optimizer, scratch: Scratch
) -> None:
    """Load each shard's part, as ``needed_parts`` returns them, into the masters and the inner optimizer's state."""
    # Views of the masters' own memory, as in `load_state_dict(state_dict())`, would be overwritten.
    live = {masters.kept.untyped_storage().data_ptr() for masters in all_masters}
    for part in parts.values():
        if MASTER in part and part[MASTER].untyped_storage().data_ptr() in live:
            part[MASTER] = part[MASTER].clone()
    inner.state.clear()
    for masters in all_masters:
        masters.load_parameters()
        for whole in list(masters.segments):
            whole.moments.clear()
            steps = itertools.groupby(_step_counts(parts[id(shard)]) for shard in whole.shards)
            for segment in masters.split(whole, [len(list(run)) for _, run in steps], inner):
                of_segment = [parts[id(shard)] for shard in segment.shards]
                if segment.storage is not None:  # without a saved master it keeps the parameter's value
                    paired = zip(segment.shards, of_segment, strict=True)
                    segment.storage.load(
                        [(s.start - segment.start, part[MASTER]) for s, part in paired if MASTER in part]
                    )
                load_moments(segment, of_segment, inner, scratch)
        if masters.tier is not None:
            masters.keep_moments(inner.state)


def _step_counts(part: Entry) -> dict[str, float | None]:
    """Return the state that neighbors in a segment must share: keys, and numbers that are not per element."""
    return {
        key: float(value) if isinstance(value, torch.Tensor) and value.dim() == 0 else None
        for key, value in part.items()
        if key not in PLACE
    }


def load_moments(segment: Segment, parts: list[Entry], inner: torch.optim.Optimizer, scratch: Scratch) -> None:
    """Build a segment's state from its shards' parts and assign it to the inner optimizer.

    ``parts`` is in shard order and is emptied here to save memory.
    """
    fused = bool(inner.param_groups[segment.group].get("fused"))
    device = segment.master.device
    state: dict[str, Any] = {}
    elements = parts[0][ELEMENTS]
    for key in [key for key in parts[0] if key not in PLACE]:
        of_shards = [part.pop(key) for part in parts]  # at most one key has two copies at a time
        value = of_shards[0]
        if key == MASTER:
            continue
        if key in elements:
            dtype = segment.master.dtype if value.is_floating_point() else value.dtype
            joined = torch.zeros(segment.master.shape, dtype=dtype, device=device)
            flat = joined.view(-1)
            for shard, part in zip(segment.shards, of_shards, strict=True):
                flat[shard.start - segment.start : shard.end - segment.start].copy_(part)
            state[key] = scratch.adopt(segment, key, joined) if segment.in_scratch else joined
            if key in segment.moments:
                segment.moments[key].copy_(flat)
        elif isinstance(value, torch.Tensor):
            # torch keeps the step count on the device for its fused kernels, and on the CPU otherwise.
            state[key] = value.detach().clone().to(device if fused or value.dim() else "cpu")
        else:
            state[key] = value
    if state:
        inner.state[segment.master] = state


def save_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the param groups without their parameters."""
    return [{key: plain_numbers(value) for key, value in group.items() if key != "params"} for group in groups]


def plain_numbers(state: Any) -> Any:
    """Replace numpy numbers and arrays by Python numbers and lists, because torch.load rejects them. Tensors are
    kept.
    """
    if isinstance(state, (np.generic, np.ndarray)):
        return state.tolist()
    if type(state) in (dict, OrderedDict):
        return type(state)((key, plain_numbers(value)) for key, value in state.items())
    return type(state)(map(plain_numbers, state)) if type(state) in (list, tuple) else state


def matching_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each group the saved group with the same name. Raises ValueError if there is none."""
    by_name = {group[GROUP_NAME]: group for group in saved}
    for group in groups:
        if group[GROUP_NAME] not in by_name:
            raise ValueError(
                f"the saved optimizer has no param group {group[GROUP_NAME]!r}; it has {list(by_name)}. Build the "
                "optimizer with the same weight decay and learning rate conditions"
            )
    return [by_name[group[GROUP_NAME]] for group in groups]


def load_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Copy learning rates, decay and other options into ``groups`` from the saved group with the same name.

    Raises ValueError if a group's name is missing.
    """
    for group, other in zip(groups, matching_groups(groups, saved), strict=True):
        group.update({key: value for key, value in other.items() if key not in ("params", "fused", "foreach")})
