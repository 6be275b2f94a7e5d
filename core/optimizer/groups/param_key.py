"""ParamKey: a selection of parameters for an override, by name, attribute or predicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypedDict

from torch import nn

# Modules of embeddings and output layers in models that do not tag their weights.
EMBEDDING_OR_OUTPUT_MODULES = frozenset(
    ("embedding", "embeddings", "word_embeddings", "position_embeddings", "embed_tokens", "wte", "wpe")
) | {"output_layer", "lm_head"}

# A pattern without any of these matches 'layers.1' if it matches 'layers.2'.
COUNTING = frozenset("0123456789?[")


class ParamGroupOverride(TypedDict, total=False):
    """Values that replace the configured ones for a group of parameters.

    Any other key is an option of the algorithm, such as ``eps``.

    Attributes:
        max_lr: Upper end of the learning rate.
        min_lr: Lower end of the learning rate.
        lr_mult: Factor of the scheduled learning rate.
        wd_mult: Factor of the weight decay.
        start_wd: Weight decay at the start, before ``wd_mult``.
        end_wd: Weight decay at the end, before ``wd_mult``.
        optimizer: The algorithm, as in OptimizerConfig.
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
    """Named condition on a parameter, for ``ParamKey``.

    Attributes:
        name: Identifies the predicate. Two predicates with the same name are equal as keys, even if their functions
            differ.
        fn: Returns True for parameters that match.
    """

    name: str
    fn: Callable[[nn.Parameter], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter) -> bool:
        return bool(self.fn(param))


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """Named condition on a parameter and its name, for ``ParamKey``.

    Attributes:
        name: Name. Predicates with equal names are equal keys, even if their functions differ.
        fn: Called with a parameter and its name. Returns True for parameters that match.
    """

    name: str
    fn: Callable[[nn.Parameter, str], bool] = field(compare=False)

    def __call__(self, param: nn.Parameter, name: str) -> bool:
        return bool(self.fn(param, name))


@dataclass(frozen=True, slots=True)
class ParamKey:
    """Matches a parameter if it meets ANY of the criteria. Each criterion is one value or a tuple of values.

        ParamKey(name=("*.router.*", "*.gate"))

    Args:
        name: Patterns with * ? [] for the name in the full model, as ``module.named_parameters()`` returns it without a
            pipeline: the model's third layer is 'layers.2' on any stage.
        attr: Parameter attributes that are true, such as 'is_embedding_or_output_parameter'.
        predicate: Tests of (parameter).
        with_name_predicate: Tests of (parameter, name).

    Raises:
        ValueError: If there is no criterion, or a criterion is a list or a set.
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
        """Return ``True`` if the match may depend on a number in the name, such as a layer index."""
        return bool(self.with_name_predicate) or not COUNTING.isdisjoint("".join(_several(self.name)))

    def __str__(self) -> str:
        shown = [f"name={name!r}" for name in _several(self.name)]
        shown += [f"attr={attr!r}" for attr in _several(self.attr)]
        shown += [f"predicate {predicate.name!r}" for predicate in _several(self.predicate)]
        shown += [f"with_name_predicate {predicate.name!r}" for predicate in _several(self.with_name_predicate)]
        return f"ParamKey({', '.join(shown)})"


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def is_bias(name: str) -> bool:
    """Return ``True`` for 'bias', 'layer.bias', and 'bias1' in layers with several. Experts' biases have matrix
    shapes.
    """
    return name.rpartition(".")[2].rstrip("0123456789") == "bias"


def decays_by_default(name: str, param: nn.Parameter) -> bool:
    """Return ``True`` for matrices. Biases, norm weights and other one-dimensional parameters do not decay."""
    return param.dim() > 1 and not is_bias(name)


def is_embedding_or_output(name: str, param: nn.Parameter) -> bool:
    """Return ``True`` for a word or position embedding and the output layer, by tag or by module name."""
    return bool(
        getattr(param, "is_embedding_or_output_parameter", False)
        or getattr(param, "shared_embedding", False)
        or EMBEDDING_OR_OUTPUT_MODULES & set(name.split("."))
    )
