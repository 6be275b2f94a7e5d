"""Buffers that forwards write, as a spectral norm's do: each microbatch is compared from the buffers that it had."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from core.distributed.router_state import KNOWN_BUFFERS
from core.groups import agree
from core.verify.job import Job


def buffers_of(module: nn.Module, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the floating-point buffers of a module on the CPU.

    Args:
        module: The module.
        before: Earlier result, whose tensors are returned again if their values have not changed.

    Returns:
        Copies by name.
    """
    found: dict[str, Tensor] = {}
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and not buffer.is_meta:
            value = buffer.detach().cpu()
            known = before.get(name)
            found[name] = known if known is not None and torch.equal(known, value) else value.clone()
    return found


def written_buffers(
    starts: Sequence[Mapping[str, Tensor]], module: nn.Module, microbatches: int, *, without: Collection[str] = ()
) -> list[dict[str, Tensor]]:
    """Return the values before each microbatch of the buffers that forwards write.

    Args:
        starts: ``buffers_of`` before each forward of a step.
        module: The module after the step.
        microbatches: Number of microbatches, each of which has the same number of forwards.
        without: Buffers to leave out.

    Returns:
        Values by name for each microbatch; empty if forwards write no buffer.
    """
    if not starts or len(starts) % microbatches:
        return []
    now = buffers_of(module, starts[-1])
    names = [name for name in now if name not in without and any(now[name] is not start.get(name) for start in starts)]
    firsts = starts[:: len(starts) // microbatches]
    return [{name: start[name] for name in names} for start in firsts] if names else []


def set_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace buffers of a module by name; names that it does not have with this shape are skipped.

    Args:
        module: The module.
        values: New values, which are copied.
    """
    own = dict(module.named_buffers())
    for name in values.keys() & own.keys():
        path, _, leaf = name.rpartition(".")
        if own[name].shape == values[name].shape:
            setattr(module.get_submodule(path), leaf, values[name].to(own[name], copy=True))


def other_buffers(starts: Mapping[int, Mapping[str, Tensor]]) -> list[str]:
    """Name a buffer that forwards write and whose values differ between ranks when a step begins."""
    (first_rank, first), *others = starts.items() or [(0, {})]
    for rank, values in others:
        for name, value in first.items():
            if name in values and not torch.equal(values[name], value):
                return [
                    f"forwards write the buffer {name!r}, and it has other values on rank {rank} than on rank "
                    f"{first_rank}, so these ranks compute different functions; each was compared with its own"
                ]
    return []


def start_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that a forward may write and use.

    finalize_model_grads updates routers' buffers. A SyncBatchNorm writes statistics that training does not use.
    """
    synced = {name for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)}
    found = ((*name.rpartition("."), value) for name, value in buffers_of(module, {}).items())
    return {
        f"{owner}{dot}{leaf}": value
        for owner, dot, leaf, value in found
        if owner not in synced and leaf not in KNOWN_BUFFERS
    }


@contextmanager
def restored(modules: Sequence[nn.Module]) -> Iterator[set[str]]:
    """Return a context in which every forward of a module starts from the same buffers. Local.

    Yields:
        Names of the buffers that forwards have written.
    """
    written: set[str] = set()
    with ExitStack() as hooks:
        for module in modules:
            start = start_of(module)

            def restore(module: nn.Module, _: object = None, start: Mapping[str, Tensor] = start) -> None:
                now = buffers_of(module, start)
                changed = {name: value for name, value in start.items() if now.get(name) is not value}
                set_buffers(module, changed)
                written.update(changed)

            hooks.enter_context(module.register_forward_pre_hook(restore))
            hooks.callback(restore, module)
        yield written


def starts_of(job: Job) -> list[dict[str, Tensor]]:
    """Return each data rank's buffers before a forward, on every rank; empty for a split model. Collective."""
    axis = "dp" if job.groups.dp is not None else "dp_cp"
    is_split = len(job.model.chunks) > 1 or job.groups.size("pp") > 1 or job.model.is_split
    mine = {} if is_split else start_of(job.model.chunks[0].module)
    answers = dict(agree.gather((job.groups.rank(axis), mine), None, "the buffers of the model").values())
    return [answers[rank] for rank in sorted(answers)]
