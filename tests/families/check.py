"""Check a family: train a tiny random copy, split over ranks, against one unsplit process, in fp64.

Both run three steps of SGD. Outputs and losses of each step, every gradient of the first step, and every weight after
the last are compared. Gradients go through DistributedDataParallel and finalize_model_grads, so the gradient contracts
are checked too. Families cast to fp32 inside; here such casts give fp64, so that equal means 1e-9.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.groups import agree
from core.hugging_face.cut.places import find_cut
from core.hugging_face.cut.report import REPORT
from core.hugging_face.cut.slices import whole_of
from core.hugging_face.cut.split import split_model, split_stages
from core.hugging_face.read.example import with_labels
from core.hugging_face.read.plan import Plan, PlanError
from core.hugging_face.read.transformers_plans import transformers_package
from core.hugging_face.run.sequence import OVER_CONTEXT
from core.hugging_face.run.stages import activations_of, stages_config
from core.pipeline_parallel import PipelineLayout, PipelineRunner, wrap_stages
from core.verify.in_double import InDouble
from core.verify.rank_pool import RankFailure, RankPool
from tests.families.tiny import tiny_config, tiny_inputs, tiny_model

TOLERANCE = 1e-9
GROWTH = 100.0  # allowed growth of rounding errors in outputs per step; weights have no such allowance
STEPS, MOVES = 3, 0.02  # SGD steps; in the first one, the weight with the largest gradient moves by MOVES
Answer = Literal["equal", "refused", "wrong", "not built"]


@dataclass(frozen=True)
class Verdict:
    """Result of checking one family.

    Attributes:
        name: Name of the family.
        answer: The result.
        why: Reason, if it is not "equal".
        off: Largest difference, relative to the largest value that it is compared with.
        summed: Number of unsplit parameters whose gradients were summed over tp, and how many of these have no rule in
            the plan.
    """

    name: str
    answer: Answer
    why: str = ""
    off: float = 0.0
    summed: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        words = {"equal": f"at most {self.off:.1e} off"}.get(self.answer, self.why)
        return f"{self.name}: {self.answer}: {words}"


def check_on_rank(
    name: str,
    kind: type,
    tp: int,
    overrides: Mapping[str, Any] | None = None,
    *,
    pp: int = 1,
    ep: int = 1,
    sp: str | None = None,
) -> Verdict:
    """Check one configuration class; every rank returns the same verdict.

    Collective over all ranks; there must be `ranks_of(tp, pp, ep, sp)` of them.

    Args:
        name: Name of the family.
        kind: Configuration class.
        tp: Tensor-parallel size.
        overrides: Values of the tiny configuration.
        pp: Number of pipeline stages. Their microbatches have different tokens.
        ep: Number of ranks that share the experts. Without stages they have different tokens.
        sp: Mode of sequence parallelism.

    Returns:
        The verdict.
    """
    batches = pp if pp > 1 else ep
    transformers_package().logging.set_verbosity_error()
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = tiny_model(tiny_config(kind, overrides))
                inputs = tiny_inputs(model)
                reference = copy.deepcopy(model)
                microbatches = [_microbatch(model, inputs, number) for number in range(batches)]
                expected, grads, rate = _reference_steps(reference, microbatches)
            except Exception as error:
                text = (str(error).strip().splitlines() or [""])[0]
                return Verdict(name, "not built", f"{type(error).__name__}: {text}")
            values = [*grads.values(), *(tensor for step in expected for batch in step for tensor in batch)]
            if not all(value is None or bool(value.isfinite().all()) for value in values):
                return Verdict(name, "not built", "the tiny copy's own output or gradients are not finite")
            if not parallel_state.model_parallel_is_initialized():
                cp = 2 if sp in OVER_CONTEXT else 1
                parallel_state.initialize_model_parallel(
                    tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep
                )
            try:
                if pp > 1:
                    run, chunks = _pipeline(model, microbatches, inputs, pp, sp)
                    model = chunks[0].module
                else:
                    split_model(model, example=inputs, sequence_parallel=sp)
                    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), model)
                    mine = parallel_state.get_process_groups().rank("dp")
                    run, chunks = partial(_data_parallel_step, wrapped, microbatches[mine], mine), [wrapped]
                    expected = [step[mine : mine + 1] for step in expected]
            except PlanError as error:
                return Verdict(name, "refused", str(error))
            plan = getattr(model, REPORT).plan
            differences = [(0.0, "")]
            for step, wanted in enumerate(expected, start=1):
                for batch, wanted_batch in zip(run(), wanted, strict=False):  # only the last stage has outputs
                    for found, value, what in zip(batch, wanted_batch, ("output", "loss"), strict=True):
                        off, place = _off(found, value, float(value.abs().max()), f"the {what} of step {step}")
                        differences.append((off / GROWTH ** (step - 1), place))
                if step == 1:
                    mine_now = {n: p.grad for n, p in model.named_parameters()}
                    differences += _differences("the gradient of", mine_now, grads, plan)
                sgd_step(model, rate)
                for chunk in chunks:
                    chunk.zero_grad_buffer()
    finally:
        torch.set_default_dtype(torch.float32)
    weights = {name: p.detach() for name, p in reference.named_parameters(remove_duplicate=False)}
    mine_now = {name: p.detach() for name, p in model.named_parameters()}
    differences += _differences(f"after {STEPS} steps", mine_now, weights, plan)
    worst = max(agree.gather(max(differences), None, "the verdict").values())
    report = getattr(model, REPORT)
    summed = len(report.partial), len(report.partial - report.plan.partial)
    answer: Answer = "equal" if worst[0] <= TOLERANCE else "wrong"
    why = "" if answer == "equal" else f"{worst[1]} is {worst[0]:.2g} off"
    return Verdict(name, answer, why, worst[0], summed)


def check_families(
    kinds: Mapping[str, type], tp: int, report: Callable[[Verdict], object], overrides: Mapping[str, Any], **sizes: Any
) -> list[Verdict]:
    """Check families one after another on processes of this machine.

    Args:
        kinds: Configuration classes, by `family/ConfigClass`.
        tp: Tensor-parallel size.
        report: Called with each verdict.
        overrides: Values of the tiny configurations.
        **sizes: pp, ep, and sp, as in `check_on_rank`.

    Returns:
        The verdicts.
    """
    verdicts, world = [], ranks_of(tp, **sizes)
    with RankPool(world) as pool:
        for name, kind in kinds.items():
            try:
                verdict: Verdict = pool.run(check_on_rank, world, (name, kind, tp, overrides), sizes, limit_s=180.0)
            except RankFailure as error:
                last = str(error).strip().splitlines()[-1]
                verdict = Verdict(name, "wrong", f"it fails while it is trained: {last}")
            report(verdict)
            verdicts.append(verdict)
    return verdicts


def table(verdicts: Iterable[Verdict], tp: int, pp: int = 1, ep: int = 1, sp: str | None = None) -> str:
    """Format the verdicts as a Markdown table with counts; each family has one row.

    Args:
        verdicts: Results of `check_families`.
        tp: Tensor-parallel size.
        pp: Number of pipeline stages.
        ep: Number of ranks that share the experts.
        sp: Mode of sequence parallelism.

    Returns:
        The table.
    """
    verdicts = list(verdicts)
    counts = ", ".join(f"{n} {answer}" for answer, n in Counter(verdict.answer for verdict in verdicts).most_common())
    layout = f"tp {tp}" + "".join(f", {name} {size}" for name, size in (("pp", pp), ("ep", ep)) if size > 1)
    layout += f", {sp}" if sp else ""
    rows = [f"At {layout}: {counts}.", "", "| family | answer | |", "| --- | --- | --- |"]
    for verdict in verdicts:
        total, without = verdict.summed
        summed = f"{total} gradients summed over tp, {without} of them without a rule" if without else ""
        rows.append(f"| `{verdict.name}` | {verdict.answer} | {summed if verdict.answer == 'equal' else verdict.why} |")
    return "\n".join(rows)


def ranks_of(tp: int, pp: int = 1, ep: int = 1, sp: str | None = None) -> int:
    """Return the number of ranks of a check. A mode over a separate group doubles it."""
    return tp * pp * ep * (2 if sp in OVER_CONTEXT else 1)


def _microbatch(model: Any, inputs: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the inputs with labels, and with different tokens for each microbatch."""
    ids = ("input_ids", "decoder_input_ids")
    return with_labels(
        model, {name: value.roll(number, -1) if name in ids else value for name, value in inputs.items()}
    )


def _reference_steps(
    model: Any, microbatches: list[dict[str, Any]]
) -> tuple[list[list[list[Tensor]]], dict[str, Tensor | None], float]:
    """(output and loss of each microbatch of each step, the first step's gradients, the learning rate)."""
    expected, grads, rate = [], dict[str, Tensor | None](), 0.0
    for step in range(STEPS):
        count = len(microbatches)
        expected.append([_backward(model, each, number, count) for number, each in enumerate(microbatches)])
        if step == 0:
            grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
            rate = MOVES / max(float(grad.abs().max()) for grad in grads.values() if grad is not None)
        sgd_step(model, rate)
        model.zero_grad(set_to_none=True)
    return expected, grads, rate


@torch.no_grad()
def sgd_step(model: Any, rate: float) -> None:
    """Take one step of SGD."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.sub_(rate * parameter.grad)


def _data_parallel_step(wrapped: Any, batch: dict[str, Any], number: int) -> list[list[Tensor]]:
    """Run one step on a batch, finalize its gradients, and return output and loss."""
    found = [_backward(wrapped, batch, number)]
    finalize_model_grads([wrapped])
    return found


def _pipeline(
    model: Any, microbatches: list[dict[str, Any]], inputs: dict[str, Any], pp: int, sp: str | None
) -> tuple[Callable[[], list[list[Tensor]]], list[Any]]:
    """Return a function that runs a step and returns output and loss of each microbatch, and this rank's stages."""
    layers = find_cut(model).count
    layout = PipelineLayout(tuple(layers // pp + (stage < layers % pp) for stage in range(pp)), pp)
    (stage,) = split_stages(model, layout, example=inputs, sequence_parallel=sp)
    found: list[list[Tensor]] = []

    def forward_step(chunk: Any, number: int, hidden: Tensor | None) -> Tensor:
        output = chunk(received=hidden, **microbatches[number])
        if isinstance(output, (Tensor, tuple)):
            return output
        value, loss = projected(output, number)
        found.append([value.detach(), loss.detach()])
        return loss

    chunks = wrap_stages(stages_config(layout), DistributedDataParallelConfig(), [stage])
    runner = PipelineRunner(chunks, layout, forward_step, activations_of(stage, microbatches[0]))

    def step() -> list[list[Tensor]]:
        found.clear()
        runner.step(range(pp))
        return list(found)

    return step, chunks


def _backward(call: Any, inputs: dict[str, Any], number: int = 0, share: int = 1) -> list[Tensor]:
    """Run forward and backward; return the output and the loss."""
    value, loss = projected(call(**inputs), number)
    (loss / share).backward()
    return [value.detach(), loss.detach()]


def projected(output: Any, number: int) -> tuple[Tensor, Tensor]:
    """Return the output, and a loss that depends on every element of it.

    The loss is a mean with random weights, different for each microbatch, plus the model's own loss.
    """
    named = [output.get(name) for name in ("logits", "last_hidden_state", "pred_masks")]
    own = output.get("loss")
    value = next(value for value in [*named, *output.values()] if isinstance(value, Tensor))
    generator = torch.Generator("cpu").manual_seed(11 + number)
    weights = torch.randn(value.shape, generator=generator, dtype=torch.float64, device="cpu")
    loss = (value * weights.to(value.device)).mean()
    return value, loss if own is None else loss + own


def _off(found: Tensor, wanted: Tensor, scale: float, what: str) -> tuple[float, str]:
    """Return the largest difference relative to `scale`, and the name of the compared value."""
    off = float((found - wanted).abs().max()) / scale
    return off if math.isfinite(off) else math.inf, what


def _differences(
    what: str, found: dict[str, Tensor | None], wanted: Mapping[str, Tensor | None], plan: Plan
) -> Iterator[tuple[float, str]]:
    """Yield `_off` of each of this rank's tensors, relative to the largest value in the full model.

    `found` are slices. Collective over the groups that cut them.
    """
    largest = max(float(value.abs().max()) for value in wanted.values() if value is not None)
    for name, piece in found.items():
        value, expected = whole_tensor(name, piece, plan), wanted[name]
        if value is not None and expected is not None:
            yield _off(value, expected, largest, f"{what} {name!r}")
        elif (value is not None and value.any()) or (expected is not None and expected.any()):
            yield math.inf, f"{what} {name!r}, which only one of the two has,"


def whole_tensor(name: str, piece: Tensor | None, plan: Plan) -> Tensor | None:
    """Gather a full tensor from its slices. Collective over the groups that cut it."""
    groups = parallel_state.get_process_groups()
    return None if piece is None else whole_of(piece, plan.splits.get(name), groups)
