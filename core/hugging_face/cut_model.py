"""A model cut over ranks, as one value that is used from ``boost`` to the forwards and the checkpoint files.

``Cutting`` holds the choices, and ``cut_model`` builds a ``CutModel`` from them. It never changes afterwards, except
that ``unread`` shrinks as weights are read. All names are the full model's names; a tied parameter uses its first name.
``parts`` are plain modules in the model's order, and a plugin wraps them; their parameters are this rank's slices.
``slice_of`` and ``whole_of`` convert any tensor of a parameter's shape (such as an optimizer moment) between its full
and its local shape. A plugin that cuts nothing has a ``CutModel`` too: its shell and its only part are the user's
model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from core.checkpoint.tied_tensors import tied_names
from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut.parts import draw
from core.hugging_face.cut.places import find_cut
from core.hugging_face.cut.report import Splitting
from core.hugging_face.cut.slices import slice_of, whole_of
from core.hugging_face.cut.split import split_empty, split_parts
from core.hugging_face.lora import is_of_adapter, put_on, splits_of, take_off
from core.hugging_face.prompts import has_prompts, keep_prompts
from core.hugging_face.read.plan import Plan, PlanError, Split
from core.hugging_face.read.policies import Policy
from core.hugging_face.read.transformers_plans import read_plan
from core.hugging_face.run.layer_checkpointing import GradientCheckpointConfig, checkpoint_layers
from core.hugging_face.run.loss.chunked_loss import use_chunked_loss
from core.hugging_face.run.stages import stage_of
from core.pipeline_parallel import PipelineLayout, plan_pipeline


@dataclass(frozen=True)
class CutModel:
    """This rank's parts of a model, and a description of the full model.

    Attributes:
        shell: Full model on the meta device, with its names, shapes, dtypes, ties, config, and adapters.
        parts: Stages of this rank, or the single model.
        ties: Each name of a tied parameter -> all its names, the first one first.
        splits: Name in the full model -> how this rank's parameter is cut over tensor and expert parallelism.
        layout: Pipeline layout, if any.
        policy: Rules that replace the family's own plan.
        unread: Names without values yet, because the model was cut on the meta device.
    """

    shell: Any
    parts: Sequence[Any]
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    groups: ProcessGroups = field(default_factory=ProcessGroups)
    splits: Mapping[str, Split] = field(default_factory=dict)
    layout: PipelineLayout | None = None
    policy: Policy | None = None
    unread: set[str] = field(default_factory=set)

    @property
    def adapters(self) -> Any:
        """Configs of the model's adapters, as peft has them, or ``None`` without adapters."""
        return getattr(self.shell, "peft_config", None)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """First name in the full model -> this rank's parameter."""
        found: dict[str, nn.Parameter] = {}
        for part in self.parts:
            for name, param in part.named_parameters():
                found.setdefault(self.names_of(name)[0], param)
        return found

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of a tensor of the full model, the first one first."""
        return self.ties.get(name, (name,))

    def slice_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a tensor of a parameter's full shape, such as an optimizer moment. A view if
        possible.
        """
        return slice_of(whole, self.split_of(name), self.groups)

    def whole_of(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Gather a full tensor from this rank's slice ``part``. Collective over the groups that cut it."""
        return whole_of(part, self.split_of(name), self.groups)

    def split_of(self, name: str) -> Split | None:
        """Return the split of a parameter, by any of its names, or ``None`` if it is unsplit."""
        return next((self.splits[each] for each in self.names_of(name) if each in self.splits), None)


@dataclass(frozen=True)
class Cutting:
    """Options of a cut over tp_size x pp_size x sp_size ranks, and of experts over ep_size.

    Attributes:
        sp_size: Size of a separate sequence-parallel group.
        sequence_parallel: As in ``split_model``.
        parallel_output: Keep logits split if the model allows it.
        policy: Rules that replace the family's own plan.
        vocabulary_multiple: Each rank's rows of a vocabulary are padded to a multiple of this, over tp_size.
        example: As in ``split_model``.
        schedule, num_chunks, layers_per_stage: As in ``plan_pipeline``; ``num_chunks`` counts chunks per rank.
        flash_attention: Use torch's scaled_dot_product_attention.
        logits_chunk: As in ``use_chunked_loss``.
        checkpointing: Layers that recompute their activations.
    """

    tp_size: int = 1
    pp_size: int = 1
    sp_size: int = 1
    ep_size: int = 1
    sequence_parallel: str | None = None
    parallel_output: bool = False
    policy: Policy | None = None
    vocabulary_multiple: int = 1
    example: Mapping[str, Any] | None = None
    schedule: str = "1F1B"
    num_chunks: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    flash_attention: bool = False
    logits_chunk: int | None = None
    checkpointing: GradientCheckpointConfig | None = None

    @property
    def is_needed(self) -> bool:
        """Return ``True`` if a rank holds a part of the model, or uses a part of its input."""
        return self.tp_size * self.pp_size * self.ep_size * self.sp_size > 1

    def layout_of(self, model: Any) -> PipelineLayout | None:
        """Plan the pipeline layout of a full model's layers, or return ``None`` without a pipeline.

        Raises ValueError if the options do not fit the model.
        """
        counts, stages = self.layers_per_stage, self.pp_size * self.num_chunks
        if self.pp_size == 1:
            if counts is not None:
                raise ValueError("num_layers_per_stage is for a pipeline, and pp_size is 1")
            return None
        cut = find_cut(model)
        if counts is None and cut.count % stages:  # more layers in the middle, away from embeddings and head
            each, rest = divmod(cut.count, stages)
            first = (stages - rest) // 2
            counts = tuple(each + (first <= stage < first + rest) for stage in range(stages))
        return plan_pipeline(
            cut.count, self.pp_size, schedule=self.schedule, chunks=self.num_chunks, layers_per_stage=counts
        )

    def plan_of(self, model: Any) -> Plan | None:
        """Return the tensor-parallel plan from the policy or the family, or ``None`` without tensor parallelism."""
        if self.tp_size == 1:
            if self.policy is not None:
                raise ValueError("custom_policy says how a model is split over tensor parallelism, and tp_size is 1")
            return None
        return read_plan(model, self.policy).with_vocabulary(self.vocabulary_multiple)


def cut_model(model: Any, cutting: Cutting, groups: ProcessGroups, device: torch.device) -> CutModel:
    """Cut a model into this rank's parts, in place, and prove that they compute the same output. Collective over the
    world.

    ``model`` is a full model with rank 0's values, in the training dtype, with or without peft adapters. On the meta
    device, the parts get memory on ``device`` but no values. Raises ValueError on all ranks if the model cannot be cut
    this way.
    """
    with agree.together(None, "boost", PlanError):
        ties = {name: names for names in tied_names(model) for name in names}
        memo = {id(param): nn.Parameter(param.to("meta"), param.requires_grad) for param in model.parameters()}
        shell = copy.deepcopy(model, memo)
        is_empty = any(param.is_meta for param in model.parameters())
        over_tensor = cutting.is_needed and cutting.pp_size == 1 and cutting.sequence_parallel is None and not is_empty
        keeps_prompts = over_tensor and has_prompts(model)
        base, adapters = model.get_base_model() if keeps_prompts else model, None
        if not keeps_prompts and (cutting.is_needed or is_empty):
            base, adapters = take_off(model, staged=cutting.pp_size > 1)
        layout, plan = cutting.layout_of(base), cutting.plan_of(base)
    if cutting.flash_attention:
        if not hasattr(base, "set_attn_implementation"):
            raise ValueError(f"enable_flash_attention needs a transformers model, and got a {type(base).__name__}")
        base.set_attn_implementation("sdpa")
    parts = [base]
    if cutting.is_needed:
        how = Splitting(
            groups, layout, "where possible" if cutting.parallel_output else False, cutting.sequence_parallel
        )
        if is_empty:
            parts = split_empty(base, plan, cutting.example, how, device)
        else:
            parts = split_parts(base, plan, cutting.example, how)
    elif is_empty:
        draw(base, device)
    if cutting.checkpointing is not None:
        cut = find_cut(base) if layout is None else stage_of(base).cut
        checkpoint_layers(parts, cutting.checkpointing, cut.lists)
    if keeps_prompts:
        parts = [keep_prompts(model, parts[0], groups)]
    elif adapters is not None:
        parts = put_on(parts, adapters, shell, groups, staged=layout is not None)
    for part in parts:
        use_chunked_loss(part, cutting.logits_chunk)
    splits = {name: split for part in parts for name, split in splits_of(part).items()}
    unread = {name for name in shell.state_dict() if not is_of_adapter(name)} if is_empty else set()
    return CutModel(shell, parts, ties, groups, splits, layout, cutting.policy, unread)
