"""GradientContract: what one parameter's gradient needs. Read once, when a model is wrapped; the only reader of tags.

For a parameter each parallel axis is one of three things: its ranks hold different slices (`sharded_over`), they hold
partial gradients that must be added or averaged (`partial_over`, `averaged_over`), or they hold equal gradients
already. Data parallelism is partial for everybody; expert parameters have a data group of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from core.distributed.contract.split_widths import params_beside_split_layers
from core.rank_grid import COPY_AXES, STAGE_CROSSING, axes_of

if TYPE_CHECKING:
    from core.process_groups import ProcessGroups

DECLARATION = "gradient_declaration"  # the attribute that `declare_gradient` leaves on a parameter


class ContractError(ValueError):
    """A parameter says two things that cannot both be true, or holds partial gradients that no rule makes whole."""


class GradientContract(NamedTuple):
    """What happens to one parameter's gradient between backward and the optimizer.

    A tuple, because there is one for each parameter of a model and a frozen dataclass takes four times as long to make.
    """

    name: str
    is_expert: bool
    data_group: str  # field of ProcessGroups: 'dp_cp' or 'expt_dp'
    divisor: int  # the sum over the data group is divided by this; 1 when the loss is per token
    sharded_over: tuple[str, ...] = ()
    partial_over: tuple[str, ...] = ()
    averaged_over: tuple[str, ...] = ()
    replicated_over: tuple[str, ...] = ()  # ranks with equal weights and, in the end, gradients
    rules: tuple[str, ...] = ()  # the sync rules that serve it, in order, in words
    counts_in_norm: bool = True  # of all ranks that hold this gradient, is this the one that counts it?
    crosses_stages: bool = False  # a copy lies on another pipeline stage

    @property
    def reductions(self) -> tuple[str, ...]:
        """Every reduction in order, in words."""
        data = f"sum over {self.data_group} / {self.divisor}"
        return (data, *self.rules)

    def of(self, name: str) -> GradientContract:
        """The same for another parameter."""
        return tuple.__new__(GradientContract, (name, *self[1:]))

    def of_each(self, names: Sequence[str]) -> Iterable[GradientContract]:
        """The same for each of these parameters; without a line of Python for each."""
        return map(partial(tuple.__new__, GradientContract), zip(names, *map(repeat, self[1:]), strict=False))


class Tags(NamedTuple):
    """All that a layer has said of a parameter, and all that its contract is read from apart from its name."""

    is_expert: bool
    sharded: bool
    averaged: bool
    declaration: tuple[tuple[str, ...], tuple[str, ...]] | None
    sequence_parallel: bool | None  # None: not said
    pipeline_parallel: bool
    shared: bool
    word_embedding: bool
    position_embedding: bool


@dataclass(frozen=True, slots=True)
class GradSyncRule:
    """A named reduction that is left after the data-parallel one.

    group: a field of ProcessGroups ('tp', 'embd', ...). serves: which contracts it reduces. The data-parallel reduction
    has been done when a rule runs, so a rule only ever sees gradients that are already whole over the data group.
    """

    name: str
    group: str
    op: Literal["sum", "mean"]
    serves: Callable[[GradientContract], bool]


def _partial(axis: str) -> Callable[[GradientContract], bool]:
    return lambda contract: axis in contract.partial_over


def _averaged(axis: str) -> Callable[[GradientContract], bool]:
    return lambda contract: axis in contract.averaged_over


DEFAULT_RULES: tuple[GradSyncRule, ...] = (
    GradSyncRule("pipeline-replicated sum", "pp", "sum", _partial("pp")),
    GradSyncRule("tensor-parallel sum", "tp", "sum", _partial("tp")),
    GradSyncRule("tensor-parallel mean", "tp", "mean", _averaged("tp")),
    GradSyncRule("expert tensor-parallel sum", "expt_tp", "sum", _partial("expt_tp")),
    GradSyncRule("expert tensor-parallel mean", "expt_tp", "mean", _averaged("expt_tp")),
    GradSyncRule("tied word embedding sum", "embd", "sum", _partial("embd")),
    GradSyncRule("position embedding sum", "pos_embd", "sum", _partial("pos_embd")),
)


def declare_gradient(
    param: nn.Parameter, *, partial_over: Sequence[str] = (), averaged_over: Sequence[str] = ()
) -> nn.Parameter:
    """Say over which axes a parameter's gradient is partial after backward; returns the parameter.

    Axes are fields of ProcessGroups. With both empty it says: the gradient is complete on every tensor-parallel rank.
    Example: a q/k norm weight sees this rank's heads only, so `declare_gradient(weight, partial_over=("tp",))`.
    """
    setattr(param, DECLARATION, (tuple(partial_over), tuple(averaged_over)))
    return param


def data_group_of(param: nn.Parameter) -> str:
    """The data-parallel group of a parameter: experts carry `allreduce = False` and have one of their own."""
    return "dp_cp" if getattr(param, "allreduce", True) else "expt_dp"


def divisor_of(groups: ProcessGroups, config: Any) -> int:
    """What the sum of a gradient over its data group is divided by: the whole data group, for experts too.

    An expert's gradient is a sum over the tokens of all expert-parallel ranks, though fewer ranks hold a copy of it.
    With `calculate_per_token_loss` nothing: finalize_model_grads divides by the number of tokens.
    """
    return 1 if getattr(config, "calculate_per_token_loss", False) else groups.size("dp_cp")


def shared_copies(
    modules: Iterable[nn.Module], pre_process_attr: str = "position_embeddings"
) -> tuple[set[int], set[int]]:
    """Ids of the word and of the position embedding weights that modules name the way Megatron's models do."""
    word: set[int] = set()
    position: set[int] = set()
    for part in modules:
        shares = _holds(part, "share_embeddings_and_output_weights") and part.share_embeddings_and_output_weights
        if shares and hasattr(part, "shared_embedding_or_output_weight"):
            weight = part.shared_embedding_or_output_weight()
            if isinstance(weight, torch.Tensor):
                word.add(id(weight))
        if _holds(part, pre_process_attr):
            weight = getattr(getattr(part, pre_process_attr), "weight", None)
            if isinstance(weight, torch.Tensor):
                position.add(id(weight))
    return word, position


def _holds(module: nn.Module, name: str) -> bool:
    """hasattr, without the microsecond that nn.Module takes to say no."""
    return name in module.__dict__ or name in module._modules or hasattr(type(module), name)


UNTAGGED = Tags(False, False, False, None, None, False, False, False, False)


def read_tags(param: nn.Parameter, *, word_embedding: bool = False, position_embedding: bool = False) -> Tags:
    """Megatron's parameter attributes, read in this one place. The two flags: is it a weight that modules share?"""
    sequence_parallel = getattr(param, "sequence_parallel", None)
    return Tags(
        data_group_of(param) == "expt_dp",
        bool(getattr(param, "tensor_model_parallel", False)),
        bool(getattr(param, "average_gradients_across_tp_domain", False)),
        getattr(param, DECLARATION, None),
        None if sequence_parallel is None else bool(sequence_parallel),
        bool(getattr(param, "pipeline_parallel", False)),
        bool(getattr(param, "shared", False)),
        word_embedding or bool(getattr(param, "shared_embedding", False)),
        position_embedding or bool(getattr(param, "shared_position_embedding", False)),
    )


def read_contract(
    name: str,
    param: nn.Parameter,
    groups: ProcessGroups,
    config: Any,
    rules: Sequence[GradSyncRule],
    *,
    word_embedding: bool = False,
    position_embedding: bool = False,
) -> GradientContract:
    """Translate one parameter's attributes into its contract. Raises ContractError, naming the parameter."""
    tags = read_tags(param, word_embedding=word_embedding, position_embedding=position_embedding)
    return _with_rules(_without_rules(name, tags, groups, config), rules, groups)


def _without_rules(name: str, tags: Tags, groups: ProcessGroups, config: Any) -> GradientContract:
    """The contract but for the sync rules that serve it."""
    tp, pp = groups.size("tp"), groups.size("pp")
    is_expert, sharded, averaged, declaration, sequence_tag = tags[:5]
    tp_axis = "expt_tp" if is_expert else "tp"
    sequence_parallel = getattr(config, "sequence_parallel", None)  # None: no config, the tags alone decide

    if sharded and averaged:
        raise ContractError(
            f"parameter {name!r}: tensor_model_parallel and average_gradients_across_tp_domain are both set; its "
            "tensor-parallel ranks hold different slices, which must not be averaged. Clear one of the two"
        )
    if sequence_tag and sequence_parallel is False and tp > 1:
        raise ContractError(
            f"parameter {name!r}: sequence_parallel is True on the parameter and False in the config; summing its "
            f"gradient over tensor parallelism would make it {tp} times too large, not summing could lose {tp - 1} "
            "parts. Make the two agree"
        )

    partial: list[str] = []
    averages: list[str] = []
    if declaration is not None:
        partial += declaration[0]
        averages += declaration[1]
    if sequence_tag and not sharded:
        partial.append("tp")
    if averaged:
        averages.append("tp")
    undecided = declaration is None and sequence_tag is None
    if tp > 1 and undecided and _is_qk_layernorm(name, config):
        partial.append("tp")
    if tags.pipeline_parallel:
        partial.append("pp")
    if tags.word_embedding:
        partial.append("embd")
    if tags.position_embedding:
        partial.append("pos_embd")
    # An expert's tensor-parallel ranks are those of expt_tp; ranks of tp may hold different experts.
    partial = [tp_axis if axis == "tp" else axis for axis in partial]
    averages = [tp_axis if axis == "tp" else axis for axis in averages]

    undeclared = declaration is None and sequence_tag is None and not sharded and not averaged and not partial
    if sequence_parallel and tp > 1 and undeclared and not is_expert:
        raise ContractError(
            f"parameter {name!r} is replicated over {tp} tensor-parallel ranks under sequence parallelism and does not "
            "say whether its gradient is partial there. If its layer sees this rank's part of the sequence, set "
            "param.sequence_parallel = True; if it sees the whole sequence, set it to False"
        )
    if sharded and tp_axis in partial:
        raise ContractError(
            f"parameter {name!r} is both split over tensor parallelism and declared partial there; its ranks hold "
            "different slices, which must not be added. Clear tensor_model_parallel or the declaration"
        )

    for axis in (*partial, *averages):
        if axis not in ("embd", "pos_embd") or pp > 1:
            groups.require(axis)  # a partial gradient whose group is unknown must not pass for a whole one
    # An axis of one rank needs no reduction.
    partial_over = tuple(axis for axis in dict.fromkeys(partial) if groups.size(axis) > 1)
    averaged_over = tuple(axis for axis in dict.fromkeys(averages) if groups.size(axis) > 1)
    for axis in partial_over:
        if axis in averaged_over:
            raise ContractError(
                f"parameter {name!r}: its gradient over {axis!r} is to be added and to be averaged; choose one"
            )

    model_axes = [axis for axis in axes_of(is_expert) if axis.carries == "activations"]
    split = {axis.name for axis in model_axes if axis.always_split or (sharded and axis.name == tp_axis)}
    reduced = (*partial_over, *averaged_over)
    sharded_over = tuple(
        axis.name for axis in model_axes if axis.name in split - set(reduced) and groups.size(axis.name) > 1
    )
    crosses = any(axis in STAGE_CROSSING for axis in reduced)
    copies = (axis.name for axis in model_axes if axis.name not in split)
    counts = not tags.shared and all(groups.rank(axis) == 0 for axis in (*copies, *reduced))
    return GradientContract(
        name,
        is_expert,
        "expt_dp" if is_expert else "dp_cp",
        divisor_of(groups, config),
        sharded_over,
        partial_over,
        averaged_over,
        replicated_over(tags, groups),
        counts_in_norm=counts,
        crosses_stages=crosses,
    )


def replicated_over(tags: Tags, groups: ProcessGroups) -> tuple[str, ...]:
    """The groups, data groups apart, whose ranks hold copies of this parameter."""
    declared = () if tags.declaration is None else (*tags.declaration[0], *tags.declaration[1])
    copied = {
        **{axis.name: axis.name in COPY_AXES for axis in axes_of(tags.is_expert)},
        "expt_tp" if tags.is_expert else "tp": not tags.sharded,
        "pp": tags.pipeline_parallel or "pp" in declared,
        "embd": tags.word_embedding or "embd" in declared,
        "pos_embd": tags.position_embedding or "pos_embd" in declared,
    }
    return tuple(axis for axis, is_copy in copied.items() if is_copy and groups.size(axis) > 1)


def _is_qk_layernorm(name: str, config: Any) -> bool:
    asked = getattr(config, "qk_layernorm", False)
    return bool(asked) and not {"q_layernorm", "k_layernorm"}.isdisjoint(name.split("."))


def _with_rules(draft: GradientContract, rules: Sequence[GradSyncRule], groups: ProcessGroups) -> GradientContract:
    """The contract with the rules that serve it. Raises ContractError where a partial gradient is left without one."""
    serving = [rule for rule in rules if rule.serves(draft) and groups.size(rule.group) > 1]
    serving.sort(key=lambda rule: rule.group in STAGE_CROSSING)  # as they run
    for axis in (*draft.partial_over, *draft.averaged_over):
        if not any(rule.group == axis for rule in serving):
            raise ContractError(
                f"parameter {draft.name!r}: its gradient is partial over {axis!r} ({groups.size(axis)} ranks) and no "
                f"sync rule reduces it there. Pass a GradSyncRule for {axis!r} in "
                "DistributedDataParallelConfig.sync_rules"
            )
    return draft._replace(
        rules=tuple(f"{rule.op} over {rule.group} ({rule.name})" for rule in serving),
        crosses_stages=draft.crosses_stages or any(rule.group in STAGE_CROSSING for rule in serving),
    )


def read_contracts(
    named_params: Iterable[tuple[str, nn.Parameter]],
    modules: Iterable[nn.Module],
    groups: ProcessGroups,
    config: Any,
    rules: Sequence[GradSyncRule] = DEFAULT_RULES,
) -> dict[str, GradientContract]:
    """The contract of every parameter, by name, in registration order; `modules` are all of the model.

    Parameters of which layers have said the same have the same contract, which is worked out once. Only a rule of the
    user's may look at names, so those rules are asked for every parameter.
    """
    modules = list(modules)
    word, position = shared_copies(modules)
    beside = params_beside_split_layers(modules) if groups.size("tp") > 1 else set()
    shared = word | position
    names_matter = any(rule not in DEFAULT_RULES for rule in rules)
    has_qk = getattr(config, "qk_layernorm", False)
    known: dict[tuple[Tags, bool], tuple[GradientContract, list[str]]] = {}  # and the names of those that have it
    contracts: dict[str, Any] = {}
    key: tuple[Tags, bool] | None = None  # of the contract that is at hand
    for name, param in named_params:
        tags = UNTAGGED
        if param.__dict__ or type(param) is not nn.Parameter or id(param) in shared:
            tags = read_tags(param, word_embedding=id(param) in word, position_embedding=id(param) in position)
        is_qk = bool(has_qk) and _is_qk_layernorm(name, config)
        if id(param) in beside and not is_qk and tags.declaration is None and tags.sequence_parallel is None:
            raise ContractError(
                f"parameter {name!r} {list(param.shape)} is replicated over {groups.size('tp')} tensor-parallel ranks "
                "and lies beside split layers, of another width than what goes into them and comes out of them. If it "
                "sees this rank's part of what they split, as a norm of queries sees this rank's heads, say so by "
                "declare_gradient(param, partial_over=('tp',)); if all ranks see the same, by declare_gradient(param)"
            )
        if key is None or tags is not key[0] or is_qk is not key[1]:
            key = tags, is_qk
            if key not in known:
                contract = _without_rules(name, tags, groups, config)
                known[key] = contract if names_matter else _with_rules(contract, rules, groups), []
            contract, names = known[key]
        if names_matter:
            contracts[name] = _with_rules(contract.of(name), rules, groups)
        else:
            contracts[name] = None  # in its place; made below, all of one kind together
            names.append(name)
    for contract, names in known.values():
        contracts.update(zip(names, contract.of_each(names), strict=True))
    return contracts
