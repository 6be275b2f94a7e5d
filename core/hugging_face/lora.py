"""LoRA on a split model: each adapter is cut like its base layer, and saved as a plain peft adapter directory.

A column layer keeps the first LoRA matrix unsplit and cuts the second along its outputs. A row layer cuts the first
along its inputs and keeps the second unsplit. Either way the adapter's output is split, or not, as the base layer's
output is. Modules that are trained and saved next to adapters (``modules_to_save``, such as a new head) are copies of
cut modules, with the same slices and seams.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut.attach import attach_adapted
from core.hugging_face.cut.parts import cut_parameters, place_seams, tag_slices
from core.hugging_face.cut.report import REPORT, SplitReport
from core.hugging_face.cut.slices import slice_of
from core.hugging_face.read.example import example_of
from core.hugging_face.read.plan import Before, Plan, PlanError, Seam, Split
from core.hugging_face.read.transformers_plans import peft_by_old_names
from core.hugging_face.run.seams import SeamForward
from core.hugging_face.run.stage_forward import StageForward
from core.hugging_face.run.stages import received_example
from core.tensor_parallel.mappings import resolve_groups
from core.watch.waiting import waiting

MARK = "lora_"  # occurs in the names of adapter parameters
COPY = ".modules_to_save."  # occurs in the names of parameters of modules that are saved next to adapters
WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")  # what peft adds to names
NO_TARGETS = "dummy-target-modules"  # peft's word for an adapter of no layer
NOTHING_NAMED = ("Target modules", "No modules were targeted", "All modules were excluded")  # how peft says it
# LoraConfig options supported on a split model. Others change base weights, or it is unknown how to split them.
KNOWN = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out"),
    *("use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("runtime_config", "modules_to_save"),
}


def add_lora(
    model: Any,
    config: Any = None,
    directory: str | os.PathLike[str] | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    pg_collection: ProcessGroups | None = None,
    adapter_name: str = "default",
) -> Any:
    """Add LoRA adapters to a split model: new ones from a config, or saved ones from a directory.

    The ranks of a tensor-parallel group get equal adapters from any random state; the ranks of a data group must be
    seeded alike. A stage without a named layer gets no adapter.

    Collective over the tensor-parallel group; for stages, over the world.

    Args:
        model: Model split by ``split_model`` or ``load_split``, or the list of this rank's pipeline stages.
        config: A peft.LoraConfig for new adapters, or several by adapter name, of which the first one is active.
        directory: Adapter directory to load instead. The loaded adapters are trainable.
        example: As in ``split_model``.
        pg_collection: Process groups; defaults to those of ``parallel_state``.
        adapter_name: As in peft.

    Returns:
        The PeftModel around the model, or the list of PeftModels around the stages.

    Raises:
        PlanError: If an option or a layer's adapter cannot be split, or no layer is named.
        TypeError: If the config is not a peft.LoraConfig.
    """
    if isinstance(model, (list, tuple)):
        with agree.together(None, "adding adapters to the stages", PlanError):
            try:
                options: Any = {"example": example, "pg_collection": pg_collection, "adapter_name": adapter_name}
                adapted = [add_lora(each, config, directory, **options) for each in model]
            except PlanError:
                raise
            except (ValueError, AttributeError) as error:
                raise PlanError(f"peft refuses a stage: {error}") from error
        found = any(MARK in name for part in adapted for name, _ in part.named_parameters())
        if not agree.any(found, None, "the adapters of all stages"):
            (kept,) = adapted[0].peft_config.values()
            raise PlanError(
                f"target_modules={kept.target_modules!r} and layers_to_transform={kept.layers_to_transform!r} of the "
                "LoraConfig name no layer of any stage; name layers that the model has"
            )
        return adapted
    report: SplitReport | None = getattr(model, REPORT, None)
    if report is None:
        raise PlanError(f"add_lora takes a model that was split, and was given a {type(model).__name__}")
    adapted = with_adapters(model, report.plan, config, directory, adapter_name=adapter_name)
    groups = resolve_groups(pg_collection)
    for name, parameter in adapted.named_parameters() if groups.size("tp") > 1 else ():
        if MARK in name:  # copies of modules are equal already
            with waiting("the adapters of the first rank", groups.require("tp")):
                dist.broadcast(parameter.detach(), group=groups.tp, group_src=0)
    finish_adapters(adapted, report, groups, example)
    return adapted


def finish_adapters(
    adapted: Any, report: SplitReport, groups: ProcessGroups, example: Mapping[str, Any] | None
) -> None:
    """Cut and tag the unsplit adapters of a PeftModel, and add their seams and gradient contracts.

    Args:
        adapted: PeftModel around a split model.
        report: Report of the base model.
        groups: Process groups.
        example: As in ``add_lora``.
    """
    model, tp = adapted.get_base_model(), groups.size("tp")
    stream = getattr(model, "forward_stream", None)
    if stream is not None:  # peft calls forward directly and skips the model's hooks
        stream.attach(adapted)
    if tp == 1:
        setattr(adapted, REPORT, replace(report, plan=replace(report.plan, family=f"LoRA on {report.plan.family}")))
        return
    plan = cut_adapters(adapted, report.plan, groups)
    place_seams(dict(adapted.named_modules()), plan, groups)
    arguments = example_of(model, groups, example)
    if "forward" in vars(model):  # a stage
        arguments.update(received_example(model, arguments))
    attach_adapted(adapted, plan, groups, arguments)


def with_adapters(
    model: Any,
    plan: Plan,
    config: Any = None,
    directory: str | os.PathLike[str] | None = None,
    *,
    adapter_name: str = "default",
    without_memory: bool = False,
) -> Any:
    """Wrap a model whose parameters are cut by a plan in a PeftModel with unsplit adapters. Local.

    Args:
        model: Model with cut parameters.
        plan: Plan of the model.
        config: As in ``add_lora``.
        directory: Adapter directory to load instead.
        adapter_name: As in peft.
        without_memory: True to create new adapters on the meta device.

    Returns:
        The PeftModel.
    """
    import peft
    from transformers.pytorch_utils import Conv1D

    config = peft.PeftConfig.from_pretrained(os.fspath(directory)) if directory is not None else config
    (adapter_name, config), *others = (config if isinstance(config, Mapping) else {adapter_name: config}).items()
    for each in (config, *(other for _, other in others)):
        _check_options(each, peft.LoraConfig)
    transposed = {f"{name}.weight": each.weight for name, each in model.named_modules() if isinstance(each, Conv1D)}
    cut = transposed.keys() & plan.splits.keys()
    for name in cut:
        transposed[name].ds_shape = torch.Size(plan.splits[name].shape)  # peft reads the full width from this attribute
    config, targets, excluded = copy.deepcopy(config), config.target_modules, config.exclude_modules
    stage = vars(model).get("forward")
    if isinstance(stage, StageForward) and not isinstance(excluded, str):
        config.exclude_modules = [*(excluded or ()), *stage.absent]

    @peft_by_old_names()
    def adapt() -> Any:
        if directory is None:
            adapted = peft.get_peft_model(model, config, adapter_name, low_cpu_mem_usage=without_memory)
            for name, other in others:
                adapted.add_adapter(name, other, low_cpu_mem_usage=without_memory)
            return adapted
        return peft.PeftModel.from_pretrained(model, os.fspath(directory), adapter_name, True, config)

    try:
        adapted = adapt()
    except ValueError as error:
        if not isinstance(stage, StageForward) or not str(error).startswith(NOTHING_NAMED):
            raise
        config.target_modules = NO_TARGETS  # all named layers are on other stages
        adapted = adapt()
        config.target_modules = targets
    finally:
        for name in cut:
            del transposed[name].ds_shape
    config.exclude_modules = excluded
    for name in stage.absent if isinstance(stage, StageForward) else ():
        owner, _, leaf = name.rpartition(".")
        absent = model.get_submodule(name)
        if hasattr(absent, "original_module"):  # another stage trains it
            setattr(model.get_submodule(owner), leaf, absent.original_module)
    for wrapper in _saved_modules(adapted):
        for copied in wrapper.modules_to_save.values():
            for copy_of, param in zip(wrapper.original_module.parameters(), copied.parameters(), strict=True):
                vars(param).update(vars(copy_of))  # tags of slices, which a copy of a parameter has not
    return adapted


def cut_adapters(adapted: Any, base: Plan, groups: ProcessGroups) -> Plan:
    """Cut and tag adapters by the seams of their base layers, and return the adapters' plan. Local."""
    plan = _plan_of_adapters(adapted, base)
    cut_parameters(adapted, plan, groups)
    tag_slices(dict(adapted.named_parameters()), plan, groups)
    copies = {name: base.splits.get(name_in_base(name)) for name, _ in adapted.named_parameters() if COPY in name}
    return replace(plan, splits={**plan.splits, **{name: split for name, split in copies.items() if split is not None}})


def _check_options(config: Any, kind: type) -> None:
    if not isinstance(config, kind):
        raise TypeError(f"add_lora takes a peft.LoraConfig, and was given a {type(config).__name__}")
    plain_config = kind()
    for name in sorted(vars(config).keys() - KNOWN):
        value, plain = getattr(config, name), getattr(plain_config, name, None)
        if value != plain and value not in ((), [], {}, set()):
            raise PlanError(f"LoRA on a split model knows {name}={plain!r} alone, and the LoraConfig has {value!r}")
    start = getattr(config, "init_lora_weights", True)
    if start not in (True, False, "gaussian"):
        raise PlanError(
            f"LoraConfig has init_lora_weights={start!r}, which needs the unsplit base weights; LoRA on a split model "
            "supports True, False and 'gaussian'"
        )


def _plan_of_adapters(adapted: Any, base: Plan) -> Plan:
    """Derive the adapters' plan from the seams of their base layers."""
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    splits: dict[str, Split] = {}
    seams: dict[str, Seam] = {}
    whole: dict[str, tuple[int, ...]] = {}
    for name, layer in adapted.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        forward = vars(layer.base_layer).get("forward")
        if isinstance(forward, SeamForward) and not isinstance(layer.base_layer, (nn.Linear, Conv1D)):
            raise PlanError(
                f"LoRA on {forward.seam.module!r}: adapters of a split {type(layer.base_layer).__name__} are not here; "
                "leave it out of target_modules"
            )
        for adapter in layer.lora_A:
            first, second = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
            shapes = {f"{part}.weight": tuple(adapted.get_submodule(part).weight.shape) for part in (first, second)}
            whole.update(shapes)
            if not isinstance(forward, SeamForward):
                continue
            seam, split = forward.seam, base.splits.get(f"{forward.seam.module}.weight")
            if split is None:  # unsplit weight; this rank uses a part of its output
                before: Before = "copy" if seam.after == "select" else ""
                seams[second] = replace(seam, module=second, style="LoRA", before=before)
                continue
            # A column layer is cut along its outputs (last dimension in Conv1D), so its second adapter matrix is cut as
            # well.
            cut, dim = (second, 0) if (split.dim == 1) == isinstance(layer.base_layer, Conv1D) else (first, 1)
            seams[cut] = Seam(cut, "LoRA", seam.before, seam.after)  # no copy after a gathered sequence
            weight = f"{cut}.weight"
            splits[weight] = Split(weight, whole.pop(weight), dim, split.blocks, split.padded, multiple=split.multiple)
    if not splits and not whole and "forward" not in vars(adapted.get_base_model()):  # a stage may have none
        raise PlanError(f"{base.family}: the LoraConfig's target_modules name no linear layer")
    return Plan(f"LoRA on {base.family}", splits, seams, frozenset(), whole)


# -- adapters of a model that is cut after them -----------------------------------------------------------------------


def take_off(model: Any, *, staged: bool = False) -> tuple[Any, dict[str, nn.Parameter] | None]:
    """Remove the LoRA adapters from a model, so that the base model can be split first.

    Args:
        model: Model with or without peft adapters.
        staged: True if the model is split into pipeline stages.

    Returns:
        The model without its adapters, and their parameters by name. A model without adapters is returned unchanged,
        with None.

    Raises:
        ValueError: If the model has several adapters that are active or in stages, adapters of another method than
            LoRA, an adapter merged into the weights, or an adapter of fused expert weights.
    """
    if not hasattr(model, "peft_config"):
        return model, None
    others = {kind for kind in map(_method_of, model.peft_config.values()) if kind != "LORA"}
    if others:
        raise ValueError(
            f"the model has adapters of type {', '.join(sorted(others))}, and only LoRA adapters can be split with a "
            "model, or one of PROMPT_TUNING, P_TUNING, PREFIX_TUNING over tp_size alone. Keep the model unsplit "
            "(tp_size=1, pp_size=1, no sequence parallelism; zero_stage=3 shards it), or train LoRA"
        )
    if len(model.base_model.active_adapters) != 1 or (staged and len(model.peft_config) != 1):
        raise ValueError(
            f"the model has the adapters {', '.join(model.peft_config)}, active {model.base_model.active_adapters}; "
            "one is active in a split model, and stages have one; call set_adapter or delete the others before boost"
        )
    fused = {name for config in model.peft_config.values() for name in getattr(config, "target_parameters", None) or ()}
    if fused:  # peft converts layer names to these if a family fuses its experts
        raise ValueError(
            f"the adapters are for the fused weights {', '.join(sorted(fused))} of experts, which are not split with "
            "adapters; name linear layers outside of the experts in target_modules, such as q_proj and v_proj"
        )
    merged = next((name for name, layer in model.named_modules() if getattr(layer, "merged_adapters", None)), None)
    if merged is not None:
        raise ValueError(
            f"the adapter is merged into the weight of {merged!r}, and would be added a second time; call "
            "model.unmerge_adapter() before boost"
        )
    values = {name: param for name, param in model.named_parameters() if is_of_adapter(name)}
    for wrapper in _saved_modules(model):
        wrapper.set_adapter([])  # unload keeps the original module then
    base = model.unload()
    if hasattr(base, "peft_config"):
        del base.peft_config
    return base, values


@torch.no_grad()
def put_on(
    parts: Sequence[Any], values: Mapping[str, nn.Parameter], shell: Any, groups: ProcessGroups, *, staged: bool
) -> list[Any]:
    """Add the adapter that ``take_off`` removed to the cut parts of a model, cut like its base layers.

    Collective, as ``add_lora``. ``values`` are the adapter's unsplit parameters; parameters on the meta device start
    from peft's initialization. The full model ``shell`` defines requires_grad and dtype.
    """
    (active,) = shell.base_model.active_adapters
    configs = copy.deepcopy({active: shell.peft_config[active], **shell.peft_config})
    with torch.enable_grad():
        if getattr(parts[0], REPORT, None) is None:  # one rank holds the full model
            import peft

            with peft_by_old_names():
                adapted = [peft.get_peft_model(parts[0], configs[active], active)]
                for name in [*configs][1:]:
                    adapted[0].add_adapter(name, configs[name])
        else:
            adapted = add_lora(list(parts) if staged else parts[0], configs, pg_collection=groups)
            adapted = adapted if staged else [adapted]
    like = dict(shell.named_parameters(remove_duplicate=False))
    for part in adapted:
        splits = splits_of(part)
        for name, param in part.named_parameters():
            whole = values.get(name)
            if whole is not None and not whole.is_meta:
                param.data = slice_of(whole.detach().to(param.device), splits.get(name), groups).clone()
            param.data = param.detach().to(like[name].dtype)
            param.requires_grad_(like[name].requires_grad)
        _set_like(part, shell)
    return list(adapted)


def _set_like(adapted: Any, shell: Any) -> None:
    """Copy settings that are not in the config from the old adapter modules to the new ones.

    These are a layer's scale, its dropout, whether it is disabled, and the training mode.
    """
    from peft.tuners.lora import LoraLayer

    for name, like in shell.named_modules():
        try:
            layer = adapted.get_submodule(name)
        except AttributeError:  # on another stage
            continue
        layer.training = like.training
        if not isinstance(like, LoraLayer) or not isinstance(layer, LoraLayer):
            continue
        for adapter in layer.scaling:
            layer.scaling[adapter] = like.scaling[adapter]
            rate = getattr(like.lora_dropout[adapter], "p", 0.0)
            layer.lora_dropout[adapter] = nn.Dropout(rate) if rate else nn.Identity()
            layer.lora_dropout[adapter].training = like.lora_dropout[adapter].training
        if like.disable_adapters:
            layer.enable_adapters(False)


def _saved_modules(adapted: Any) -> Iterator[Any]:
    """Yield peft's wrapper of each module that is trained and saved next to adapters."""
    from peft.utils.other import ModulesToSaveWrapper

    return (module for module in adapted.modules() if isinstance(module, ModulesToSaveWrapper))


def is_of_adapter(name: str) -> bool:
    """Return True for the name of a parameter that an adapter adds to a model."""
    return MARK in name or COPY in name


def _method_of(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def splits_of(part: Any) -> Mapping[str, Split]:
    """Return the splits of a part's parameters over tensor and expert parallelism, with or without adapters."""
    report = getattr(part, REPORT, None)
    if report is None or not hasattr(part, "peft_config"):
        return {} if report is None else report.plan.splits
    below = part.get_base_model().split_report.plan.splits  # splits of the base layers
    names = [name for name, _ in part.named_parameters(remove_duplicate=False)]
    return {**report.plan.splits, **{n: below[name_in_base(n)] for n in names if name_in_base(n) in below}}


def name_in_base(name: str) -> str:
    """Return the name that a parameter of a PeftModel has in the base model."""
    return WRAPPERS.sub(".", name.removeprefix("base_model.model."))
