"""Param groups: one list on all ranks, from parameter names, parameters and overrides.

A group's parameters share their overrides, their algorithm, and whether they are experts. A pipeline stage sees only
its own parameters, so ranks exchange their lists. All ranks then have the same groups in the same order, and a group is
empty on stages without such parameters.
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
# Entries of a group for the scheduler, checkpoints and users; all others are options of its algorithm.
BOOKKEEPING = frozenset(
    (*LEARNING_RATES, "lr_mult", "wd_mult", "start_wd", "end_wd", "params", "lr", "weight_decay")
    + ("is_expert_parallel", "is_decoupled_lr", "default_config", "optimizer", "name")
)


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return the default overrides: no decay of biases and vectors, ``decoupled_lr`` for embedding and output layers.

    Combine them with your own: ``{**get_standard_config_overrides(config), key: {...}}``.

    Args:
        config: ``decoupled_lr`` may be ``None``; ``apply_wd_to_qk_layernorm`` lets query and key norms decay.
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
    """Return the standard overrides, modified by Megatron's older conditions over (name, parameter).

    ``no_weight_decay_cond`` replaces the standard decay rule. ``scale_lr_cond`` selects parameters whose learning rate
    is multiplied by ``lr_mult``.
    """
    overrides = get_standard_config_overrides(config)
    if no_weight_decay_cond is not None:
        no_decay = _key_of_condition("no_weight_decay_cond", no_weight_decay_cond)
        overrides = {no_decay: ParamGroupOverride(wd_mult=0.0), **_decoupled_overrides(config)}
    if scale_lr_cond is not None:
        overrides[_key_of_condition("scale_lr_cond", scale_lr_cond)] = ParamGroupOverride(lr_mult=lr_mult)
    return overrides


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Key of a param group. Parameters with equal keys are updated with equal numbers. Sent between ranks."""

    algorithm: str
    overrides: tuple[tuple[str, Any], ...] = ()
    is_decoupled_lr: bool = False
    is_expert_parallel: bool = False

    @property
    def name(self) -> str:
        """Name of the group without learning rates, so that a run with other rates finds the group again."""
        parts = [self.algorithm, *(key if key in LEARNING_RATES else f"{key}={value}" for key, value in self.overrides)]
        parts += ["decoupled"] * self.is_decoupled_lr + ["expert"] * self.is_expert_parallel
        return " ".join(parts)


class ParamGroups:
    """Param groups of a model, and the group of each parameter of this rank.

    A parameter gets the union of all overrides whose keys match it. ``agree`` raises the errors found here on all
    ranks.

    Args:
        params: (name in the full model, parameter, is_expert) of all chunks, sharded or not.
        overrides: Overrides by key. Defaults to ``get_standard_config_overrides(config)``.
        frozen: (name, parameter) of frozen parameters. A key that matches only these is accepted.
        repeated_name: Description of a name that two pipeline stages use for different parameters, if any. A key that
            depends on numbers in names would then match other layers than in the full model, and is rejected.
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
        self.matched: set[ParamKey] = set()  # keys of overrides that matched a parameter
        self.problem: str | None = None  # the first mistake that this rank sees; `agree` raises it on all ranks
        self._key_of: dict[int, GroupKey] = {}  # keyed by id(parameter)
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
        """Combine the overrides that match a parameter. ValueError if two of them contradict each other."""
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
        """Merge the group lists of all ranks. Collective over ``groups`` in order, which must reach all ranks.

        Raises ValueError on every rank if overrides contradict each other, or match no parameter of any rank.
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
                    f"{key} in config_overrides matches no parameter on any rank; compare it with named_parameters() "
                    "of the model before it is cut into pipeline stages, or remove it"
                )

    def of(self, param: nn.Parameter) -> int:
        return self._index[self._key_of[id(param)]]

    def needs_whole(self, param: nn.Parameter) -> str | None:
        """Return a parameter's algorithm if it needs the unsplit parameter in its shape, else ``None``."""
        algorithm = self._key_of[id(param)].algorithm
        return algorithm if update_scope(algorithm) != "element" else None

    def torch_groups(self, config: OptimizerConfig) -> list[dict[str, Any]]:
        """Create one empty torch param group per key, or one group if no rank has parameters.

        Raises ValueError if ``config.lr`` is ``None``.
        """
        if config.lr is None:
            raise ValueError("OptimizerConfig.lr is None; set the learning rate that training starts with")
        groups = [torch_group(config, key) for key in self.keys or [GroupKey(label(config.optimizer))]]
        for index, group in enumerate(groups):  # keys that differ only in a learning rate have the same name
            same_name = sum(other["name"] == group["name"] for other in groups[:index])
            if same_name:
                group["name"] += f" #{same_name + 1}"
        return groups


def torch_group(config: OptimizerConfig, key: GroupKey) -> dict[str, Any]:
    """Create the torch param group of a key.

    ``lr`` is the learning rate of the first step if no scheduler sets it. ``max_lr`` and ``min_lr`` are the group's own
    or the configured ones, before ``lr_mult``, as a scheduler reads them. A group without min_lr uses the scheduler's.
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
    """Return a parameter's algorithm. Muon only steps hidden layers' matrices, and stacks of them (experts')."""
    if config.optimizer != "muon":
        return config.optimizer
    is_matrix = decays_by_default(name, param) and param.dim() in (2, 3) and not is_embedding_or_output(name, param)
    return "muon" if is_matrix else config.muon_scalar_optimizer


def _may_match_nothing(config: OptimizerConfig) -> set[ParamKey]:
    """Return the keys that this file creates for any model, and that may match no parameter."""
    conditions = (_key_of_condition(what, lambda *_: False) for what in ("no_weight_decay_cond", "scale_lr_cond"))
    return {*get_standard_config_overrides(config), *conditions}
