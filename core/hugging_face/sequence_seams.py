"""The seams of 'split_gather': where hidden states are a part of the sequence, and where they are made whole.

Between the first and the last layer of a model each tensor-parallel rank holds its part of the positions. Norms and
residual sums compute on that part. A module of a layer that has anything else in it gets the whole sequence, because
attention takes its shape from its input. Where its plan has nothing but column projections and one row projection, the
joined input and the scattered sum take the place of their two sums over the ranks. Any other module stays as it is over
tensor parallelism, between a join and a split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from core.hugging_face.plan import Plan, PlanError, Seam
from core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

STYLE = "sequence"
ACTIONS: dict[str, Callable[..., Tensor]] = {
    "split sequence": scatter_to_sequence_parallel_region,
    "join sequence": partial(gather_from_sequence_parallel_region, tensor_parallel_output_grad=False),
    "gather sequence": gather_from_sequence_parallel_region,
    "reduce sequence": reduce_scatter_to_sequence_parallel_region,
}


def on_sequence(function: Callable[..., Tensor], tensor: Tensor, group: Any) -> Tensor:
    """What a function makes of the first dimension, made of the last but one: [..., s, h]."""
    return function(tensor.transpose(0, -2), group=group).transpose(0, -2).contiguous()


def is_hidden(value: Any) -> bool:
    """True for what can be hidden states."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def on_first_tensor(
    function: Callable[[Tensor], Tensor], module: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the first tensor of hidden states exchanged, which may be given by keyword."""
    place = next((number for number, value in enumerate(args) if is_hidden(value)), None)
    if place is not None:
        return (*args[:place], function(args[place]), *args[place + 1 :]), kwargs
    name = next((name for name, value in kwargs.items() if is_hidden(value) and "mask" not in name), None)
    if name is None:
        raise PlanError(f"module {module!r} was called without hidden states, whose sequence was to be cut or joined")
    return args, {**kwargs, name: function(kwargs[name])}


def on_output(function: Callable[[Tensor], Tensor], module: str, output: Any) -> Any:
    """A module's output, a tensor or a tuple that begins with one, with the hidden states exchanged."""
    if is_hidden(output):
        return function(output)
    if isinstance(output, tuple) and output and is_hidden(output[0]):
        return (function(output[0]), *output[1:])
    raise PlanError(f"module {module!r} gave a {type(output).__name__} that does not begin with hidden states")


def present_layers(model: nn.Module, layers: str) -> list[str]:
    """The names of a list's layers that lie on this stage."""
    found = model.get_submodule(layers).named_children()
    return [f"{layers}.{name}" for name, layer in found if any(True for _ in layer.parameters())]


def over_sequence(model: nn.Module, plan: Plan, layers: str) -> Plan:
    """The plan of a model, or of a stage, with hidden states split over the sequence inside a list of layers.

    PlanError where a layer has a seam of its own.
    """
    seams = dict(plan.seams)
    present = present_layers(model, layers)
    for name in present:
        for inner, module in _parts(name, model.get_submodule(name)):
            seams.update(_seams_of(inner, module, plan))
        if name in seams:
            raise PlanError(f"{plan.family}: layer {name!r} has a rule of its own, so its sequence cannot be split")
    for name in {present[0], present[-1]}:
        before, after = name == present[0], name == present[-1]
        seams[name] = Seam(name, STYLE, "split sequence" if before else "", "join sequence" if after else "")
    return replace(plan, seams=seams)


def _parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a layer calls; a list of modules is not called itself."""
    for leaf, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(f"{name}.{leaf}", child)
        else:
            yield f"{name}.{leaf}", child


def _seams_of(name: str, module: nn.Module, plan: Plan) -> dict[str, Seam]:
    """What changes at one module of a layer and inside it."""
    parameters = dict(module.named_parameters(prefix=name))
    inside = {place: seam for place, seam in plan.seams.items() if f"{place}.".startswith(f"{name}.")}
    if not inside and all(parameter.dim() <= 1 for parameter in parameters.values()):
        return {}  # nothing here, or a norm
    columns = [place for place, seam in inside.items() if (seam.before, seam.after) == ("copy", "")]
    rows = [place for place, seam in inside.items() if (seam.before, seam.after) == ("", "reduce")]
    known = plan.splits.keys() | plan.partial
    others = [p for p in parameters if p not in known and p.rpartition(".")[0] not in rows]
    if len(rows) > 1 or len(columns) + len(rows) != len(inside) or not inside or (columns and others):
        if name in inside:
            raise PlanError(f"{plan.family}: the rule of module {name!r} has no form for a part of the sequence")
        return {name: Seam(name, STYLE, "join sequence", "split sequence")}
    changed = {place: replace(inside[place], after="reduce sequence") for place in rows}
    changed |= {place: replace(inside[place], before="") for place in columns}
    if columns:
        changed[name] = replace(inside.get(name, Seam(name, STYLE)), before="gather sequence")
    return changed
