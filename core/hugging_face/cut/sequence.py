"""Seams of a sequence that is cut over the tensor-parallel ranks, inside the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from core.hugging_face.read.plan import Plan, PlanError, Seam
from core.hugging_face.run.sequence import present_layers

STYLE = "sequence"  # style of the seams created in this file


def over_sequence(model: nn.Module, plan: Plan, layers: str) -> Plan:
    """Return a plan with added seams that split hidden states over the sequence inside a list of layers.

    ``model`` may also be one stage. Raises PlanError if a layer already has a seam.
    """
    seams = dict(plan.seams)
    present = present_layers(model, layers)
    for name in present:
        for inner, module in _parts(name, model.get_submodule(name)):
            seams.update(_seams_of(inner, module, plan))
        if name in seams:
            raise PlanError(
                f"{plan.family}: layer {name!r} has a separate rule in the plan, so its sequence cannot be split"
            )
    for name in {present[0], present[-1]}:
        before, after = name == present[0], name == present[-1]
        seams[name] = Seam(name, STYLE, "split sequence" if before else "", "join sequence" if after else "")
    return replace(plan, seams=seams)


def _parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a layer calls. Lists of modules are expanded, since they are not called themselves."""
    for leaf, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(f"{name}.{leaf}", child)
        else:
            yield f"{name}.{leaf}", child


def _seams_of(name: str, module: nn.Module, plan: Plan) -> dict[str, Seam]:
    """Return the seams of one module of a layer, and of the modules inside it."""
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
