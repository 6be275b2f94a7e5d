"""Find the weight of each microbatch in a loop's gradient.

A loop may take the mean over all samples in place of the mean of microbatches' means. A wrong loop may skip a
microbatch, or clear it by a late zero_grad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.distributed.buffer.grad_placeholder import tensors_in
from core.groups import agree
from core.verify.causes import SAMPLE
from core.verify.check import Allowed, comparison
from core.verify.diagnosis import SAME, fit
from core.verify.gathered import Held
from core.verify.job import Job
from core.verify.reference import Reference
from core.verify.report import GradientReport

IGNORED = -100  # label that torch's cross_entropy leaves out
LEFT_OVER = (
    "the gradients of the step before are still there: zero_grad is not called, or only after the first backward"
)


def microbatches_at_fault(
    job: Job,
    reference: Reference,
    batch: Any,
    report: GradientReport,
    got: dict[Any, Tensor],
    before: dict[Any, Tensor],
) -> str:
    """Describe which microbatches' parts of a gradient are wrong; '' if such parts do not explain it. Collective."""
    name, parts = reference.of_microbatches(batch, [entry.name for entry in report.wrong], SAMPLE)
    bound = max(entry.bound for entry in report.wrong if entry.name == name)
    held = next((held for held in job.model.trained if held.name == name), None)
    mine = "" if held is None else _of_rank(held, parts, got[held.key], before.get(held.key), max(SAME, 4 * bound))
    answers = agree.gather(mine, None, "the parts of the microbatches")
    return next((text for text in answers.values() if text), "")


def find_shares(
    job: Job,
    reference: Reference,
    batch: Sequence[Sequence[Any]],
    got: dict[Any, Tensor],
    bound: float | None,
    noise: float,
) -> str:
    """Set the reference's weights of microbatches if the loop takes a mean over samples or labels. Collective.

    Args:
        job: Model and steps of the layout.
        reference: The unsplit model; its ``shares`` are set.
        batch: Microbatches of all data ranks.
        got: This rank's gradients by ``Held.key``.
        bound: Allowed relative error.
        noise: Share of the norm over all gradients below which a gradient is round-off.

    Returns:
        A note about the mean; '' if microbatches have equally many samples and labels, or no mean fits.
    """
    means = {} if reference.per_token else shares_of(batch)
    for text, shares in {"": None, **means}.items() if means else ():
        reference.shares = shares
        expected = reference.step(batch)
        allowed = Allowed(expected, noise, bound, job.model.dtype)
        mine = [comparison(job, h, 0, got[h.key], expected.grads[h.name], allowed) for h in job.model.trained]
        if not agree.any(any(not each.error <= each.bound for each in mine), None, "the weights of microbatches"):
            if text:
                return f"the loop takes {text}, not the mean of its microbatches' means"
            return _uneven(batch)
    reference.shares = None
    return ""


def shares_of(batch: Sequence[Sequence[Any]]) -> dict[str, list[float]]:
    """Return means over samples or labels that differ from the mean of microbatches' means. Pure.

    Returns:
        The weight of each microbatch in the mean, whose mean is 1, by description.
    """
    found: dict[str, list[float]] = {}
    for what, count in (("samples", _samples), ("labels", _labels), ("predicted labels", _predicted)):
        counts = [[count(microbatch) for microbatch in of_rank] for of_rank in batch]
        number, total = sum(map(len, counts)), sum(map(sum, counts))
        if total and all(map(sum, counts)):
            found[f"the mean over the {what} of all ranks"] = [c * number / total for row in counts for c in row]
            by_rank = [c * len(row) / sum(row) for row in counts for c in row]
            found[f"the mean of the ranks' means over their {what}"] = by_rank
    return {text: shares for text, shares in found.items() if max(shares) - min(shares) > SAME}


def _samples(microbatch: Any) -> int:
    return next((len(tensor) for tensor in tensors_in(list(microbatch)) if tensor.dim()), 0)


def _labels(microbatch: Any) -> int:
    """Count the labels that are not ignored."""
    return sum(int((labels != IGNORED).sum()) for labels in _label_tensors(microbatch))


def _predicted(microbatch: Any) -> int:
    """Count the labels of a loss that predicts the next token, for which the first label of a row does not count."""
    return sum(int((labels[..., 1:] != IGNORED).sum()) for labels in _label_tensors(microbatch) if labels.dim())


def _label_tensors(microbatch: Any) -> list[Tensor]:
    """Return the tensors of labels: those of that name, else integer tensors with ignored elements."""
    kwargs = microbatch[1]
    if isinstance(kwargs.get("labels"), Tensor):
        return [kwargs["labels"]]
    integers = [tensor for tensor in tensors_in(list(microbatch)) if tensor.dtype == torch.int64]
    return [tensor for tensor in integers if bool((tensor == IGNORED).any())]


def _uneven(batch: Sequence[Sequence[Any]]) -> str:
    """Return a note about microbatches that count the same though their numbers of labels differ; '' otherwise."""
    counts = [_labels(microbatch) for of_rank in batch for microbatch in of_rank]
    if min(counts) == max(counts):
        return ""
    return (
        "microbatches with unequal numbers of labels count the same: the loop takes the mean of their means. Divide "
        "each summed loss by the step's number of labels, or a label in a short microbatch weighs more than others"
    )


def _of_rank(held: Held, parts: Sequence[Sequence[Tensor]], got: Tensor, before: Tensor | None, close: float) -> str:
    columns = [[held.slice_of(part).double().reshape(-1) for part in of_rank] for of_rank in parts]
    have = got.detach().cpu().double().reshape(-1)
    if have.numel() < sum(map(len, columns)) + 1:  # too few elements to distinguish data ranks
        columns = [[torch.stack(same).sum(dim=0) for same in zip(*columns, strict=True)]]
    flat = [column for of_rank in columns for column in of_rank]
    extra = [] if before is None else [before.detach().cpu().double().reshape(-1)]
    for more in ([], extra) if extra else ([],):  # try without the previous step first
        weights = fit(torch.stack([*flat, *more], 1), have, close)
        if isinstance(weights, list):
            width = len(columns[0])
            rows = [weights[start : start + width] for start in range(0, len(flat), width)]
            return in_words(rows, weights[len(flat)] if more else 0.0, close)
    return ""


def in_words(weights: Sequence[Sequence[float]], left_over: float, close: float = SAME) -> str:
    """Describe wrong weights of microbatches. Pure.

    Args:
        weights: For each data rank and microbatch, its weight in the gradient; 1 is right.
        left_over: Weight of the previous step's gradient.
        close: Tolerance.
    """
    everything = [weight for row in weights for weight in row]
    if abs(left_over) > close and all(abs(weight - 1.0) < close for weight in everything):
        return LEFT_OVER  # complete, or clipped by an optimizer
    if max(everything) - min(everything) < close or abs(left_over) > close:
        return ""
    found: dict[str, list[int]] = {}
    for rank, row in enumerate(weights):
        text = _of_data_rank(row, close)
        if text:
            found.setdefault(text, []).append(rank)
    (text, ranks), *others = found.items()
    if others or len(ranks) == len(weights):
        return "; ".join([text, *(other for other, _ in others)])
    return f"on data rank {', '.join(map(str, ranks))} alone {text}"


def _of_data_rank(row: Sequence[float], close: float) -> str:
    count = len(row)
    missing = [number for number, weight in enumerate(row, start=1) if abs(weight) < close]
    twice = [number for number, weight in enumerate(row, start=1) if abs(weight - 2.0) < close]
    right = [number for number, weight in enumerate(row, start=1) if abs(weight - 1.0) < close]
    if len(right) == count:
        return ""
    if missing and len(missing) + len(right) == count:
        which = f"{_numbered(missing)} of {count}, so {len(right)}/{count} of the gradient is there"
        if missing == list(range(1, len(missing) + 1)) and right:
            return f"a late zero_grad: it clears {which}; or their backward does not run"
        return f"the backward does not run of {which}"
    if twice and len(twice) + len(right) == count:
        return f"the backward runs twice of {_numbered(twice)} of {count}"
    return f"the microbatches count {', '.join(f'{weight:.3g}' for weight in row)} times what is due"


def _numbered(numbers: Sequence[int]) -> str:
    return f"microbatch{'' if len(numbers) == 1 else 'es'} {', '.join(map(str, numbers))}"
