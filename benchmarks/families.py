"""The census of families: every class with a plan or a policy, through HybridParallelPlugin at its defaults.

(With an `example` where a model takes more than token ids, as the error for such a model says.)

A tiny random copy makes three steps of SGD on a batch of three rows with labels, split over tensor-parallel ranks of
this machine, or over its sequence (--sp, in the last two modes over 2 ranks of their own), and on one process of plain
transformers. Losses and weights are compared. In fp64 they are equal within 1e-8: norms that a model computes in fp32
round the last digit of fp64 to one of theirs. In bf16 both are compared with the fp64 run, and the split one may be off
three times as far as the one process that is off further: unchanged, or rounded otherwise.

A table on disk is resumable: classes that it holds are left out. Exit status 0: all are equal or refused by name.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import circumstances
from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin
from core.groups import agree
from core.hugging_face.read.example import with_labels
from core.hugging_face.read.precision import cast_model, rounded_otherwise
from core.hugging_face.read.transformers_plans import transformers_package
from core.hugging_face.run.sequence import MODES, OVER_CONTEXT
from core.verify.in_double import InDouble
from core.verify.rank_pool import RankFailure, RankPool
from tests.families.check import STEPS, Verdict, projected, ranks_of
from tests.families.tiny import INPUTS, all_families, tiny_config, tiny_inputs, tiny_model

TOLERANCE = 1e-8
MOVES = 0.05  # how far the first step moves the weight with the largest gradient
WORSE, FLOOR = 3.0, 0.02  # in bf16: times the one process's own error, and what is allowed in any case
PRECISIONS = {"fp64": "fp32", "bf16": "bf16"}  # 'fp32' leaves parameters as they are
Run = tuple[list[float], dict[str, Tensor]]  # losses, and weights after the last step


def loss_of(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """The model's own loss of labels; a random projection of its output, where it computes none."""
    output = model(**batch)
    own = output.get("loss")
    return own if isinstance(own, Tensor) else projected(output, 0)[1]


def one_process(model: Any, batch: Mapping[str, Any], rate: float, dtype: torch.dtype, otherwise: bool = False) -> Run:
    """Steps of plain transformers, with masters in fp64 where the model is in 16 bits.

    otherwise: True to round 16 bits otherwise than they are, as another order of sums does.
    """
    losses = []
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    if dtype is not torch.float64:
        model = cast_model(copy.deepcopy(model), dtype)
        batch = {n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in batch.items()}
    for _ in range(STEPS):
        with rounded_otherwise(model) if otherwise else nullcontext():
            loss = loss_of(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                masters[name] -= rate * parameter.grad.double()
                parameter.data.copy_(masters[name])
                parameter.grad = None
    return losses, {name: p.detach().double() for name, p in model.named_parameters()}


def boosted(model: Any, batch: Mapping[str, Any], rate: float, tp: int, precision: str, **options: Any) -> Run:
    """Steps of the boosted model. ValueError where `boost` refuses it."""
    plugin = HybridParallelPlugin(tp, 1, precision=PRECISIONS[precision], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    wrapped, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(wrapped, batch)
        plugin_backward(wrapped, optimizer, loss)
        losses.append(float(loss.detach()))
    weights = {n: wrapped.cut.whole_of(n, p.detach()).double() for n, p in wrapped.unwrap().named_parameters()}
    return losses, weights


def plugin_backward(model: Any, optimizer: Any, loss: Tensor) -> None:
    """Backward, a step, and no gradients."""
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def learning_rate(model: Any, batch: Mapping[str, Any]) -> float:
    """A rate by which the first step moves the weight with the largest gradient by MOVES."""
    loss_of(model, batch).backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    return MOVES / largest


def distance(found: Run, wanted: Run, before: Mapping[str, Tensor]) -> tuple[float, str]:
    """(the largest difference of a loss, or of a weight relative to the largest movement; of which)."""
    losses = zip(found[0], wanted[0], strict=True)
    offs = [(abs(mine - its) / max(abs(its), 1e-6), f"the loss of step {n}") for n, (mine, its) in enumerate(losses, 1)]
    moved = max(float((after - before[name]).abs().max()) for name, after in wanted[1].items())
    offs += [(float((found[1][n] - w).abs().max()) / moved, f"after {STEPS} steps {n!r}") for n, w in wanted[1].items()]
    return max((off if math.isfinite(off) else math.inf, what) for off, what in offs)


def verdict_on_rank(name: str, kind: type, tp: int, precision: str, sp: str | None = None) -> Verdict:
    """The verdict on a configuration class, on every rank alike. Collective over all ranks: `ranks_of(tp, sp=sp)`.

    sp: a mode of sequence parallelism.
    """
    transformers_package().logging.set_verbosity_error()
    dtype = torch.float64 if precision == "fp64" else torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.set_default_dtype(torch.float64)
            with InDouble():
                model = tiny_model(tiny_config(kind))
                batch = with_labels(model, tiny_inputs(model))
                before = {n: p.detach().clone() for n, p in model.named_parameters()}
                rate = learning_rate(model, batch)
                exact = one_process(copy.deepcopy(model), batch, rate, torch.float64)
            torch.set_default_dtype(torch.float32)
            ways = () if precision == "fp64" else (False, True)
            own = [distance(one_process(model, batch, rate, dtype, each), exact, before)[0] for each in ways]
        except Exception as error:
            return Verdict(name, "not built", f"{type(error).__name__}: {first_line(error)}")
        finally:
            torch.set_default_dtype(torch.float32)
        # A model in fp64 is computed with in fp64 throughout, also where its family casts to fp32.
        with InDouble() if precision == "fp64" else nullcontext():
            try:
                needs_example = type(model.config).__name__ in INPUTS
                options: dict[str, Any] = {"example": tiny_inputs(model)} if needs_example else {}
                if sp is not None:
                    size = ranks_of(1, sp=sp) if sp in OVER_CONTEXT else None
                    options |= {"enable_sequence_parallelism": True, "sequence_parallelism_mode": sp, "sp_size": size}
                found = boosted(model, batch, rate, tp, precision, **options)
            except ValueError as error:
                return Verdict(name, "refused", first_line(error))
    limit = TOLERANCE if precision == "fp64" else WORSE * max(own) + FLOOR
    off, what = max(agree.gather(distance(found, exact, before), None, "the verdict").values())
    if off <= limit:
        return Verdict(name, "equal", off=off)
    return Verdict(name, "wrong", f"{what} is {off:.2g} off, where {limit:.2g} is allowed", off)


def first_line(error: Exception) -> str:
    """Text of an error, in one line."""
    return (str(error).strip().splitlines() or [""])[0]


def table_of(rows: Mapping[str, Mapping[str, Any]], tp: int, precision: str, sp: str | None = None) -> str:
    """Counts, and a row for each class that is not equal, in Markdown."""
    counts = Counter(row["answer"] for row in rows.values()).most_common()
    lines = [
        f"At tp {tp}, {f'{sp}, ' if sp else ''}{precision}: "
        + ", ".join(f"{count} {answer}" for answer, count in counts)
        + "."
    ]
    odd = {name: row for name, row in rows.items() if row["answer"] != "equal"}
    lines += ["", "| class | answer | |", "| --- | --- | --- |"] if odd else []
    lines += [f"| `{name}` | {row['answer']} | {row['why']} |" for name, row in odd.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the census; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks families", description=__doc__)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks (default: 2)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp64")
    parser.add_argument("--sp", choices=MODES, help="split the sequence too, in this mode")
    parser.add_argument("--table", type=Path, help="a file of verdicts, which this run adds to")
    parser.add_argument("names", nargs="*", help="parts of family/ConfigClass; all where none is given")
    options = parser.parse_args(arguments)
    mode = f", {options.sp}" if options.sp else ""
    layout = f"tp {options.tp}{mode}, {options.precision}, transformers {transformers_package().__version__}"
    known: dict[str, Any] = {}
    if options.table is not None and options.table.exists():
        known = json.loads(options.table.read_text())
    rows: dict[str, Any] = known.setdefault(layout, {})
    chosen = all_families()
    if options.names:
        chosen = {name: kind for name, kind in chosen.items() if any(part in name for part in options.names)}
    world = ranks_of(options.tp, sp=options.sp)
    with RankPool(world) as pool:
        for name, kind in chosen.items():
            if name in rows:
                continue
            given = (name, kind, options.tp, options.precision, options.sp)
            try:
                verdict: Verdict = pool.run(verdict_on_rank, world, given, {}, limit_s=240.0)
            except RankFailure as error:
                verdict = Verdict(name, "wrong", f"it fails: {str(error).strip().splitlines()[-1]}")
            print(verdict, flush=True)
            rows[name] = {"answer": verdict.answer, "why": verdict.why, "off": verdict.off}
            if options.table is not None:
                known["circumstances"] = circumstances("families", arguments)
                options.table.write_text(json.dumps(known, indent=1) + "\n")
    print(table_of(rows, options.tp, options.precision, options.sp))
    return int(any(row["answer"] not in ("equal", "refused") for row in rows.values()))
