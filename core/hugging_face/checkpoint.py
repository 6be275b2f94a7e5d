"""Checkpoint directories of split models: each rank reads its slices only, and what is saved is a plain directory.

Transformers' own loading is used, so renamed keys and fused experts are handled as there. It is given tensors that read
this rank's part of a safetensors file when they are asked for.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.checkpoint.tied_tensors import refuse_apart
from core.checkpoint.weights.one_file import is_kind_with_point
from core.checkpoint.weights.sliced import Cut, SlicedTensor
from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut_parts import check_cut, cut_parameters, keep_stage, mark_absent
from core.hugging_face.cut_places import find_cut
from core.hugging_face.directory import check_files, look_at, read_configuration
from core.hugging_face.example import example_of
from core.hugging_face.plan import Plan, PlanError, Split, family_of
from core.hugging_face.policies import Policy
from core.hugging_face.prove import refusing_together
from core.hugging_face.slices import whole_of
from core.hugging_face.split import finish_parts, prepare
from core.hugging_face.split_report import REPORT, SplitReport, Splitting
from core.hugging_face.stage_forward import ModelCut, StageForward
from core.hugging_face.stages import stage_of
from core.hugging_face.ties import Stored, stored_tensors, ties_of, untie, untie_as_stored
from core.hugging_face.transformers_plans import read_plan, transformers_package
from core.pipeline_parallel.layout import PipelineLayout
from core.tensor_parallel.mappings import resolve_groups
from core.watch.waiting import waiting

# What `from_pretrained` calls when it has found the files and made a model without memory. It is no public name.
LOADING = "_load_pretrained_model"
AUTO = "_model_mapping"  # what an auto class has: configuration class -> class of models
FAILURES = (ValueError, OSError, RuntimeError)
STACKED = ("ep", -1, 1, 1)  # the cut of a tensor that is one expert's


def load_split(
    directory: str | os.PathLike[str],
    kind: Any = None,
    *,
    policy: Policy | None = None,
    example: Mapping[str, Any] | None = None,
    layout: PipelineLayout | None = None,
    device: torch.device | str = "cpu",
    parallel_output: bool = False,
    sequence_parallel: str | None = None,
    pg_collection: ProcessGroups | None = None,
    **options: Any,
) -> Any:
    """A model of a checkpoint directory, split over tensor parallelism; `model.bytes_read` says how much was read.

    kind: the class of models, or an auto class; by default the one that the directory's config names, or the family's
    causal language model. policy: rules in place of the
    family's own. options: those of `from_pretrained` (dtype, attn_implementation, ...). device: where the model goes
    when it is read, before its example runs. The rest as in `split_model`; the whole model exists on no rank, so its
    output is not compared. layout: of a pipeline; then a list of this rank's stages is returned, each of which has read
    its part only. Collective over the tensor-parallel group, and with a layout over the world. Raises PlanError as
    `split_model` and `split_stages` do, and where the checkpoint lacks a parameter, but those of a new head, or stores
    it in a form of which no part can be read.
    """
    groups = resolve_groups(pg_collection)
    how = Splitting(groups, layout, parallel_output, sequence_parallel)
    options = {"trust_remote_code": False, **options}
    parts: list[Any] = []
    # Any error: what is wrong with a file on one rank, transformers says by errors of many kinds.
    with refusing_together("the loading of a model", Exception, groups=how.ranks):
        kind = _class_of(directory, kind, options["trust_remote_code"])
        checked = _checked_files(directory, groups, layout)
        stages: Sequence[int | None] = [None]
        if layout is not None:
            layout.check_ranks(groups)
            stages = layout.stages_of(groups.rank("pp"))
        for stage in stages:
            model, plan, loading = _load(directory, kind, policy, stage, how, options, checked)
            _refuse_drawn(model, loading["missing_keys"], directory)
            parts.append(model.to(device))
    finish_parts(parts, plan, example_of(parts[0], groups, example), how)
    return parts[0] if layout is None else parts


def _checked_files(
    directory: str | os.PathLike[str], groups: ProcessGroups, layout: PipelineLayout | None
) -> set[Path]:
    """The directory's files, whose checksums are shared out among the ranks that load them together."""
    if layout is None:
        return check_files(directory, groups.rank("tp"), groups.size("tp"))
    return check_files(directory, dist.get_rank(), dist.get_world_size())


def _class_of(directory: str | os.PathLike[str], kind: Any, trust_remote_code: bool) -> Any:
    """The class of models: the one that is given, of an auto class the one for the directory's config.json.

    Without a class it is what config.json names, or else the family's causal language model. PlanError for none.
    """
    transformers = transformers_package()
    if kind is not None and not hasattr(kind, AUTO):
        look_at(directory, trust_remote_code=True)  # the caller has the code
        return kind
    configuration = read_configuration(directory, trust_remote_code=trust_remote_code)
    where = f"{os.fspath(directory)!r}: its config.json"
    names = configuration.architectures
    auto = transformers.AutoModelForCausalLM if kind is None else kind
    code: dict[str, str] = (getattr(configuration, "auto_map", None) or {}) if trust_remote_code else {}
    own = [name for name in code.values() if kind is None and names and name.endswith(f".{names[0]}")]
    if own or auto.__name__ in code:
        reference = own[0] if own else code[auto.__name__]
        return transformers.dynamic_module_utils.get_class_from_dynamic_module(reference, os.fspath(directory))
    if kind is None and names:
        if not hasattr(transformers, names[0]):
            raise PlanError(f"{where} names the class {names[0]!r}, which transformers does not have; pass kind=")
        return getattr(transformers, names[0])
    try:
        found = getattr(auto, AUTO)[type(configuration)]
    except (KeyError, AttributeError):
        names_none = " names no class under 'architectures', and" if kind is None else ":"
        raise PlanError(
            f"{where}{names_none} {auto.__name__} has no class for the model type {configuration.model_type!r}; pass "
            "kind=, the class of models to load"
        ) from None
    return found[0] if isinstance(found, tuple) else found


def _load(
    directory: str | os.PathLike[str],
    kind: Any,
    policy: Policy | None,
    stage: int | None,
    how: Splitting,
    options: Any,
    checked: Collection[Path],
) -> tuple[Any, Plan, Mapping[str, Any]]:
    """A model, or one stage of it, with this rank's slices, without tags and seams; the plan of the whole model; and
    the report of loading: `missing_keys`, `unexpected_keys`, names `untied` by the files, and those `stored`."""
    layout, groups = how.layout, how.groups
    plans: list[Plan] = []
    read: list[int] = []
    untied: list[str] = []
    names: set[str] = set()

    def load(model: Any, state_dict: Any, files: list[str], config: Any, expected_keys: Any = None) -> Any:
        stored = _stored(model, files, config, Path(directory), checked)
        names.update(name for name, _ in stored)
        untied.extend(untie_as_stored(model, stored, os.fspath(directory)))
        whole = model.state_dict().keys()
        chosen = None if policy is None else read_plan(model, policy)
        cut, plan = None, prepare(model, chosen, groups).with_vocabulary(how.vocabulary_multiple)
        plans.append(plan)
        if layout is not None and stage is not None:
            cut = find_cut(model)
            check_cut(cut, layout, groups)
            keep_stage(model, cut, layout, stage)
            mark_absent(model)
        cut_parameters(model, plan, groups)
        tensors = _sliced(model, plan, stored, config, groups, read, whole, cut)
        return getattr(kind, LOADING)(model, tensors, None, config, expected_keys)

    members = {LOADING: staticmethod(load), "__module__": kind.__module__}
    loader: Any = type(kind.__name__, (kind,), members)
    model, loading = loader.from_pretrained(directory, output_loading_info=True, **options)
    model.__class__ = kind
    lacking = sorted(name for name in loading["missing_keys"] if name in plans[0].splits)
    if lacking:
        raise PlanError(
            f"{plans[0].family}: the checkpoint {os.fspath(directory)!r} has no {lacking[0]!r}, which is cut"
        )
    model.train()
    model.bytes_read = sum(read)
    return model, plans[0], {**loading, "untied": untied, "stored": names}


def is_of_head(model: Any, name: str) -> bool:
    """True for a parameter of a head or a pooler, which files of another class of the family may lack."""
    below = f"{model.base_model_prefix}."
    return not name.startswith(below) or name.startswith(f"{below}pooler.")


def _refuse_drawn(model: Any, missing: Collection[str], directory: str | os.PathLike[str]) -> None:
    """PlanError for weights that transformers has drawn at random; a head of another class than saved may be new."""
    is_saved_class = type(model).__name__ in (model.config.architectures or ())
    drawn = sorted(name for name in missing if is_saved_class or not is_of_head(model, name))
    if drawn:
        raise PlanError(
            f"{family_of(model)}: the checkpoint {os.fspath(directory)!r} lacks {len(drawn)} of the model's weights, "
            f"the first {drawn[0]!r}; its files are of another model, or not all there"
        )


def read_slices(
    directory: str | os.PathLike[str],
    kind: Any,
    policy: Policy | None,
    layout: PipelineLayout | None,
    stage: int | None,
    groups: ProcessGroups,
    tied: Collection[tuple[str, ...]] = (),
    vocabulary_multiple: int = 1,
    *,
    strict: bool = True,
    **options: Any,
) -> tuple[dict[str, Tensor], set[str], int]:
    """This rank's slices of a checkpoint directory by the names of the whole model.

    Returns them, the names that the files have values for on any stage, and the number of bytes that were read.

    For files whose names or shapes are not the model's: transformers' own loading makes one of the other. layout,
    stage: one stage of a pipeline; None for the whole model. tied: the names of each parameter that is one where the
    slices go. vocabulary_multiple: a rank's rows of a split vocabulary are padded to a multiple of it. strict: False
    leaves out what the files lack, and what the model lacks. options: those of `from_pretrained`; with `config` the
    model is that one, and the config.json of the directory is not read. Not collective.
    Raises PlanError as `load_split` does, and ValueError where the files lack a weight of the model, have another one,
    or have different values for the names of one.
    """
    checked = _checked_files(directory, groups, layout)
    how = Splitting(groups, layout, vocabulary_multiple=vocabulary_multiple)
    model, _, loading = _load(directory, kind, policy, stage, how, options, checked)
    refuse_apart([(n[0], name) for name in loading["untied"] for n in tied if name in n], os.fspath(directory))
    lacking, unknown = sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"])
    if strict and (lacking or unknown):
        raise ValueError(
            f"the checkpoint {os.fspath(directory)!r} lacks {len(lacking)} names that the model has {lacking[:4]} and "
            f"has {len(unknown)} that the model lacks {unknown[:4]}; load it into the same model, or with strict=False"
        )
    found = model.state_dict(keep_vars=True)
    found = {name: value for name, value in found.items() if name not in loading["missing_keys"]}
    return found, loading["stored"], model.bytes_read


def _stored(model: Any, files: list[str], config: Any, directory: Path, checked: Collection[Path]) -> Stored:
    """The tensors of the files by the parameters that they become.

    checked: files whose checksums have been compared. PlanError for files that are no safetensors or lie outside of the
    directory, and for whole numbers in place of a weight.
    """
    for file in files:
        if not file.endswith(".safetensors"):
            raise PlanError(f"{family_of(model)}: {file!r} is no safetensors file, so no part of it can be read alone")
        path = Path(file)
        if directory.is_dir() and (directory not in path.parents or ".." in path.relative_to(directory).parts):
            raise PlanError(f"{family_of(model)}: its config.json names {file!r}, which is outside of {directory}")
    stored = stored_tensors(model, {file: Path(file) not in checked for file in files}, config.weight_mapping or [])
    weights = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    for (name, _), keys in stored.items() if getattr(model.config, "quantization_config", None) is None else ():
        for key, opened in keys.items() if name in weights else ():
            kind = opened.get_slice(key).get_dtype()
            if not is_kind_with_point(kind):
                raise PlanError(
                    f"{family_of(model)}: {key!r} is {kind} in the files, and the model has numbers with a "
                    "point there; config.json says nothing of a quantization"
                )
    return stored


def _sliced(
    model: Any,
    plan: Plan,
    stored: Stored,
    config: Any,
    groups: ProcessGroups,
    read: list[int],
    whole: Collection[str],
    stages: ModelCut | None = None,
) -> dict[str, SlicedTensor]:
    """Every tensor of the files, cut as the parameter that it becomes, or a part of, is cut.

    whole: the names of the whole model. stages: of a model that is one stage; then tensors of other stages are left
    out, and a tied one is read under the name that it has here. Transformers reports names that are not in `whole`.
    """
    from transformers.core_model_loading import WeightConverter

    converters = [entry for entry in config.weight_mapping or [] if isinstance(entry, WeightConverter)]
    known = model.state_dict()
    sources: dict[tuple[str, str | None], dict[str, tuple[str, Any]]] = {}  # of a parameter: key -> (target, file)
    for (name, pattern), files in stored.items():
        here = [name]
        if stages is not None and name not in known and name in whole:
            here = [tied for tied in stages.tied if tied in known and name in stages.tied]
        if here:
            parts = {key: (key if here == [name] else here[0], opened) for key, opened in files.items()}
            sources.setdefault((here[0], pattern), {}).update(parts)
    tensors: dict[str, SlicedTensor] = {}
    for (name, pattern), parts in sources.items():
        split, keys = plan.splits.get(name), list(parts)
        cuts = [] if split is None else [cut for cut in split.cuts if groups.size(cut[0]) > 1]
        if split is not None and cuts and pattern is not None:
            converter = next(entry for entry in converters if pattern in entry.source_patterns)
            cuts = [_cut_of_part(plan.family, keys[0], split, cut, converter) for cut in cuts]
            if STACKED in cuts:  # one tensor an expert, of which a rank needs its own
                cuts.remove(STACKED)
                keys.sort(key=lambda key: [int(number) for number in re.findall(r"\d+", key)])
                if len(keys) != split.shape[0]:
                    raise PlanError(f"{plan.family}: {name!r} has {split.shape[0]} experts, the files {len(keys)}")
                own = len(keys) // groups.size("ep")
                keys = keys[groups.rank("ep") * own :][:own]
        for key in keys:
            target, opened = parts[key]
            part = opened.get_slice(key)
            if split is not None and split.padded and tuple(part.get_shape()) != split.shape:
                shapes = f"{part.get_shape()} in the files and {list(split.shape)} in the model"
                raise PlanError(f"{plan.family}: {key!r} is {shapes}")  # where padding lies, transformers sees nothing
            tensors[target] = SlicedTensor(part, cuts, groups, read)
    return tensors


def _cut_of_part(family: str, key: str, split: Split, cut: Cut, converter: Any) -> Cut:
    """Cut of a tensor that is stacked (one an expert) and joined (gate and up) into a parameter that is cut."""
    axis, dim, blocks, multiple = cut
    kinds = [type(operation).__name__ for operation in converter.operations]
    dims = {type(operation).__name__: getattr(operation, "dim", None) for operation in converter.operations}
    stacked = kinds[:1] == ["MergeModulelist"] and dims["MergeModulelist"] == 0
    rest = kinds[1:] if stacked else kinds
    along = dims.get("Concatenate") or 0
    joined = rest == ["Concatenate"] and along > 0
    if axis == "ep" and (joined or not rest):
        return STACKED if stacked else cut
    if joined and along == dim and len(converter.source_patterns) == blocks:
        return axis, dim - stacked, 1, multiple
    if axis == "tp" and not rest and stacked and dim > 0:
        return axis, dim - 1, blocks, multiple
    raise PlanError(
        f"{family}: {key!r} becomes {split.parameter!r} by {', '.join(kinds)}, of which no part can be made alone. "
        "Load the whole model by from_pretrained on every rank, then split_model"
    )


def save_split(model: nn.Module | Sequence[nn.Module], directory: str | os.PathLike[str], **options: Any) -> None:
    """Save a split model as a directory that plain `from_pretrained` loads: the same keys, bits and dtypes.

    Of a model with adapters (`add_lora`) an adapter directory is saved, which `PeftModel.from_pretrained` loads. model:
    split, wrapped in DistributedDataParallel or not; of a pipeline this rank's stages. options: those of
    `save_pretrained` (max_shard_size, ...). The first rank writes; it holds the whole model in host memory while it
    does. Collective over all ranks.
    """
    inner = [_split_part(part) for part in ([model] if isinstance(model, nn.Module) else model)]
    groups = resolve_groups(None)
    only = ""
    if hasattr(inner[0], "peft_config"):
        _pass_targets(inner, groups)
        only, options = "lora_", {"save_embedding_layers": False, **options}
    error: Exception | None = None
    whole: dict[str, Tensor] = {}
    for part in inner:
        whole = {**_whole_state(part, getattr(part, REPORT), groups, only), **whole}
    if groups.rank("dp_cp") == 0:
        writer = inner[0]
        if groups.size("pp") > 1 and groups.rank("tp") == 0:
            whole = _from_stages(whole, groups.require("pp"), next(writer.parameters()).device)
        if groups.rank("tp") == 0 and groups.rank("pp") == 0:
            try:
                if isinstance(vars(writer).get("forward"), StageForward):
                    cut = stage_of(writer).cut
                    entry = [name for name in cut.tied if name.rpartition(".")[0] in cut.entry]
                    whole.update(dict.fromkeys(cut.tied, whole[entry[0]]) if entry else {})  # one tensor again
                    writer = _empty_copy(writer)
                elif groups.size("pp") > 1:  # peft saves the adapters of layers that are there
                    ((key, config),) = writer.peft_config.items()
                    with torch.device("meta"):
                        writer = type(writer)(_empty_copy(writer.get_base_model()), copy.deepcopy(config), key)
                writer.save_pretrained(directory, state_dict=whole, is_main_process=True, **options)
            except FAILURES as failure:
                error = failure
    agree.refuse(error, None, "a save of the model")  # ranks may write the path differently


def _pass_targets(parts: Sequence[Any], groups: ProcessGroups) -> None:
    """Give every stage's config the names of layers with adapters on all stages: peft spells out 'all-linear'."""
    configs = [item for part in parts for item in part.peft_config.items() if isinstance(item[1].target_modules, set)]
    targets = [[(key, config.target_modules) for key, config in configs]]
    if groups.size("pp") > 1:
        targets = list(agree.gather(targets[0], groups.require("pp"), "the layers with adapters").values())
    for key, config in configs:
        config.target_modules = {name for each in targets for other, names in each if other == key for name in names}


def _split_part(model: Any) -> Any:
    inner = model
    while getattr(inner, REPORT, None) is None:
        inner = getattr(inner, "module", None)
        if inner is None:
            raise PlanError(f"save_split takes a model that was split, and was given a {type(model).__name__}")
    return inner


def _empty_copy(model: Any) -> Any:
    """The whole model, without memory."""
    with torch.device("meta"):
        whole: Any = type(model)(model.config)
    whole = whole.to(model.dtype)
    whole.generation_config = getattr(model, "generation_config", None)
    untie(whole, ties_of(whole).keys() - stage_of(model).cut.tied)
    return whole


def _from_stages(mine: dict[str, Tensor], group: dist.ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    """The states of all stages on the first of them, on the CPU, one tensor under way at a time. Collective."""
    mine_is, first = dist.get_rank(), dist.get_global_rank(group, 0)
    headers = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mine.items()}
    whole = dict(mine)
    for source, theirs in agree.gather(headers, group, "the names of all stages").items():
        for name, (shape, dtype) in theirs.items() if source != first else ():
            if mine_is == source:
                with waiting("the first stage to save", group):
                    dist.send(mine[name].to(device), first, group=group)
            elif mine_is == first:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                with waiting("the weights of another stage", group):
                    dist.recv(tensor, source, group=group)
                whole.setdefault(name, tensor.cpu())
    return whole if mine_is == first else {}


@torch.no_grad()
def _whole_state(model: Any, report: SplitReport, groups: ProcessGroups, only: str) -> dict[str, Tensor]:
    """The state of the whole model on the first data and tensor-parallel rank, on the CPU; elsewhere nothing.

    only: a part of the names that are wanted. Collective over a stage.
    """
    whole: dict[str, Tensor] = {}
    by_memory: dict[int, Tensor] = {}  # tied parameters are one tensor, which the saving looks for
    for name, tensor in model.state_dict(keep_vars=True).items():
        if only not in name:
            continue
        split = report.plan.splits.get(name)
        if groups.rank("expt_dp" if split is not None and "ep" in split.axes else "dp_cp") > 0:
            continue  # a copy of the first rank's
        if id(tensor) not in by_memory:
            by_memory[id(tensor)] = whole_of(tensor.detach(), split, groups, on_first=True).cpu()
        whole[name] = by_memory[id(tensor)]
    return whole if groups.rank("tp") == groups.rank("dp_cp") == 0 else {}
