"""Load and save checkpoint directories of split models.

Loading the full model on every rank needs too much memory, so each rank only reads its own slices. Transformers' own
loading code runs, so renamed keys and fused experts are handled as usual. It receives lazy tensors that read this
rank's part of a safetensors file on access. Saving writes a plain directory that ``from_pretrained`` loads.
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
from core.hugging_face.cut.attach import attach_parts
from core.hugging_face.cut.parts import check_cut, cut_parameters, keep_stage, mark_absent, prepare
from core.hugging_face.cut.places import find_cut
from core.hugging_face.cut.report import REPORT, SplitReport, Splitting
from core.hugging_face.cut.slices import whole_of
from core.hugging_face.lora import is_of_adapter
from core.hugging_face.read.directory import check_files, look_at, read_configuration
from core.hugging_face.read.example import example_of
from core.hugging_face.read.plan import Plan, PlanError, Split, family_of
from core.hugging_face.read.policies import Policy
from core.hugging_face.read.ties import Stored, stored_tensors, ties_of, untie, untie_as_stored
from core.hugging_face.read.transformers_plans import read_plan, transformers_package
from core.hugging_face.run.stage_forward import ModelCut, StageForward
from core.hugging_face.run.stages import stage_of
from core.pipeline_parallel.layout import PipelineLayout
from core.tensor_parallel.mappings import resolve_groups
from core.watch.waiting import waiting

# Private method that `from_pretrained` calls after it has found the files and built the model on the meta device.
LOADING = "_load_pretrained_model"
AUTO = "_model_mapping"  # attribute of auto classes: configuration class -> model class
FAILURES = (ValueError, OSError, RuntimeError)
STACKED = ("ep", -1, 1, 1)  # marks a tensor that holds a single expert


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
    """Load a checkpoint directory as a model that is split over tensor parallelism.

    Use this for models that do not fit on one rank: each rank only reads its own slices, and ``model.bytes_read``
    reports how many bytes that was. The full model exists on no rank, so unlike in ``split_model`` the output is not
    compared.

    This is a collective over the tensor-parallel group, or with ``layout`` over the world.

    Args:
        directory: Checkpoint directory with a config.json and safetensors files.
        kind: Model class or auto class. Defaults to the class that config.json names, else to the family's causal
            language model.
        policy: Rules that replace the family's own plan.
        example: Keyword arguments of one small forward, as in ``split_model``.
        layout: Pipeline layout. If given, a list of this rank's stages is returned, each of which has only read its
            part.
        device: Device to move the model to after reading, before the example runs.
        parallel_output: As in ``split_model``.
        sequence_parallel: As in ``split_model``.
        pg_collection: Process groups. Defaults to those of ``parallel_state``.
        **options: Options of ``from_pretrained`` (dtype, attn_implementation, ...).

    Returns:
        The split model, or with ``layout`` the list of this rank's stages.

    Raises:
        PlanError: As in ``split_model`` and ``split_stages``; also if the checkpoint lacks a parameter other than a new
            head's, or stores a parameter in a format that cannot be read in part.
    """
    groups = resolve_groups(pg_collection)
    how = Splitting(groups, layout, parallel_output, sequence_parallel)
    options = {"trust_remote_code": False, **options}
    parts: list[Any] = []
    # Catch every exception: transformers reports a bad file on one rank by many exception types.
    with agree.together(how.ranks, "the loading of a model", PlanError):
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
    attach_parts(parts, plan, example_of(parts[0], groups, example), how)
    return parts[0] if layout is None else parts


def _checked_files(
    directory: str | os.PathLike[str], groups: ProcessGroups, layout: PipelineLayout | None
) -> set[Path]:
    """Verify the directory's checksums, divided among the ranks that load it together, and return the checked files."""
    if layout is None:
        return check_files(directory, groups.rank("tp"), groups.size("tp"))
    return check_files(directory, dist.get_rank(), dist.get_world_size())


def _class_of(directory: str | os.PathLike[str], kind: Any, trust_remote_code: bool) -> Any:
    """Resolve the model class to load. An auto class is resolved by the directory's config.json.

    If ``kind`` is ``None``, use the class that config.json names, else the family's causal language model. Raises
    PlanError if no class can be found.
    """
    transformers = transformers_package()
    if kind is not None and not hasattr(kind, AUTO):
        look_at(directory, trust_remote_code=True)  # the caller already has the model's code
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
    """Load a model, or one of its stages, with this rank's slices but without tags and seams.

    Return the model, the plan of the full model, and the loading report: ``missing_keys``, ``unexpected_keys``, the
    names that the files hold untied (``untied``), and all names that the files have values for (``stored``).
    """
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
    """Return ``True`` for parameters of a head or pooler, which files of another model class of the family may lack."""
    below = f"{model.base_model_prefix}."
    return not name.startswith(below) or name.startswith(f"{below}pooler.")


def _refuse_drawn(model: Any, missing: Collection[str], directory: str | os.PathLike[str]) -> None:
    """Raise PlanError for weights that transformers initialized at random, except a new head of another model class."""
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
    """Read this rank's slices of a checkpoint directory, named as in the full model. Does not communicate.

    This is needed if names or shapes in the files differ from the model's, because transformers' own loading converts
    them. Return the slices by name, the names that the files have values for on any stage, and the number of bytes
    read.

    Args:
        layout: Pipeline layout, or None for the full model.
        stage: Index of the stage to read, or None for the full model.
        tied: For each tied parameter of the target model, all its names.
        vocabulary_multiple: Each rank's rows of a split vocabulary are padded to a multiple of this.
        strict: If False, skip names that the files or the model lack.
        **options: Options of ``from_pretrained``. With ``config``, the model is built from that config and the
            directory's config.json is not read.

    Raises:
        PlanError: As in ``load_split``.
        ValueError: If the files lack a weight of the model, have an unknown one, or hold different values for the names
            of one tied parameter.
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
    """Map each of the model's parameters to its tensors in the files.

    ``checked`` are files whose checksums were already compared. Raises PlanError for files that are not safetensors or
    are outside the directory, and for weights stored as integers without a quantization config.
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
    """Return every tensor of the files, cut like the parameter it becomes or is a part of.

    ``read`` receives the number of bytes of every read. ``whole`` are the names of the full model; transformers reports
    names that are not in it. If ``model`` is one stage, ``stages`` is the model's cut: tensors of other stages are
    skipped, and a tied tensor is read under the name that it has on this stage.
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
            if STACKED in cuts:  # one tensor per expert; a rank reads only its own experts
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
                raise PlanError(f"{plan.family}: {key!r} is {shapes}")  # padding hides this mismatch from transformers
            tensors[target] = SlicedTensor(part, cuts, groups, read)
    return tensors


def _cut_of_part(family: str, key: str, split: Split, cut: Cut, converter: Any) -> Cut:
    """Return the cut of one of the checkpoint tensors that are stacked or concatenated into a cut parameter.

    Experts are stacked; gate and up are concatenated. Raises PlanError for any other conversion.
    """
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
        f"{family}: {key!r} becomes {split.parameter!r} through {', '.join(kinds)}, and this conversion needs the full "
        "tensor. Load the unsplit model with from_pretrained on every rank, then call split_model"
    )


def save_split(model: nn.Module | Sequence[nn.Module], directory: str | os.PathLike[str], **options: Any) -> None:
    """Save a split model as a directory that plain ``from_pretrained`` loads, with the same keys, bits, and dtypes.

    Only the adapter of a model with adapters (``add_lora``) is saved; ``PeftModel.from_pretrained`` loads it. The first
    rank gathers the full model in host memory and writes it. Collective over all ranks.

    Args:
        model: Split model, wrapped in DistributedDataParallel or not. For a pipeline, the list of this rank's stages.
        directory: Directory to write.
        **options: Options of ``save_pretrained`` (max_shard_size, ...).

    Raises:
        PlanError: If the model was not split. A failed write raises on all ranks.
    """
    inner = [_split_part(part) for part in ([model] if isinstance(model, nn.Module) else model)]
    groups = resolve_groups(None)
    has_adapters = hasattr(inner[0], "peft_config")
    if has_adapters:
        _pass_targets(inner, groups)
        options = {"save_embedding_layers": False, **options}
    error: Exception | None = None
    whole: dict[str, Tensor] = {}
    for part in inner:
        whole = {**_full_state(part, getattr(part, REPORT), groups, only_adapters=has_adapters), **whole}
    if groups.rank("dp_cp") == 0:
        writer = inner[0]
        if groups.size("pp") > 1 and groups.rank("tp") == 0:
            whole = _from_stages(whole, groups.require("pp"), next(writer.parameters()).device)
        if groups.rank("tp") == 0 and groups.rank("pp") == 0:
            try:
                if isinstance(vars(writer).get("forward"), StageForward):
                    cut = stage_of(writer).cut
                    entry = [name for name in cut.tied if name.rpartition(".")[0] in cut.entry]
                    whole.update(dict.fromkeys(cut.tied, whole[entry[0]]) if entry else {})  # restore the tie
                    writer = _empty_copy(writer)
                elif groups.size("pp") > 1:  # peft saves adapters only for layers that exist
                    ((key, config),) = writer.peft_config.items()
                    with torch.device("meta"):
                        writer = type(writer)(_empty_copy(writer.get_base_model()), copy.deepcopy(config), key)
                writer.save_pretrained(directory, state_dict=whole, is_main_process=True, **options)
            except FAILURES as failure:
                error = failure
    agree.refuse(error, None, "a save of the model")  # ranks may write the path differently


def _pass_targets(parts: Sequence[Any], groups: ProcessGroups) -> None:
    """Give every stage's adapter config the target names of all stages, since peft expands 'all-linear' per stage."""
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
    with torch.device("meta"):
        whole: Any = type(model)(model.config)
    whole = whole.to(model.dtype)
    whole.generation_config = getattr(model, "generation_config", None)
    untie(whole, ties_of(whole).keys() - stage_of(model).cut.tied)
    return whole


def _from_stages(mine: dict[str, Tensor], group: dist.ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    """Gather the states of all stages on the first stage's CPU, one tensor at a time. Collective."""
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
def _full_state(model: Any, report: SplitReport, groups: ProcessGroups, *, only_adapters: bool) -> dict[str, Tensor]:
    """Gather the full state on the CPU of the first data- and tensor-parallel rank. Other ranks return an empty dict.

    Collective over a stage.
    """
    whole: dict[str, Tensor] = {}
    by_memory: dict[int, Tensor] = {}  # saving detects tied parameters by tensor identity
    for name, tensor in model.state_dict(keep_vars=True).items():
        if only_adapters and not is_of_adapter(name):
            continue
        split = report.plan.splits.get(name)
        if groups.rank("expt_dp" if split is not None and "ep" in split.axes else "dp_cp") > 0:
            continue  # replica of the first rank's tensor
        if id(tensor) not in by_memory:
            by_memory[id(tensor)] = whole_of(tensor.detach(), split, groups, on_first=True).cpu()
        whole[name] = by_memory[id(tensor)]
    return whole if groups.rank("tp") == groups.rank("dp_cp") == 0 else {}
