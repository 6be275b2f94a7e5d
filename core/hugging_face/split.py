"""split_model: cut a transformers model over tensor parallelism in place, by its plan. No DTensor, no tracing.

Parameters become this rank's slices and carry the tags that the gradient contract reads; modules at seams get a
SeamForward. One forward on a small example then shows what each whole parameter meets, which decides its contract.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.distributed.contract.gradient_contract import declare_gradient
from core.hugging_face.dataflow import Dataflow, run_watched
from core.hugging_face.experts import EXPERTS_SEAM, ExpertsForward, over_experts
from core.hugging_face.parallel_loss import use_parallel_loss
from core.hugging_face.plan import Plan, PlanError, Split
from core.hugging_face.seams import SeamForward
from core.hugging_face.sequence import OVER_CONTEXT, SequenceParallel
from core.hugging_face.slices import slice_of
from core.hugging_face.stages import list_of_layers
from core.hugging_face.transformers_plans import read_plan
from core.process_groups import ProcessGroups
from core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from core.tensor_parallel.mappings import resolve_groups

AGAIN = "The model has been cut; make it anew"
ONCE_SPLIT = ("once it is split", "A module there needs its whole width. ")
OTHER_TOKENS = "its layers use other tokens elsewhere than in attention, or in a way that is unknown here"
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3}  # fp64 models compute norms and routers in fp32
EXPERT_TAGS = {"allreduce": False, "expert_dim": 0}  # of experts that other ranks do not have
REPORT = "split_report"  # the attribute of a split model that says how it was split


@dataclass(frozen=True)
class SplitReport:
    """How a model was split. partial: whole parameters whose gradients are summed over tp, by what the forward showed.

    unseen: parameters that learn and that the example did not reach; they are taken to be whole with whole gradients.
    """

    plan: Plan
    tp: int
    rank: int
    partial: frozenset[str]
    unseen: frozenset[str]

    def __str__(self) -> str:
        lines = [self.plan.table(self.tp)]
        if self.partial:
            lines.append("gradients summed over tp: " + ", ".join(sorted(self.partial)))
        if self.unseen:
            lines.append("not reached by the example: " + ", ".join(sorted(self.unseen)))
        return "\n".join(lines)


def split_model(
    model: Any,
    plan: Plan | None = None,
    *,
    example: Mapping[str, Any] | None = None,
    parallel_output: bool = False,
    sequence_parallel: str | None = None,
    pg_collection: ProcessGroups | None = None,
) -> SplitReport:
    """Cut a transformers model over the tensor-parallel group, in place. Then wrap it in DistributedDataParallel.

    model: whole, with the same weights on every rank of the group, on a real device. plan: read from the model by
    default; `read_plan(model, policy)` makes one of a Policy. example: keyword arguments of one small forward, equal on
    all ranks; by default 8 token ids. It is run before and after the cut, without backward, and the outputs must be
    equal. parallel_output: keep the logits split and compute the loss from the parts. sequence_parallel: 'split_gather'
    or 'ring' over the tensor-parallel group, 'all_to_all' or 'ring_attn' over the context-parallel group; every rank of
    it is given the whole sequence.

    Collective over these groups. Raises PlanError on all of its ranks where sizes do not fit or the plan
    cannot give right gradients; what was found after the cut leaves the model unusable, so make it anew.
    """
    groups = resolve_groups(pg_collection)
    plan = prepare(model, plan, groups)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PlanError(f"{plan.family}: parameters are on the meta device; load the checkpoint by load_split instead")
    arguments = dict(example_of(model, groups) if example is None else example)
    before = _first_output(model, arguments) if groups.size("tp") * plan.ep > 1 else None
    cut_parameters(model, plan, groups)
    report = finish_split(
        model,
        plan,
        arguments,
        parallel_output=parallel_output,
        sequence_parallel=sequence_parallel,
        pg_collection=pg_collection,
    )
    if before is not None and not parallel_output:
        refuse_other_output(plan, before, _first_output(model, arguments))
    return report


def prepare(model: Any, plan: Plan | None, groups: ProcessGroups) -> Plan:
    """The plan, with everything refused that can be refused before a parameter is touched."""
    if getattr(model, REPORT, None) is not None:
        raise PlanError(f"this {type(model).__name__} was split already; split each model once")
    if not hasattr(model, "config") or not hasattr(model, "tp_plan"):
        raise PlanError(
            f"split_model takes a transformers model and was given a {type(model).__name__}; split before any wrapper"
        )
    if plan is None:
        try:
            plan = read_plan(model)
        except PlanError:
            if groups.size("tp") > 1:
                raise
            plan = Plan(model.config.model_type, {}, {})  # on one rank nothing is split
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


class WholeOnly:
    """Stands in place of a method that takes a model for whole: it would go on with this rank's part, and says so."""

    def __init__(self, method: Any, sentence: str) -> None:
        self.method, self.sentence = method, sentence

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """PlanError; but a call that brings the whole state along (`save_split`) is let through."""
        if kwargs.get("state_dict") is None:
            raise PlanError(self.sentence)
        return self.method(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeOnly:
        owner = self.method.__self__
        return WholeOnly(getattr(type(owner), self.method.__name__).__get__(memo.get(id(owner), owner)), self.sentence)


def refuse_whole_methods(model: Any, family: str, *, parallel_output: bool) -> None:
    """Refuse what would save, resize or sample from a rank's part as if it were the model."""
    refused = {
        "save_pretrained": "would save this rank's part as if it were the model; call save_split on all ranks",
        "resize_token_embeddings": "would resize this rank's part; resize the whole model before it is split",
    }
    if parallel_output:
        refused["generate"] = "would choose among this rank's part of the vocabulary; split with parallel_output=False"
    for name, why in refused.items():
        if not isinstance(getattr(model, name, None), (WholeOnly, type(None))):
            setattr(model, name, WholeOnly(getattr(model, name), f"{family} is split: {name} {why}"))


def finish_split(
    model: Any,
    plan: Plan,
    arguments: dict[str, Any],
    *,
    parallel_output: bool,
    sequence_parallel: str | None = None,
    pg_collection: ProcessGroups | None,
) -> SplitReport:
    """Tags, seams, and the forward that decides the contracts of whole parameters."""
    groups = resolve_groups(pg_collection)
    group, tp, rank = groups.tp, groups.size("tp"), groups.rank("tp")
    partial: set[str] = set()
    unseen: set[str] = set()
    sequence: SequenceParallel | None = None
    cut_to_the_end = parallel_output and sequence_parallel in OVER_CONTEXT
    if sequence_parallel is not None:
        sequence = SequenceParallel(sequence_parallel, groups, plan.family, local_logits=cut_to_the_end)
        layers = list_of_layers(model, f"{plan.family}: sequence parallelism is for models with")
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    tag_slices(parameters, plan, groups)
    for seam in plan.seams.values():
        if seam.style == EXPERTS_SEAM:
            modules[seam.module].forward = ExpertsForward(modules[seam.module], seam, groups)
    if parallel_output and (tp > 1 or sequence is not None):
        plan = use_parallel_loss(model, plan, group, sequence if cut_to_the_end else None)
    if tp > 1:
        for name, number in plan.numbers.items():
            owner, _, attribute = name.rpartition(".")
            setattr(modules[owner], attribute, number // tp)
        place_seams(modules, plan, group)
    if sequence is not None:
        with refusing_failures(plan, *ONCE_SPLIT):
            before = _first_output(model, arguments)  # over tensor parallelism alone
        whole, plan = plan, sequence.cut_plan(model, plan, layers)
        if plan is not whole:
            place_seams(modules, plan, group, whole)
    if tp > 1:
        flow = watch(model, plan, arguments, [parameters[name] for name in parameters if name in plan.splits])
        partial, unseen = declare_whole(parameters, plan, flow)
    if sequence is not None:
        sequence.attach(model, layers)
        with refusing_failures(plan, f"with {sequence_parallel!r}"):
            after = _first_output(model, arguments)
        after = sequence.join(after, -2) if sequence.local_logits else after
        refuse_other_output(plan, before, after, f"under {sequence_parallel!r}", OTHER_TOKENS)
    if tp * plan.ep > 1 or sequence is not None or "forward" in vars(model):  # a stage has a forward of its own
        refuse_whole_methods(model, plan.family, parallel_output=parallel_output)
    report = SplitReport(plan, tp, rank, frozenset(partial), frozenset(unseen))
    setattr(model, REPORT, report)
    model.check_replicas_in_first_step = tp * plan.ep > 1  # finalize_model_grads compares what must be equal, once
    return report


def place_seams(
    modules: Mapping[str, nn.Module], plan: Plan, group: dist.ProcessGroup | None, before: Plan | None = None
) -> None:
    """Give modules the forwards of their seams. before: the plan that they have already, of which some seams change."""
    known = {} if before is None else before.seams
    for seam in plan.seams.values():
        module = modules[seam.module]
        if seam.style != EXPERTS_SEAM and seam != known.get(seam.module):
            if seam.module in known:
                del module.forward
            module.forward = SeamForward(module, seam, group, _length(plan, seam.module))


def tag_slices(parameters: Mapping[str, nn.Parameter], plan: Plan, groups: ProcessGroups) -> None:
    """Mark the parameters that are slices, for contracts and checkpoints."""
    for name, parameter in parameters.items():
        split = plan.splits.get(name)
        if split is not None and "tp" in split.axes and groups.size("tp") > 1:
            set_tensor_model_parallel_attributes(parameter, True, split.dim, split.blocks, split.length)
        if split is not None and "ep" in split.axes:
            for tag, value in EXPERT_TAGS.items():
                setattr(parameter, tag, value)


def declare_whole(parameters: Mapping[str, nn.Parameter], plan: Plan, flow: Dataflow) -> tuple[set[str], set[str]]:
    """Give whole parameters that learn their contracts, by what a watched forward showed: (partial, unseen) ones."""
    partial: set[str] = set()
    unseen: set[str] = set()
    for name, parameter in parameters.items():
        if name in plan.splits or not parameter.requires_grad:
            continue
        seen = name in flow.partial or name in flow.complete
        if name in flow.partial or (not seen and name in plan.partial):
            declare_gradient(parameter, partial_over=("tp",))
            partial.add(name)
        elif seen:
            declare_gradient(parameter)
        if not seen:
            unseen.add(name)
    return partial, unseen


def _length(plan: Plan, module: str) -> int:
    """Of what a seam gathers or looks up, in the whole model; 0 where it does neither."""
    split = plan.splits.get(f"{module}.weight")
    return 0 if split is None else split.length


def _first_output(model: Any, arguments: dict[str, Any]) -> Tensor:
    """The first tensor that a forward gives, in evaluation mode and without gradients."""
    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng():
            output = model.eval()(**arguments)
    finally:
        model.train(training)
    return first_tensor(output)


def first_tensor(output: Any) -> Tensor:
    """The first tensor of what a model gives: its logits, or its last hidden state."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "keys") else output
    return next(value for value in values if isinstance(value, Tensor))


def refuse_other_output(
    plan: Plan, before: Tensor, after: Tensor, how: str = "split over tp", why: str = "its plan is wrong"
) -> None:
    """The split model computes what the whole one did, up to rounding, or its plan is wrong."""
    off = float(torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before).clamp(min=1e-30))
    if not off <= ROUNDING.get(before.dtype, 0.1):
        raise PlanError(
            f"{plan.family}: {how}, its output for the example is {off:.2g} away from that of the whole model "
            f"(relative to its norm), so {why}. {AGAIN}"
        )


def watch(model: Any, plan: Plan, arguments: dict[str, Any], split: list[nn.Parameter]) -> Dataflow:
    """One watched forward of a split model. PlanError, naming the module, where no contract can make it right."""
    with refusing_failures(plan, *ONCE_SPLIT):
        flow = run_watched(model, split, arguments)
    both = sorted(flow.partial & flow.complete)
    if flow.faults:
        more = f" (and {len(flow.faults) - 1} more places)" if len(flow.faults) > 1 else ""
        raise PlanError(f"{plan.family}: {flow.faults[0]}{more}. {AGAIN}")
    if both:
        raise PlanError(
            f"{plan.family}: parameter {both[0]!r} is used beside split tensors and beside whole ones, so its gradient "
            f"is neither whole nor a part of a sum over tp. {AGAIN}"
        )
    return flow


@contextmanager
def refusing_failures(plan: Plan, when: str, advice: str = "") -> Iterator[None]:
    """A PlanError, naming the module, instead of an error of a model's own code."""
    try:
        yield
    except PlanError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, NotImplementedError) as error:
        text = str(error).strip().splitlines() or [""]
        raise PlanError(
            f"{plan.family}: its forward fails {when}: {type(error).__name__}: {text[0]} (in module "
            f"{where_it_failed(error)!r}). {advice}{AGAIN}"
        ) from error


def where_it_failed(error: BaseException) -> str:
    """The innermost module class whose forward the error came from."""
    place, trace = "", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            place = type(owner).__name__
        trace = trace.tb_next
    return place


def example_of(model: Any, groups: ProcessGroups) -> dict[str, Any]:
    """A forward's arguments for a model of token ids: one sequence of 8, or more where more ranks may cut it."""
    if model.main_input_name != "input_ids":
        raise PlanError(
            f"{type(model).__name__} takes {model.main_input_name!r}; pass example= with the arguments of a small "
            "forward, equal on all ranks"
        )
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", 8)
    length = math.lcm(8, groups.size("tp"), 2 * groups.size("cp"))
    ids = torch.arange(length, device=model.device).unsqueeze(0) % vocabulary
    return {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
