"""The two sides of a case, plain torch on one process and ours on all ranks, and what is right between them."""

from __future__ import annotations

import copy
import datetime
import faulthandler
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import LowLevelZeroPlugin
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, SyncError, finalize_model_grads
from core.optimizer import get_megatron_optimizer
from tests.unit_tests.distributed.habit_cases import (
    ADAPTERS,
    SCALE,
    Case,
    draw,
    drops_by_ours,
    optimizer_config,
    reduces_in_backward,
    torch_optimizer,
)
from tests.unit_tests.distributed.habit_models import Data, build
from tests.unit_tests.distributed.training_habits import train

Note = tuple[str, torch.Tensor]
CASE_LIMIT_S = 20.0  # for the ranks of one case to end; a case takes a tenth of a second


class Side:
    """What both sides have."""

    optimizer: Any

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self.module = build(case.parts, case.odd, case.dtype, case.seed)
        if case.adapter == ADAPTERS[0]:
            self.module.add_adapter(case.dtype)
        self.notes: list[Note] = []

    def note(self, name: str, value: Any) -> None:
        """What is compared between the sides: a number or a tensor."""
        self.notes.append((name, torch.as_tensor(value).detach().clone().double()))

    def new_optimizer(self) -> Any:
        raise NotImplementedError

    def restart(self) -> None:
        """Make a new optimizer, and load the old one's state into it."""
        state = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer = self.new_optimizer()
        self.optimizer.load_state_dict(state)

    def clip(self, max_norm: float = 0.0, value: float = 0.0) -> None:
        """Clip the gradients, as a loop does."""
        if max_norm:
            self.note("norm", clip_grad_norm_(self.module.parameters(), max_norm))
        else:
            clip_grad_value_(self.module.parameters(), value)

    def change_lr(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= factor


class Plain(Side):
    """A rank of plain torch. 16-bit parameters have fp32 gradients, and masters in fp32 that the optimizer steps."""

    def __init__(self, case: Case, rank: int, buffers: list[dict[str, torch.Tensor]]) -> None:
        """buffers: what all ranks of a training share, the first rank's buffers before each of its broadcasts."""
        super().__init__(case, rank)
        self.buffers, self.broadcasts, self.is_due, self.syncs = buffers, 0, True, True
        self.low = [param for param in self.module.parameters() if param.dtype.itemsize == 2]
        for param in self.low:
            param.grad_dtype = torch.float32
        self.masters = [param.detach().float() for param in self.low]
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        others = [param for param in self.module.parameters() if param.dtype.itemsize > 2]
        return torch_optimizer(self.case, [*self.masters, *others])

    def __call__(self, data: Data, *args: Any, **kwargs: Any) -> Any:
        if self.case.broadcasts:
            self.take_buffers()
        return self.module(data, *args, **kwargs)

    def take_buffers(self) -> None:
        """As torch's DDP before a forward: if the forward before recorded gradients outside `no_sync`."""
        was_due, self.is_due = self.is_due, self.syncs and torch.is_grad_enabled()
        if not was_due:
            return
        own = dict(self.module.named_buffers())
        if self.rank == 0:  # it runs before the others
            self.buffers.append({name: buffer.clone() for name, buffer in own.items()})
        for name, buffer in self.buffers[self.broadcasts].items():
            own[name].data.copy_(buffer)
        self.broadcasts += 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        try:
            yield
        finally:
            self.syncs = True

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def zero_grad(self) -> None:
        stays = self.case.zero in ("optimizer.zero_grad(set_to_none=False)", "grad.zero_() by hand")
        self.module.zero_grad(set_to_none=not stays)

    def step(self) -> None:
        if self.case.clip:
            clip_grad_norm_(self.module.parameters(), self.case.clip)
        self.step_masters()

    @torch.no_grad()
    def step_masters(self) -> None:
        for param, master in zip(self.low, self.masters, strict=True):
            master.grad = param.grad
            if not torch.equal(master.to(param.dtype), param):  # somebody has edited it
                master.copy_(param)
        self.optimizer.step()
        for param, master in zip(self.low, self.masters, strict=True):
            param.copy_(master)

    def load(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state)


@torch.no_grad()
def average(ranks: Sequence[Plain]) -> None:
    """What data parallelism means: each gradient becomes the mean over ranks, and none where no rank has one."""
    for copies in zip(*(rank.module.parameters() for rank in ranks), strict=True):
        there = [param.grad.to_dense() for param in copies if param.grad is not None]
        if there and copies[0].requires_grad:
            mean = torch.stack(there).sum(0) / len(ranks)
            for param in copies:
                param.grad = mean.clone(memory_format=torch.preserve_format)


def plain_training(case: Case) -> list[Plain]:
    """All ranks on this process, in step with each other."""
    buffers: list[dict[str, torch.Tensor]] = []
    ranks = [Plain(case, rank, buffers) for rank in range(case.world)]
    programs = [train(rank) for rank in ranks]
    done: object = object()
    while all([next(program, done) is not done for program in programs]):
        average(ranks)
    return ranks


class Ours(Side):
    """This rank of ours: wrapped, or boosted."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.booster: Booster | None = None
        self.model: Any
        self.optimizer: Any
        if case.steps_by == "booster":
            precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(case.dtype, "fp32")
            options = {"precision": precision, "initial_scale": SCALE, "max_norm": case.clip, **case.options}
            self.booster = Booster(plugin=LowLevelZeroPlugin(**options))
            optimizer = torch_optimizer(case, self.module.parameters())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.model, self.optimizer, *_ = self.booster.boost(self.module, optimizer)
        else:
            config = DistributedDataParallelConfig(data_parallel_sharding_strategy=case.sharding, **case.options)
            self.model = DistributedDataParallel(None, config, self.module)
            self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> Any:
        if self.case.steps_by == "torch":
            return torch_optimizer(self.case, self.module.parameters())
        config = optimizer_config(self.case)
        return get_megatron_optimizer(config, [self.model], no_weight_decay_cond=lambda name, param: False)

    def __call__(self, data: Data, *args: Any, **kwargs: Any) -> Any:
        return (self.module if self.case.calls_module else self.model)(data, *args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        no_sync: AbstractContextManager[None] = self.model.no_sync()
        return no_sync

    def gathered(self) -> AbstractContextManager[None]:
        gathered: AbstractContextManager[None] = nullcontext() if self.booster is not None else self.model.gathered()
        return gathered

    def backward(self, loss: torch.Tensor) -> None:
        if self.booster is not None:
            self.booster.backward(loss, self.optimizer)
        else:
            (self.optimizer.scale_loss(loss) if self.case.dtype == torch.float16 else loss).backward()

    def clip(self, max_norm: float = 0.0, value: float = 0.0) -> None:
        if self.booster is None:
            super().clip(max_norm, value)
        elif max_norm:
            self.note("norm", self.optimizer.clip_grad_by_norm(max_norm))
        else:
            self.optimizer.clip_grad_by_value(value)

    def zero_grad(self) -> None:
        how = self.case.zero
        if how == "optimizer.zero_grad()":
            self.optimizer.zero_grad()
        elif how == "optimizer.zero_grad(set_to_none=False)":
            self.optimizer.zero_grad(set_to_none=False)
        elif how == "model.zero_grad()":
            self.model.zero_grad()
        elif how == "model.zero_grad_buffer()" and self.booster is None:
            self.model.zero_grad_buffer()
        elif how == "grad = None by hand":
            for param in self.module.parameters():
                param.grad = None
        elif how == "grad.zero_() by hand":
            for param in self.module.parameters():
                if param.grad is not None:
                    param.grad.zero_()
        else:
            self.module.zero_grad()

    def finalize(self) -> None:
        """Make the gradients of all ranks one. The Booster's optimizer does it in its step."""
        if self.booster is None:
            finalize_model_grads([self.model], force_all_reduce=self.case.full_gradients)

    def step(self) -> None:
        self.optimizer.step()

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state) if self.booster is None else self.module.load_state_dict(state)


def our_training(case: Case, rank: int) -> Ours:
    """This rank's part."""
    ours = Ours(case, rank)
    for _ in train(ours):
        ours.finalize()
    return ours


# -- what is right ----------------------------------------------------------------------------------------------------


def bound_of(case: Case) -> float:
    """How far apart equal trainings may be; weights are of the order of one.

    In bf16 a sum that falls on the other side of a rounding moves single weights by a whole step of the format.
    """
    if case.dtype.itemsize == 2:
        return 8e-3
    single = case.dtype == torch.float32 or "OtherDtype" in case.parts
    return 3e-5 if single else 1e-9


def differences(case: Case, ours: Ours, plain: Plain) -> list[str]:
    """A line for each weight, buffer and note that is not the reference's. The reference must have moved."""
    bound = bound_of(case)
    with ours.gathered():
        got, want = ours.module.state_dict(), plain.module.state_dict()
    lines = [far(f"weight {name}", got[name], want[name], bound) for name in want]
    if [name for name, _ in ours.notes] != [name for name, _ in plain.notes]:
        lines.append(f"noted {[name for name, _ in ours.notes]} and not {[name for name, _ in plain.notes]}")
    else:
        lines += [
            far(name, here, there, bound) for (name, here), (_, there) in zip(ours.notes, plain.notes, strict=True)
        ]
    before = build(case.parts, case.odd, case.dtype, case.seed).state_dict()
    moved = max(
        float((want[name].double() - before[name].double()).abs().max()) for name in before if before[name].numel()
    )
    if not (2 if case.dtype.itemsize == 2 else 100) * bound < moved < 1000:
        lines.append(f"the reference itself has moved by {moved:.3g}")
    return [line for line in lines if line]


def far(name: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> str:
    """Empty, or how far one is from the other."""
    if want.numel() == 0:
        return ""
    got, want = got.double(), want.double()
    off = float(((got - want).abs() / (1 + want.abs())).max())
    return "" if off <= bound else f"{name} is off by {off:.3g}"


@dataclass(frozen=True)
class Refusal:
    """A habit that may be refused: in which cases, and in which words."""

    habit: str
    applies: Callable[[Case], bool]
    words: str  # a pattern that the error's text must hold
    error: type[Exception] = SyncError

    def covers(self, case: Case, error: BaseException) -> bool:
        """True if this error is a right answer to this case."""
        named = isinstance(error, self.error) and re.search(self.words, str(error)) is not None
        return named and self.applies(case)


ZEROED_UNSEEN = ("forgotten", "grad.zero_() by hand", "optimizer.zero_grad(set_to_none=False)")
UNSCALED = ("one graph twice", "several losses at once", "only some inputs", "in two parts")
REFUSALS = (
    Refusal(
        "whole gradients of the step before are there, and cannot be added to",
        lambda case: (
            (case.zero in ZEROED_UNSEEN and (case.full_gradients or (case.clip > 0 and case.dtype.itemsize == 2)))
            or (
                case.full_gradients
                and not case.habits.isdisjoint(("finalize after every microbatch", "a loss that is not stepped"))
            )
        ),
        "already reduced, was still in `.grad`|force_all_reduce=True came .* has left sharded",
    ),
    Refusal(
        "gradients that are sharded, or still to be scaled, are edited or read",
        lambda case: any(case.edits) and (not case.keeps_whole_gradients or "scale_in_optimizer" in case.options),
        "which is not in `.grad` now: its reduction has begun, or it is sharded"
        "|(set to None|replaced|added to) after finalize_model_grads, and its gradient is not there",
    ),
    Refusal(
        "gradients are dropped in torch's ways when their reduction has begun",
        lambda case: (
            not case.habits.isdisjoint(
                ("dropped and begun again", "a backward that raises", "a loss that is not stepped")
            )
            and not drops_by_ours(case)
            and reduces_in_backward(case)
        ),
        "was dropped through `.grad` .* after its reduction had begun|was added to after finalize_model_grads",
    ),
    Refusal(
        "a hook of the user's edits a gradient whose reduction has begun",
        lambda case: "a hook after accumulation" in case.habits and reduces_in_backward(case),
        "which is not in `.grad` now: its reduction has begun",
    ),
    Refusal(
        "a rank drops a step that others do not",
        lambda case: reduces_in_backward(case) and "a backward that raises" in case.habits,
        "do not drop a step together|have different numbers of backwards in this step",
    ),
    Refusal(
        "sharded parameters are read or written outside of a forward, and nobody has gathered them",
        lambda case: (
            case.shards_parameters
            and (not case.gathers_always or "functional call" in case.habits or "add decay by hand" in case.habits)
        ),
        "and its values are not gathered|which are not gathered|is sharded and not gathered",
    ),
    Refusal(
        "one update needs all parameters, of which ranks have parts",
        lambda case: case.algorithm == "one rate of all parameters" and case.sharding != "no_shard",
        "OneRate.couples_parameters = False",
        ValueError,
    ),
    Refusal(
        "a parameter trains that was frozen or not there at the wrap",
        lambda case: case.adapter is not None,
        "was (frozen|not there|added)",
        RuntimeError,
    ),
    Refusal(
        "a backward begins at no scaled loss",
        lambda case: case.dtype == torch.float16 and not case.habits.isdisjoint(UNSCALED),
        "comes from a loss that was not multiplied by the loss scale",
        RuntimeError,
    ),
    Refusal(
        "parameters are moved out of the buffers",
        lambda case: "vector_to_parameters" in case.habits and case.sharding != "no_shard",
        "moved out of the buffers since the wrap",
    ),
)


def outcome(case: Case, rank: int, plain: Sequence[Plain] | None = None) -> str:
    """'equal', 'refused: ...' in allowed words, or what is wrong."""
    try:
        plain = plain_training(case) if plain is None else plain
    except Exception:
        return f"wrong: the reference raised {traceback.format_exc()}"
    try:
        ours = our_training(case, rank)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if any(refusal.covers(case, error) for refusal in REFUSALS):
            return f"refused: {text}"
        return f"wrong: {''.join(traceback.format_exception(error)[-6:])}"
    lines = differences(case, ours, plain[rank])
    return "wrong: " + "; ".join(lines[:6]) if lines else "equal"


def run_cases(rank: int, world: int, seeds: Sequence[int], folder: str) -> None:
    """Run the cases of these seeds; AssertionError with the words of all that are wrong. Every rank calls it."""
    wrong = [text for _, text in outcomes(rank, world, seeds, folder) if text]
    assert not wrong, f"{len(wrong)} of {len(seeds)} cases:\n\n" + "\n\n".join(wrong)


def outcomes(rank: int, world: int, seeds: Sequence[int], folder: str) -> Iterator[tuple[str, str]]:
    """For each seed what came of it, and the words of what is wrong, if anything.

    Ranks compare through a file: a case that is refused may leave them at different collectives.
    """
    store = dist.FileStore(str(Path(folder) / "outcomes"), world)
    store.set_timeout(datetime.timedelta(seconds=CASE_LIMIT_S))
    parallel_state.initialize_model_parallel()
    for number, seed in enumerate(seeds):
        case = draw(seed, world)
        with Path(folder, f"rank-{rank}").open("w") as frames:
            frames.write(f"{case}\n")
            frames.flush()
            faulthandler.dump_traceback_later(CASE_LIMIT_S, file=frames)  # of a rank that does not end
            store.set(f"{number}/{rank}", outcome(case, rank))
            faulthandler.cancel_dump_traceback_later()
        found = []
        for other in range(world):
            try:
                found.append(store.get(f"{number}/{other}").decode())
            except RuntimeError:  # DistStoreError, or what a FileStore raises in its place
                found.append(f"wrong: had not ended {CASE_LIMIT_S:g} s after rank {rank}")
        assert not any("had not ended" in text for text in found), said(case, found)
        kinds = {text.split(":")[0] for text in found}
        if kinds != {"equal"}:  # ranks may be at different collectives
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel()
        bad = kinds not in ({"equal"}, {"refused"})
        yield found[rank], said(case, found) if bad else ""


def said(case: Case, found: Sequence[str]) -> str:
    """A case, and what became of it on each rank."""
    return "\n".join([str(case), *(f"rank {rank}: {text}" for rank, text in enumerate(found))])
