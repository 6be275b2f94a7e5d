"""Splitting of a transformers model over tensor parallelism and pipeline stages.

``split_model`` cuts a full model in place, ``split_stages`` returns this rank's stages, and ``split_empty`` starts on
the meta device. All follow a plan; they use neither DTensor nor tracing. A model without pipeline stages is handled as
a single part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut.attach import attach_parts
from core.hugging_face.cut.order import watch_order
from core.hugging_face.cut.parts import cut_into_parts, draw, prepare
from core.hugging_face.cut.report import REPORT, SplitReport, Splitting
from core.hugging_face.prove.compare import CUT, Reference, prove, record_output
from core.hugging_face.read.example import PASS, example_of
from core.hugging_face.read.plan import Plan, PlanError
from core.hugging_face.read.quiet import refusing_failures
from core.pipeline_parallel.layout import PipelineLayout
from core.tensor_parallel.mappings import resolve_groups


def split_model(
    model: Any,
    plan: Plan | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    parallel_output: bool | Literal["where possible"] = False,
    sequence_parallel: str | None = None,
    pg_collection: ProcessGroups | None = None,
) -> SplitReport:
    """Cut a transformers model over the tensor-parallel group, in place.

    Afterwards wrap the model in DistributedDataParallel. A model with a wrong plan would train incorrectly without an
    error, so an example runs before and after the cut, without backward, and the outputs must be equal.

    This is a collective over the tensor- and expert-parallel groups and, if sequence parallelism uses it, the
    context-parallel group.

    Args:
        model: Full model on a real device, with the same weights on every rank of the group.
        plan: Plan of the split. Defaults to the plan read from the model; ``read_plan(model, policy)`` builds one from
            a Policy.
        example: Keyword arguments of one small forward, the same on all ranks. Defaults to two rows of at least 8 token
            ids, or to pixels or audio for models that take these.
        parallel_output: True keeps the logits split and computes the loss from the parts. 'where possible' falls back
            to full logits, with a warning, for models that compute their loss in another way.
        sequence_parallel: 'split_gather' or 'ring' over the tensor-parallel group, 'all_to_all' or 'ring_attn' over the
            context-parallel group. Every rank of that group receives the complete sequence.
        pg_collection: Process groups. Defaults to those of ``parallel_state``.

    Returns:
        A report of the plan, the gradient contracts, and the lengths that the example did not reach.

    Raises:
        PlanError: On all ranks of these groups, if sizes do not fit or the plan cannot give correct gradients. An error
            found after the cut leaves the model unusable; build it again.
    """
    how = Splitting(resolve_groups(pg_collection), None, parallel_output, sequence_parallel)
    (part,) = split_parts(model, plan, example, how)
    report: SplitReport = getattr(part, REPORT)
    return report


def split_stages(
    model: Any,
    layout: PipelineLayout,
    plan: Plan | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    parallel_output: bool | Literal["where possible"] = False,
    sequence_parallel: str | None = None,
    pg_collection: ProcessGroups | None = None,
) -> list[Any]:
    """Cut a transformers model into this rank's pipeline stages, also split over tensor parallelism.

    One forward of the example runs through the full model and one through the pipeline, and the outputs must be equal.
    Wrap the stages with ``core.pipeline_parallel.wrap_stages``, and run them with a ``PipelineRunner``,
    ``stage_forward_step`` and ``stage_activations``. Collective over the world.

    Args:
        model: Full model. It becomes the last stage of this rank; modules of other stages are removed from it.
        layout: Pipeline layout.
        plan, example, parallel_output, sequence_parallel, pg_collection: As in ``split_model``.

    Returns:
        This rank's stages, in the model's order.

    Raises:
        PlanError: On all ranks, if the model cannot be cut this way.
        ValueError: If the layout does not fit the groups.
    """
    how = Splitting(resolve_groups(pg_collection), layout, parallel_output, sequence_parallel)
    return split_parts(model, plan, example, how)


def split_parts(model: Any, plan: Plan | None, example: Mapping[str, Any] | None, how: Splitting) -> list[Any]:
    """Cut a model into this rank's parts, the stages of a layout or the model itself, and prove the cut.

    See ``split_model`` and ``split_stages`` for the arguments, collectives, and errors.
    """
    layout, groups = how.layout, how.groups
    reference: Reference | None = None
    with agree.together(how.ranks, CUT, PlanError):
        plan = prepare(model, plan, groups)
        if any(parameter.is_meta for parameter in model.parameters()):
            raise PlanError(f"{plan.family}: parameters are on the meta device; load the checkpoint by load_split")
        arguments = example_of(model, groups, example, with_images=layout is not None)
        if layout is not None or groups.size("tp") * plan.ep > 1 or how.sequence_parallel is not None:
            with refusing_failures(plan, "for the example", f"Pass {PASS}", again=""):
                reference = record_output(model, arguments, None if layout is None else watch_order)
            arguments = reference.arguments
        parts = cut_into_parts(model, None if reference is None else reference.order, plan, how)
    if reference is not None:
        _refuse_failure_of_some(reference.failure, how.ranks)
    attach_parts(parts, plan, arguments, how)
    if reference is not None:
        prove(parts, plan, reference, groups, layout, how.sequence_parallel)
    return parts


def _refuse_failure_of_some(failure: Exception | None, ranks: agree.Groups) -> None:
    """Raise on all ranks if the example with labels failed on only some ranks, which would then prove less."""
    what = "the forward of the example with labels"
    least, most = agree.bounds([failure is not None], ranks, what)
    if least != most:
        agree.refuse(failure, ranks, what, PlanError)


def split_empty(
    model: Any, plan: Plan | None, example: Mapping[str, Any] | None, how: Splitting, device: torch.device
) -> list[Any]:
    """Split a model that is on the meta device, so that each rank only allocates its own slices, on ``device``.

    The values are a new model's and differ between layouts, so load a checkpoint over them. The full model exists on no
    rank, and the output is therefore not compared. Collective over the world. See ``split_parts``.
    """
    with agree.together(None, CUT, PlanError):
        plan = prepare(model, plan, how.groups)
        parts = cut_into_parts(model, None, plan, how)
        for part in parts:
            draw(part, device)
    attach_parts(parts, plan, example_of(parts[0], how.groups, example), how)
    return parts
