"""Pure arithmetic from the sizes of a job to its groups of ranks: a table of axes, a dense and an expert grid.

A rank is a number in mixed radix. ``order`` names the digits, leftmost first and with the smallest stride: in
'tp-cp-ep-dp-pp' neighboring ranks differ in tp. The dense grid and the expert grid factor the same ranks; an axis
missing in a grid has size 1 there. Nothing here imports torch.

A new axis is a row of ``AXES``, an argument of ``core.parallel_state.initialize_model_parallel``, and its sync rules in
``core.distributed.contract.gradient_contract``. Everything else is derived from the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Axis:
    """Dimension of parallelism.

    Attributes:
        name: Argument of RankGrid and field of ProcessGroups.
        token: Digit in ``order``.
        label: Name in messages.
        grid: Grid that has the axis.
        carries: Traffic of its group. The ranks of an axis that carries gradients have equal weights and form the data
            group.
        option: Argument of initialize_model_parallel for its size; None for the remaining size.
        always_split: True if no two of its ranks have the same parameter, unless the parameter is marked otherwise.
        crosses_stages: True if its ranks have different layers.
    """

    name: str
    token: str
    label: str
    grid: Literal["dense", "expert", "both"]
    carries: Literal["gradients", "activations", "both"]
    option: str | None = None
    always_split: bool = False
    crosses_stages: bool = False

    @property
    def words(self) -> str:
        """Adjective in the option, such as 'expert tensor' for expert_tensor_parallel_size."""
        return (self.option or self.label).split("_model")[0].split("_parallel")[0].replace("_", " ")


# The rows are in the default order of their tokens.
AXES = (
    Axis("tp", "tp", "tp", "dense", "activations", "tensor_model_parallel_size"),
    Axis("expt_tp", "tp", "etp", "expert", "activations", "expert_tensor_parallel_size"),
    Axis("cp", "cp", "cp", "dense", "both", "context_parallel_size"),
    Axis("ep", "ep", "ep", "expert", "activations", "expert_model_parallel_size", always_split=True),
    Axis("dp", "dp", "dp", "dense", "gradients"),
    Axis("expt_dp", "dp", "expert dp", "expert", "gradients"),
    Axis("pp", "pp", "pp", "both", "activations", "pipeline_model_parallel_size", True, crosses_stages=True),
)


def axes_of(expert: bool) -> list[Axis]:
    """Return the axes of the dense or of the expert grid."""
    return [axis for axis in AXES if axis.grid in ("both", "expert" if expert else "dense")]


def size_options(sizes: Any) -> dict[str, Any]:
    """Return the size arguments of initialize_model_parallel from an object with attributes such as tp and etp."""
    return {axis.option: getattr(sizes, axis.label) for axis in AXES if axis.option and hasattr(sizes, axis.label)}


def _kind(expert: bool, belongs: Callable[[Axis], bool]) -> tuple[str, bool]:
    return "-".join(axis.token for axis in axes_of(expert) if belongs(axis)), expert


def _is_model(axis: Axis) -> bool:
    return axis.carries == "activations"


TOKENS = tuple(dict.fromkeys(axis.token for axis in AXES))
DEFAULT_ORDER = "-".join(TOKENS)

# Every kind of group that spans a set of axes of one grid: field of ProcessGroups -> (tokens, expert grid).
GRID_KINDS: dict[str, tuple[str, bool]] = {
    **{axis.name: (axis.token, axis.grid == "expert") for axis in AXES},
    "dp_cp": _kind(False, lambda axis: not _is_model(axis)),
    "mp": _kind(False, _is_model),
    "tp_dp": _kind(False, lambda axis: not axis.crosses_stages and axis.carries != "both"),
    "tp_dp_cp": _kind(False, lambda axis: not axis.crosses_stages),
    "tp_cp": _kind(False, lambda axis: not axis.crosses_stages and axis.carries != "gradients"),
    "tp_ep": _kind(True, lambda axis: not axis.crosses_stages and _is_model(axis)),
    "tp_ep_pp": _kind(True, _is_model),
}


def _kinds_where(holds: Callable[[Axis], bool]) -> set[str]:
    return {
        kind
        for kind, (tokens, expert) in GRID_KINDS.items()
        if all(holds(axis) for axis in axes_of(expert) if axis.token in tokens.split("-"))
    }


DATA_KINDS = ("dp_cp", "expt_dp")  # groups that reduce the gradients of dense and of expert parameters
MODEL_AXES = tuple(axis.name for axis in axes_of(False) if _is_model(axis))  # with 'dp_cp' they reach every rank once
COPY_AXES = tuple(axis.name for axis in AXES if _is_model(axis) and not axis.always_split)  # tagged split or copies
# Parts of data groups in one optimizer instance, and equal positions in all instances.
INSTANCE_KINDS = [f"{side}_{kind}" for kind in (*DATA_KINDS, "dist_opt") for side in ("intra", "inter")]
KINDS = (*GRID_KINDS, "embd", "pos_embd", *INSTANCE_KINDS)
# Kinds whose members hold different layers.
STAGE_CROSSING = set(GRID_KINDS) - _kinds_where(lambda axis: not axis.crosses_stages) | {"embd", "pos_embd"}
# Kinds that exchange activations in forward and backward.
ACTIVATION_KINDS = _kinds_where(lambda axis: axis.carries != "gradients")
# Kinds whose collectives backward launches when gradients are complete: Note [Gradient groups] in process_groups.py.
GRADIENT_KINDS = _kinds_where(lambda axis: not _is_model(axis)) - ACTIVATION_KINDS | set(INSTANCE_KINDS)


def parse_tokens(text: str) -> tuple[str, ...]:
    """Split 'tp-dp' into ('tp', 'dp'). Raises ValueError for unknown, repeated or no tokens."""
    tokens = tuple(text.lower().split("-"))
    for token in tokens:
        if token not in TOKENS:
            raise ValueError(f"'{text}' has the unknown token {token!r}; use {', '.join(TOKENS)}, joined by '-'.")
        if tokens.count(token) > 1:
            raise ValueError(f"'{text}' names {token!r} {tokens.count(token)} times; each token may appear once.")
    return tokens


class RankGrid:
    """Ranks of a job, arranged on a dense and an expert grid.

    The data-parallel sizes follow: dp = world / (tp * cp * pp), expt_dp = world / (expt_tp * ep * pp).

        RankGrid(8, tp=2, pp=2).groups("tp-dp")   # [[0, 1, 2, 3], [4, 5, 6, 7]]

    ``order`` has the tokens of all axes larger than 1, smallest stride first. ``sizes`` are keyed by the names of
    ``AXES`` and default to 1, except that expt_tp defaults to tp. Each size is also an attribute. Raises ValueError if
    a size is below 1 or the order is malformed, and RuntimeError if the sizes do not divide the world size.
    """

    def __init__(self, world_size: int, *, order: str = DEFAULT_ORDER, **sizes: int | None) -> None:
        known = {axis.name: 1 for axis in AXES if axis.option}
        if not sizes.keys() <= known.keys():
            raise TypeError(f"unknown sizes {sorted(sizes.keys() - known.keys())}; the axes are {', '.join(known)}.")
        if sizes.get("expt_tp") is None:
            sizes["expt_tp"] = sizes.get("tp", 1)
        self.world_size = world_size
        self.sizes: dict[str, Any] = {**known, **sizes}
        for name, size in {"world_size": world_size, **self.sizes}.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {size!r}.")
        self.sizes |= {"dp": self._remaining(False), "expt_dp": self._remaining(True)}
        self._token_sizes = {
            expert: {axis.token: self.sizes[axis.name] for axis in axes_of(expert)} for expert in (False, True)
        }
        self.order = order
        self.order = "-".join(self._complete(parse_tokens(order)))
        self._check_pipeline_agrees()

    def __getattr__(self, name: str) -> int:
        sizes: dict[str, int] = self.__dict__.get("sizes", {})
        if name not in sizes:
            raise AttributeError(f"a RankGrid has no {name!r}; its sizes are {', '.join(sizes)}")
        return sizes[name]

    def __repr__(self) -> str:
        return f"RankGrid({self.world_size}, {self.sizes}, order={self.order!r})"

    @property
    def axes(self) -> tuple[str, ...]:
        """Tokens of all axes, smallest stride first."""
        return tuple(self.order.split("-"))

    def size(self, token: str, expert: bool = False) -> int:
        return self._token_sizes[expert].get(token, 1)

    def stride(self, token: str, expert: bool = False) -> int:
        """Return the distance between two ranks that are neighbors along an axis."""
        return next(stride for axis, _, stride in self._digits(expert) if axis == token)

    def coordinate(self, rank: int, token: str, expert: bool = False) -> int:
        self._check_rank(rank)
        return rank // self.stride(token, expert) % self.size(token, expert)

    def group_of(self, rank: int, tokens: str, expert: bool = False) -> list[int]:
        """Return the group of a rank over axes such as 'tp-dp', ascending. Costs O(group size)."""
        self._check_rank(rank)
        wanted = parse_tokens(tokens)
        group = [rank]
        for axis, size, stride in self._digits(expert):
            if axis in wanted:
                first = rank // stride % size * stride
                group = [member + step * stride - first for step in range(size) for member in group]
        return group

    def groups(self, tokens: str, expert: bool = False) -> list[list[int]]:
        """Return all groups of the world over axes such as 'tp-dp', ordered by their first rank."""
        wanted = parse_tokens(tokens)
        firsts = [0]
        for axis, size, stride in self._digits(expert):
            if axis not in wanted:
                firsts = [first + step * stride for step in range(size) for first in firsts]
        return [self.group_of(first, tokens, expert) for first in firsts]

    def _digits(self, expert: bool) -> Iterator[tuple[str, int, int]]:
        """Return (token, size, stride) of every axis, smallest stride first."""
        stride = 1
        for token in self.axes:
            size = self.size(token, expert)
            yield token, size, stride
            stride *= size

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size} ranks (0 to {self.world_size - 1}).")

    def _remaining(self, expert: bool) -> int:
        factors = [axis for axis in axes_of(expert) if axis.option]
        product = math.prod(self.sizes[axis.name] for axis in factors)
        if self.world_size % product:
            what = f"expert_tensor_model_pipeline_parallel size ({product})" if expert else product
            words = " x ".join(f"{axis.words} ({self.sizes[axis.name]})" for axis in factors)
            raise RuntimeError(
                f"world_size ({self.world_size}) is not divisible by {what} = {words} parallel size; start a multiple "
                f"of {product} ranks or change a size."
            )
        return self.world_size // product

    def _complete(self, tokens: tuple[str, ...]) -> tuple[str, ...]:
        """Append the axes of size 1 that the order leaves out, and reject a larger one."""
        missing = [token for token in TOKENS if token not in tokens]
        for token in missing:
            size = max(self.size(token), self.size(token, expert=True))
            if size > 1:
                raise RuntimeError(
                    f"The size of ({token}) is ({size}), but you haven't specified the order ({self.order}): add "
                    f"'{token}' to the order, for example '{DEFAULT_ORDER}'."
                )
        return (*tokens, *missing)

    def _check_pipeline_agrees(self) -> None:
        dense, expert = self.stride("pp"), self.stride("pp", expert=True)
        if self.pp > 1 and dense != expert:
            raise RuntimeError(
                f"With order '{self.order}' pipeline stages are {dense} ranks apart in the dense grid and {expert} in "
                f"the expert grid (sizes {self.sizes}), but both must have the same pipeline groups; let the order end "
                "in 'pp'."
            )


EmbeddingRule = Callable[[list[int]], list[int]]


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline group with the word embedding: its first and its last."""
    return [pp_ranks[0]] if len(pp_ranks) == 1 else [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the rank of a pipeline group with the position embedding: its first."""
    return [pp_ranks[0]]


def group_ranks(
    grid: RankGrid,
    rank: int,
    *,
    num_instances: int = 1,
    embedding_ranks: EmbeddingRule | None = None,
    position_embedding_ranks: EmbeddingRule | None = None,
) -> dict[str, list[int]]:
    """Return the members of every kind of group that ``rank`` belongs to, ascending, in the same order on all ranks.

    Args:
        num_instances: Distributed optimizer instances. Each data group is split into that many contiguous slices
            (intra); equal positions in the slices form the inter groups.
        embedding_ranks: Maps a pipeline group to its ranks that share the embedding. Other ranks get no such kind.
        position_embedding_ranks: The same for the position embedding.

    Raises:
        RuntimeError: If the instances do not divide a data group.
        ValueError: If a rule returns ranks of other stages.
    """
    _check_instances(grid, num_instances)
    members = {kind: grid.group_of(rank, tokens, expert) for kind, (tokens, expert) in GRID_KINDS.items()}
    rules = {
        "embd": embedding_ranks or default_embedding_ranks,
        "pos_embd": position_embedding_ranks or default_position_embedding_ranks,
    }
    for kind, rule in rules.items():
        chosen = _apply_rule(kind, rule, members["pp"])
        if rank in chosen:
            members[kind] = chosen
    for kind in DATA_KINDS:
        members[f"intra_{kind}"] = own = _own_slice(members[kind], rank, num_instances)
        members[f"inter_{kind}"] = members[kind][own.index(rank) :: len(own)]
    members["intra_dist_opt"] = _instance_ranks(grid, rank, num_instances, expert=True)
    members["inter_dist_opt"] = members["inter_expt_dp"]
    return members


def _own_slice(group: list[int], rank: int, num_slices: int) -> list[int]:
    length = len(group) // num_slices
    first = group.index(rank) // length * length
    return group[first : first + length]


def _instance_ranks(grid: RankGrid, rank: int, num_instances: int, expert: bool) -> list[int]:
    """Return all ranks of one optimizer instance: the model replicas of one slice of a data group.

    Costs O(instance size).
    """
    if num_instances == 1:
        return list(range(grid.world_size))
    data, model = (GRID_KINDS[kind][0] for kind in (("expt_dp", "tp_ep_pp") if expert else ("dp_cp", "mp")))
    replicas = _own_slice(grid.group_of(rank, data, expert), rank, num_instances)
    return sorted(member for replica in replicas for member in grid.group_of(replica, model, expert))


def _check_instances(grid: RankGrid, num_instances: int) -> None:
    if isinstance(num_instances, bool) or not isinstance(num_instances, int) or num_instances < 1:
        raise ValueError(f"num_distributed_optimizer_instances must be at least 1, got {num_instances!r}.")
    if num_instances == 1:
        return
    for kind, words in zip(DATA_KINDS, ("Data", "Expert data"), strict=True):
        size = len(grid.group_of(0, *GRID_KINDS[kind]))
        if size % num_instances:
            raise RuntimeError(
                f"{words} parallel size should be divisible by partial DistOpt shard factor: the size {size} of group "
                f"{kind!r} (world {grid.world_size}, sizes {grid.sizes}) is not divisible by "
                f"num_distributed_optimizer_instances {num_instances}."
            )
    data_group = grid.group_of(0, *GRID_KINDS["dp_cp"])
    for first in data_group[:: len(data_group) // num_instances]:
        if _instance_ranks(grid, first, num_instances, False) != _instance_ranks(grid, first, num_instances, True):
            raise RuntimeError(
                f"With order '{grid.order}' the dense and the expert data groups, cut into {num_instances} optimizer "
                f"instances, put different ranks into the instance of rank {first}; let the order end in 'dp-pp'."
            )


def _apply_rule(kind: str, rule: EmbeddingRule, pp_ranks: list[int]) -> list[int]:
    chosen = sorted(rule(list(pp_ranks)))
    if len(set(chosen)) != len(chosen) or not set(chosen) <= set(pp_ranks):
        raise ValueError(
            f"The rule for the '{kind}' group returned {chosen} for the pipeline group {pp_ranks}; it must return "
            f"different ranks of that group."
        )
    return chosen
