"""The optimizer's state by parameter name and place, for any buckets, segments, strategy and dtypes in memory.

An entry says which elements of the flattened parameter it covers; a parameter has one or several, over disjoint
elements. A state that covers more than a rank needs (one saved by the replicated optimizer) loads into a shard.

    {"param_groups": [{"lr": ..., ...}],
     "state": {"layer.weight": [{"offset": 0, "numel": 6, "step": ..., "exp_avg": ..., "master": ...}], ...}}

Numbers of elements are 1-dim tensors of `numel` elements: views of the live state where it is kept as fp32 or bf16,
fp32 copies for remainders. Loading converts to what is kept here.
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

MASTER = "master"  # an entry's master weights, where they are not the parameters themselves
ELEMENTS = "elements"  # of a part that is loaded: keys of its values that have one number for each element
OTHERS = "not_per_element"  # of an entry: keys of values that have the size of such a one, and are none
PLACE = ("offset", "numel", ELEMENTS, OTHERS)  # of an entry; everything else in it is state
GROUP_NAME = "name"  # what a group is found by in a saved state

Entry = dict[str, Any]


def segment_entries(segment: Segment, state: Mapping[str, Any]) -> Iterator[tuple[ParamShard, Entry]]:
    """(shard, its entry) for each shard of a segment. state: what the inner optimizer holds for the segment."""
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
    """Return the entry of some elements of a parameter, from its state in torch's format. Tensors are views."""
    elements, numbers = {}, {}
    for key, value in state.items():
        if is_per_element(key, value, param):
            elements[key] = value.reshape(-1)[offset : offset + numel]
        else:
            numbers[key] = value
    return _entry(offset, numel, elements, numbers)


def _entry(offset: int, numel: int, elements: Entry, numbers: Entry) -> Entry:
    """Put an entry together: `elements` are flat, [numel], and `numbers` are as the optimizer has made them.

    Sizes alone do not distinguish them: a factor of a row [1, n] has n numbers, as the row has.
    """
    entry: Entry = {"offset": offset, "numel": numel, **elements, **numbers}
    others = sorted(elements_of(entry) - elements.keys())
    return entry | {OTHERS: others} if others else entry


def elements_of(entry: Entry) -> set[str]:
    """Return the keys of an entry whose values have one number for each of its elements."""
    tensors = {key: value for key, value in entry.items() if isinstance(value, torch.Tensor) and key != "step"}
    sized = {key for key, value in tensors.items() if value.shape == (entry["numel"],)}
    return sized.difference(entry.get(OTHERS, ()))


def needed_part(name: str, shard: ParamShard, saved: Entry | Sequence[Entry]) -> Entry:
    """Part of saved entries that a shard needs; ValueError when they do not cover the shard."""
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
        f"the saved optimizer state of {name!r} covers elements {covered or 'none'} and this rank needs "
        f"[{first}, {last}); it was saved by another rank, with other data-parallel sizes or another bucket_size "
        "(or num_buckets). Load what this rank saved, with the bucket_size= of the run that saved it, or a checkpoint "
        "of core.checkpoint, which any layout can load"
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
    """By id of a shard, what saved entries hold of it; ValueError where they lack a part of one.

    names: id of a parameter -> its name.
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
    """Give every segment of this rank its shards' parts. inner: the torch optimizer over the segments."""
    # What lies in the masters' own memory, as in `load_state_dict(state_dict())`, would be overwritten.
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
            for segment in masters.split(whole, [len(list(alike)) for _, alike in steps], inner):
                of_segment = [parts[id(shard)] for shard in segment.shards]
                if segment.storage is not None:  # without a saved master it stays that of the parameter
                    paired = zip(segment.shards, of_segment, strict=True)
                    segment.storage.load(
                        [(s.start - segment.start, part[MASTER]) for s, part in paired if MASTER in part]
                    )
                load_moments(segment, of_segment, inner, scratch)
        if masters.tier is not None:
            masters.keep_moments(inner.state)


def _step_counts(part: Entry) -> dict[str, float | None]:
    """State that neighbours in a segment must share: keys, and numbers that are not per element."""
    return {
        key: float(value) if isinstance(value, torch.Tensor) and value.dim() == 0 else None
        for key, value in part.items()
        if key not in PLACE
    }


def load_moments(segment: Segment, parts: list[Entry], inner: torch.optim.Optimizer, scratch: Scratch) -> None:
    """Give the inner optimizer the state of a segment, put together from those of its shards, which are used up."""
    fused = bool(inner.param_groups[segment.group].get("fused"))
    device = segment.master.device
    state: dict[str, Any] = {}
    elements = parts[0][ELEMENTS]
    for key in [key for key in parts[0] if key not in PLACE]:
        of_shards = [part.pop(key) for part in parts]  # two copies of one key live at a time, not of all
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
    """The param groups without their parameters."""
    return [{key: plain_numbers(value) for key, value in group.items() if key != "params"} for group in groups]


def plain_numbers(state: Any) -> Any:
    """A state with Python's numbers in the place of numpy's, which torch.load refuses. Tensors stay."""
    if isinstance(state, (np.generic, np.ndarray)):
        return state.tolist()
    if type(state) in (dict, OrderedDict):
        return type(state)((key, plain_numbers(value)) for key, value in state.items())
    return type(state)(map(plain_numbers, state)) if type(state) in (list, tuple) else state


def matching_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each group the saved one of the same name; ValueError where there is none."""
    by_name = {group[GROUP_NAME]: group for group in saved}
    for group in groups:
        if group[GROUP_NAME] not in by_name:
            raise ValueError(
                f"the saved optimizer has no param group {group[GROUP_NAME]!r}; it has {list(by_name)}. Build the "
                "optimizer with the same weight decay and learning rate conditions"
            )
    return [by_name[group[GROUP_NAME]] for group in groups]


def load_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Set learning rates, decay and the rest from the saved group of the same name."""
    for group, other in zip(groups, matching_groups(groups, saved), strict=True):
        group.update({key: value for key, value in other.items() if key not in ("params", "fused", "foreach")})
