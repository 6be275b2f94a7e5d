"""Cut a model: this rank's slices of parameters, this rank's layers, and the tags and seams of both. Nothing runs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut_places import Watched, find_cut, hidden_streams, lists_of_layers
from core.hugging_face.example import layer_configurations
from core.hugging_face.experts import EXPERTS_SEAM, ExpertsForward
from core.hugging_face.plan import Plan, PlanError, Split
from core.hugging_face.seams import SeamForward
from core.hugging_face.slices import slice_of
from core.hugging_face.split_report import Splitting
from core.hugging_face.stage_forward import ModelCut, StageForward
from core.hugging_face.stages import stage_of
from core.hugging_face.streams import Streams
from core.pipeline_parallel.gpt_stages import check_embedding_group
from core.pipeline_parallel.layout import PipelineLayout
from core.tensor_parallel.layers import set_tensor_model_parallel_attributes

EXPERT_TAGS = {"allreduce": False, "expert_dim": 0}  # of experts that other ranks do not have
INITIALIZED = "_is_hf_initialized"  # True on a module whose parameters loading must not draw


def cut_into_parts(model: Any, watched: Watched | None, plan: Plan, how: Splitting) -> list[Any]:
    """This rank's stages with its slices: copies of the model, and the model itself as the last one."""
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
    """Raise ValueError or PlanError unless a model can be cut as a layout says."""
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
    """Replace each parameter of the plan by this rank's slice, under all of its names."""
    cut: dict[int, tuple[nn.Parameter, Split]] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        split = plan.splits.get(name)
        if split is None or all(groups.size(axis) == 1 for axis in split.axes):
            continue
        if id(parameter) not in cut:
            piece = slice_of(parameter.detach(), split, groups)
            # A slice along the first dimension is a view, which would keep the whole parameter in memory.
            piece = piece.clone(memory_format=torch.contiguous_format) if not piece.is_meta else piece
            cut[id(parameter)] = nn.Parameter(piece, requires_grad=parameter.requires_grad), split
        replacement, first = cut[id(parameter)]
        if (first.dim, first.blocks) != (split.dim, split.blocks):
            raise PlanError(f"{plan.family}: {first.parameter!r} and {name!r} are tied and are cut differently")
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, replacement)


def tag_slices(parameters: Mapping[str, nn.Parameter], plan: Plan, groups: ProcessGroups) -> None:
    """Mark the parameters that are slices, for contracts and checkpoints."""
    for name, parameter in parameters.items():
        split = plan.splits.get(name)
        if split is not None and "tp" in split.axes and groups.size("tp") > 1:
            set_tensor_model_parallel_attributes(parameter, True, split.dim, split.blocks, split.length)
        if split is not None and "ep" in split.axes:
            vars(parameter).update(EXPERT_TAGS)


def place_seams(modules: Mapping[str, nn.Module], plan: Plan, groups: ProcessGroups) -> None:
    """Give modules the forwards of their seams, in place of those of other seams that they have already."""
    for seam in plan.seams.values():
        module, split = modules[seam.module], plan.splits.get(f"{seam.module}.weight")
        placed = getattr(vars(module).get("forward"), "seam", None)
        if placed == seam or (groups.size("tp") == 1 and seam.style != EXPERTS_SEAM):
            continue
        if placed is not None:
            del module.forward
        kind = ExpertsForward if seam.style == EXPERTS_SEAM else SeamForward
        sizes = (0, 1) if split is None else (split.length, split.multiple)
        module.forward = kind(module, seam, groups, *sizes)


def keep_stage(model: Any, cut: ModelCut, layout: PipelineLayout, index: int, streams: Streams | None = None) -> Any:
    """Leave one stage's modules in a model, in place; parameters and children of all others go. Returns the model.

    streams: what passes between its layers; None for a model of one list, which passes hidden states.
    """
    part = layout.stage(index)
    if not part.layer_numbers:
        raise PlanError(f"{cut.family}: stage {index} of {list(layout.layers_per_stage)} has no layer; give each one")
    if "forward" in vars(model):
        raise PlanError(f"{cut.family}: the model has a forward of its own on the instance; cut it into stages before")
    modules = dict(model.named_modules())  # all of them, before children are taken out
    if streams is None and len(lists_of_layers(model)) > 1:
        raise PlanError(
            f"{cut.family}: what passes between the stages of a model with several lists of layers is seen in a "
            "forward of the whole model; load it with its values (from_pretrained) on every rank"
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
    """Take parameters, buffers and children out of a module, and give it another forward."""
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, None)
    for name, _ in [*module.named_buffers(recurse=False), *module.named_children()]:
        delattr(module, name)
    module.forward = forward


def mark_absent(model: Any) -> None:
    """Have transformers draw nothing for layers of other stages. Rotary tables are buffers, and are made."""
    for module in model.modules():
        setattr(module, INITIALIZED, not [*module.parameters(), *module.buffers()])


@torch.no_grad()
def draw(model: Any, device: torch.device) -> None:
    """Give parameters and buffers memory, and the values by which the family begins. Equal slices are equal."""
    mark_absent(model)
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if id(tensor) not in made:  # tied ones stay tied
                memory = torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
                is_learned = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(memory, tensor.requires_grad) if is_learned else memory
            setattr(module, name, made[id(tensor)])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.initialize_weights()


def copied(model: Any) -> Any:
    """A copy that has the same parameters, without memory of its own."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def of_stage(plan: Plan, chunk: nn.Module) -> Plan:
    """The part of a plan about the parameters and modules of a stage."""
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
    """A tied parameter has a copy on two ranks, whose gradients are added; or is one parameter of two stages."""
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
        if leaf in module._parameters:  # the module uses it, and the first stage holds it
            del module._parameters[leaf]
            vars(module)[leaf] = weight
            module.borrowed_weights = (weight,)
