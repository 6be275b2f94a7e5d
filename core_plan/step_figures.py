"""Costs of one microbatch in each part of a model: memory, work and traffic, from one step without values.

The parts are the embeddings, each layer, and the head with the loss. A stage of many layers is composed from the
figures of one layer of each kind, so planning a deep model takes as long as planning two layers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from core.distributed import DistributedDataParallelConfig
from core.distributed.buffer.grad_placeholder import tensors_in
from core_plan.live_memory import AFTER, BACKWARD, BEFORE, FORWARD, LiveMemory, Phase, Work
from core_plan.planned_groups import Ledger
from core_plan.without_values import WithoutValues

Sent = Mapping[tuple[str, str], tuple[int, int]]  # (group, collective) -> (calls, bytes that this rank sends)
Params = Sequence[tuple[int, bool]]


@dataclass(frozen=True)
class PartFigures:
    """Figures of one part of a model, for one microbatch.

    Peaks do not contain the bytes saved by earlier parts. Parameters before the layers belong to the first part, and
    parameters after them to the last.
    """

    saved: int  # bytes that forward saves for backward
    forward: int  # bytes at the peak of forward
    backward: int  # bytes at the peak of backward
    work: Mapping[str, Counter[Work]]  # key: phase
    sent: Mapping[str, Sent]  # key: phase
    params: Params = ()  # (elements on this rank, True for an expert's) of each trainable parameter
    name: str = ""
    output: int = 0  # bytes of `saved` that are passed to the next part, which keeps them


def with_more(part: PartFigures, layer: PartFigures, alike: PartFigures) -> PartFigures:
    """Add to a part outside the layers the additional costs of its neighbouring layer, compared with an equal layer."""
    more = layer.saved - alike.saved
    sent: dict[str, Sent] = {}
    for phase, calls in part.sent.items():
        total = Counter({key: n for key, (n, _) in calls.items()})
        nbytes = Counter({key: size for key, (_, size) in calls.items()})
        for of_layer, sign in ((layer.sent[phase], 1), (alike.sent[phase], -1)):
            for key, (n, size) in of_layer.items():
                total[key] += sign * n
                nbytes[key] += sign * size
        sent[phase] = {key: (total[key], nbytes[key]) for key in total if total[key]}
    return replace(
        part,
        saved=part.saved + more,
        forward=part.forward + more,
        backward=part.backward + more,
        work={phase: work + (layer.work[phase] - alike.work[phase]) for phase, work in part.work.items()},
        sent=sent,
    )


def layers_in_words(has_experts: bool | None, again: str, of_type: str = "") -> str:
    """Describe layers of one kind, such as 'expert layers (sliding), computed again'. ``again`` is '' without that."""
    kind = {None: "", False: "dense ", True: "expert "}[has_experts]
    return f"{kind}layers{f' ({of_type})' * bool(of_type)}{f', {again}' * bool(again)}"


def watch_step(
    module: nn.Module,
    layers: Sequence[nn.Module],
    run: Callable[[], Tensor],
    ledger: Ledger,
    mode: WithoutValues,
    ddp: DistributedDataParallelConfig,
) -> dict[str, PartFigures]:
    """Measure forward and backward of a model on fake tensors, part by part. Must be called inside ``mode``.

    Gradients of parameters are accumulated into ``.grad``, which is created here as by a wrapper with ``ddp``. A part's
    work therefore includes accumulation in each microbatch: the cast of 16-bit gradients to fp32, or the product that
    accumulates into ``main_grad`` directly.

    Args:
        module: The model.
        layers: The model's layers in forward order; the n-th is the part "n".
        run: Runs the forward; its result is differentiated.
        ledger: Record of the groups' traffic.
        mode: The active mode.
        ddp: Configuration of the wrapper.
    """
    known = [*module.parameters(), *module.buffers()]
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = ddp.grad_dtype_of(parameter.dtype)
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
            parameter.main_grad = None if ddp.shards_gradients else parameter.grad
            known.append(parameter.grad)
    live = LiveMemory(known)
    ledger.sent.clear()  # clear a previous step
    given: dict[str, list[weakref.ref[torch.UntypedStorage]]] = {}  # tensors passed by each part to the next

    def enter(phase: str, part: str) -> None:
        live.enter(phase, part)
        ledger.during = f"{phase} {part}"

    handles: list[Any] = []
    for number, layer in enumerate(layers):
        last = number == len(layers) - 1

        def begin(_: Any, args: Any, kwargs: Any, part: str = str(number), first: bool = number == 0) -> None:
            if live.place.phase == BACKWARD:  # recomputation of a layer
                return
            enter(FORWARD, part)
            if first:
                given[BEFORE] = _storages((args, kwargs))
                _when_differentiated((args, kwargs), lambda: enter(BACKWARD, BEFORE))

        def end(_: Any, args: Any, output: Any, part: str = str(number), last: bool = last) -> None:
            if live.place.phase == BACKWARD:
                return
            given[part] = _storages(output)
            _when_differentiated(output, lambda: enter(BACKWARD, part))
            if last:
                enter(FORWARD, AFTER)

        handles += [layer.register_forward_pre_hook(begin, with_kwargs=True), layer.register_forward_hook(end)]
    try:
        with mode.followed_by(live):
            enter(FORWARD, BEFORE if layers else AFTER)
            output = run()
            saved = dict(live.live_of)
            kept = {part: _alive(refs) for part, refs in given.items()}
            enter(BACKWARD, AFTER)
            output.backward(None if output.numel() == 1 else torch.empty_like(output))
    finally:
        for handle in handles:
            handle.remove()
    return _figures(live, saved, kept, ledger, _params(module, layers))


def _params(module: nn.Module, layers: Sequence[nn.Module]) -> dict[str, Params]:
    """Return the parameters of each part, in the order in which parts run."""
    part_of = {id(param): str(number) for number, layer in enumerate(layers) for param in layer.parameters()}
    found: dict[str, list[tuple[int, bool]]] = {part: [] for part in (BEFORE, *map(str, range(len(layers))), AFTER)}
    around = BEFORE
    for param in module.parameters():
        part = part_of.get(id(param), around)
        around = AFTER if id(param) in part_of else around
        if param.requires_grad:
            found[part].append((param.numel(), not getattr(param, "allreduce", True)))
    return dict(found)


def _figures(
    live: LiveMemory,
    saved: Mapping[str, int],
    kept: Mapping[str, int],
    ledger: Ledger,
    params: Mapping[str, Params],
) -> dict[str, PartFigures]:
    figures = {}
    before = 0  # bytes saved by earlier parts
    for part in params:
        places = {phase: Phase(phase, part) for phase in (FORWARD, BACKWARD)}
        figures[part] = PartFigures(
            saved.get(part, 0),
            max(0, live.peak[places[FORWARD]] - before),
            max(0, live.peak[places[BACKWARD]] - before),
            {phase: live.work[place] for phase, place in places.items()},
            {
                phase: {
                    (entry.group, entry.collective): (calls, nbytes)
                    for entry, (calls, nbytes) in ledger.sent.items()
                    if entry.during == f"{phase} {part}"
                }
                for phase in places
            },
            params[part],
            output=min(saved.get(part, 0), kept.get(part, 0)),
        )
        before += saved.get(part, 0)
    return figures


def _storages(value: Any) -> list[weakref.ref[torch.UntypedStorage]]:
    """Return the storages of tensors in ``value`` that require a gradient."""
    return [weakref.ref(item.untyped_storage()) for item in tensors_in(value) if item.requires_grad]


def _alive(storages: Sequence[weakref.ref[torch.UntypedStorage]]) -> int:
    """Return the bytes of storages that are still alive."""
    return sum(storage.nbytes() for storage in (ref() for ref in storages) if storage is not None)


def _when_differentiated(value: Any, call: Callable[[], None]) -> None:
    """Call a function when backward reaches the first tensor in ``value`` that requires a gradient."""
    for item in tensors_in(value):
        if item.requires_grad:
            item.register_hook(lambda _: call())
            return
