"""check: a tiny random copy of a family, split over tp, against one process that splits nothing. All in fp64.

Output and every gradient are compared, after DistributedDataParallel and finalize_model_grads, so the contracts are
checked too. Families cast to fp32 inside; here such casts give fp64, so that equal means 1e-9.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.groups import agree
from core.hugging_face.plan import Plan, PlanError
from core.hugging_face.sequence import OVER_CONTEXT
from core.hugging_face.slices import whole_of
from core.hugging_face.split import REPORT
from core.hugging_face.split_stages import split_model, split_stages
from core.hugging_face.stages import find_cut, stage_activations, stages_config
from core.hugging_face.tiny import tiny_config, tiny_inputs, tiny_model
from core.hugging_face.transformers_plans import transformers_package
from core.pipeline_parallel import PipelineLayout, PipelineRunner, wrap_stages
from core.verify.in_double import InDouble
from core.verify.rank_pool import RankFailure, RankPool

TOLERANCE = 1e-9
Answer = Literal["equal", "refused", "wrong", "not built"]


@dataclass(frozen=True)
class Verdict:
    """What became of one family. off: the largest difference, relative to the largest value it is compared with.

    summed: how many whole parameters had their gradients summed over tp, and of these without a rule in the plan.
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
    """The verdict on a configuration class, on every rank alike. Collective over all ranks: `ranks_of(tp, pp, ep, sp)`.

    Ranks of `ep` have other tokens, unless there are stages, whose microbatches have. sp: a mode of sequence
    parallelism.
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
                microbatches = [_microbatch(inputs, number) for number in range(batches)]
                expected = [_backward(reference, each, number, batches) for number, each in enumerate(microbatches)]
            except Exception as error:
                text = (str(error).strip().splitlines() or [""])[0]
                return Verdict(name, "not built", f"{type(error).__name__}: {text}")
            grads = [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
            if not all(bool(tensor.isfinite().all()) for tensor in (*expected, *grads)):
                return Verdict(name, "not built", "the tiny copy's own output or gradients are not finite")
            if not parallel_state.model_parallel_is_initialized():
                cp = 2 if sp in OVER_CONTEXT else 1
                parallel_state.initialize_model_parallel(
                    tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep
                )
            try:
                if pp > 1:
                    model, found = _pipeline(model, microbatches, inputs, pp, sp)
                else:
                    split_model(model, example=inputs, sequence_parallel=sp)
            except PlanError as error:
                return Verdict(name, "refused", str(error))
            if pp == 1:
                wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), model)
                mine = parallel_state.get_process_groups().rank("dp")
                found, expected = [_backward(wrapped, microbatches[mine], mine)], [expected[mine]]
                finalize_model_grads([wrapped])
    finally:
        torch.set_default_dtype(torch.float32)
    report = getattr(model, REPORT)
    worst = max(agree.gather(_worst(found, expected, model, reference, report.plan), None, "the verdict").values())
    summed = len(report.partial), len(report.partial - report.plan.partial)
    answer: Answer = "equal" if worst[0] <= TOLERANCE else "wrong"
    why = "" if answer == "equal" else f"{worst[1]} is {worst[0]:.2g} off"
    return Verdict(name, answer, why, worst[0], summed)


def check_families(
    kinds: Mapping[str, type], tp: int, told: Callable[[Verdict], object], overrides: Mapping[str, Any], **sizes: Any
) -> list[Verdict]:
    """The verdicts on families (by `family/ConfigClass`), one after another on processes of this machine.

    sizes: pp, ep and sp, as `check_on_rank` takes them.
    """
    verdicts, world = [], ranks_of(tp, **sizes)
    with RankPool(world) as pool:
        for name, kind in kinds.items():
            try:
                verdict: Verdict = pool.run(check_on_rank, world, (name, kind, tp, overrides), sizes, limit_s=180.0)
            except RankFailure as error:
                last = str(error).strip().splitlines()[-1]
                verdict = Verdict(name, "wrong", f"it fails while it is trained: {last}")
            told(verdict)
            verdicts.append(verdict)
    return verdicts


def table(verdicts: Iterable[Verdict], tp: int, pp: int = 1, ep: int = 1, sp: str | None = None) -> str:
    """The verdicts as a table in Markdown, with counts: one row a family, reasons in words."""
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
    """How many ranks a check takes: a mode over ranks of its own has two of them."""
    return tp * pp * ep * (2 if sp in OVER_CONTEXT else 1)


def _microbatch(inputs: dict[str, Any], number: int) -> dict[str, Any]:
    """The inputs with other tokens for each microbatch."""
    ids = ("input_ids", "decoder_input_ids")
    return {name: value.roll(number, -1) if name in ids else value for name, value in inputs.items()}


def _pipeline(
    model: Any, microbatches: list[dict[str, Any]], inputs: dict[str, Any], pp: int, sp: str | None
) -> tuple[Any, Any]:
    """This rank's stage after a step, and on the last stage what each microbatch gave."""
    layers = find_cut(model).count
    layout = PipelineLayout(tuple(layers // pp + (stage < layers % pp) for stage in range(pp)), pp)
    (stage,) = split_stages(model, layout, example=inputs, sequence_parallel=sp)
    found: list[Tensor] = []

    def forward_step(chunk: Any, number: int, hidden: Tensor | None) -> Tensor:
        output = chunk(received=hidden, **microbatches[number])
        if isinstance(output, Tensor):
            return output
        value, loss = _projected(output, number)
        found.append(value.detach())
        return loss

    chunks = wrap_stages(stages_config(layout), DistributedDataParallelConfig(), [stage])
    shape = stage_activations(stage, *inputs["input_ids"].shape)
    PipelineRunner(chunks, layout, forward_step, shape).step(range(pp))
    return stage, found


def _backward(call: Any, inputs: dict[str, Any], number: int = 0, share: int = 1) -> Tensor:
    """Backward from a random projection of the output, so that every element of it counts; the output."""
    value, loss = _projected(call(**inputs), number)
    (loss / share).backward()
    return value.detach()


def _projected(output: Any, number: int) -> tuple[Tensor, Tensor]:
    """The output, and a mean of it with random weights, which are others for each microbatch."""
    named = [output.get(name) for name in ("logits", "last_hidden_state", "pred_masks")]
    value = next(value for value in [*named, *output.values()] if isinstance(value, Tensor))
    generator = torch.Generator("cpu").manual_seed(11 + number)
    weights = torch.randn(value.shape, generator=generator, dtype=torch.float64, device="cpu")
    return value, (value * weights.to(value.device)).mean()


def _worst(found: list[Tensor], expected: list[Tensor], model: Any, reference: Any, plan: Plan) -> tuple[float, str]:
    """(largest relative difference, where): of the output, and of each gradient beside the model's largest one."""
    references = dict(reference.named_parameters(remove_duplicate=False))
    largest = max(float(p.grad.abs().max()) for p in references.values() if p.grad is not None)
    differences = [(0.0, "")]
    for output, wanted_output in zip(found, expected, strict=False):  # the first stages have no output
        differences.append((float((output - wanted_output).abs().max() / wanted_output.abs().max()), "the output"))
    for name, parameter in model.named_parameters():
        grad, wanted = whole_gradient(name, parameter, plan), references[name].grad
        if grad is None or wanted is None:
            if (grad is None or not grad.any()) and (wanted is None or not wanted.any()):
                continue
            return math.inf, f"the gradient of {name!r}, which only one of the two has,"
        off = float((grad - wanted).abs().max()) / largest
        differences.append((off if math.isfinite(off) else math.inf, f"the gradient of {name!r}"))
    return max(differences)


def whole_gradient(name: str, parameter: torch.nn.Parameter, plan: Plan) -> Tensor | None:
    """A finalized gradient in the shape of the whole model. Collective over the groups that a slice is cut over."""
    grad, groups = parameter.grad, parallel_state.get_process_groups()
    return None if grad is None else whole_of(grad, plan.splits.get(name), groups)
