"""Checks for modules and parameters that cannot be wrapped, before any storage or collective exists."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def check_modules(root: nn.Module, modules: Mapping[str, nn.Module], *, reads_seen: bool) -> None:
    """Reject a ScriptModule, and a wrapper of torch's inside the model, by ValueError.

    ``reads_seen`` is True if a parameter's class must see each read of it, as with sharded parameters.
    """
    if isinstance(root, torch.jit.ScriptModule):
        raise ValueError(
            f"{type(root).__name__} takes no Python hooks, which show when a forward begins; wrap a plain module that "
            "holds it: torch.nn.Sequential(scripted)"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model holds one of its wrappers only if it was imported
    wrappers = (nn.parallel.DistributedDataParallel, *([fsdp.FullyShardedDataParallel] if fsdp else []))
    for name, inner in modules.items():
        if reads_seen and isinstance(inner, torch.jit.ScriptModule):
            raise ValueError(
                f"module {name!r} is a ScriptModule, which reads its parameters without asking their class; use "
                "data_parallel_sharding_strategy='optim_grads', or a plain module"
            )
        if isinstance(inner, wrappers):
            raise ValueError(
                f"module {name!r} is torch's {type(inner).__name__}, which reduces the same gradients too; take "
                "the module out of it (its `.module`) before wrapping, or leave this wrapper out"
            )


def check_param(name: str, param: nn.Parameter, first: tuple[str, nn.Parameter]) -> None:
    """Reject a parameter that cannot share a buffer with the first one of its model, by ValueError.

    It may be lazy, a DTensor, complex, on the meta device, not dense, on another device, or without full storage.
    """
    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"parameter {name!r} is lazy and has no shape yet; run one forward of the model before wrapping"
        )
    if type(param) is not nn.Parameter:
        from torch.distributed.tensor import DTensor

        if isinstance(param, DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor over {param.device_mesh}: torch (fully_shard, parallelize_module) "
                "splits it and reduces its gradient. Leave this wrapper out, or split the layers with "
                "core.tensor_parallel instead"
            )
    if param.is_complex():
        raise ValueError(
            f"parameter {name!r} is {param.dtype}; gradient buffers hold real numbers. Keep its real and imaginary "
            "parts as two parameters (torch.view_as_complex in the forward)"
        )
    if param.is_meta:
        raise ValueError(
            f"parameter {name!r} is on the meta device; give the module to core.distributed.materialize before wrapping"
        )
    if param.layout is not torch.strided:
        raise ValueError(
            f"parameter {name!r} is {param.layout}; gradient buffers hold dense tensors: make it one (to_dense())"
        )
    if param.device != first[1].device:
        raise ValueError(
            f"parameter {name!r} is on {param.device} and {first[0]!r} on {first[1].device}; the parameters of one "
            "model chunk share a gradient buffer and must be on one device"
        )
    size = param.untyped_storage().nbytes()
    if size < param.nbytes and type(param) is nn.Parameter:  # reading it would end the process
        raise ValueError(
            f"parameter {name!r} has {param.nbytes} bytes but its storage has {size}: the storage was freed (resize_), "
            "or elements share memory (expand). Give the parameter its own full storage before wrapping"
        )


def shared_params(
    modules: Mapping[str, nn.Module], trained: Mapping[str, nn.Parameter], frozen: Mapping[str, nn.Parameter]
) -> dict[str, str]:
    """Find trained parameters whose memory is also used by another tensor, and describe that tensor by their name.

    The other tensor may be a frozen parameter, a buffer or a plain attribute of a module. It would keep the old values
    when the parameter is moved. Parameters that are slices of one tensor without overlap are not reported. Raises
    ValueError if two trained parameters share memory, because they would get two gradients and two updates.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, param in trained.items():
        if param.numel():
            by_storage.setdefault(param.untyped_storage().data_ptr(), []).append((name, param))
    for name, tensor in _others(modules, trained, frozen):
        at = tensor.untyped_storage().data_ptr()
        if at in by_storage and tensor.numel():
            by_storage[at].append((name, tensor))
    shared: dict[str, str] = {}
    for tensors in by_storage.values():
        for name, other in _overlaps(tensors, trained) if len(tensors) > 1 else ():
            if other in trained:
                raise ValueError(
                    f"parameters {name!r} and {other!r} share memory but are two Parameter objects, so each would get "
                    "a separate gradient and update. Use one Parameter object for both (`b.weight = a.weight`)"
                )
            shared.setdefault(name, other)
    return shared


def _others(
    modules: Mapping[str, nn.Module], trained: Mapping[str, nn.Parameter], frozen: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    own = {id(param) for param in trained.values()}
    for name, param in frozen.items():
        yield f"frozen parameter {name!r}", param
    for path, module in modules.items():
        for kind, table in (("buffer", dict(module.named_buffers(recurse=False))), ("attribute", vars(module))):
            for name, value in table.items():
                if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
                    continue
                # For `weight_orig` a `weight` is made again in each forward (torch's spectral_norm, prune).
                if id(value) not in own and not hasattr(module, f"{name}_orig"):
                    yield f"{kind} {f'{path}.{name}'.lstrip('.')!r}", value


def _overlaps(tensors: Sequence[tuple[str, Tensor]], trained: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, str]]:
    """Yield (trained parameter, other tensor) for tensors of one storage with common bytes; trained ones come first."""
    spans = sorted(_span(tensor) for _, tensor in tensors)
    if all(before[1] <= after[0] for before, after in pairwise(spans)):
        return
    owner = torch.zeros(
        tensors[0][1].untyped_storage().nbytes(), dtype=torch.int32, device="cpu"
    )  # number, from 1, of the owner of each byte
    for number, (name, tensor) in enumerate(tensors, 1):
        size = tensor.element_size()
        shape, strides = (*tensor.shape, size), (*(size * stride for stride in tensor.stride()), 1)
        mine = owner.as_strided(shape, strides, size * tensor.storage_offset())
        for index in mine.unique().tolist():
            if index:
                yield tensors[index - 1][0], name
        if name in trained:
            mine.fill_(number)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's byte range [first, end) within its storage."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    return size * tensor.storage_offset(), size * (tensor.storage_offset() + last + 1)
