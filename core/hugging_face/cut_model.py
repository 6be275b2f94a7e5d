"""A model cut over ranks, as one value that is carried whole from `boost` through forwards to checkpoint files.

The contract. `Cutting` holds the choices, `cut_model` makes a `CutModel` by them, and nothing changes it afterwards but
`unread`, which shrinks as weights are read. Names are those of the whole model everywhere; a tied parameter goes by its
first name. `parts` are plain modules, in the model's order, which a plugin wraps; their parameters are this rank's
slices. `slice_of` and `whole_of` turn a tensor with a parameter's shape, such as a moment, from one form into the
other. A plugin that cuts nothing has a `CutModel` too, whose shell and only part are the user's model.
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
from core.groups.process_groups import ProcessGroups
from core.hugging_face.chunked_loss import use_chunked_loss
from core.hugging_face.cut_parts import draw
from core.hugging_face.cut_places import find_cut
from core.hugging_face.layer_checkpointing import GradientCheckpointConfig, checkpoint_layers
from core.hugging_face.lora import MARK, put_on, splits_of, take_off
from core.hugging_face.plan import Plan, Split
from core.hugging_face.policies import Policy
from core.hugging_face.prove import refusing_together
from core.hugging_face.slices import slice_of, whole_of
from core.hugging_face.split import split_empty, split_parts
from core.hugging_face.split_report import Splitting
from core.hugging_face.stages import stage_of
from core.hugging_face.transformers_plans import read_plan
from core.pipeline_parallel import PipelineLayout, plan_pipeline


@dataclass(frozen=True)
class CutModel:
    """This rank's parts of a model, and what is known of the whole.

    shell: the whole model without memory, with its names, shapes, dtypes, ties, config and adapters. parts: the stages
    of this rank, or the one model. ties: for each name of a tied parameter all of its names, the first one first.
    splits: name in the whole model -> how this rank's parameter is cut over tensor and expert parallelism. layout: of
    the stages; None without a pipeline. policy: rules in place of the family's own plan. unread: names that have no
    values yet, because the model was cut on the meta device.
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
        """peft's configurations of the model's adapters; None without adapters."""
        return getattr(self.shell, "peft_config", None)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Name in the whole model, the first one of a tied parameter -> this rank's parameter."""
        found: dict[str, nn.Parameter] = {}
        for part in self.parts:
            for name, param in part.named_parameters():
                found.setdefault(self.names_of(name)[0], param)
        return found

    def names_of(self, name: str) -> tuple[str, ...]:
        """All names of a tensor of the whole model, the first one first."""
        return self.ties.get(name, (name,))

    def slice_of(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a tensor that has the shape of a whole parameter. A view where it can be one."""
        return slice_of(whole, self.split_of(name), self.groups)

    def whole_of(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A tensor with the shape of a whole parameter, from its slices. Collective over the groups that cut it."""
        return whole_of(part, self.split_of(name), self.groups)

    def split_of(self, name: str) -> Split | None:
        """The split of a parameter, by any of its names; None for a whole one."""
        return next((self.splits[each] for each in self.names_of(name) if each in self.splits), None)


@dataclass(frozen=True)
class Cutting:
    """Choices of a cut over tp_size x pp_size x sp_size ranks, and of experts over ep_size.

    sequence_parallel, example: as in `split_model`. parallel_output: True to leave logits split where the model allows
    it. policy: rules in place of the family's own plan. vocabulary_multiple: each rank's rows of a vocabulary are
    padded to a multiple of it over tp_size. schedule, num_chunks, layers_per_stage: of a pipeline (`plan_pipeline`).
    params_sharded: True if ranks of a data group share each parameter. flash_attention: attention is torch's
    scaled_dot_product_attention. logits_chunk: as in `use_chunked_loss`. checkpointing: which layers keep no
    activations.
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
    params_sharded: bool = False
    flash_attention: bool = False
    logits_chunk: int | None = None
    checkpointing: GradientCheckpointConfig | None = None

    @property
    def is_needed(self) -> bool:
        """True if a rank has a part of the model, or uses a part of its input."""
        return self.tp_size * self.pp_size * self.ep_size * self.sp_size > 1

    def layout_of(self, model: Any) -> PipelineLayout | None:
        """Layout of a whole model's layers; None without a pipeline. Local; ValueError for what cannot be."""
        counts, stages = self.layers_per_stage, self.pp_size * self.num_chunks
        if self.pp_size == 1:
            if counts is not None:
                raise ValueError("num_layers_per_stage is for a pipeline, and pp_size is 1")
            return None
        cut = find_cut(model)
        if cut.tied and self.params_sharded and self.schedule == "ZBVZeroBubble":
            raise ValueError(
                f"{cut.family}: with pp_style='zbv' the first stage lends its tied {sorted(cut.tied)[0]!r} to the last "
                "one, which cannot gather it under zero_stage=3; use zero_stage 2, or another pp_style"
            )
        if counts is None and cut.count % stages:  # more layers in the middle, away from embeddings and head
            each, rest = divmod(cut.count, stages)
            first = (stages - rest) // 2
            counts = tuple(each + (first <= stage < first + rest) for stage in range(stages))
        return plan_pipeline(
            cut.count, self.pp_size, schedule=self.schedule, chunks=self.num_chunks, layers_per_stage=counts
        )

    def plan_of(self, model: Any) -> Plan | None:
        """The plan over tensor parallelism, by the family's own or the policy; None where there is none."""
        if self.tp_size == 1:
            if self.policy is not None:
                raise ValueError("custom_policy says how a model is split over tensor parallelism, and tp_size is 1")
            return None
        return read_plan(model, self.policy).with_vocabulary(self.vocabulary_multiple)

    def splits_logits(self, model: Any) -> bool:
        """True if logits of a causal model stay split by its class, and its loss is computed from the parts.

        `cut_model` runs a forward with labels to see it.
        """
        loss = getattr(getattr(model, "loss_function", None), "__name__", "")
        return self.parallel_output and self.tp_size * self.sp_size > 1 and loss == "ForCausalLMLoss"


def cut_model(model: Any, cutting: Cutting, groups: ProcessGroups, device: torch.device) -> CutModel:
    """Cut a model into this rank's parts and prove them, in place. Collective over the world.

    model: whole, with rank 0's values, in the dtype of training, with adapters of peft or without. Or on the meta
    device: then parts get memory on `device`, and no values. Raises ValueError on all ranks for a model that cannot be
    cut so.
    """
    with refusing_together("boost", ValueError, AttributeError):
        ties = {name: names for names in tied_names(model) for name in names}
        memo = {id(param): nn.Parameter(param.to("meta"), param.requires_grad) for param in model.parameters()}
        shell = copy.deepcopy(model, memo)
        is_empty = any(param.is_meta for param in model.parameters())
        base, adapters = take_off(model) if cutting.is_needed or is_empty else (model, None)
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
    if adapters is not None:
        parts = put_on(parts, adapters, shell, groups, staged=layout is not None)
    for part in parts:
        use_chunked_loss(part, cutting.logits_chunk)
    splits = {name: split for part in parts for name, split in splits_of(part).items()}
    unread = {name for name in shell.state_dict() if MARK not in name} if is_empty else set()
    return CutModel(shell, parts, ties, groups, splits, layout, cutting.policy, unread)
