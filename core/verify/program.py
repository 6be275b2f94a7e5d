"""`python -m core.verify train.py ARGS`: run a user's program, and check the first step of the model that it trains.

Calls of modules are watched while the program runs. The first module that is called in training mode, and that no
other module calls, is the model. Its inputs are kept until its gradients are whole. For a model in our wrapper that is
in `finalize_model_grads`; for any other, when an optimizer of torch begins to step, or gradients are clipped.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from core.distributed import DistributedDataParallel
from core.groups import agree
from core.interface.whole import KEEPERS
from core.models import GPTModel
from core.verify.loop import LoopJob, Microbatch, StepCheck, kept, loss_of_call
from core.verify.report import GradientReport
from core.verify.structure import builder_of, structure_of, with_memory
from core.verify.torch_model import TorchLoopJob, unwrapped

NUM_ITEMS = "num_items_in_batch"  # transformers' name for the labels that count in the whole batch
UNCOPYABLE = (TypeError, AttributeError, RuntimeError, ValueError, NotImplementedError, AssertionError)
NAMED = "module:function, or a function of the program"
NAME_IT = "name a function that builds the model without any splitting: --whole module:function"


@dataclass(frozen=True)
class Asked:
    """Options of the command line. whole, loss: names of functions, 'module:function', or of the program's own.

    continues: True if the program continues to train after the report.
    """

    program: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    whole: str | None = None
    loss: str | None = None
    continues: bool = False


@dataclass(frozen=True)
class Noted:
    """A microbatch that the loop has passed to `note`, and its loss."""

    loss_fn: Callable[..., Any]
    microbatch: Microbatch
    per_token: bool


def asked_by(arguments: Sequence[str]) -> Asked:
    """Parse the command line: options, then the program and its own arguments."""
    parser = argparse.ArgumentParser(prog="python -m core.verify", description=__doc__)
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module, as for python -m")
    parser.add_argument("--whole", metavar="FUNCTION", help=f"builds the model without any splitting; {NAMED}")
    parser.add_argument(
        "--loss", metavar="FUNCTION", help=f"the mean loss of a microbatch, of a model and inputs; {NAMED}"
    )
    parser.add_argument("--go-on", dest="continues", action="store_true", help="train on after the report")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    found = vars(parser.parse_args(arguments))
    return Asked(**{**found, "arguments": tuple(found["arguments"])})


def run_program(asked: Asked) -> int:
    """Run the program and check its first step; the exit status. 0: all gradients are right."""
    if not asked.is_module and not Path(asked.program).is_file():
        print(f"python -m core.verify: there is no file {asked.program!r}", file=sys.stderr)
        return 2
    watch = ProgramWatch(asked)
    sys.argv = [asked.program, *asked.arguments]
    status: Any = 0
    with watch.active():
        try:
            if asked.is_module:
                runpy.run_module(asked.program, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(asked.program).resolve().parent)
                runpy.run_path(asked.program, run_name="__main__")
        except SystemExit as end:
            status = end.code
    if watch.reports:
        return 0 if all(report.ok for report in watch.reports) else 1
    if status not in (None, 0):  # the program has failed, and has said why; or ranks that it has started have reported
        return status if isinstance(status, int) else 1
    if not watch.calls and not watch.starts_ranks():
        print("python -m core.verify: the program has called no model in training mode, so nothing is compared")
        return 1
    if watch.calls:
        print("python -m core.verify: the program has ended before its first step was complete; nothing is compared")
        return 1
    return 0


def note(loss_fn: Callable[..., Any], *arguments: Any, per_token: bool = False) -> None:
    """Say what a microbatch's loss is, where the model's forward does not give it. Does nothing but under the command.

    loss_fn(whole, *arguments): the mean loss of the microbatch, divided by nothing. per_token: True if it returns the
    summed loss and the number of tokens. Call it once for each microbatch, on every rank, before its backward.

        verify.note(mean_loss, inputs, targets)
        (mean_loss(model, inputs, targets) / microbatches).backward()
    """
    for watch in _ACTIVE:
        watch.noted.append(Noted(loss_fn, kept((arguments, {})), per_token))


_ACTIVE: list[ProgramWatch] = []


class ProgramWatch:
    """Watches the calls of modules in a program. reports: of the steps that were compared."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.reports: list[GradientReport] = []
        self.noted: list[Noted] = []
        self.structures: list[nn.Module] = []  # of whole models
        self.checks: dict[int, ProgramCheck] = {}  # by the identity of the model as the program calls it
        self.inside: set[int] = set()  # modules of these
        self.open: list[ProgramCheck] = []  # whose model is being called
        self.depth = 0
        self.calls = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch in this block."""
        call = nn.Module.__call__

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.before(module, args, kwargs)
            self.depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self.depth -= 1

        hook = register_module_module_registration_hook(self.keep_wrapped)
        KEEPERS.append(self.keep)
        _ACTIVE.append(self)
        try:
            with mock.patch.object(nn.Module, "__call__", watched):
                yield
        finally:
            _ACTIVE.remove(self)
            KEEPERS.remove(self.keep)
            hook.remove()

    def keep_wrapped(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        """A module becomes a child of another: of a wrapper, which may change it."""
        if name == "module" and module is not None and isinstance(parent, (DistributedDataParallel, TorchDDP)):
            self.keep(module)

    def keep(self, model: nn.Module) -> None:
        """Remember the structure of a model; not of one that cannot be copied."""
        try:
            self.structures.append(structure_of(model))
        except UNCOPYABLE:
            return

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is about to be called."""
        if any(not check.listens for check in self.checks.values()):
            return  # the step is over; the reference is called now
        if self.depth:
            for check in self.open:
                check.look_inside(module)
            return
        if not module.training or not torch.is_grad_enabled():
            self.open = []
            return
        known = self.checks.get(id(module))
        if known is None:
            trains = id(module) not in self.inside and any(param.requires_grad for param in module.parameters())
            if not trains:
                return
            known = self.checks[id(module)] = self._check(module, kwargs)
            self.inside |= {id(part) for part in module.modules()}
        self.calls += 1
        self.open = [known]
        known.note_forward(args, kwargs)

    def _check(self, model: nn.Module, kwargs: Mapping[str, Any]) -> ProgramCheck:
        wrappers = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        weighted = _is_weighted(model, kwargs)
        loss_fn: Any = _loss_by_tokens if weighted else _loss_of_forward
        if self.asked.loss is not None:
            loss_fn, weighted = function_named(self.asked.loss), False
        if len(wrappers) > 1 or any(wrapper.groups.size(axis) > 1 for wrapper in wrappers for axis in ("pp", "cp")):
            raise ValueError(
                "python -m core.verify compares a whole model of a rank, and this one is cut over a pipeline or over "
                "context parallelism: use check_gradients"
            )
        job = LoopJob(wrappers[0], loss_of_call(loss_fn)) if wrappers else TorchLoopJob(model, loss_of_call(loss_fn))
        job.per_token = job.per_token or weighted
        return ProgramCheck(self, job, module=job.model.chunks[0].module)

    def end(self, report: GradientReport) -> None:
        """Print a report, on rank 0; end the program on all ranks, unless it continues."""
        self.reports.append(report)
        if dist.get_rank() == 0:
            print(report, flush=True)
            if report.where is not None:
                print(report.where.table(), flush=True)
        if not self.asked.continues:
            raise SystemExit(0 if report.ok else 1)

    def starts_ranks(self) -> bool:
        """True if the program has started ranks of its own, which compare."""
        return "core.training.own_ranks" in sys.modules and not dist.is_initialized()


class ProgramCheck(StepCheck):
    """The check of a program's first step. Its reference is built when the step is over."""

    def __init__(self, watch: ProgramWatch, job: LoopJob, module: nn.Module) -> None:
        super().__init__(job, self._whole, conclude=watch.end)
        self.watch = watch
        self.module = module
        self.structure: nn.Module | None = None

    def look_inside(self, module: nn.Module) -> None:
        """A module inside of the model is about to be called: autocast, or a cast of the weights, shows here."""
        if not self.listens:
            return
        kind = self.job.model.device.type
        if torch.is_autocast_enabled(kind):
            self.autocast = torch.get_autocast_dtype(kind)
        self.job.model.note_dtype(module)

    def prepare(self) -> None:
        """See StepCheck. Raises ValueError on all ranks if the whole model is not known."""
        noted = self.watch.noted
        if noted:
            self.noted = [each.microbatch for each in noted]
            self.job.loss_fn = loss_of_call(noted[0].loss_fn)
            self.job.per_token = noted[0].per_token
        names = {held.name for held in self.job.model.held}
        everyone = agree.gather(names, None, "the names of the model's parameters").values()
        names = set().union(*everyone)
        for structure in self.watch.structures:
            if names == {name for name, _ in structure.named_parameters()}:
                self.structure = structure
                break
        is_known = self.watch.asked.whole or self.structure is not None or builder_of(self.module) is not None
        error = None if is_known else ValueError(f"the whole model is not known; {NAME_IT}")
        agree.refuse(error, None, "the reference", ValueError)
        super().prepare()

    def _whole(self) -> nn.Module:
        if self.watch.asked.whole is not None:
            whole = function_named(self.watch.asked.whole)()
            assert isinstance(whole, nn.Module), f"--whole {self.watch.asked.whole} gave no module"
            return whole
        builder = builder_of(self.module)
        if builder is not None:
            return builder()
        assert self.structure is not None, "looked for in `prepare`"
        return with_memory(self.structure)


def function_named(name: str) -> Callable[..., Any]:
    """A function by 'module:function', or by its name in the program that runs."""
    module_name, _, function_name = name.rpartition(":")
    module = importlib.import_module(module_name) if module_name else sys.modules["__main__"]
    found = getattr(module, function_name, None)
    if not callable(found):
        raise ValueError(f"{name!r} names no function; {module_name or 'the program'} has no {function_name!r}")
    function: Callable[..., Any] = found
    return function


def _is_weighted(model: nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """True if every label of the whole batch counts alike, in whichever microbatch it lies."""
    from core.booster.plugin.hybrid_parallel_model import HybridParallelModel
    from core.hugging_face.label_counts import count_labels

    own = model.unwrap() if isinstance(model, HybridParallelModel) else model
    by_items = kwargs.get(NUM_ITEMS) is not None
    by_plugin = isinstance(model, HybridParallelModel) and model.engine is not None
    return (by_items or by_plugin) and count_labels(unwrapped(own), kwargs) is not None


def _loss_of_forward(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The mean loss that a model's forward gives."""
    kwargs.pop(NUM_ITEMS, None)
    output = model(*args, **kwargs)
    found = output if isinstance(output, Tensor) else None
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    elif found is None:
        found = getattr(output, "loss", None)
    if isinstance(unwrapped(model), GPTModel) and isinstance(found, Tensor):
        return found.mean()  # of the tokens
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = f" of shape {list(found.shape)}" if isinstance(found, Tensor) else ""
        raise ValueError(
            f"the forward of {type(unwrapped(model)).__name__} gives a {type(output).__name__}{shape}, and no loss. "
            "Name the loss of a microbatch, --loss module:function, which takes the model and the forward's arguments; "
            "or call core.verify.note(loss_fn, ...) in the loop"
        )
    return found


def _loss_by_tokens(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(the summed loss, the number of labels that count)."""
    from core.hugging_face.label_counts import count_labels

    loss = _loss_of_forward(model, *args, **kwargs)
    count = count_labels(unwrapped(model), kwargs)
    assert count is not None, "counted in the first forward"
    return torch.where(count > 0, loss, torch.zeros_like(loss)) * count, count
