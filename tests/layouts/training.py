"""train_gpt: some steps of training in a layout, next to the same steps on one process with torch's own optimizer.

Gradients that are right in one step can still train another model: a norm that counts a copy twice clips harder, a
shard that is not gathered stays behind, a bias that drifts chooses other experts. After many steps all of it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.distributed.guard.finite import ReplicaDriftError
from core.groups import agree
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.verify.gathered import Held
from core.verify.reference import Reference
from tests.layouts.gpt import (
    DTYPES,
    build_whole,
    global_batch,
    groups_of,
    job_of,
    token_mean,
    token_sum,
    wrapper_config,
)
from tests.layouts.layouts import Layout

BOUND = {"fp64": 1e-6, "fp32": 1e-2}
DECAY = 0.01
CLIP = 0.5  # below most norms, so that a wrong one shows in every weight
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.9},
    "adam": {"optimizer": "adam", "lr": 0.01, "adam_eps": 1e-6},
}


@dataclass(frozen=True)
class TrainingReport:
    """The verdict on several steps of training; equal on all ranks.

    loss_errors, norm_errors: relative, of each step's loss and gradient norm. weight_error: the largest relative one of
    a parameter after the last step, of parameter `worst`. moved: by how much the reference's weights changed, relative.
    stopped: why training ended early, or nothing.
    """

    title: str
    bound: float
    loss_errors: tuple[float, ...]
    norm_errors: tuple[float, ...]
    weight_error: float
    worst: str
    moved: float
    stopped: str = ""
    digest: str = ""

    @property
    def largest_error(self) -> float:
        """Of losses, norms and weights."""
        return max([self.weight_error, *self.loss_errors, *self.norm_errors])

    @property
    def ok(self) -> bool:
        """Was everything within the bound, and did the weights move by far more than it?"""
        return not self.stopped and self.largest_error <= self.bound and self.moved > 1e3 * self.bound

    def __str__(self) -> str:
        steps = len(self.loss_errors)
        if self.stopped:
            return f"{self.title}: stopped in step {steps}: {self.stopped}"
        if self.moved <= 1e3 * self.bound:
            return f"{self.title}: the reference's weights moved by {self.moved:.3g}, too little to show anything"
        if self.ok:
            return f"{self.title}: {steps} steps right, largest relative error {self.largest_error:.2g}"
        lines = [
            f"{self.title}: after {steps} steps {self.worst!r} is off by {self.weight_error:.3g} (bound {self.bound:g})"
        ]
        for what, errors in (("loss", self.loss_errors), ("gradient norm", self.norm_errors)):
            late = next((step for step, error in enumerate(errors) if not error <= self.bound), None)
            if late is not None:
                lines.append(f"the {what} is wrong from step {late} on, relative error {errors[late]:.3g}")
        return "\n  ".join(lines)


def train_gpt(layout: Layout, dtype: str = "fp64", *, optimizer: str = "sgd", steps: int = 20) -> TrainingReport:
    """The report on so many steps of one layout, with new data in each and the drift guard on.

    Collective over a started default process group of `layout.world` ranks.
    """
    with groups_of(layout) as groups:
        job = job_of(layout, dtype, groups, wrapper_config(layout, check_replicas=True))
        loss_fn = token_sum if layout.per_token else token_mean
        reference = Reference(job, lambda: build_whole(layout), torch.float64, loss_fn)
        ours = get_megatron_optimizer(
            OptimizerConfig(**OPTIMIZERS[optimizer], weight_decay=DECAY, clip_grad=CLIP, params_dtype=DTYPES[dtype]),
            job.model.chunks,
        )
        theirs = PlainTraining(reference.model, optimizer) if reference.model is not None else None
        start = reference.gather(weights_of)
        losses: list[float] = []
        norms: list[float] = []
        stopped = ""
        for step in range(steps):
            batch = global_batch(layout, step)
            expected = reference.step(batch)
            norm = _from_rank_zero(theirs.update(expected.grads) if theirs is not None else None)
            try:
                loss = job.step(batch)
                updated, our_norm, _ = ours.step()
            except ReplicaDriftError as error:
                stopped = str(error)
                break
            losses.append(abs(loss - expected.loss) / max(abs(expected.loss), 1.0))
            norms.append(abs((our_norm or 0.0) - norm) / norm if updated else float("inf"))
        want = reference.gather(weights_of)
        floor = 1e-3 * _norm(want.values()) / max(1, len(want)) ** 0.5
        with job.model.gathered():
            errors = [(_error(held, want[held.name], floor), held.name) for held in job.model.trained]
        weight_error, worst = max(agree.gather(max(errors, default=(0.0, "")), None, "the largest error").values())
        return TrainingReport(
            title=f"{dtype} {layout} {optimizer}",
            bound=BOUND[dtype],
            loss_errors=tuple(losses),
            norm_errors=tuple(norms),
            weight_error=weight_error,
            worst=worst,
            moved=_norm(want[name] - start[name] for name in want) / _norm(want.values()),
            stopped=stopped,
        )


class PlainTraining:
    """torch's own optimizer and clipping over the whole model; biases and vectors do not decay."""

    def __init__(self, model: nn.Module, optimizer: str) -> None:
        self.model = model
        options = OPTIMIZERS[optimizer]
        decays = {name: p.dim() > 1 and "bias" not in name for name, p in model.named_parameters()}
        matrices = [p for name, p in model.named_parameters() if decays[name]]
        vectors = [p for name, p in model.named_parameters() if not decays[name]]
        groups: list[Any] = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer: torch.optim.Optimizer
        if options["optimizer"] == "sgd":
            self.optimizer = torch.optim.SGD(groups, lr=options["lr"], momentum=options["sgd_momentum"])
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=options["lr"], eps=options["adam_eps"])

    def update(self, grads: dict[str, Tensor]) -> float:
        """One step; the gradients' norm before clipping."""
        for name, param in self.model.named_parameters():
            param.grad = grads[name].clone()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return float(norm)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters, by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _error(held: Held, whole: Tensor, floor: float) -> float:
    want, have = held.slice_of(whole).double(), held.tensor.detach().cpu().double()
    return float((have - want).norm()) / max(float(want.norm()), floor)


def _norm(tensors: Any) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())


def _from_rank_zero(value: float | None) -> float:
    return float(agree.gather(value, None, "the norm")[0] or 0.0)
