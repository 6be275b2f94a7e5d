"""Programs in the style of ColossalAI's examples, import lines and all, on 2 ranks: losses as of a plain torch loop."""

from __future__ import annotations

import importlib.util
import math
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import core_compat.colossalai as colossalai
from tests.unit_tests.booster.test_booster_checkpoint import shared
from tests.unit_tests.ranks import ranks

SCRIPTS = Path(__file__).with_name("colossalai_scripts")
Rate = Callable[[int], float]  # of a step, as a share of the base rate


def warm_then(steps: int, total: int, after: Rate, begin: int = 1) -> Rate:
    """A linear warm-up of `steps` steps from begin / steps, then `after` of the share of steps that are done."""
    return lambda t: (t + begin) / steps if t < steps else after((t - steps) / (total - steps))


def adamw(lr: float, decay: float = 0.0, beta: float = 0.999) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=lr, eps=1e-4, weight_decay=decay, betas=(0.9, beta))


class PlainLars(torch.optim.Optimizer):
    """One rate for each parameter: 0.05 |w| / (|g| + 1e-3 |w|) of the given one, with momentum 0.9."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            weight, grad = param.detach().double(), param.grad.double()
            size = float(weight.norm()) * 0.05 / (float(grad.norm()) + 1e-3 * float(weight.norm()))
            size = size if weight.norm() > 0 else 1.0
            moved = (grad + 1e-3 * weight).clamp(-10, 10)
            moved = self.state[param]["moved"] = 0.9 * self.state[param].get("moved", 0.0) + moved
            param.data.copy_(weight - self.param_groups[0]["lr"] * min(size, 50.0) * moved)


# script -> (its optimizer, written in torch; share of the rate at each step; the norm that it clips to)
PLAIN: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Rate, float]] = {
    "bert": (adamw(5e-3, 0.01), warm_then(2, 6, lambda done: 1 - done, begin=0), 1.0),
    "gpt": (adamw(2e-2), lambda t: 1.0, 1.0),
    "vit": (adamw(2e-3, 0.1), warm_then(2, 6, lambda done: (1 + math.cos(math.pi * done)) / 2), math.inf),
    "resnet": (PlainLars, lambda t: (t + 1) / 3 if t < 2 else (6 - t) / 4, math.inf),
    "cifar": (
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=5e-4),
        lambda t: 0.5 ** (t // 2),
        math.inf,
    ),
    "llama": (
        adamw(2e-2, 0.1, 0.95),
        warm_then(2, 6, lambda done: 0.025 + 0.975 * (1 + math.cos(math.pi * done)) / 2),
        0.5,
    ),
    "opt": (adamw(5e-3, 0.01), warm_then(2, 5, lambda done: 0.2 + 0.8 * (1 - done) ** 2), 1.0),
    "palm": (adamw(2e-2), lambda t: 1.0, 0.5),
}
NEED_TRANSFORMERS = ("bert", "gpt", "vit", "llama", "opt")


def losses_of_plain_torch(program: dict[str, Any], name: str) -> list[float]:
    """The program's model and data in a loop on whole batches."""
    make, rate, max_norm = PLAIN[name]
    torch.manual_seed(42)
    model = program["build_model"]()
    optimizer = make(list(model.parameters()))
    base = optimizer.param_groups[0]["lr"]
    dataset, size = program["build_dataset"](), program["BATCH"]
    losses = []
    for step in range(program["STEPS"]):
        optimizer.param_groups[0]["lr"] = base * rate(step)
        batch = default_collate([dataset[number] for number in range(step * size, (step + 1) * size)])
        optimizer.zero_grad()
        loss = program["loss_of"](model, batch)
        loss.backward()
        if max_norm < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@contextmanager
def installed() -> Iterator[None]:
    colossalai.install()
    try:
        yield
    finally:
        colossalai.uninstall()


@ranks(2, timeout_s=120)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name not in NEED_TRANSFORMERS else pytest.mark.nightly) for name in PLAIN],
)
def test_a_program_trains_as_one_process_of_plain_torch(rank: int, world: int, tmp_path: Path, name: str) -> None:
    if name in NEED_TRANSFORMERS and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    with installed(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("CHECKPOINT_FOLDER", str(shared(tmp_path)))
        program = runpy.run_path(str(SCRIPTS / f"{name}.py"))
        losses = program["main"]()
    wanted = losses_of_plain_torch(program, name)
    assert losses == pytest.approx(wanted, rel=5e-5)
    assert max(wanted) - min(wanted) > 0.02, f"the losses {wanted} hardly move, so equality says little"
