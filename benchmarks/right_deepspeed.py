"""Small loops over DeepSpeed's engine on the CPU, checked as by `python -m core verify`."""

from __future__ import annotations

import contextlib
import logging
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.right_program import last_report, launched
from core.verify import GradientReport

STEPS = 3


@dataclass(frozen=True)
class Zero:
    """A loop.

    Attributes:
        stage: Stage of ZeRO.
        parts: Microbatches a step.
        clip: Largest norm of the gradients; 0 for no limit.
        bf16: True to train in bfloat16.
        built_in_parts: True if the model is built under `deepspeed.zero.Init`.
        fault: Name of a planted mistake; '' for none.
    """

    stage: int
    parts: int = 1
    clip: float = 0.0
    bf16: bool = False
    built_in_parts: bool = False
    fault: str = ""

    def __str__(self) -> str:
        words = f"ZeRO {self.stage}", "zero.Init" * self.built_in_parts, f"{self.parts} microbatches" * (self.parts > 1)
        return ", ".join(filter(None, [*words, "bf16" * self.bf16, "clipped" * bool(self.clip), self.fault]))


RIGHT = [
    *(Zero(stage, parts, clip) for stage in (0, 1, 2, 3) for parts, clip in ((1, 0.0), (2, 0.05))),
    *(Zero(stage, 2, bf16=True) for stage in (1, 2, 3)),
    Zero(3, 2, built_in_parts=True),
]
# A loop with a planted mistake, and text that its report contains.
WRONG = {
    Zero(1, 2, fault="divided twice"): "too small, the number of microbatches",
    Zero(2, 2, fault="doubled"): "the backward runs twice of microbatch 2 of 2",
    Zero(3, 2, fault="skipped"): "on data rank 1 alone",
    Zero(0, 2, fault="not zeroed"): "zero_grad is not called",
    Zero(1, 2, fault="norm"): "norm.weight",
    Zero(3, 2, fault="norm"): "norm.weight",
    Zero(2, 2, fault="boundary"): "microbatches count",
    Zero(2, 2, fault="other rate"): "lr=0.05",
    Zero(1, 1, 0.05, fault="norm of a rank"): "the optimizer clips by a gradient norm of",
    Zero(2, 1, 0.05, fault="norm of a rank"): "the optimizer clips by a gradient norm of",
}


class Net(nn.Module):
    """Two blocks around one shared layer, and the mean squared error of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.shared = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 4)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.up(inputs).tanh()
        hidden = hidden + self.shared(hidden).tanh()
        hidden = self.norm(hidden + self.shared(hidden).tanh())
        loss: Tensor = (self.down(hidden) - targets).float().square().mean()
        return loss


def report_of(program: Zero) -> GradientReport:
    """Run a loop, compare its gradients and weights, and return the last report. Collective over the world."""
    import deepspeed

    warnings.simplefilter("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an extension that is compiled for minutes
    own_groups = mock.patch.dict(vars(deepspeed.utils.groups))
    own_backend = mock.patch.object(deepspeed.comm.comm, "cdb", None)
    with launched(DS_ACCELERATOR="cpu"), own_groups, own_backend:
        return last_report(partial(_train, program))


def _train(program: Zero) -> None:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": program.parts,
        "gradient_clipping": program.clip,
        "zero_optimization": {"stage": program.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": program.bf16},
        "steps_per_print": 1_000_000,
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config) if program.built_in_parts else contextlib.nullcontext():
        model = Net()
    fault, rank = program.fault, dist.get_rank()
    if fault == "norm":  # as if a second reduction had added the gradient
        model.norm.weight.register_hook(lambda grad: 2 * grad)
    if fault == "boundary":
        config["gradient_accumulation_steps"] = 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if (fault, rank) == ("other rate", 1) else 0.1)
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    if fault == "not zeroed":
        engine.optimizer.zero_grad = engine.zero_grad = lambda *_, **__: None
    if fault == "norm of a rank":
        _leave_out_reductions_of_norms(engine.optimizer)
    dtype = torch.bfloat16 if program.bf16 else torch.float32
    for step in range(STEPS):
        for part in range(program.parts):
            seed = rank + 2 * (part + program.parts * step)
            rows = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)).to(dtype)
            loss = engine(rows[:, :8], rows[:, 8:])
            if fault == "divided twice":
                loss = loss / program.parts
            if (fault, part) == ("doubled", 1):
                loss = 2 * loss
            if (fault, part, rank) == ("skipped", 0, 1):
                loss = 0 * loss
            engine.backward(loss)
            if fault != "boundary" or part == program.parts - 1:
                engine.step()


def _leave_out_reductions_of_norms(optimizer: Any) -> None:
    """Let each rank clip by its partition's norm."""
    step = optimizer.step

    def step_by_own_norm(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(dist, "all_reduce", lambda *_, **__: None):
            step(*args, **kwargs)

    optimizer.step = step_by_own_norm
