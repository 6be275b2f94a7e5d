"""Split a model, or a stage of it, by its plan. No DTensor, no tracing.

Parameters become this rank's slices and carry the tags that the gradient contract reads; modules at seams get a
SeamForward. One forward on a small example then shows what each whole parameter meets, which decides its contract.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from core.distributed.contract.gradient_contract import declare_gradient
from core.groups import agree
from core.groups.process_groups import ProcessGroups
from core.hugging_face.counted_positions import CountedPositions
from core.hugging_face.dropout import ForwardStream, drop_parts_apart
from core.hugging_face.example import unreached
from core.hugging_face.experts import EXPERTS_SEAM, ExpertsForward, over_experts
from core.hugging_face.parallel_loss import (
    gathering_logits,
    use_parallel_loss,
    why_logits_stay_whole,
    with_whole_logits,
)
from core.hugging_face.partial_outputs import IN_STAGES, SPLIT_HEADS, refuse_partial_outputs
from core.hugging_face.plan import Plan, PlanError, Split, family_of
from core.hugging_face.precision import rounded_otherwise
from core.hugging_face.seams import SeamForward
from core.hugging_face.sequence import OVER_CONTEXT, OVER_TENSOR, SequenceParallel, over_sequence, present_layers
from core.hugging_face.slices import slice_of
from core.hugging_face.stage_forward import StageForward
from core.hugging_face.stages import list_of_layers, run_quietly
from core.hugging_face.transformers_plans import read_plan
from core.interface.whole import about_to_change
from core.pipeline_parallel.layout import PipelineLayout
from core.tensor_parallel.dataflow import run_watched
from core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from core.watch.waiting import is_peers

AGAIN = "The model has been cut; make it again"
IN_PARTS = "would choose a token from a part of the layers or of the sequence; generate with the model saved"
ONCE_SPLIT = ("once it is split", "A module there needs its whole width. ")
OTHER_TOKENS = "its layers use other tokens elsewhere than in attention, or in a way that is unknown here"
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}  # fp64 models compute norms and routers in fp32
IN_16_BITS, TIMES = 0.1, 3.0  # what rounding may do in any case, and of what it does to the whole model
EXPERT_TAGS = {"allreduce": False, "expert_dim": 0}  # of experts that other ranks do not have
REPORT = "split_report"  # the attribute of a split model that says how it was split


@dataclass(frozen=True)
class SplitReport:
    """Report of a split. partial: whole parameters whose gradients are summed over tp, by what the forward showed.

    unseen: parameters that learn and that the example did not reach; they are taken to be whole with whole gradients.
    unreached: what the configuration counts in tokens (windows, chunks, floors) and the example was too short to show.
    """

    plan: Plan
    tp: int
    partial: frozenset[str]
    unseen: frozenset[str]
    unreached: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        found = {"gradients summed over tp": self.partial, "not reached by the example": self.unseen}
        lines = [f"{what}: {', '.join(sorted(names))}" for what, names in found.items() if names]
        lines += [f"the example is no longer than {name} ({number})" for name, number in self.unreached.items()]
        return "\n".join([self.plan.table(self.tp), *lines])


def prepare(model: Any, plan: Plan | None, groups: ProcessGroups) -> Plan:
    """The plan, with everything refused that can be refused before a parameter is touched."""
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
            plan = Plan(family, {}, {}, whole=shapes)  # on one rank nothing is split
    return over_experts(model, plan.at(groups.size("tp")), groups)


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


def whole_only(method: Callable[..., Any], sentence: str, *args: Any, **kwargs: Any) -> Any:
    """Replaces a method that needs the whole model: it would use this rank's part alone, and raises instead.

    A call that brings the whole state along (`save_split`) is let through.
    """
    if kwargs.get("state_dict") is None:
        raise PlanError(sentence)
    return method(*args, **kwargs)


def generate_alike(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A split model's `generate`: of whole logits, with the same numbers drawn on all ranks of its group."""
    model: Any = getattr(method, "__self__")  # noqa: B009
    with gathering_logits(model), model.forward_stream.alike():
        return method(*args, **kwargs)


def refuse_whole_methods(model: Any, family: str, **more: str) -> None:
    """Refuse what would save or resize a rank's part as if it were the model. more: other methods, and why."""
    refused = {
        "save_pretrained": "would save this rank's part as if it were the model; call save_split on all ranks",
        "resize_token_embeddings": "would resize this rank's part; resize the whole model before it is split",
        **more,
    }
    for name, why in refused.items():
        if not isinstance(getattr(model, name, None), (partial, type(None))):
            setattr(model, name, partial(whole_only, getattr(model, name), f"{family} is split: {name} {why}"))


@dataclass(frozen=True)
class Splitting:
    """Options of splitting on this rank: groups, stages, and outputs (`split_model`)."""

    groups: ProcessGroups
    layout: PipelineLayout | None = None
    parallel_output: bool | Literal["where possible"] = False
    sequence_parallel: str | None = None
    vocabulary_multiple: int = 1

    @property
    def ranks(self) -> agree.Groups:
        """The groups over which a call is collective. With stages these are all ranks."""
        if self.layout is not None:
            return None
        axes = ["tp", "ep", *(["cp"] if self.sequence_parallel in OVER_CONTEXT else [])]
        return [self.groups.require(axis) for axis in axes if self.groups.size(axis) > 1]


def finish_split(model: Any, plan: Plan, arguments: dict[str, Any], how: Splitting) -> SplitReport:
    """Tags, seams, and the forward that decides the contracts of whole parameters."""
    groups, mode = how.groups, how.sequence_parallel
    tp = groups.size("tp")
    if mode is not None:
        layers = list_of_layers(model, f"{plan.family}: sequence parallelism is for models with")
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    tag_slices(parameters, plan, groups)
    for name, number in plan.numbers.items() if tp > 1 else ():
        owner, _, attribute = name.rpartition(".")
        setattr(modules[owner], attribute, number // tp)
    place_seams(modules, plan, groups)
    parallel_output = how.parallel_output is not False and (tp > 1 or mode is not None)
    if parallel_output:
        try:
            with refusing_failures(plan, "with labels", again=""):
                why = why_logits_stay_whole(model, plan, arguments, tp, cuts_sequence=mode in OVER_CONTEXT)
        except PlanError as error:
            why = str(error).strip().removeprefix(f"{plan.family}: ")
        if why is not None and how.parallel_output is True:
            raise PlanError(f"{plan.family}: {why}; leave the logits whole (parallel_output=False)")
        if why is not None:
            warnings.warn(f"{plan.family}: logits stay whole on each rank: {why}", stacklevel=2)
        parallel_output = why is None
    sequence = None
    if mode is not None:
        sequence = SequenceParallel(mode, groups, plan.family, local_logits=parallel_output)
    if parallel_output:
        plan = use_parallel_loss(model, plan, groups.tp, sequence)
        place_seams(modules, plan, groups)
    unlabelled = {name: value for name, value in arguments.items() if name != "labels"}
    if sequence is not None:
        counted, counted_of_parts = CountedPositions(), CountedPositions()
        inner = [model.get_submodule(place) for place in present_layers(model, layers)]
        with refusing_failures(plan, *ONCE_SPLIT), counted.inside(inner):
            before = shown_by(model, unlabelled)  # over tensor parallelism alone
            limit = rounding_of(model, unlabelled, before)
        if mode in OVER_TENSOR:
            plan = over_sequence(model, plan, layers)
            place_seams(modules, plan, groups)
    report = SplitReport(plan, tp, frozenset(), frozenset(), unreached(model, arguments))
    if tp > 1:
        split_ones = [parameters[name] for name in parameters if name in plan.splits]
        report = declare_whole(model, plan, groups, unlabelled, split_ones)
        report = replace(report, unreached=unreached(model, arguments))
    if sequence is not None:
        sequence.attach(model, layers)
        with refusing_failures(plan, f"with {mode!r}"), counted_of_parts.inside(inner):
            after = _shown_over_sequence(model, unlabelled, sequence, before.output.shape)
        refuse_other_output(plan, before, after, limit, f"under {mode!r}", OTHER_TOKENS)
        for place in counted.of_parts(counted_of_parts):
            raise PlanError(
                f"{plan.family}: under {mode!r} a layer counts the positions of its tokens itself (torch.arange in "
                f"{place}), from 0 on every rank; use 'split_gather'. {AGAIN}"
            )
    is_stage = isinstance(vars(model).get("forward"), StageForward)
    if tp * plan.ep > 1 or sequence is not None or is_stage:
        parts = sequence is not None or is_stage
        refuse_whole_methods(model, plan.family, **({"generate": IN_PARTS} if parts else {}))
        if not parts and hasattr(model, "generate"):
            model.generate = partial(generate_alike, model.generate)
    if tp > 1:
        refuse_partial_outputs(model, plan.family, f"over tp {tp}", SPLIT_HEADS)
    if is_stage:
        refuse_partial_outputs(model, plan.family, "in stages", IN_STAGES)
    if tp * plan.ep > 1 or sequence is not None or is_stage:
        model.forward_stream = ForwardStream(groups)
        model.forward_stream.attach(model)
    setattr(model, REPORT, report)
    return report


def _shown_over_sequence(model: Any, arguments: dict[str, Any], sequence: SequenceParallel, shape: torch.Size) -> Shown:
    """The output of the example over a cut sequence, joined. Collective over the ranks that cut it.

    Behind its layers gpt2 gives hidden states the shape of its input: the sequence is joined there for such a model.
    """
    if sequence.local_logits:
        try:
            after = sequence.join(shown_by(model, arguments).output, -2)
        except RuntimeError:
            after = None
        if after is not None and after.shape == shape:
            return Shown(after)
        sequence.local_logits = False
    return shown_by(model, arguments)


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


def tag_slices(parameters: Mapping[str, nn.Parameter], plan: Plan, groups: ProcessGroups) -> None:
    """Mark the parameters that are slices, for contracts and checkpoints."""
    for name, parameter in parameters.items():
        split = plan.splits.get(name)
        if split is not None and "tp" in split.axes and groups.size("tp") > 1:
            set_tensor_model_parallel_attributes(parameter, True, split.dim, split.blocks, split.length)
        if split is not None and "ep" in split.axes:
            vars(parameter).update(EXPERT_TAGS)


def declare_whole(
    model: nn.Module, plan: Plan, groups: ProcessGroups, arguments: dict[str, Any], split: Collection[nn.Parameter]
) -> SplitReport:
    """Give whole parameters that learn their contracts, by what one watched forward of a split model shows.

    PlanError, naming the module, where no contract can make it right.
    """
    received = [value for value in arguments.get("received", ()) if getattr(value, "tensor_model_parallel", False)]
    with refusing_failures(plan, *ONCE_SPLIT):
        flow = run_watched(model, [*split, *received], arguments)
    if flow.faults:
        more = f" (and {len(flow.faults) - 1} more places)" if len(flow.faults) > 1 else ""
        raise PlanError(f"{plan.family}: {flow.faults[0]}{more}. {AGAIN}")
    both = sorted(flow.partial & flow.complete)
    if both:
        raise PlanError(
            f"{plan.family}: parameter {both[0]!r} is used with split tensors and with whole ones, so its gradient "
            f"is neither whole nor a part of a sum over tp. {AGAIN}"
        )
    whole = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in plan.splits}
    unseen = whole.keys() - flow.partial - flow.complete
    partial_ones = (flow.partial | (unseen & plan.partial)) & whole.keys()
    for name, parameter in whole.items():
        if name in partial_ones:
            declare_gradient(parameter, partial_over=("tp",))
        elif name not in unseen:
            declare_gradient(parameter)
    drop_parts_apart(model, flow, groups)
    return SplitReport(plan, groups.size("tp"), frozenset(partial_ones), frozenset(unseen))


class Shown(NamedTuple):
    """Values of a forward that are compared: logits or the last hidden state, and the loss if there are labels."""

    output: Tensor
    loss: Tensor | None = None

    @classmethod
    def of(cls, output: Any) -> Shown:
        """Of what a model gives."""
        if isinstance(output, Tensor):
            return cls(output)
        named = output.items() if hasattr(output, "keys") else enumerate(output)
        loss = output.get("loss") if hasattr(output, "keys") else None
        value = next(value for name, value in named if isinstance(value, Tensor) and name != "loss")
        return cls(value, loss if isinstance(loss, Tensor) and bool(loss.isfinite().all()) else None)


def shown_by(model: Any, arguments: Mapping[str, Any], *, whole: bool = False) -> Shown:
    """Values of a forward without gradients: as in training where there are labels, else in evaluation mode.

    whole: True to gather split logits.
    """
    output = run_quietly(model, arguments, training="labels" in arguments)
    return Shown.of(with_whole_logits(model, output) if whole else output)


def rounding_of(model: Any, arguments: Mapping[str, Any], before: Shown) -> float:
    """Largest relative change of the example's output `before` by rounding.

    In 16 bits a router may choose another expert after it. So the example runs once more there, rounded otherwise.
    """
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point())
    if eps <= torch.finfo(torch.float32).eps:
        return ROUNDING.get(before.output.dtype, IN_16_BITS)
    with rounded_otherwise(model):
        return max(IN_16_BITS, TIMES * distance_of(shown_by(model, arguments).output, before.output))


def distance_of(after: Tensor, before: Tensor) -> float:
    """The norm of a difference, relative to that of `before`."""
    return float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before).clamp(min=1e-30))


def refuse_other_output(
    plan: Plan,
    before: Shown,
    after: Shown,
    limit: float,
    how: str = "split over tp",
    why: str = "its plan is wrong",
) -> None:
    """The split model computes what the whole one did, up to rounding (`limit`), or its plan is wrong."""
    for what, value, expected in zip(("output", "loss"), after, before, strict=True):
        if value is None or expected is None:
            continue
        if value.shape != expected.shape:
            raise PlanError(
                f"{plan.family}: {how}, its {what} for the example is {list(value.shape)} and that of the whole model "
                f"{list(expected.shape)}, so {why}. {AGAIN}"
            )
        off = distance_of(value, expected)
        if not off <= limit:
            raise PlanError(
                f"{plan.family}: {how}, its {what} for the example is {off:.2g} away from that of the whole model "
                f"(relative to its norm), so {why}. {AGAIN}"
            )


@contextmanager
def refusing_failures(plan: Plan, when: str, advice: str = "", again: str = AGAIN) -> Iterator[None]:
    """A PlanError that names the module, for an error of a model's own code. again: what has become of the model."""
    try:
        yield
    except PlanError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, NotImplementedError) as error:
        if is_peers(error):  # another rank has ended, and the model's code is not to blame
            raise
        text = str(error).strip().splitlines() or [""]
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        where = next((type(owner).__name__ for owner in reversed(owners) if isinstance(owner, nn.Module)), "")
        raise PlanError(
            f"{plan.family}: its forward fails {when}: {type(error).__name__}: {text[0]} (in module {where!r}). "
            f"{advice}{again}"
        ) from error


@contextmanager
def refusing_together(what: str, *kinds: type[Exception], groups: agree.Groups = None) -> Iterator[None]:
    """Raise on all ranks what one of them raises inside: a PlanError, or an error of other kinds.

    Collective over `groups`, or else the world.
    """
    failure: Exception | None = None
    kinds = (PlanError, *kinds)
    try:
        yield
    except kinds as error:
        failure = error
    agree.refuse(failure, groups, what, PlanError)
