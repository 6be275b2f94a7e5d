"""Cut a model into this rank's parameter slices and layers, and add their tags and seams. Nothing runs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut.experts import EXPERTS_SEAM, ExpertsForward, over_experts
from core.hugging_face.cut.order import Watched, hidden_streams
from core.hugging_face.cut.places import find_cut, lists_of_layers
from core.hugging_face.cut.report import REPORT, Splitting
from core.hugging_face.cut.slices import slice_of
from core.hugging_face.read.example import layer_configurations
from core.hugging_face.read.plan import Plan, PlanError, Split, family_of
from core.hugging_face.read.transformers_plans import read_plan
from core.hugging_face.run.seams import SeamForward
from core.hugging_face.run.stage_forward import ModelCut, StageForward
from core.hugging_face.run.stages import stage_of
from core.hugging_face.run.streams import Streams
from core.interface.whole import about_to_change
from core.pipeline_parallel.gpt_stages import check_embedding_group
from core.pipeline_parallel.layout import PipelineLayout
from core.tensor_parallel.initialization import set_tensor_model_parallel_attributes

EXPERT_TAGS = {"allreduce": False, "expert_dim": 0}  # tags of experts that are on this rank only
INITIALIZED = "_is_hf_initialized"  # True on modules that loading must not initialize


def prepare(model: Any, plan: Plan | None, groups: ProcessGroups) -> Plan:
    """Return the plan for these groups after every check that is possible before parameters change.

    Raises PlanError if the model was split before, has no plan, or does not fit the group sizes.
    """
    if getattr(model, REPORT, None) is not None:
        raise PlanError(f"this {type(model).__name__} was split already; split each model once")
    about_to_change(model)
    family = family_of(model)
    if plan is None:
        try:
            plan = read_plan(model)
        except PlanError:
            if groups.size("tp") > 1:
                raise
            shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            plan = Plan(family, {}, {}, whole=shapes)  # one rank needs no split
    return over_experts(model, plan.at(groups.size("tp")), groups)


def cut_into_parts(model: Any, watched: Watched | None, plan: Plan, how: Splitting) -> list[Any]:
    """Return this rank's stages with sliced parameters: copies of the model, and the model itself as the last stage.

    Without a layout, return only the model. ``watched`` has the findings of a forward of the full model, if one has
    run.
    """
    layout, groups = how.layout, how.groups
    parts = [model]
    if layout is not None:
        cut, streams = find_cut(model, watched.sides if watched else None), watched.streams if watched else None
        check_cut(cut, layout, groups)
        if streams is not None:
            heads = {getattr(layer, "num_attention_heads", 0) for layer in layer_configurations(model)}
            streams = streams.over(heads, groups.size("tp"))
        numbers = layout.stages_of(groups.rank("pp"))
        parts = [*(copied(model) for _ in numbers[:-1]), model]
        for part, number in zip(parts, numbers, strict=True):
            keep_stage(part, cut, layout, number, streams)
    for part in parts:
        cut_parameters(part, plan, groups)
    return parts


def check_cut(cut: ModelCut, layout: PipelineLayout, groups: ProcessGroups) -> None:
    """Check that a model can be cut into the stages of a layout.

    Raises PlanError if several stages of a rank would share a parameter outside the layers, and ValueError if the
    layout does not fit the groups or the model.
    """
    layout.check_ranks(groups)
    layout.check_model(cut.count)
    if cut.tied and layout.pp > 1:
        check_embedding_group(layout, groups)
    if cut.around and layout.chunks > 1:
        raise PlanError(
            f"{cut.family}: parameter {sorted(cut.around)[0]!r} belongs to no module before or after the layers, so "
            f"every stage has a copy; {layout.chunks} stages on one rank cannot share it, use one a rank"
        )


def cut_parameters(model: nn.Module, plan: Plan, groups: ProcessGroups) -> None:
    """Replace each cut parameter by this rank's slice, under all of its names.

    Raises PlanError if the plan cuts tied parameters differently.
    """
    cut: dict[int, tuple[nn.Parameter, Split]] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        split = plan.splits.get(name)
        if split is None or all(groups.size(axis) == 1 for axis in split.axes):
            continue
        if id(parameter) not in cut:
            piece = slice_of(parameter.detach(), split, groups)
            # A slice along the first dimension is a view and would keep the full parameter in memory.
            piece = piece.clone(memory_format=torch.contiguous_format) if not piece.is_meta else piece
            cut[id(parameter)] = nn.Parameter(piece, requires_grad=parameter.requires_grad), split
        replacement, first = cut[id(parameter)]
        if (first.dim, first.blocks) != (split.dim, split.blocks):
            raise PlanError(f"{plan.family}: {first.parameter!r} and {name!r} are tied and are cut differently")
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, replacement)


def tag_slices(parameters: Mapping[str, nn.Parameter], plan: Plan, groups: ProcessGroups) -> None:
    """Tag the parameters that are slices, for gradient contracts and checkpoints."""
    tp = groups.size("tp")
    for name, split in plan.splits.items():
        parameter = parameters.get(name)
        if parameter is None:
            continue
        if "tp" in split.axes and tp > 1:
            set_tensor_model_parallel_attributes(parameter, True, split.dim, split.blocks, split.length)
        if "ep" in split.axes:
            vars(parameter).update(EXPERT_TAGS)


def place_seams(modules: Mapping[str, nn.Module], plan: Plan, groups: ProcessGroups) -> None:
    """Install the seams' forwards on modules, replacing forwards of earlier seams."""
    tp = groups.size("tp")
    for seam in plan.seams.values():
        module, split = modules[seam.module], plan.splits.get(f"{seam.module}.weight")
        placed = getattr(vars(module).get("forward"), "seam", None)
        if placed == seam or (tp == 1 and seam.style != EXPERTS_SEAM):
            continue
        if placed is not None:
            del module.forward
        kind = ExpertsForward if seam.style == EXPERTS_SEAM else SeamForward
        sizes = (0, 1) if split is None else (split.length, split.multiple)
        module.forward = kind(module, seam, groups, *sizes)


def keep_stage(model: Any, cut: ModelCut, layout: PipelineLayout, index: int, streams: Streams | None = None) -> Any:
    """Remove the modules of all other stages from a full model, in place, and give it the forward of stage ``index``.

    ``streams`` are the tensors that pass between layers, or ``None`` for a model with one list of layers, which passes
    hidden states. Raises PlanError if the stage has no layer, or the model cannot be cut this way.
    """
    part = layout.stage(index)
    if not part.layer_numbers:
        raise PlanError(f"{cut.family}: stage {index} of {list(layout.layers_per_stage)} has no layer; give each one")
    if "forward" in vars(model):
        raise PlanError(
            f"{cut.family}: forward was replaced on the model instance; cut the model into stages before replacing it"
        )
    modules = dict(model.named_modules())  # all modules, before any are removed
    if streams is None and len(lists_of_layers(model)) > 1:
        raise PlanError(
            f"{cut.family}: a model with several lists of layers runs one forward to find the tensors that stages "
            "send, and its weights are not loaded; load the full model with from_pretrained on every rank"
        )
    deep = len(getattr(getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    if deep > layout.layers_per_stage[0]:
        raise PlanError(
            f"{cut.family}: features of images are added to its first {deep} layers, and the first stage has "
            f"{layout.layers_per_stage[0]}; give it {deep} or more (num_layers_per_stage)"
        )
    streams = streams or hidden_streams(model, cut)
    stage = StageForward(model, cut, layout, part, streams)
    absent: dict[str, Any] = {}
    for number, name in enumerate(cut.layers):
        if number not in part.layer_numbers:
            absent[name] = partial(stage.absent_layer, number)
        elif number == part.layer_numbers[0] or number == streams.decoder:
            modules[name].register_forward_pre_hook(partial(stage.enter, number), with_kwargs=True)
    for name in cut.entry if not part.pre_process else ():
        absent[name] = partial(stage.absent_entry, name)
    for name in cut.between if cut.counts[0] - 1 not in part.layer_numbers else ():
        absent[name] = partial(stage.absent_exit, name)
    for name in cut.exit if not part.post_process else ():
        absent[name] = partial(stage.absent_exit, name)
    for name, forward in absent.items():
        empty_module(modules[name], forward)
    stage.absent = list(absent)
    model.forward = stage
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {target: source for target, source in ties.items() if {target, source} <= names}
    return model


def empty_module(module: nn.Module, forward: Any) -> None:
    """Remove parameters, buffers, and children from a module, and replace its forward."""
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, None)
    for name, _ in [*module.named_buffers(recurse=False), *module.named_children()]:
        delattr(module, name)
    module.forward = forward


def mark_absent(model: Any) -> None:
    """Keep transformers from initializing layers of other stages. Rotary tables are buffers and are still computed."""
    for module in model.modules():
        setattr(module, INITIALIZED, not [*module.parameters(), *module.buffers()])


@torch.no_grad()
def draw(model: Any, device: torch.device) -> None:
    """Allocate a meta-device model on ``device``, with the family's initial values.

    Ranks with equal slices get equal values.
    """
    mark_absent(model)
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in made:  # keeps ties
                memory = torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
                is_learned = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(memory, tensor.requires_grad) if is_learned else memory
            setattr(module, name, made[id(tensor)])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.initialize_weights()


def copied(model: Any) -> Any:
    """Return a copy of a model that shares its parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def of_stage(plan: Plan, chunk: nn.Module) -> Plan:
    """Return the part of a plan that applies to a stage's parameters and modules."""
    names = {name for name, _ in chunk.named_parameters(remove_duplicate=False)}
    modules = {name for name, module in chunk.named_modules() if any(True for _ in module.parameters())}
    return dataclasses.replace(
        plan,
        splits={name: split for name, split in plan.splits.items() if name in names},
        seams={name: seam for name, seam in plan.seams.items() if name in modules},
        partial=plan.partial & names,
        whole={name: shape for name, shape in plan.whole.items() if name in names},
        numbers={name: number for name, number in plan.numbers.items() if name.rpartition(".")[0] in modules},
    )


def tie_ends(chunks: Sequence[Any], layout: PipelineLayout) -> None:
    """Mark the copies of a tied parameter on two ranks, so that their gradients are summed, or share it on one rank."""
    first, last = chunks[0], chunks[-1]
    cut = stage_of(first).cut
    if layout.num_stages == 1 or not cut.tied:
        return
    if not layout.ends_share_a_rank:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters(remove_duplicate=False):
                if name in cut.tied:
                    parameter.shared_embedding = True
        return
    if not stage_of(last).part.post_process:
        return
    weight = next(parameter for name, parameter in first.named_parameters() if name in cut.tied)
    for name in cut.tied:
        owner, _, leaf = name.rpartition(".")
        module = last.get_submodule(owner)
        if leaf in module._parameters:  # the module uses the first stage's parameter
            del module._parameters[leaf]
            vars(module)[leaf] = weight
            module.borrowed_weights = (weight,)
