"""Pure arithmetic from the sizes of a job to its groups of ranks: the dense and the expert grid.

A rank is a number written in mixed radix. `order` names the digits, leftmost first and with the smallest stride: in
'tp-cp-ep-dp-pp' neighbouring ranks differ in tp. The dense grid has digits tp, cp, dp, pp (ep is 1); the expert grid
factors the same ranks into tp (of the experts), ep, dp (of the experts), pp (cp is 1). Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TOKENS = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


def parse_tokens(text: str) -> tuple[str, ...]:
    """Split 'tp-dp' into ('tp', 'dp'). ValueError on unknown, repeated or no tokens."""
    tokens = tuple(text.lower().split("-"))
    for token in tokens:
        if token not in TOKENS:
            raise ValueError(f"'{text}' has the unknown token {token!r}; use {', '.join(TOKENS)}, joined by '-'.")
        if tokens.count(token) > 1:
            raise ValueError(f"'{text}' names {token!r} {tokens.count(token)} times; each token may appear once.")
    return tokens


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a job laid out on a dense and an expert grid.

    world_size: number of ranks. tp, pp, cp, ep: tensor, pipeline, context and expert parallel size. expt_tp: tensor
    parallel size of the experts, tp by default. order: the tokens of all axes larger than 1, smallest stride first.
    The data parallel sizes follow: dp = world / (tp * cp * pp), expt_dp = world / (expt_tp * ep * pp).

    Raises ValueError on sizes below 1 and malformed orders, RuntimeError where the arithmetic does not come out.

        RankGrid(8, tp=2, pp=2).groups("tp-dp")   # [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expt_tp: int | None = None
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        if self.expt_tp is None:
            object.__setattr__(self, "expt_tp", self.tp)
        for name in ("world_size", "tp", "pp", "cp", "ep", "expt_tp"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}.")
        self._check_divisible()
        object.__setattr__(self, "order", "-".join(self._complete(parse_tokens(self.order))))
        self._check_pipeline_agrees()

    @property
    def dp(self) -> int:
        """Data parallel size of the dense grid, without context parallelism."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def expt_dp(self) -> int:
        """Data parallel size of the expert grid."""
        return self.world_size // (self._expt_tp * self.ep * self.pp)

    @property
    def axes(self) -> tuple[str, ...]:
        """The tokens of `order`, smallest stride first, all five of them."""
        return tuple(self.order.split("-"))

    @property
    def _expt_tp(self) -> int:
        assert self.expt_tp is not None, "expt_tp is resolved in __post_init__"
        return self.expt_tp

    def size(self, token: str, expert: bool = False) -> int:
        """Number of ranks along one axis of the dense or the expert grid."""
        if expert:
            sizes = {"tp": self._expt_tp, "cp": 1, "ep": self.ep, "dp": self.expt_dp, "pp": self.pp}
        else:
            sizes = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}
        return sizes[token]

    def stride(self, token: str, expert: bool = False) -> int:
        """Distance between two ranks that are neighbours along an axis."""
        stride = 1
        for axis in self.axes:
            if axis == token:
                break
            stride *= self.size(axis, expert)
        return stride

    def coordinate(self, rank: int, token: str, expert: bool = False) -> int:
        """Where a rank lies along one axis."""
        self._check_rank(rank)
        return rank // self.stride(token, expert) % self.size(token, expert)

    def group_of(self, rank: int, tokens: str, expert: bool = False) -> list[int]:
        """The group of `rank` that spans the axes `tokens`, ascending; costs O(size of the group)."""
        self._check_rank(rank)
        wanted = parse_tokens(tokens)
        group, stride = [rank], 1
        for axis in self.axes:
            size = self.size(axis, expert)
            if axis in wanted:
                first = rank // stride % size * stride
                group = [member + step * stride - first for step in range(size) for member in group]
            stride *= size
        return group

    def groups(self, tokens: str, expert: bool = False) -> list[list[int]]:
        """All groups of the world that span the axes `tokens`, ordered by their first rank."""
        wanted = parse_tokens(tokens)
        firsts, stride = [0], 1
        for axis in self.axes:
            size = self.size(axis, expert)
            if axis not in wanted:
                firsts = [first + step * stride for step in range(size) for first in firsts]
            stride *= size
        return [self.group_of(first, tokens, expert) for first in firsts]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size} ranks (0 to {self.world_size - 1}).")

    def _check_divisible(self) -> None:
        dense = self.tp * self.pp * self.cp
        if self.world_size % dense:
            raise RuntimeError(
                f"world_size ({self.world_size}) is not divisible by {dense} = tensor ({self.tp}) x pipeline "
                f"({self.pp}) x context ({self.cp}) parallel size; start a multiple of {dense} ranks or change a size."
            )
        expert = self._expt_tp * self.ep * self.pp
        if self.world_size % expert:
            raise RuntimeError(
                f"world_size ({self.world_size}) is not divisible by expert_tensor_model_pipeline_parallel size "
                f"({expert}) = expert tensor ({self.expt_tp}) x expert ({self.ep}) x pipeline ({self.pp}) parallel "
                f"size; start a multiple of {expert} ranks or change a size."
            )

    def _complete(self, tokens: tuple[str, ...]) -> tuple[str, ...]:
        """Append the axes of size 1 that the order leaves out; refuse one that is larger."""
        missing = [token for token in TOKENS if token not in tokens]
        for token in missing:
            size = max(self.size(token), self.size(token, expert=True))
            if size > 1:
                raise RuntimeError(
                    f"The size of ({token}) is ({size}), but you haven't specified the order ({self.order}): put "
                    f"'{token}' into it where its stride belongs, for example '{DEFAULT_ORDER}'."
                )
        return (*tokens, *missing)

    def _check_pipeline_agrees(self) -> None:
        dense, expert = self.stride("pp"), self.stride("pp", expert=True)
        if self.pp > 1 and dense != expert:
            raise RuntimeError(
                f"With order '{self.order}' pipeline stages are {dense} ranks apart in the dense grid (tp {self.tp}, "
                f"cp {self.cp}, dp {self.dp}) and {expert} in the expert grid (tp {self.expt_tp}, ep {self.ep}, dp "
                f"{self.expt_dp}), but both must have the same pipeline groups; let the order end in 'pp'."
            )


EmbeddingRule = Callable[[list[int]], list[int]]


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline group that hold the word embedding: its first and its last."""
    return [pp_ranks[0]] if len(pp_ranks) == 1 else [pp_ranks[0], pp_ranks[-1]]


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline group that hold the position embedding: its first."""
    return [pp_ranks[0]]


# Every kind of group that is a set of axes of one grid: field of ProcessGroups -> (tokens, expert grid).
GRID_KINDS: dict[str, tuple[str, bool]] = {
    "dp": ("dp", False),
    "dp_cp": ("dp-cp", False),
    "cp": ("cp", False),
    "mp": ("tp-pp", False),
    "tp": ("tp", False),
    "pp": ("pp", False),
    "tp_dp": ("tp-dp", False),
    "tp_dp_cp": ("tp-dp-cp", False),
    "tp_cp": ("tp-cp", False),
    "ep": ("ep", True),
    "expt_tp": ("tp", True),
    "tp_ep": ("tp-ep", True),
    "tp_ep_pp": ("tp-ep-pp", True),
    "expt_dp": ("dp", True),
}


def group_ranks(
    grid: RankGrid,
    rank: int,
    *,
    num_instances: int = 1,
    embedding_ranks: EmbeddingRule | None = None,
    position_embedding_ranks: EmbeddingRule | None = None,
) -> dict[str, list[int]]:
    """The members of every kind of group that `rank` belongs to, ascending, kinds in one order for all ranks.

    num_instances: distributed optimizer instances; each data group is cut into that many contiguous slices (intra), and
    equal places of the slices form the inter groups. embedding_ranks, position_embedding_ranks: a pipeline group ->
    which of its ranks share the (position) embedding; a rank that is not among them gets no such kind.

    Raises RuntimeError where the instances do not come out even, ValueError where a rule names ranks of other stages.
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
    for kind in ("dp_cp", "expt_dp"):
        members[f"intra_{kind}"] = _own_slice(members[kind], rank, num_instances)
        members[f"inter_{kind}"] = _across_slices(members[kind], rank, num_instances)
    members["intra_dist_opt"] = _instance_ranks(grid, rank, num_instances, expert=True)
    members["inter_dist_opt"] = members["inter_expt_dp"]
    return members


def _own_slice(group: list[int], rank: int, num_slices: int) -> list[int]:
    length = len(group) // num_slices
    first = group.index(rank) // length * length
    return group[first : first + length]


def _across_slices(group: list[int], rank: int, num_slices: int) -> list[int]:
    length = len(group) // num_slices
    return group[group.index(rank) % length :: length]


def _instance_ranks(grid: RankGrid, rank: int, num_instances: int, expert: bool) -> list[int]:
    """All ranks of one optimizer instance: the model replicas of one slice of a data group. O(size of the instance)."""
    if num_instances == 1:
        return list(range(grid.world_size))
    data, model = ("dp", "tp-ep-pp") if expert else ("dp-cp", "tp-pp")
    replicas = _own_slice(grid.group_of(rank, data, expert), rank, num_instances)
    return sorted(member for replica in replicas for member in grid.group_of(replica, model, expert))


def _check_instances(grid: RankGrid, num_instances: int) -> None:
    if isinstance(num_instances, bool) or not isinstance(num_instances, int) or num_instances < 1:
        raise ValueError(f"num_distributed_optimizer_instances must be at least 1, got {num_instances!r}.")
    if num_instances == 1:
        return
    dp_cp = grid.dp * grid.cp
    if dp_cp % num_instances:
        raise RuntimeError(
            f"Data parallel size should be divisible by partial DistOpt shard factor: data x context parallel size "
            f"{dp_cp} = world {grid.world_size} / (tp {grid.tp} x pp {grid.pp}) is not divisible by "
            f"num_distributed_optimizer_instances {num_instances}."
        )
    if grid.expt_dp % num_instances:
        raise RuntimeError(
            f"Expert data parallel size should be divisible by partial DistOpt shard factor: {grid.expt_dp} = world "
            f"{grid.world_size} / (expert tp {grid.expt_tp} x ep {grid.ep} x pp {grid.pp}) is not divisible by "
            f"num_distributed_optimizer_instances {num_instances}."
        )
    data_group = grid.group_of(0, "dp-cp")
    for first in data_group[:: dp_cp // num_instances]:
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
