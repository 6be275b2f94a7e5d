"""declare_splits: say how user code has split the parameters of a model, where neither tags nor DTensors say it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from core.distributed import DistributedDataParallel
from core.tensor_parallel.layers import set_tensor_model_parallel_attributes

Model = TypeVar("Model", bound=nn.Module)


def declare_splits(model: Model, splits: Mapping[str, int | tuple[int, int]]) -> Model:
    """Mark the parameters of which tensor-parallel ranks hold slices, by Megatron's attributes; returns the model.

    splits: a parameter's name, or a pattern as of fnmatch -> the dimension that is split, or (dimension, sections).
    Sections are parts of that dimension, each split for itself: 2 where a rank's gate and value lie in one weight.
    Parameters that no name matches are whole. Names are those of `model.named_parameters()`; for one that is called
    otherwise in the unsplit model, a module says so (`global_names`).

    Local. Raises ValueError, and marks nothing, for a name that matches no parameter or one that is declared already,
    for a dimension that the parameter does not have or that does not divide into the sections, for a DTensor, and for
    a model in our wrapper, which has read the attributes.

        declare_splits(model, {"*.gate_value.weight": (0, 2), "*.down.weight": 1})
        check = verify_with(model, build_whole, mean_loss)
    """
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ValueError(
            "declare_splits was given a model in DistributedDataParallel, which has read how its parameters are split; "
            "call it before the wrap"
        )
    params = dict(model.named_parameters())
    found: dict[str, tuple[str, int, int]] = {}
    for pattern, split in splits.items():
        dim, sections = split if isinstance(split, tuple) else (split, 1)
        names = [name for name in params if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"{pattern!r} is no parameter of this model; it has {', '.join(map(repr, [*params][:4]))}")
        for name in names:
            param, shape = params[name], list(params[name].shape)
            if name in found:
                raise ValueError(f"parameter {name!r} is declared twice: by {found[name][0]!r} and by {pattern!r}")
            if isinstance(param, DTensor):
                raise ValueError(f"parameter {name!r} is a DTensor, whose placements say how it is split; leave it out")
            if not 0 <= dim < len(shape):
                raise ValueError(f"parameter {name!r} of shape {shape} has no dimension {dim} (pattern {pattern!r})")
            if sections < 1 or shape[dim] % sections:
                raise ValueError(
                    f"parameter {name!r}: dimension {dim} of shape {shape} does not divide into {sections} sections"
                )
            found[name] = pattern, dim, sections
    for name, (_, dim, sections) in found.items():
        set_tensor_model_parallel_attributes(params[name], True, dim, sections)
    return model
