"""What cannot be wrapped, said by name before any storage or collective exists.

What goes over all parameters or modules is a few passes in C; names are looked up only for a message.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from operator import attrgetter, lt, methodcaller

import torch
from torch import Tensor, nn

PLAIN = {Tensor, nn.Parameter}


def check_kinds(root: nn.Module, modules: Sequence[nn.Module], named: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError for a ScriptModule, a wrapper of torch's inside, and parameters that are lazy or DTensors."""
    if isinstance(root, torch.jit.ScriptModule):
        raise ValueError(
            f"{type(root).__name__} takes no Python hooks, which tell when a forward begins; wrap a plain module that "
            "holds it: torch.nn.Sequential(scripted)"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model holds one of its wrappers only if it was imported
    wrappers = (nn.parallel.DistributedDataParallel, *([fsdp.FullyShardedDataParallel] if fsdp else []))
    if any(issubclass(kind, wrappers) for kind in set(map(type, modules))):
        name, inner = next((n, m) for n, m in root.named_modules() if isinstance(m, wrappers))
        raise ValueError(
            f"module {name!r} is torch's {type(inner).__name__}, which reduces the same gradients by itself; take the "
            "module out of it (its `.module`) before wrapping, or leave this wrapper out"
        )
    if not set(map(type, named.values())) <= {nn.Parameter}:
        for name, param in named.items():
            _check_kind(name, param)


def _check_kind(name: str, param: nn.Parameter) -> None:
    from torch.distributed.tensor import DTensor

    if nn.parameter.is_lazy(param):
        raise ValueError(
            f"parameter {name!r} is lazy and has no shape yet; run one forward of the model before wrapping"
        )
    if isinstance(param, DTensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor over {param.device_mesh}: torch (fully_shard, parallelize_module) splits "
            "it and reduces its gradient. Leave this wrapper out, or split the layers with core.tensor_parallel instead"
        )


def check_storage(named: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError for a parameter whose storage is too small for it: reading it would end the process."""
    params = [param for param in named.values() if type(param) is nn.Parameter]
    held = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, params))
    if not any(map(lt, held, map(attrgetter("nbytes"), params))):
        return
    for name, param in named.items():
        size = param.untyped_storage().nbytes()
        if type(param) is nn.Parameter and size < param.nbytes:
            raise ValueError(
                f"parameter {name!r} has {param.nbytes} bytes and its storage {size}: the storage was freed (resize_), "
                "or the elements share memory (expand). Give the parameter whole storage of its own before wrapping"
            )


def shared_params(
    root: nn.Module,
    modules: Sequence[nn.Module],
    trained: Mapping[str, nn.Parameter],
    frozen: Mapping[str, nn.Parameter],
) -> dict[str, str]:
    """Trained parameters whose memory another tensor of the model uses too -> that tensor, in words.

    It may be a frozen parameter, a buffer or a plain attribute of a module; it would keep the old values when the
    parameter is moved. Parameters cut from one tensor without overlap share nothing. Raises ValueError for two trained
    parameters, which would get two gradients and two updates.
    """
    places = _places(trained.values())
    tables = [frozen, *map(attrgetter("_buffers"), modules), *map(vars, modules)]
    values = chain.from_iterable(map(methodcaller("values"), tables))
    others = [value for value in values if type(value) in PLAIN and value.layout is torch.strided]
    if len(set(places)) == len(places) and set(_places(others)).isdisjoint(places):
        return {}
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in chain(trained.items(), _others(root, trained, frozen)):
        if tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    shared: dict[str, str] = {}
    for tensors in by_storage.values():
        for name, other in _overlaps(tensors, trained):
            if other in trained:
                raise ValueError(
                    f"parameters {name!r} and {other!r} share memory and are two parameters, so each would get a "
                    "gradient and an update of its own. Use one Parameter object for both (`b.weight = a.weight`)"
                )
            shared.setdefault(name, other)
    return shared


def _places(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, tensors)))


def _others(
    root: nn.Module, trained: Mapping[str, nn.Parameter], frozen: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, Tensor]]:
    own = set(map(id, trained.values()))
    for name, param in frozen.items():
        yield f"frozen parameter {name!r}", param
    for path, module in root.named_modules():
        for kind, table in (("buffer", module._buffers), ("attribute", vars(module))):
            for name, value in table.items():
                # Beside `weight_orig` a `weight` is made anew in each forward (torch's spectral_norm, prune).
                made_anew = f"{name}_orig" in module._parameters
                if type(value) in PLAIN and value.layout is torch.strided and id(value) not in own and not made_anew:
                    yield f"{kind} {f'{path}.{name}'.lstrip('.')!r}", value


def _overlaps(tensors: Sequence[tuple[str, Tensor]], trained: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, str]]:
    """(trained parameter, the other) for tensors of one storage, trained ones first, that have bytes in common."""
    spans = sorted(map(_span, (tensor for _, tensor in tensors)))
    if all(before[1] <= after[0] for before, after in pairwise(spans)):
        return
    owner = torch.zeros(tensors[0][1].untyped_storage().nbytes(), dtype=torch.int32)  # of each byte, from 1 on
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
    """The first byte of a tensor within its storage, and the one after its last."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    return size * tensor.storage_offset(), size * (tensor.storage_offset() + last + 1)
