"""ParamKey: which parameters an override of hyperparameters is for; by name, attribute or predicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypedDict

from torch import nn

# Where the embeddings and the output layer lie in models that do not tag their weights.
EMBEDDING_OR_OUTPUT_MODULES = frozenset(
    ("embedding", "embeddings", "word_embeddings", "position_embeddings", "embed_tokens", "wte", "wpe")
) | {"output_layer", "lm_head"}

# With none of these a pattern fits 'layers.1' if it fits 'layers.2'.
COUNTING = frozenset("0123456789?[")


class ParamGroupOverride(TypedDict, total=False):
    """Numbers of a group of parameters, in place of the configured ones.

    max_lr, min_lr: between which its learning rate moves. lr_mult: what the scheduled rate is multiplied by.
    wd_mult: what the weight decay is multiplied by. start_wd, end_wd: between which it moves, before `wd_mult`.
    optimizer: the algorithm, as in OptimizerConfig. Any other key is an option of the algorithm, such as `eps`.
    """

    max_lr: float
    min_lr: float
    lr_mult: float
    wd_mult: float
    start_wd: float
    end_wd: float
    optimizer: str


@dataclass(frozen=True)
class ParamPredicate:
    """A named test of a parameter: two with one name are the same key, for any functions."""

    name: str
    fn: Callable[[nn.Parameter], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter) -> bool:
        return bool(self.fn(param))


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A named test of a parameter and its name."""

    name: str
    fn: Callable[[nn.Parameter, str], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter, name: str) -> bool:
        return bool(self.fn(param, name))


@dataclass(frozen=True, slots=True)
class ParamKey:
    """Matches a parameter that meets ANY of the criteria; each is one value or a tuple of them.

    name: patterns with * ? [] for the name in the whole model, as in `module.named_parameters()` where no pipeline
        cuts it: the third layer of all is 'layers.2', on whichever stage it lies.
    attr: attributes of the parameter that are true, such as 'is_embedding_or_output_parameter'.
    predicate, with_name_predicate: tests of (parameter) and of (parameter, name).

        ParamKey(name=("*.router.*", "*.gate"))
    """

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()

    def __post_init__(self) -> None:
        for criterion in ("name", "attr", "predicate", "with_name_predicate"):
            value = getattr(self, criterion)
            if isinstance(value, (list, set)):
                raise ValueError(f"ParamKey({criterion}={value!r}) is not hashable; write a tuple")
        if not (self.name or self.attr or self.predicate or self.with_name_predicate):
            raise ValueError("ParamKey() has no criterion and matches nothing; give a name, attr or predicate")

    def matches(self, param: nn.Parameter, param_name: str) -> bool:
        return (
            any(fnmatchcase(param_name, pattern) for pattern in _several(self.name))
            or any(getattr(param, attr, False) for attr in _several(self.attr))
            or any(predicate(param) for predicate in _several(self.predicate))
            or any(predicate(param, param_name) for predicate in _several(self.with_name_predicate))
        )

    @property
    def counts(self) -> bool:
        """True if the answer may depend on a number in the name, such as a layer's."""
        return bool(self.with_name_predicate) or not COUNTING.isdisjoint("".join(_several(self.name)))

    def __str__(self) -> str:
        """The criteria that are set, with predicates by their names."""
        shown = [f"name={name!r}" for name in _several(self.name)]
        shown += [f"attr={attr!r}" for attr in _several(self.attr)]
        shown += [f"predicate {predicate.name!r}" for predicate in _several(self.predicate)]
        shown += [f"with_name_predicate {predicate.name!r}" for predicate in _several(self.with_name_predicate)]
        return f"ParamKey({', '.join(shown)})"


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def is_bias(name: str) -> bool:
    """'bias' and 'layer.bias'; and 'bias1', as layers with several name them. Experts' biases are matrices in shape."""
    return name.rpartition(".")[2].rstrip("0123456789") == "bias"


def decays_by_default(name: str, param: nn.Parameter) -> bool:
    """Weight decay is for matrices: not for biases, nor for norm weights and other one-dimensional parameters."""
    return param.dim() > 1 and not is_bias(name)


def is_embedding_or_output(name: str, param: nn.Parameter) -> bool:
    """True for a word or position embedding and the output layer, by its tag or by the modules it lies in."""
    return bool(
        getattr(param, "is_embedding_or_output_parameter", False)
        or getattr(param, "shared_embedding", False)
        or EMBEDDING_OR_OUTPUT_MODULES & set(name.split("."))
    )
