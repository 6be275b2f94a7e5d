"""The first two steps of a wrapped model are watched, because most mistakes of a program are there from the first step.

What is looked at, where several ranks train a model and `first_steps` is not 'ignore':

| in | what | if it is wrong |
|---|---|---|
| both steps | weights of which several ranks hold copies are equal | an error |
| both steps | ranks of tensor parallelism have the same tokens | an error; a warning where they may have parts |
| both steps | what `core.context_parallel` has cut are parts of one batch | an error |
| both steps | the first and the last pipeline stage have the same microbatch | an error |
| the first step | gradients of copies are equal over every group that holds them, data groups apart | an error |
| the first step | no two stages hold one parameter that no rule adds: see `guard.replicas` | an error |
| the first step | rows of split tables: see `guard.inputs` | a warning |
| the second step | the data ranks were not given one batch in both steps | a warning |
| the second step | every trained parameter has had a gradient on some rank | a warning |
| the second step | every parameter that had one has moved, or an optimizer holds it | a warning |
| the second step | its optimizer's step has no gradients of the step before | a warning |
| the second step | not only vectors are trained, of a model with matrices | a warning |
| the second step | gradients of outputs, inputs of recomputed modules: see `guard.outputs` | a warning |
| at any time | the first forward without gradients in training mode drops nothing out | a warning |

An error is raised in `finalize_model_grads`, on all ranks alike, before the optimizer steps. With 'warn' it is a
warning too. Warnings are given by the first rank of a stage. A first step in which a gradient is not finite, as with
a loss scale that is still too high, counts as no step; after MOST_TRIES of them nothing more is looked at. Nothing is
gathered for it where parameters or gradients are sharded, and on a GPU nothing is read before `finalize_model_grads`.
Afterwards one boolean a forward and a step is left.

What is not a mistake, and is not warned of: a parameter that is not used on some ranks, or in one of the two steps; an
expert without tokens; weights that no optimizer moves because it skips or has a learning rate of 0; the same batch
again and again, or constants, on all data ranks.
"""

from __future__ import annotations

import gc
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.buffer.bucket import Bucket
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.guard.finite import Finding, ReplicaDriftError, are_finite, unequal_gradients
from core.distributed.guard.inputs import (
    MOST_NAMES,
    Inputs,
    Leaf,
    Tables,
    other_inputs,
    other_microbatches,
    same_data_twice,
    same_on_data_ranks,
    whole_numbers,
)
from core.distributed.guard.outputs import Outputs
from core.distributed.guard.replicas import held_twice
from core.distributed.layout.model_plan import ModelPlan
from core.groups import agree
from core.groups.process_groups import ProcessGroups, world_chain, world_groups

MOST_TRIES = 64  # first steps that overflow
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Sample(NamedTuple):
    """The element of a parameter with the largest gradient of a step, of those that this rank steps."""

    bucket: Bucket
    number: int  # of the parameter in the bucket
    place: torch.Tensor  # 0-dim: of the element in the flat parameter
    gradient: torch.Tensor  # 0-dim
    weight: torch.Tensor  # 0-dim, a copy


class FirstSteps:
    """Records of one wrapped chunk until its second step has been checked.

    module, plan, buckets: of the chunk. config: of the model, or None. own_part: of a sharded parameter this rank's
    elements, and where they begin; None for any other.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ModelPlan,
        buckets: Sequence[Bucket],
        groups: ProcessGroups,
        ddp_config: DistributedDataParallelConfig,
        config: Any,
        own_part: Callable[[nn.Parameter], tuple[int, torch.Tensor] | None],
    ) -> None:
        several = any(groups.size(name) > 1 for name in world_chain(groups))
        self.active = several and ddp_config.first_steps != "ignore"
        self.groups = groups
        self.warns = ddp_config.first_steps == "warn"
        self.ddp_config = ddp_config
        self.module, self.plan, self.buckets, self.own_part = module, plan, list(buckets), own_part
        self.config = config
        self.computes_in_16_bits = False
        self.seen = 0  # steps that count
        self.tries = 0  # steps that do not
        self.inputs, self.microbatches = Inputs(), Inputs()
        self.given_up = 0  # inputs noted before a zero_grad, until the next forward
        self.outputs = Outputs(module)
        self.sees_evaluation = ddp_config.first_steps != "ignore"
        self.tables = Tables(self.buckets, groups)
        self.batch: list[Leaf] | None = None  # of the first step, if all data ranks were given the same
        self.used = [bytearray(len(bucket.params)) for bucket in self.buckets]
        self.samples: list[Sample] = []
        self.stepped = 0  # optimizers' steps on these parameters until the first finalize
        self.left: list[torch.Tensor] = []  # 0-dim, by sample: its gradient when the second step begins
        self.mixed = ""  # a warning that is due if an optimizer steps with the second step's gradients
        if self.active:
            self.outputs.start()
        else:
            self.stop()

    def note_forward(self, args: Sequence[Any], kwargs: dict[str, Any], *, trains: bool) -> None:
        """A forward that records gradients begins. trains: True if the module is in training mode."""
        kind = self.plan.device.type
        lower = torch.get_float32_matmul_precision() != "highest"
        self.computes_in_16_bits |= torch.is_autocast_enabled(kind) or lower
        if trains:
            self.begin_notes()
            if self.outputs.is_forward:  # the forward before did not end: it raised an error
                del self.inputs.noted[-1:]
            self.inputs.note({**dict(enumerate(args)), **kwargs})
            self.outputs.begin_forward()
            for tokens in whole_numbers((args, kwargs)) if self.seen == 0 else ():
                self.tables.note(tokens)

    def begin_notes(self) -> None:
        """Drop what was noted before a zero_grad if no gradient has come since: that step was given up."""
        if self.given_up and not any(1 in bucket.used for bucket in self.buckets):
            self.drop_notes()
        self.given_up = 0

    def drop_notes(self) -> None:
        """Forget the inputs of a step that has failed or was given up, so that the next one is compared alone."""
        self.inputs.noted.clear()
        self.microbatches.noted.clear()

    @property
    def speaks(self) -> bool:
        """True on the first rank of a stage."""
        return all(self.groups.rank(name) == 0 for name in ("dp_cp", "tp"))

    def note_evaluation(self) -> None:
        """A forward begins in training mode that records no gradients. The first one is looked at, in any step."""
        sees, self.sees_evaluation = self.sees_evaluation, False
        for name, part in self.module.named_modules() if sees and self.speaks else ():
            if isinstance(part, DROPOUTS) and part.training and part.p > 0:
                warnings.warn(
                    f"rank {dist.get_rank()}: a forward without gradients ran in training mode, so {name!r} has "
                    f"dropped {part.p:g} of its elements. Call model.eval() before an evaluation, and model.train() "
                    "after it",
                    stacklevel=4,
                )
                return

    def cuts_inputs(self) -> bool:
        """True if ranks of tensor parallelism may be given parts of a sequence or of a batch."""
        tags = (getattr(param, "sequence_parallel", False) for param in self.plan.named.values())
        averaged = any(contract.averaged_over for contract in self.plan.contracts.values())
        return bool(getattr(self.config, "sequence_parallel", False)) or averaged or any(tags)

    def note_begin(self, *, keep: bool) -> None:
        """A step begins: the first gradient has come, or those before it were dropped. keep: may add to them."""
        self.mixed = ""
        self.given_up = 0 if keep else len(self.inputs.noted) + len(self.microbatches.noted)
        self.left = [_gradient(sample) for sample in self.samples] if keep and self.seen == 1 else []

    def note_optimizer_step(self) -> None:
        """An optimizer steps with the gradients of the last `finalize_model_grads`."""
        if self.mixed:
            warnings.warn(self.mixed, stacklevel=5)
            self.mixed = ""

    def stop(self) -> None:
        """Look no more, and keep nothing."""
        self.active = False
        self.outputs.stop()
        self.inputs, self.microbatches, self.tables = Inputs(), Inputs(), Tables([], self.groups)
        self.samples, self.left, self.batch = [], [], None


@contextmanager
def paused(watches: Sequence[FirstSteps]) -> Iterator[None]:
    """Steps in here are not looked at and do not count, because what runs them sees more."""
    active = [watch for watch in watches if watch.active]
    for watch in active:
        watch.active = False
    try:
        yield
    finally:
        for watch in active:
            watch.active = True


def note_microbatch(chunk: nn.Module, microbatch: Any) -> None:
    """The first or the last stage of a pipeline is about to use a microbatch. chunk: its module, wrapped or not."""
    watch = getattr(vars(chunk).get("engine"), "first_steps", None)
    if watch is not None and watch.active and torch.is_grad_enabled():
        watch.begin_notes()
        watch.microbatches.note(microbatch)


def drop_notes(chunks: Iterable[nn.Module]) -> None:
    """A step of a pipeline has failed. chunks: its modules, wrapped or not."""
    for chunk in chunks:
        engine = vars(chunk).get("engine")
        if engine is not None:
            engine.first_steps.drop_notes()


def look(watches: Sequence[FirstSteps], groups: ProcessGroups, optimizer_steps: int) -> None:
    """Look at a step of one model whose gradients are reduced and not handed to the optimizer yet.

    watches: of the model's chunks on this rank. optimizer_steps: on its parameters, by optimizers of torch, ever.
    Collective: every rank of the job. Raises ReplicaDriftError on all of them.
    """
    first = watches[0]
    optimizer_steps += sum(bucket.optimizer_steps for watch in watches for bucket in watch.buckets)
    inputs = [leaf for watch in watches for leaf in watch.inputs.take()]
    ends = [leaf for watch in watches for leaf in watch.microbatches.take()]
    found, doubt = other_inputs(inputs, groups, may_be_parts=first.cuts_inputs())
    found = found or other_microbatches(ends, groups)
    if first.seen == 0 and first.ddp_config.initial_weights != "ignore":
        coarse = any(watch.computes_in_16_bits for watch in watches)
        buckets = [bucket for watch in watches for bucket in watch.buckets]
        drift = unequal_gradients(buckets, groups, coarse=coarse)  # all ranks of a group make its collective
        untied = held_twice([(watch.module, watch.plan) for watch in watches], groups)
        found = found or untied or drift
    overflows = first.seen == 0 and not are_finite([bucket for watch in watches for bucket in watch.buckets])
    same = same_on_data_ranks(inputs, groups)
    chain = world_groups(groups)
    _, answers = agree.bounds([found is not None, overflows], chain, "the first steps")
    if answers[0]:
        everyone = agree.gather(found, chain, "what is wrong in the first steps").values()
        _report(min(finding for finding in everyone if finding is not None), first)
    unmasked = [text for watch in watches if first.seen == 0 for text in watch.tables.unmasked()]
    if doubt and first.speaks:
        _warn(f"{doubt[2]}. This is right only if each rank is meant to have a part of a batch")
    if answers[1]:
        for watch in watches:
            watch.tries += 1
            watch.outputs.end_step(counts=False, is_second=False)
            if watch.tries >= MOST_TRIES:
                watch.stop()
        return
    for watch in watches:
        for used, bucket in zip(watch.used, watch.buckets, strict=True):
            used[:] = bytes(a | b for a, b in zip(used, bucket.used, strict=True))
    if first.seen == 0:
        for watch in watches:
            watch.samples = _samples(watch)
            watch.seen = 1
            watch.outputs.end_step(counts=True, is_second=False)
        first.batch, first.stepped = inputs if same else None, optimizer_steps
        for text in unmasked if groups.rank("dp_cp") == 0 else ():
            _warn(text)
        return
    texts = [
        *same_data_twice(first.batch, inputs if same else None),
        *(text for watch in watches for text in watch.outputs.end_step(counts=True, is_second=True)),
        *(text for watch in watches for text in (*_without_gradient(watch), *_only_vectors(watch))),
        *_not_moved(watches),
    ]
    if optimizer_steps > first.stepped and first.speaks and (text := _not_zeroed(watches)):
        first.mixed = _titled(text)
    for watch in watches:
        watch.stop()
    for text in texts if first.speaks else ():
        _warn(text)


def _report(finding: Finding, watch: FirstSteps) -> None:
    advice = "If it is right all the same, set first_steps='warn' in DistributedDataParallelConfig"
    if not watch.warns:
        raise ReplicaDriftError(f"{finding[2]}. {advice}")
    if dist.get_rank() == finding[1]:
        _warn(finding[2])


def _warn(text: str) -> None:
    warnings.warn(_titled(text), stacklevel=6)


def _titled(text: str) -> str:
    return f"rank {dist.get_rank()}, the first two steps: {text}"


# -- parameters -----------------------------------------------------------------------------------------------------


def _named(names: Sequence[str]) -> str:
    rest = len(names) - MOST_NAMES
    return ", ".join(map(repr, names[:MOST_NAMES])) + (f" and {rest} more" if rest > 0 else "")


def _without_gradient(watch: FirstSteps) -> list[str]:
    """Trained parameters that no rank has used in either step, but for experts and other alternatives."""
    used = {
        contract.name: bool(flag)
        for bucket, flags in zip(watch.buckets, watch.used, strict=True)
        for contract, flag in zip(bucket.contracts, flags, strict=True)
    }
    names = [name for name in watch.plan.params if name in used]  # in registration order
    if not any(used.values()):  # a model that has not been trained in these steps
        return []
    counts = Counter(id(param) for _, param in watch.module.named_parameters(remove_duplicate=False))
    last = next((n for n, name in enumerate(names) if used[name] and counts[id(watch.plan.params[name])] < 2), 0)
    cut = set(names[:last])  # everything before the first one that is used, but for tied ones
    chosen = {_without_number(name) for name in names if used[name]}
    missing = [
        name
        for name in names
        if not used[name]
        and not watch.plan.contracts[name].is_expert
        and watch.plan.params[name].numel() > 0
        and (name in cut or _without_number(name) not in chosen)
    ]
    if not missing:
        return []
    frozen = [name for name in missing if not watch.plan.params[name].requires_grad]
    if frozen == missing:
        return [
            f"{len(frozen)} of {len(names)} parameters were frozen after the wrap and are not trained: "
            f"{_named(frozen)}. Freeze them before it if this is meant, which saves their gradients' memory"
        ]
    return [
        f"{len(missing)} of {len(names)} trained parameters got no gradient on any rank: {_named(missing)}. Is the "
        "graph cut before them (detach, no_grad, .item(), a new tensor), or is what they compute not in the loss? "
        "Freeze those that are not to be trained (requires_grad_(False) before the wrap)"
    ]


def _without_number(name: str) -> str:
    """A name with a mark in place of its last number: the same for all experts of a layer, and other alternatives."""
    return re.sub(r"(^|\.)\d+(?=\.(?!.*(?:^|\.)\d+\.))", r"\1*", name)


def _only_vectors(watch: FirstSteps) -> list[str]:
    """A model of which vectors alone are trained, though it has matrices: a filter by names has gone wrong."""
    matrices = [name for name, param in watch.plan.frozen.items() if param.dim() > 1]
    if not matrices or not watch.plan.params or any(param.dim() > 1 for param in watch.plan.params.values()):
        return []
    return [
        f"only vectors are trained ({_named(list(watch.plan.params))}), and all {len(matrices)} matrices are frozen. "
        "This is right for tuning norms or biases alone; otherwise the filter that freezes parameters takes too many"
    ]


@torch.no_grad()
def _samples(watch: FirstSteps) -> list[Sample]:
    """One element of each trained parameter, where its gradient is largest. Waits for nothing."""
    found = []
    for bucket in watch.buckets:
        for i, param in enumerate(bucket.params):
            part = bucket.part_of(bucket.owned_grad, i, bucket.shard_range)
            if part.numel() == 0:
                continue
            at = part.abs().argmax()
            place = at + max(0, bucket.shard_range[0] - bucket.ranges[i][0])
            found.append(Sample(bucket, i, place, part.take(at), _weight(watch, param, place)))
    return found


def _weight(watch: FirstSteps, param: nn.Parameter, place: torch.Tensor) -> torch.Tensor:
    """0-dim: a copy of one element of a parameter."""
    own = watch.own_part(param)
    begin, flat = (0, param.detach().reshape(-1)) if own is None else own
    return flat.take((place - begin).to(flat.device))


@torch.no_grad()
def _not_moved(watches: Sequence[FirstSteps]) -> list[str]:
    """Trained parameters that had a gradient in the first step, are where they were, and that no optimizer holds."""
    still: list[Sample] = []
    moved = 0
    for watch in watches:
        samples = watch.samples
        if not samples:
            continue
        flags = [
            torch.stack([(s.gradient != 0).to(watch.plan.device), (now != s.weight).to(watch.plan.device)])
            for s in samples
            for now in [_weight(watch, s.bucket.params[s.number], s.place)]
        ]
        for sample, (had, went) in zip(samples, torch.stack(flags).tolist(), strict=True):
            moved += went
            if had and not went and not sample.bucket.optimizer_steps and sample.bucket.owed is None:
                still.append(sample)
    still = [sample for sample in still if sample.bucket.params[sample.number].requires_grad]
    if not still:
        return []
    held, elsewhere = _held_by_optimizers(watches)
    left = [s for s in still if id(s.bucket.params[s.number]) not in held]
    if not left or not (moved or elsewhere or len(left) < len(still)):
        return []
    names = [sample.bucket.contracts[sample.number].name for sample in left]
    return [
        f"{len(names)} parameters had a gradient and have not moved, and no optimizer holds them: {_named(names)}. "
        + (f"{elsewhere} holds other parameters of the same shapes, without gradients. " if elsewhere else "")
        + "Make the optimizer of the parameters of the wrapped model, after copies, casts and moves of it"
    ]


def _held_by_optimizers(watches: Sequence[FirstSteps]) -> tuple[set[int], str]:
    """Ids of all parameters in a living optimizer; and one that has parameters shaped like the model's, but not them.

    Looks through all objects of the process. So it is asked only where something is wrong.
    """
    ours = {id(param) for watch in watches for param in watch.plan.named.values()}
    shapes = Counter(tuple(param.shape) for watch in watches for param in watch.plan.params.values())
    held: set[int] = set()
    elsewhere = ""
    for optimizer in gc.get_objects():
        if not issubclass(type(optimizer), torch.optim.Optimizer):
            continue
        params = [param for group in optimizer.param_groups for param in group["params"]]
        mine = {id(param) for param in params}
        held |= mine
        alike = not Counter(tuple(param.shape) for param in params) - shapes
        if params and alike and mine.isdisjoint(ours) and all(param.grad is None for param in params):
            elsewhere = type(optimizer).__name__
    return held, elsewhere


@torch.no_grad()
def _gradient(sample: Sample) -> torch.Tensor:
    """0-dim: what the memory of gradients holds at a sample, if the parameter's `.grad` is kept; else 0."""
    bucket, i = sample.bucket, sample.number
    if bucket.sharded or not bucket.attribute.accumulates[i]:
        return torch.zeros_like(sample.gradient)
    return bucket.part_of(bucket.owned_grad, i, bucket.shard_range).take(sample.place)


def _not_zeroed(watches: Iterable[FirstSteps]) -> str:
    """A warning of gradients that a step was made of and this one has added to, but for the one that came first.

    It is due when an optimizer steps with them: a generator's loss adds to the discriminator's, which are dropped.
    """
    before = [sample.gradient for watch in watches for sample in watch.samples]
    left = [gradient for watch in watches for gradient in watch.left]
    if not before or len(left) != len(before):
        return ""
    both = torch.stack([torch.stack(before), torch.stack(left)]).double().tolist()
    ratios = sorted(now / was for was, now in zip(*both, strict=True) if was != 0)
    factor = ratios[len(ratios) // 2] if ratios else 0.0  # ours has multiplied them by the clip
    same = [ratio for ratio in ratios if math.isclose(ratio, factor, rel_tol=1e-2)]
    if factor == 0.0 or len(same) < len(ratios) - 1:
        return ""
    return (
        "the gradients of the first step were not zeroed after optimizer.step(), and those of the second were added to "
        "them. Call optimizer.zero_grad() or model.zero_grad_buffer() in every step"
    )
