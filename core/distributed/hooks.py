"""Hooks on parameters and on the wrapped module, through which autograd and a forward call the engine.

Hooks of modules are functions without state that find the engine by the module's identity. A copied or pickled module
therefore contains nothing of the engine, and is a plain module.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from core.distributed.engine import Engine
from core.distributed.reduce.fused_kernels import ignore_dummies
from core.distributed.reduce.grad_reducer import arrived, arrived_at_sharded
from core.distributed.sharded.unsharder import Unsharder
from core.groups.agree import SyncError

_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()  # all engines of this process
_UNSHARDERS: weakref.WeakValueDictionary[int, Unsharder] = weakref.WeakValueDictionary()  # keyed by id of the module


def engine_of(part: nn.Module | torch.Tensor) -> Engine | None:
    """Return the engine of a wrapped module, or the one that reduces a parameter's gradient; None if it has none."""
    return next((engine for engine in _ENGINES if id(part) in engine.ids), None)


def owned_params() -> frozenset[int]:
    """Return the ids of all parameters that engines reduce, and of the wrapped modules."""
    return frozenset().union(*(engine.ids for engine in _ENGINES))


def hook(engine: Engine) -> None:
    """Register the hooks of an engine. They are removed when the engine is deleted, which leaves a plain module."""
    module = engine.module  # calling it without the wrapper is the same
    hooks = [
        module.register_forward_pre_hook(_begin_forward, prepend=True, with_kwargs=True),
        module.register_state_dict_pre_hook(_finish_gathers),
        module.register_load_state_dict_pre_hook(_begin_load),
    ]
    for part in module.modules() if isinstance(engine.params, Unsharder) else ():
        hooks.append(part.register_forward_pre_hook(_enter, prepend=True))
        hooks.append(part.register_forward_hook(_leave, always_call=True))
        hooks.append(part.register_state_dict_pre_hook(_refuse_without_values))
        hooks.append(part.register_load_state_dict_pre_hook(_refuse_without_values))
    hooks += [part.register_state_dict_post_hook(_own_memory) for part in module.modules() if part is not module]
    # Weak: Python's garbage collector does not see autograd's references to hooks. A module that refers to its wrapper,
    # as through `config.grad_scale_func = optimizer.scale_loss`, would never be freed.
    reducer = weakref.ref(engine.reducer)
    note = arrived_at_sharded if engine.params.units else arrived
    for number, bucket in enumerate(engine.buckets):
        for index, param in enumerate(bucket.params):
            if "grad_added_to_main_grad" in param.__dict__:
                ignore_dummies(param, bucket.contracts[index].name)
            hooks.append(param.register_post_accumulate_grad_hook(partial(note, reducer, number, index)))
    if isinstance(engine.params, Unsharder):
        _UNSHARDERS.update(dict.fromkeys(map(id, module.modules()), engine.params))
    weakref.finalize(engine, _remove, hooks).atexit = False
    _ENGINES.add(engine)


def _begin_forward(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Record the beginning of a step. Raises SyncError if torch's DDP would reduce the gradients too."""
    engine = engine_of(module)
    if engine is None:
        return
    outside = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)  # its forward is running
    if outside is not None and any(part is module for part in outside.modules()):
        raise SyncError(
            f"the forward of {type(module).__name__} runs inside torch's DistributedDataParallel, and it is wrapped by "
            "core.distributed's too: both would reduce its gradients, each into the other's. Leave one of the two out"
        )
    if torch.is_grad_enabled():
        engine.reducer.note_forward()
        engine.weights.record()
        if engine.first_steps.active and module.training:
            engine.first_steps.record_forward(args, kwargs)


def _finish_gathers(module: nn.Module, *_: Any) -> None:
    """Complete the gathers that an interrupted step has left in flight, before the module is saved."""
    engine = engine_of(module)
    if engine is not None:
        engine.params.finish()


def _begin_load(module: nn.Module, *_: Any) -> None:
    """Complete gathers, and record a load: the next ``finalize_model_grads`` compares weights that only some ranks have
    loaded.
    """
    engine = engine_of(module)
    if engine is not None:
        engine.params.finish()
        engine.reducer.loads += 1


def _enter(module: nn.Module, _inputs: Any) -> None:
    """Begin to gather parameters that are used."""
    unsharder = _UNSHARDERS.get(id(module))
    if unsharder is not None:
        unsharder.enter()


def _leave(module: nn.Module, _inputs: Any, _outputs: Any) -> None:
    unsharder = _UNSHARDERS.get(id(module))
    if unsharder is not None:
        unsharder.leave()


def _refuse_without_values(module: nn.Module, *arguments: Any) -> None:
    """Raise SyncError if parameters without values would be saved or loaded."""
    unsharder = _UNSHARDERS.get(id(module))
    keeps_vars = len(arguments) == 2 and arguments[1]  # state_dict(keep_vars=True) gives the parameters themselves
    if unsharder is not None and not (unsharder.stays_unsharded or unsharder.loaded is not None or keeps_vars):
        raise SyncError(
            f"the state dict of {type(module).__name__} holds sharded parameters, which are not gathered; call "
            "state_dict() or load_state_dict() of the wrapped model, or do it inside `with model.gathered():`, on all "
            "ranks"
        )


def _own_memory(_part: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Copy tensors of a submodule's state dict that are views into a larger buffer.

    torch.save writes all memory under a view. A state dict of all modules keeps the views, as torch returns it, because
    its buffers are written once. So do the parameters themselves, which keep_vars returns.
    """
    if prefix:  # part of a larger state dict
        return
    copies: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], torch.Tensor] = {}  # tied ones stay one
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter) or value.layout != torch.strided:
            continue
        if value.untyped_storage().nbytes() > value.nbytes:
            key = value.data_ptr(), value.shape, value.stride(), value.dtype
            state[name] = copies.setdefault(key, value.clone())


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for each in hooks:
        each.remove()
