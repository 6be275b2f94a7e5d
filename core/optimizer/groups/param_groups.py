"""Hyperparameters of each parameter: from names, parameters and overrides to one list of groups on all ranks.

A group is what parameters have in common: their overrides, the algorithm, and whether they are experts. A pipeline
stage sees its own parameters only, so the ranks put their lists together: everywhere the same groups in the same order,
empty where a stage has none of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from core.groups import agree
from core.optimizer.algorithms.names import Algorithm, label, update_scope
from core.optimizer.groups.param_key import (
    ParamGroupOverride,
    ParamKey,
    ParamWithNamePredicate,
    decays_by_default,
    is_embedding_or_output,
)
from core.optimizer.optimizer_config import OptimizerConfig

Condition = Callable[[str, nn.Parameter], bool]
Overrides = Mapping[ParamKey, ParamGroupOverride]

LEARNING_RATES = ("max_lr", "min_lr")
# What a group holds for the scheduler, for checkpoints and for people; the rest are options of its algorithm.
BOOKKEEPING = frozenset(
    (*LEARNING_RATES, "lr_mult", "wd_mult", "start_wd", "end_wd", "params", "lr", "weight_decay")
    + ("is_expert_parallel", "is_decoupled_lr", "default_config", "optimizer", "name")
)


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Overrides that hold by default: no decay of biases and vectors; embedding and output layer learn
    with `decoupled_lr` where it is set. Add your own to it: `{**get_standard_config_overrides(config), key: {...}}`.
    """
    decaying_norms = {"q_layernorm", "k_layernorm"} if config.apply_wd_to_qk_layernorm else set()
    excepted = ", q and k norms excepted" if decaying_norms else ""

    def no_decay(name: str, param: nn.Parameter) -> bool:
        return not decays_by_default(name, param) and decaying_norms.isdisjoint(name.split("."))

    return {
        _key_of_condition(f"bias or one-dimensional{excepted}", no_decay): ParamGroupOverride(wd_mult=0.0),
        **_decoupled_overrides(config),
    }


def _key_of_condition(what: str, condition: Condition) -> ParamKey:
    return ParamKey(with_name_predicate=ParamWithNamePredicate(what, lambda param, name: condition(name, param)))


def _decoupled_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    if config.decoupled_lr is None:
        return {}
    decoupled = ParamGroupOverride(max_lr=config.decoupled_lr)
    if config.decoupled_min_lr is not None:
        decoupled["min_lr"] = config.decoupled_min_lr
    return {ParamKey(attr="is_embedding_or_output_parameter"): decoupled}


def overrides_of_conditions(
    config: OptimizerConfig,
    no_weight_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
) -> dict[ParamKey, ParamGroupOverride]:
    """The standard overrides, with Megatron's older conditions over (name, parameter) in place of the decay rule."""
    overrides = get_standard_config_overrides(config)
    if no_weight_decay_cond is not None:
        no_decay = _key_of_condition("no_weight_decay_cond", no_weight_decay_cond)
        overrides = {no_decay: ParamGroupOverride(wd_mult=0.0), **_decoupled_overrides(config)}
    if scale_lr_cond is not None:
        overrides[_key_of_condition("scale_lr_cond", scale_lr_cond)] = ParamGroupOverride(lr_mult=lr_mult)
    return overrides


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Parameters with equal keys are updated with the same numbers. Sent between ranks."""

    algorithm: str
    overrides: tuple[tuple[str, Any], ...] = ()
    is_decoupled_lr: bool = False
    is_expert_parallel: bool = False

    @property
    def name(self) -> str:
        """The group in words, without numbers of learning rates, so that a run with others finds it again."""
        parts = [self.algorithm, *(key if key in LEARNING_RATES else f"{key}={value}" for key, value in self.overrides)]
        parts += ["decoupled"] * self.is_decoupled_lr + ["expert"] * self.is_expert_parallel
        return " ".join(parts)


class ParamGroups:
    """The groups of a model, and the group of every parameter of this rank.

    params: (name in the whole model, parameter, True for an expert's), of all chunks, sharded or not.
    overrides: default `get_standard_config_overrides(config)`. A parameter takes the sum of all that match; where two
        of them contradict each other, `agree` says so.
    frozen: (name, parameter) of those that do not train; a key that matches only them is no mistake.
    repeated_name: in words a name that two pipeline stages have for different parameters, if there is one; then a key
        that goes by numbers in names would match other layers than in the whole model, and is refused.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        params: Iterable[tuple[str, nn.Parameter, bool]],
        overrides: Overrides | None = None,
        *,
        frozen: Iterable[tuple[str, nn.Parameter]] = (),
        repeated_name: str | None = None,
    ) -> None:
        standard = get_standard_config_overrides(config)
        self.config = config
        self.overrides = dict(standard if overrides is None else overrides)
        self.matched: set[ParamKey] = set()  # keys of overrides that have been used
        self.problem: str | None = None  # the first mistake that this rank sees; `agree` raises it on all ranks
        self._key_of: dict[int, GroupKey] = {}  # by id of the parameter
        for name, param, is_expert in params:
            try:
                self._key_of[id(param)] = self._make_key(name, param, is_expert)
            except ValueError as error:
                self.problem = self.problem or str(error)
        self._number(self._key_of.values())
        for name, param in frozen:
            self.matched.update(self._matching(name, param))
        counting = [key for key in self.overrides if key.counts and key not in standard]
        if repeated_name is not None and counting:
            self.problem = (
                f"{counting[0]} may match other layers than in the whole model: {repeated_name}. Say what the parts of "
                "a stage are called in the whole model, module.global_names = {'layers.0': 'layers.12'}; or use a rule "
                "that looks at the parameter alone, ParamKey(predicate=...) or ParamKey(attr=...)"
            )

    def _matching(self, name: str, param: nn.Parameter) -> list[ParamKey]:
        return [key for key in self.overrides if key.matches(param, name)]

    def _make_key(self, name: str, param: nn.Parameter, is_expert: bool) -> GroupKey:
        """The sum of the overrides that match a parameter. ValueError where two of them contradict each other."""
        combined: dict[str, Any] = {}
        source: dict[str, ParamKey] = {}
        for key in self._matching(name, param):
            self.matched.add(key)
            for field, value in self.overrides[key].items():
                if combined.setdefault(field, value) != value:
                    raise ValueError(
                        f"parameter {name!r}: {source[field]} sets {field}={combined[field]} and {key} sets "
                        f"{field}={value}; make one of the two keys narrower"
                    )
                source[field] = key
        algorithm = label(combined.pop("optimizer", None) or algorithm_of(self.config, name, param))
        tagged = getattr(param, "is_embedding_or_output_parameter", False)
        decoupled = bool(tagged) and self.config.decoupled_lr is not None and combined.get("max_lr") is not None
        return GroupKey(algorithm, tuple(sorted(combined.items())), decoupled, is_expert)

    def _number(self, keys: Iterable[GroupKey]) -> None:
        self.keys = list(dict.fromkeys(keys))
        self._index = {key: index for index, key in enumerate(self.keys)}

    def agree(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Put the lists of all ranks together. Collective over `groups`, one after the other.

        Raises ValueError on every rank when overrides contradict each other for a parameter of any rank, or when one of
        them matches no parameter of any rank.
        """
        used = [key in self.matched for key in self.overrides]
        answers = agree.gather((self.keys, used, self.problem), groups, "the param groups")
        in_order = [answers[rank] for rank in sorted(answers)]
        for *_, problem in in_order:
            if problem is not None:
                raise ValueError(problem)
        self._number(key for keys, *_ in in_order for key in keys)
        for index, key in enumerate(self.overrides):
            if not any(used[index] for _, used, *_ in in_order) and key not in _may_match_nothing(self.config):
                raise ValueError(
                    f"{key} in config_overrides matches no parameter of the model on any rank; compare it with the "
                    "names in named_parameters() of the whole model, which no pipeline cuts, or leave it out"
                )

    def of(self, param: nn.Parameter) -> int:
        """The index of a parameter's group."""
        return self._index[self._key_of[id(param)]]

    def needs_whole(self, param: nn.Parameter) -> str | None:
        """The algorithm of a parameter if it must see it whole, in its shape."""
        algorithm = self._key_of[id(param)].algorithm
        return algorithm if update_scope(algorithm) != "element" else None

    def torch_groups(self, config: OptimizerConfig) -> list[dict[str, Any]]:
        """One empty torch param group a key, with its lr and weight decay; one where there is no parameter at all."""
        if config.lr is None:
            raise ValueError("OptimizerConfig.lr is None; set the learning rate that training starts with")
        groups = [torch_group(config, key) for key in self.keys or [GroupKey(label(config.optimizer))]]
        for index, group in enumerate(groups):  # keys that differ in a learning rate only have one name
            alike = sum(other["name"] == group["name"] for other in groups[:index])
            if alike:
                group["name"] += f" #{alike + 1}"
        return groups


def torch_group(config: OptimizerConfig, key: GroupKey) -> dict[str, Any]:
    """The torch param group of a key. `lr` is what the first step takes where no scheduler sets it.

    max_lr and min_lr are the group's own or the configured ones, before `lr_mult`, as a scheduler reads them; a group
    without min_lr follows the scheduler's.
    """
    numbers = dict(key.overrides)
    max_lr = numbers.get("max_lr", config.lr)
    lr_mult, wd_mult = numbers.get("lr_mult", 1.0), numbers.get("wd_mult", 1.0)
    group = {
        "params": [],
        "lr": max_lr * lr_mult,
        "max_lr": max_lr,
        "weight_decay": numbers.get("start_wd", config.weight_decay) * wd_mult,
        "wd_mult": wd_mult,
        "lr_mult": lr_mult,
        "is_expert_parallel": key.is_expert_parallel,
        "is_decoupled_lr": key.is_decoupled_lr,
        "default_config": not any(field in numbers for field in (*LEARNING_RATES, "lr_mult")),
        "optimizer": key.algorithm,
        "name": key.name,
    }
    if "min_lr" in numbers or config.min_lr is not None:
        group["min_lr"] = numbers.get("min_lr", config.min_lr)
    return group | {field: value for field, value in numbers.items() if field not in group}


def algorithm_of(config: OptimizerConfig, name: str, param: nn.Parameter) -> Algorithm:
    """The algorithm of a parameter. Under Muon only hidden layers' matrices, and stacks of them (experts'), have it."""
    if config.optimizer != "muon":
        return config.optimizer
    is_matrix = decays_by_default(name, param) and param.dim() in (2, 3) and not is_embedding_or_output(name, param)
    return "muon" if is_matrix else config.muon_scalar_optimizer


def _may_match_nothing(config: OptimizerConfig) -> set[ParamKey]:
    """Keys that are made here, for any model."""
    conditions = (_key_of_condition(what, lambda *_: False) for what in ("no_weight_decay_cond", "scale_lr_cond"))
    return {*get_standard_config_overrides(config), *conditions}
