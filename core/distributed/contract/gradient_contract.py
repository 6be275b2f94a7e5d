"""GradientContract: the reductions that one parameter's gradient needs, read once from its tags at the wrap.

Tags are read here and in core/groups/param_attributes.py only. For a parameter, each parallel axis is one of three
things: its ranks hold different slices (``sharded_over``), they hold partial gradients that must be added or averaged
(``partial_over``, ``averaged_over``), or their gradients are already equal. Gradients of all parameters are partial
over data parallelism. Expert parameters have a separate data group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import nn

from core.groups.param_attributes import STAGE_COPIES, copies_across_stages, data_group_of, embeddings_of
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import COPY_AXES, DATA_KINDS, STAGE_CROSSING, axes_of

DECLARATION = "gradient_declaration"  # the attribute that `declare_gradient` sets on a parameter


class ContractError(ValueError):
    """A parameter's tags contradict each other, or no rule reduces its partial gradient."""


# A tuple, because every parameter of a model has one, and a frozen dataclass takes four times as long to create.
class GradientContract(NamedTuple):
    """Reductions of one parameter's gradient between backward and the optimizer.

    Attributes:
        name: Parameter name.
        is_expert: True for a parameter of an expert.
        data_group: Field of ProcessGroups that the gradient is summed over: 'dp_cp' or 'expt_dp'.
        divisor: Divisor of that sum; 1 if losses are per token.
        sharded_over: Axes whose ranks hold different slices of the parameter.
        partial_over: Axes whose ranks hold summands of the gradient.
        averaged_over: Axes whose gradients are averaged.
        replicated_over: Axes whose ranks hold equal weights and, after all reductions, equal gradients.
        rules: Descriptions of the sync rules that apply to it, in order.
        counts_in_norm: True on exactly one of the ranks that hold this gradient.
        crosses_stages: True if another pipeline stage has a copy.
    """

    name: str
    is_expert: bool
    data_group: str
    divisor: int
    sharded_over: tuple[str, ...] = ()
    partial_over: tuple[str, ...] = ()
    averaged_over: tuple[str, ...] = ()
    replicated_over: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    counts_in_norm: bool = True
    crosses_stages: bool = False

    @property
    def reductions(self) -> tuple[str, ...]:
        """Descriptions of all reductions in order."""
        data = f"sum over {self.data_group} / {self.divisor}"
        return (data, *self.rules)


class Tags(NamedTuple):
    """Attributes of a parameter. Contracts depend only on these and on the name."""

    is_expert: bool
    sharded: bool  # True if tensor-parallel ranks hold different slices
    averaged: bool  # True if they hold gradients to be averaged
    uncounted: bool  # True if another copy counts in the norm
    declaration: tuple[tuple[str, ...], tuple[str, ...]] | None  # set by declare_gradient: partial over, averaged over
    sequence_parallel: bool | None  # None if the parameter does not have the tag
    copies: tuple[str, ...]  # groups across stages whose ranks hold copies


@dataclass(frozen=True, slots=True)
class GradSyncRule:
    """A named reduction that runs after the data-parallel one.

    A rule only gets gradients that are already reduced over the data group.

    Args:
        name: Name for messages and ``describe()``.
        group: A field of ProcessGroups ('tp', 'embd', ...).
        op: 'sum' or 'mean'.
        serves: Returns True for the contracts that the rule reduces.
    """

    name: str
    group: str
    op: Literal["sum", "mean"]
    serves: Callable[[GradientContract], bool]


def _rule(name: str, group: str, op: Literal["sum", "mean"]) -> GradSyncRule:
    reduced = "partial_over" if op == "sum" else "averaged_over"
    return GradSyncRule(name, group, op, lambda contract: group in getattr(contract, reduced))


DEFAULT_RULES = (
    _rule("pipeline-replicated sum", "pp", "sum"),
    _rule("tensor-parallel sum", "tp", "sum"),
    _rule("tensor-parallel mean", "tp", "mean"),
    _rule("expert tensor-parallel sum", "expt_tp", "sum"),
    _rule("expert tensor-parallel mean", "expt_tp", "mean"),
    _rule("tied word embedding sum", "embd", "sum"),
    _rule("position embedding sum", "pos_embd", "sum"),
)


def declare_gradient(
    param: nn.Parameter, *, partial_over: Sequence[str] = (), averaged_over: Sequence[str] = ()
) -> nn.Parameter:
    """Declare the axes over which a parameter's gradient is partial after backward.

    A wrong declaration is a wrong gradient: ranks of a partial axis would train on their part only. With both arguments
    empty, the gradient is declared complete on every tensor-parallel rank. For example, a q/k norm weight gets
    gradients from this rank's heads only, so use ``declare_gradient(weight, partial_over=("tp",))``.

    Args:
        param: The parameter.
        partial_over: Fields of ProcessGroups whose ranks' gradients are added.
        averaged_over: Fields of ProcessGroups whose ranks' gradients are averaged.

    Returns:
        The parameter.
    """
    setattr(param, DECLARATION, (tuple(partial_over), tuple(averaged_over)))
    return param


def divisor_of(groups: ProcessGroups, config: Any) -> int:
    """Return the divisor of a gradient's sum over its data group: the size of 'dp_cp', for experts too.

    An expert's gradient is a sum over the tokens of all expert-parallel ranks, although fewer ranks hold a copy of the
    expert. With ``calculate_per_token_loss`` the divisor is 1, because finalize_model_grads divides by the number of
    tokens.

    Args:
        groups: Process groups of the model.
        config: Config of the model, or None.
    """
    return 1 if getattr(config, "calculate_per_token_loss", False) else groups.size("dp_cp")


UNTAGGED = Tags(False, False, False, False, None, None, ())


def read_tags(param: nn.Parameter, embeddings: Mapping[int, str]) -> Tags:
    """Read Megatron's attributes of a parameter. Only this function reads them.

    Args:
        param: The parameter.
        embeddings: Result of ``embeddings_of``.
    """
    if type(param) is nn.Parameter and not vars(param) and id(param) not in embeddings:
        return UNTAGGED  # the usual case: saves half of the time of reading a contract
    sequence_parallel = getattr(param, "sequence_parallel", None)
    return Tags(
        data_group_of(param) == "expt_dp",
        bool(getattr(param, "tensor_model_parallel", False)),
        bool(getattr(param, "average_gradients_across_tp_domain", False)),
        bool(getattr(param, "shared", False)),
        getattr(param, DECLARATION, None),
        None if sequence_parallel is None else bool(sequence_parallel),
        copies_across_stages(param, embeddings),
    )


def _without_rules(name: str, tags: Tags, groups: ProcessGroups, config: Any) -> GradientContract:
    """Return the contract without the sync rules that serve it."""
    tp = groups.size("tp")
    sharded, averaged, sequence_tag = tags.sharded, tags.averaged, tags.sequence_parallel
    is_untagged = tags.declaration is None and sequence_tag is None
    tp_axis = "expt_tp" if tags.is_expert else "tp"
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

    declared_partial, declared_averages = tags.declaration or ((), ())
    partial, averages = list(declared_partial), list(declared_averages)
    if (sequence_tag and not sharded) or (tp > 1 and is_untagged and _is_qk_layernorm(name, config)):
        partial.append("tp")
    if averaged:
        averages.append("tp")
    # An expert's tensor-parallel ranks are those of expt_tp; ranks of tp may hold different experts.
    partial = [tp_axis if axis == "tp" else axis for axis in (*partial, *tags.copies)]
    averages = [tp_axis if axis == "tp" else axis for axis in averages]

    undeclared = is_untagged and not sharded and not averaged and not partial
    if sequence_parallel and tp > 1 and undeclared and not tags.is_expert:
        raise ContractError(
            f"parameter {name!r} is replicated over {tp} tensor-parallel ranks under sequence parallelism, and nothing "
            "says whether its gradient is partial on each rank. Set param.sequence_parallel = True if its layer gets "
            "only this rank's part of the sequence, False if it gets the full sequence"
        )
    if sharded and tp_axis in partial:
        raise ContractError(
            f"parameter {name!r} is both split over tensor parallelism and declared partial there; its ranks hold "
            "different slices, which must not be added. Clear tensor_model_parallel or the declaration"
        )

    for axis in (*partial, *averages):
        if axis not in ("embd", "pos_embd") or groups.size("pp") > 1:
            groups.require(axis)  # a partial gradient whose group is unknown must not pass as complete
    # An axis of one rank needs no reduction.
    partial_over = tuple(axis for axis in dict.fromkeys(partial) if groups.size(axis) > 1)
    averaged_over = tuple(axis for axis in dict.fromkeys(averages) if groups.size(axis) > 1)
    for axis in partial_over:
        if axis in averaged_over:
            raise ContractError(
                f"parameter {name!r}: its gradient over {axis!r} is to be added and to be averaged; choose one"
            )

    model_axes = [axis for axis in axes_of(tags.is_expert) if axis.carries == "activations"]
    split = {axis.name for axis in model_axes if axis.always_split or (sharded and axis.name == tp_axis)}
    reduced = (*partial_over, *averaged_over)
    sharded_over = tuple(
        axis.name for axis in model_axes if axis.name in split - set(reduced) and groups.size(axis.name) > 1
    )
    crosses = any(axis in STAGE_CROSSING for axis in reduced)
    copies = (axis.name for axis in model_axes if axis.name not in split)
    counts = not tags.uncounted and all(groups.rank(axis) == 0 for axis in (*copies, *reduced))
    return GradientContract(
        name,
        tags.is_expert,
        DATA_KINDS[tags.is_expert],
        divisor_of(groups, config),
        sharded_over,
        partial_over,
        averaged_over,
        replicated_over(tags, groups),
        counts_in_norm=counts,
        crosses_stages=crosses,
    )


def replicated_over(tags: Tags, groups: ProcessGroups) -> tuple[str, ...]:
    """Return the groups, other than data groups, whose ranks hold copies of this parameter.

    Args:
        tags: Tags of the parameter.
        groups: Process groups of the model.
    """
    across_stages = {*tags.copies, *(axis for axes in tags.declaration or () for axis in axes)}
    copied = {
        **{axis.name: axis.name in COPY_AXES for axis in axes_of(tags.is_expert)},
        "expt_tp" if tags.is_expert else "tp": not tags.sharded,
        **{group: group in across_stages for group in STAGE_COPIES},
    }
    return tuple(axis for axis, is_copy in copied.items() if is_copy and groups.size(axis) > 1)


def _is_qk_layernorm(name: str, config: Any) -> bool:
    is_enabled = bool(getattr(config, "qk_layernorm", False))
    return is_enabled and not {"q_layernorm", "k_layernorm"}.isdisjoint(name.split("."))


def _with_rules(draft: GradientContract, rules: Sequence[GradSyncRule], groups: ProcessGroups) -> GradientContract:
    """Add the rules that serve a contract. Raises ContractError if no rule reduces a partial gradient."""
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
    """Read the contract of every parameter.

    Parameters with the same tags get the same contract, which is computed once. Only a user's rule may depend on names,
    so user rules are called for every parameter.

    Args:
        named_params: Names and parameters, in registration order.
        modules: All modules of the model.
        groups: Process groups of the model.
        config: Config of the model, or None.
        rules: Sync rules that may serve a parameter.

    Returns:
        Contracts by name, in registration order.

    Raises:
        ContractError: If a parameter's tags contradict each other, or no rule reduces its partial gradient.
    """
    embeddings = embeddings_of(modules)
    names_matter = any(rule not in DEFAULT_RULES for rule in rules)
    by_tags: dict[tuple[Tags, bool], GradientContract] = {}
    contracts: dict[str, GradientContract] = {}
    for name, param in named_params:
        tags = read_tags(param, embeddings)
        is_qk = _is_qk_layernorm(name, config)
        if (tags, is_qk) not in by_tags:
            draft = _without_rules(name, tags, groups, config)
            by_tags[tags, is_qk] = draft if names_matter else _with_rules(draft, rules, groups)
        contract = by_tags[tags, is_qk]._replace(name=name)
        contracts[name] = _with_rules(contract, rules, groups) if names_matter else contract
    return contracts
