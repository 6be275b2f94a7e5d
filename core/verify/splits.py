"""declare_splits: describe how user code splits a model's parameters if neither tags nor DTensors do."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from core.distributed import DistributedDataParallel
from core.tensor_parallel.initialization import set_tensor_model_parallel_attributes

Model = TypeVar("Model", bound=nn.Module)


def declare_splits(model: Model, splits: Mapping[str, int | tuple[int, int]]) -> Model:
    """Mark the parameters that tensor-parallel ranks hold as slices, by Megatron's attributes.

    verify_with needs this for plain tensors that user code has split; it takes all others as full parameters. Local.

        declare_splits(model, {"*.gate_value.weight": (0, 2), "*.down.weight": 1})
        check = verify_with(model, build_whole, mean_loss)

    Args:
        model: Model, before it is wrapped.
        splits: Parameter name or fnmatch pattern -> the split dimension, or (dimension, sections). Sections are parts
            of the dimension that are split separately: 2 if a rank's gate and value are in one weight. Names are from
            ``model.named_parameters()``; a module declares different names in the unsplit model by ``global_names``.

    Returns:
        The model.

    Raises:
        ValueError: If a name matches no parameter or an already declared one, the parameter does not have the dimension
            or the dimension is not divisible by the sections, the parameter is a DTensor, or the model is in our
            wrapper, which has already read the attributes. No parameter is marked then.
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
