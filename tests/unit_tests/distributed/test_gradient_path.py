"""How many functions and files of core one enters to follow a gradient. The numbers may only become smaller."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.wire import shared_memory
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.watch import waiting
from tests.unit_tests.ranks import ranks

ROOT = Path(__file__).parents[3]
ARCHITECTURE = ROOT / "docs" / "source" / "architecture.md"
# (functions, files) that are entered from autograd's hook to the launch, from the hook to the call of torch's
# optimizer, in a whole step from zero_grad on, and at the wrap. Comprehensions count with the function around them.
MOST = {"backward": (18, 6), "read": (140, 27), "step": (180, 30), "wrap": (136, 33)}

Call = tuple[str, str]  # a function's name, with its class, and its file
READ: Call = ("torch's optimizer", "")


def calls_of(action: Callable[[], Any]) -> tuple[Any, list[Call]]:
    """What `action` returns, and the functions of core that it enters, in order; READ where torch's optimizer steps."""
    calls: list[Call] = []

    def note(frame: Any, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT / 'core'}/") and not code.co_name.startswith("<"):
            calls.append((code.co_qualname, str(Path(code.co_filename).relative_to(ROOT))))

    hook = register_optimizer_step_pre_hook(lambda *_: calls.append(READ))
    sys.setprofile(note)
    try:
        return action(), calls
    finally:
        sys.setprofile(None)
        hook.remove()


@ranks(2)
def test_a_gradient_makes_exactly_the_hops_that_the_architecture_page_lists(
    rank: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In backward every function; later the calls named there, in that order.

    The gradient is the last one of its bucket, in the third step: the first two are watched.
    """
    parallel_state.initialize_model_parallel()
    module = torch.nn.Linear(64, 64, bias=False)  # each rank's shard holds a part
    torch.nn.init.ones_(module.weight)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    model, wrap = calls_of(lambda: DistributedDataParallel(None, ddp_config, module))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    monkeypatch.setattr(shared_memory, "LOOK_S", math.inf)  # a slow rank must not change what is entered
    monkeypatch.setattr(waiting, "LOOK_S", 60.0)
    for _ in range(3):
        _, zero = calls_of(optimizer.zero_grad)
        loss, forward = calls_of(lambda: model(torch.ones(2, 64)).sum())
        _, backward = calls_of(loss.backward)
        _, finalize = calls_of(lambda: finalize_model_grads([model]))
        _, step = calls_of(optimizer.step)
    later = [*finalize, *step]
    found = {
        "backward": backward,
        "read": [*backward, *later[: later.index(READ)]],
        "step": [*zero, *forward, *backward, *later],
        "wrap": wrap,
    }
    entered = {name: set(calls) - {READ} for name, calls in found.items()}
    counts = {name: (len(calls), len({file for _, file in calls})) for name, calls in entered.items()}
    for name, (functions, files) in counts.items():
        print(f"{name}: {functions} functions in {files} files")
    print(*dict.fromkeys(backward), sep="\n")

    page = ARCHITECTURE.read_text().split("## The path of one gradient")[1].split("\n## ")[0]
    listed, named = (
        [(function.split()[0], file) for function, file in re.findall(r"^([\w.]+) +(core/\S+\.py)", block, re.M)]
        for block in page.split("```")[1:4:2]
    )
    assert listed == list(dict.fromkeys(backward))
    rest = iter(later)
    for hop in named:
        assert hop in rest, f"{hop} does not come after the hops above it; the calls were {later}"
    assert len(named) > 2
    over = {name for name, count in counts.items() if any(a > b for a, b in zip(count, MOST[name], strict=True))}
    assert not over, f"more functions or files are entered than before: {over}"
