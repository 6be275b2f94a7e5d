"""Findings about a program's steps that are right in some programs and mistakes in others.

They never make a report wrong; a report lists them after its verdict.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from core.groups import agree
from core.optimizer.optimizer import MegatronOptimizer
from core.verify.outputs import Outputs
from core.verify.ran_jobs import RanJob

MOST_NAMES = 5  # per line
MANY_ADDENDS = 64  # number of gradients summed in 16 bits
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class AlsoSeen:
    """Notes on the compared steps of one job. Every rank has one; ``lines`` combines them."""

    def __init__(self, job: RanJob) -> None:
        self.job = job
        self.modules: list[nn.Module] = [chunk.module for chunk in job.model.chunks]
        self.params = [dict(module.named_parameters()) for module in self.modules]
        self.outputs = Outputs()
        self.until_over = ExitStack()
        if len(self.modules) == 1 and job.groups.size("pp") == 1:
            self.until_over.callback(self.modules[0].register_forward_hook(self.outputs.note).remove)
        self.forwards_in_eval = 0  # forwards with gradients in eval mode
        self.used: set[tuple[int, str]] = set()  # parameters with a gradient in some step
        self.had: set[tuple[int, str]] = set()  # parameters with a gradient in the last step
        self.before: dict[tuple[int, str], Tensor] = {}  # weights when the first step's gradients were reduced
        self.still: list[tuple[int, str]] = []  # had a gradient then, but have not moved
        self.addends = 0

    def end_step(self, gradients: dict[tuple[int, str], Tensor], microbatches: int) -> None:
        """Record a step that was compared. Collective."""
        self.outputs.end_step()
        had = {key for key, grad in gradients.items() if bool(grad.any())}
        self.used |= had
        narrow = any(grad.dtype.itemsize <= 2 for grad in gradients.values())
        self.addends = microbatches if narrow and microbatches >= MANY_ADDENDS else 0
        with self.job.model.gathered(), torch.no_grad():
            now = {held.key: self._param(held.key).detach() for held in self.job.model.trained}
            if self.before:
                same = [key for key in self.before if torch.equal(self.before[key], _local(now[key]))]
                self.still = [key for key in same if key in self.had]
            self.before = {key: _local(value).clone() for key, value in now.items()}
        self.had = had

    def stop(self) -> None:
        """Remove the hooks and drop all copies."""
        self.until_over.close()
        self.before = {}

    def lines(self) -> list[str]:
        """Describe the findings of all ranks. Collective over the world."""
        trained = [held.key for held in self.job.model.trained]
        unused = [key for key in trained if key not in self.used]
        held_by, elsewhere = self._optimizers()
        left = [key for key in self.still if not held_by[id(self._param(key))]]
        twice = [self._name(key) for key in trained if held_by[id(self._param(key))] > 1]
        mine = {
            "unused": [self._name(key) for key in unused],
            "frozen": [self._name(key) for key in unused if not self._param(key).requires_grad],
            "left": [self._name(key) for key in left],
            "still": [self._name(key) for key in self.still if key not in left],
            "twice": twice,
        }
        texts = [self.outputs.broadcast(), self._only_vectors(), self.in_eval(), self._added(), elsewhere]
        answers = agree.gather((mine, [self._name(key) for key in trained], texts), None, "also seen")
        names = list(dict.fromkeys(name for _, names, _ in answers.values() for name in names))
        used_somewhere = {name for mine, names, _ in answers.values() for name in names if name not in mine["unused"]}
        return _in_words(names, used_somewhere, [mine for mine, *_ in answers.values()], answers[0][2])

    def _param(self, key: tuple[int, str]) -> Any:
        return self.params[key[0]][key[1]]

    def _name(self, key: tuple[int, str]) -> str:
        return next(held.name for held in self.job.model.held if held.key == key)

    def in_eval(self) -> str:
        """Report forwards with gradients in eval mode; '' if there were none."""
        if not self.forwards_in_eval:
            return ""
        return (
            f"{self.forwards_in_eval} forwards with gradients ran in eval mode. If an evaluation came before them, "
            "model.train() is missing after it"
        )

    def _added(self) -> str:
        if not self.addends:
            return ""
        return (
            f"gradients of {self.addends} microbatches are added up in 16 bits, which loses small ones; set "
            "grad_reduce_in_fp32"
        )

    def _only_vectors(self) -> str:
        """Report a model with matrices that trains only vectors: a filter by names may be wrong."""
        params = [param for of_chunk in self.params for param in of_chunk.values()]
        trained = [param.dim() > 1 for param in params if param.requires_grad]
        matrices = sum(param.dim() > 1 for param in params)
        if not trained or any(trained) or not matrices:
            return ""
        return (
            f"only vectors are trained, and all {matrices} matrices are frozen. This is right for tuning norms or "
            "biases alone; otherwise the filter that freezes parameters takes too many"
        )

    def _optimizers(self) -> tuple[Counter[int], str]:
        """Count the optimizers of each parameter, and name an optimizer that holds others of the same shapes."""
        ours = {id(param): param for of_chunk in self.params for param in of_chunk.values()}
        shapes = Counter(tuple(param.shape) for param in ours.values())
        held: Counter[int] = Counter()
        elsewhere = ""
        for optimizer in optimizers_alive():
            params = list(params_of(optimizer))
            held.update({id(param) for param in params} & ours.keys())
            alike = bool(params) and not Counter(tuple(param.shape) for param in params) - shapes
            if alike and not any(id(param) in ours for param in params) and all(param.grad is None for param in params):
                elsewhere = type(optimizer).__name__
        return held, elsewhere


def dropped_by(module: nn.Module) -> str:
    """Report a forward in training mode that drops elements; '' if nothing is dropped."""
    for name, part in module.named_modules():
        if isinstance(part, DROPOUTS) and part.training and part.p > 0:
            return (
                f"a forward without gradients ran in training mode, so {name!r} has dropped {part.p:g} of its "
                "elements. Call model.eval() before an evaluation, and model.train() after it"
            )
    return ""


def optimizers_alive() -> list[Any]:
    """Return this process's optimizers, without those that another one wraps."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    inner = {id(vars(each).get("optimizer")) for each in found}
    return [each for each in found if id(each) not in inner]


def params_of(optimizer: Any) -> Iterable[Tensor]:
    """Return an optimizer's parameters; our optimizers update the models' parameters through master weights."""
    if isinstance(optimizer, MegatronOptimizer):
        return [param for chunk in optimizer.model_chunks for param in chunk.parameters()]
    return [param for group in getattr(optimizer, "param_groups", ()) for param in group["params"]]


def _in_words(
    names: Sequence[str], used: set[str], ranks: Sequence[dict[str, list[str]]], texts: Sequence[str]
) -> list[str]:
    """Describe the findings. ``texts`` are rank 0's, the last one an optimizer's class. Pure."""
    found = {kind: [name for name in names if any(name in mine[kind] for mine in ranks)] for kind in ranks[0]}
    unused = [name for name in found["unused"] if name not in used]
    *own, elsewhere = texts
    lines = [text for text in own if text]
    if unused and all(name in found["frozen"] for name in unused):
        lines.append(
            f"{len(unused)} of {len(names)} parameters were frozen after the wrap and are not trained: "
            f"{_named(unused)}. Freeze them before it if this is meant, which saves their gradients' memory"
        )
    elif unused:
        lines.append(
            f"{len(unused)} of {len(names)} trained parameters got no gradient on any rank: {_named(unused)}. Is the "
            "graph cut before them (detach, no_grad, .item(), a new tensor), or is what they compute not in the loss?"
        )
    if found["left"]:
        others = f"{elsewhere} holds other parameters of the same shapes, without gradients. " if elsewhere else ""
        lines.append(
            f"{len(found['left'])} parameters had a gradient and have not moved, and no optimizer holds them: "
            f"{_named(found['left'])}. {others}Make the optimizer of the parameters of the wrapped model, after "
            "copies, casts and moves of it"
        )
    if found["still"]:
        lines.append(
            f"{len(found['still'])} parameters had a gradient and have not moved, though an optimizer holds them: "
            f"{_named(found['still'])}. Is the learning rate of their group 0, or the update below their dtype's "
            "resolution?"
        )
    if found["twice"]:
        lines.append(f"{len(found['twice'])} parameters are in two optimizers: {_named(found['twice'])}")
    return lines


def _named(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMES
    return ", ".join(map(repr, names[:MOST_NAMES])) + (f" and {rest} more" if rest > 0 else "")


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
