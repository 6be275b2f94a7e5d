"""Combine the microbatches that the ranks of a step received into the full model's microbatches. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.context_parallel.sequence_split import join_sequence
from core.distributed.buffer.grad_placeholder import tensors_in
from core.verify.gathered import on_tensors

# Arguments of a forward, or of `note`: (args, kwargs). In a combined batch, buffers follow that forwards write.
Microbatch = tuple[Any, ...]
JoinFn = Callable[[Sequence[Tensor]], Tensor]  # parts of a context-parallel group, in rank order -> the complete tensor


class Given(NamedTuple):
    """Microbatches that one rank received.

    Attributes:
        data_rank: Index among the data ranks.
        cp: Rank in the context-parallel group.
        tp: Rank in the tensor-parallel group.
        stage: 0 for the first stage, -1 for the last of several, None for a stage between them.
        digests: Digests of each microbatch's tensors.
        parts: The microbatches; None if another rank sends the same ones.
        wholes: Digests of the batches from which tokens of the forwards were cut.
        buffers: Values before each microbatch of the buffers that forwards wrote; empty if they wrote none.
        weights: Checksums of parameters by name and position; empty for a model in our wrapper, which compares them.
    """

    data_rank: int
    cp: int
    tp: int
    stage: int | None
    digests: list[list[str]]  # digests of each microbatch's tensors
    parts: list[Microbatch] | None  # None if another rank sends the same ones
    wholes: list[str]  # digests of batches that the forwards' tokens were cut from
    buffers: list[dict[str, Tensor]]
    weights: dict[tuple[Any, ...], list[int]]


def full_batch(answers: Mapping[int, Given], join: JoinFn | None) -> list[list[Microbatch]]:
    """Combine the ranks' microbatches.

    Args:
        answers: Microbatches by rank.
        join: Joins the parts of a context-parallel group; None for a head and a tail chunk in dim 1.
    """
    data_ranks = 1 + max(given.data_rank for given in answers.values())
    return [_of_data_rank([g for g in answers.values() if g.data_rank == number], join) for number in range(data_ranks)]


def _of_data_rank(given: Sequence[Given], join: JoinFn | None) -> list[Microbatch]:
    by_place = {(each.cp, each.stage): each.parts for each in given if each.parts is not None}
    cp = 1 + max(each.cp for each in given)
    of_cp = [_both_ends(by_place[rank, 0], by_place.get((rank, -1))) for rank in range(cp)]
    joined = [_joined(list(parts), join) for parts in zip(*of_cp, strict=True)]
    buffers = next((each.buffers for each in given if each.buffers), None)
    return joined if buffers is None else [(*part, values) for part, values in zip(joined, buffers, strict=True)]


def _both_ends(first: list[Microbatch], last: list[Microbatch] | None) -> list[Microbatch]:
    """Return the first stage's microbatches; missing inputs, such as labels, come from the last stage."""
    return first if last is None else [_filled(a, b) for a, b in zip(first, last, strict=True)]


def _filled(first: Any, last: Any) -> Any:
    if first is None:
        return last
    if isinstance(first, dict) and isinstance(last, dict):
        return {**last, **{key: _filled(value, last.get(key)) for key, value in first.items()}}
    if isinstance(first, (tuple, list)) and isinstance(last, (tuple, list)) and len(first) == len(last):
        return type(first)(_filled(a, b) for a, b in zip(first, last, strict=True))
    return first


def _joined(parts: list[Microbatch], join: JoinFn | None) -> Microbatch:
    """Join one microbatch from the parts of a context-parallel group."""
    if len(parts) == 1:
        return parts[0]
    columns = list(zip(*(tensors_in(part) for part in parts), strict=True))
    lengths = {_length(column[0]) for column in columns if not all(map(column[0].equal, column[1:]))}
    joined = iter([_join(column, lengths, join) for column in columns])
    whole: Microbatch = on_tensors(lambda _: next(joined), parts[0])
    return whole


def _join(column: Sequence[Tensor], lengths: set[int], join: JoinFn | None) -> Tensor:
    """Join one tensor of a context-parallel group.

    It is part of a sequence if it differs between ranks, or is as long as one that does (a mask of ones).
    """
    if _length(column[0]) not in lengths:
        return column[0]
    if join is not None:
        return join(column)
    if column[0].dim() < 2:
        raise ValueError(
            f"tensors of shape {list(column[0].shape)} differ between the ranks of a context-parallel group, expected "
            "the sequence in dim 1; pass a join_fn that joins the ranks' parts"
        )
    return join_sequence(torch.cat(list(column), dim=1), 1, len(column))


def _length(tensor: Tensor) -> int:
    return tensor.shape[1] if tensor.dim() > 1 else -1 - tensor.dim()


def data_of(answers: Mapping[int, Given]) -> dict[int, list[str]]:
    """Return the digest of each microbatch by data rank."""
    return {g.data_rank: [repr(part) for part in g.digests if part] for g in answers.values() if g.cp == g.stage == 0}


def same_data(answers: Mapping[int, Given], before: Mapping[int, list[str]]) -> list[str]:
    """Describe data ranks that share data, and a rank that repeats its data. Both may be intended."""
    data = data_of(answers)
    ranks_of: dict[str, set[int]] = {}
    for rank, parts in data.items():
        for part in parts:
            ranks_of.setdefault(part, set()).add(rank)
    found = []
    for ranks in dict.fromkeys(frozenset(ranks) for ranks in ranks_of.values() if len(ranks) > 1):
        common = set.intersection(*(set(data[rank]) for rank in ranks))
        some = "the same microbatches, so they train as one"
        if any(set(data[rank]) != common for rank in ranks):
            some = f"{len(common)} equal microbatches among others"
        found.append(
            f"data ranks {sorted(ranks)} were given {some}; choose data by parallel_state.get_data_parallel_rank(), or "
            "with a DistributedSampler, unless this is meant"
        )
    stale = [rank for rank, parts in data.items() if parts and parts == before.get(rank)]
    if stale and len(stale) < len(data):
        found.append(
            f"data ranks {stale} were given the microbatches of the step before once more, and the others new ones: is "
            "their iterator not advanced?"
        )
    return found


def other_inputs(answers: Mapping[int, Given]) -> str:
    """Name ranks of the same position that received different microbatches.

    The list is not always a fault: ranks of sequence parallelism may receive parts, or their rank's number.
    """
    return _difference(
        {rank: ((given.data_rank, given.cp, given.stage), given.digests) for rank, given in answers.items()},
        "share one part of the data and were given different inputs",
    )


def other_wholes(answers: Mapping[int, Given]) -> str:
    """Name context-parallel ranks whose parts were cut from different batches."""
    return _difference(
        {rank: ((given.data_rank, given.tp, given.stage), given.wholes) for rank, given in answers.items()},
        "hold parts of a sequence that were cut from different batches",
    )


def other_weights(answers: Mapping[int, Given]) -> str:
    """Name a parameter whose copies differ between two ranks before the step."""
    firsts: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
    for rank, given in answers.items():
        for place, found in given.weights.items():
            first, expected = firsts.setdefault(place, (rank, found))
            if found != expected:
                return (
                    f"parameter {place[0]!r} had other values on rank {rank} than on rank {first} before this step: "
                    "did a rank leave out an optimizer's step, or load or write weights alone?"
                )
    return ""


def _difference(facts: Mapping[int, tuple[Any, Any]], what: str) -> str:
    """Name two ranks that share their data but differ in a fact. ``facts``: by rank, its data position and the fact."""
    firsts: dict[Any, tuple[int, Any]] = {}
    for rank, (place, fact) in facts.items():
        first, expected = firsts.setdefault(place, (rank, fact))
        if fact != expected:
            return (
                f"ranks {first} and {rank} {what}: choose data by parallel_state.get_data_parallel_rank(), and draw it "
                "from one seed among them"
            )
    return ""


def other_ends(answers: Mapping[int, Given]) -> str:
    """Name a pipeline whose first and last stage received microbatches without a common tensor."""
    ends: dict[tuple[int, int, int], dict[int, tuple[int, list[list[str]]]]] = {}
    for rank, given in answers.items():
        if given.stage is not None:
            ends.setdefault((given.data_rank, given.cp, given.tp), {})[given.stage] = rank, given.digests
    for pair in ends.values():
        (first, start), (last, end) = pair[0], pair.get(-1, pair[0])
        paired = [(set(a), set(b)) for a, b in zip(start, end, strict=True) if len(a) == len(b) > 0]
        if paired and not any(a & b for a, b in paired):
            return (
                f"the first stage (rank {first}) and the last one (rank {last}) of a pipeline were given different "
                "microbatches, so labels may belong to other tokens: choose data by "
                "parallel_state.get_data_parallel_rank()"
            )
    return ""


def digests_of(microbatch: Microbatch) -> list[str]:
    """Hash each tensor, in order."""
    found: list[str] = []

    def add(tensor: Tensor) -> None:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.append(f"{list(tensor.shape)} {hashlib.sha256(data).hexdigest()}")

    on_tensors(add, microbatch)
    return found
