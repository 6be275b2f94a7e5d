"""materialize(): initializes a module on the meta device while it is wrapped, one part after another.

A part is the parameters and buffers of a single module without its children. If parameters are sharded, each part is
sharded before the next one is initialized, so no rank ever holds the full model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from core.distributed.buffer.grad_attribute import attributes_alone
from core.distributed.guard.replicas import (
    checksum,
    refuse_unequal,
    unequal_weights,
    within_stage,
)
from core.distributed.layout.model_plan import ModelPlan
from core.distributed.sharded.plain_params import PlainParams
from core.distributed.wire import huge_pages
from core.distributed.wire.collectives import Collectives
from core.distributed.wire.packs import flat_of, packs_of
from core.groups import agree
from core.groups.agree import SyncError
from core.groups.process_groups import ProcessGroups, control_of_stage

Init = Callable[[nn.Module], Any]
GIVEN_BACK = 2**26  # bytes of sharded weights after which memory freed in the C library is returned to the system
MOVES = ("to", "cpu", "cuda", "xpu", "half", "bfloat16", "float", "double", "type")  # methods that move tensors
MARK = "weights_to_make"  # attribute of a module whose weights are created at the wrap


class DeferredParameter(nn.Parameter):
    """A parameter between ``materialize`` and the wrap: shape, dtype and device, and one NaN for all values.

    It stays a single number when it is moved or cast. torch would allocate memory for all values.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with attributes_alone():
            if getattr(func, "__name__", "") not in MOVES or not args[0].numel():
                return func(*args, **kwargs)
            one = args[0].detach()[(0,) * args[0].dim()]
            kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
            return func(one, *args[1:], **kwargs).expand(args[0].shape)


def materialize(module: nn.Module, init: Init | None = None, *, device: torch.device | str = "cpu") -> nn.Module:
    """Let the wrap initialize a module that was built on the meta device, one part after another. Local.

    A model that is too large for one rank cannot be built before it is sharded. On the meta device it has no memory,
    and the wrap creates, initializes and shards one part before it begins the next.

        with torch.device("meta"):
            module = Model()
        model = DistributedDataParallel(None, config, materialize(module, init))

    Args:
        module: Module with all parameters on the meta device.
        init: Called with every module that directly has parameters or buffers, children first, as by ``module.apply``.
            It writes all of them, and no other module's. None for the modules' own ``reset_parameters``. Ranks that
            hold copies must draw equal weights. Otherwise the wrap rejects them, or uses the first rank's: see
            initial_weights.
        device: Device of the weights.

    Returns:
        The module.

    Raises:
        ValueError: If a parameter is not on the meta device, or ``init`` is None and a module has no
            ``reset_parameters``. The wrap raises it for a parameter that ``init`` has not written.
    """
    params = dict(module.named_parameters())
    present = next((name for name, param in params.items() if not param.is_meta), None)
    if present is not None:
        raise ValueError(
            f"parameter {present!r} has values already; build the module inside `with torch.device('meta'):`, or wrap "
            "it unchanged"
        )
    names = {id(part): name for name, part in module.named_modules()}
    for part in _parts(module):
        if init is None and not callable(getattr(part, "reset_parameters", None)):
            raise ValueError(
                f"module {names[id(part)]!r} ({type(part).__name__}) has no reset_parameters(); pass init, a function "
                "that writes the parameters and buffers of the module it is given"
            )
    made = {id(param): _deferred(param, device) for param in params.values()}
    buffers = {id(buffer): torch.zeros_like(buffer, device=device) for buffer in module.buffers() if buffer.is_meta}
    for part in module.modules():
        for name, param in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, made[id(param)])
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, buffers.get(id(buffer), buffer))
    vars(module)[MARK] = init or methodcaller("reset_parameters")
    return module


def make_all(module: nn.Module, init: Init) -> None:
    """Initialize the complete model, for ranks that hold all of it. Local."""
    names = {id(param): name for name, param in module.named_parameters()}
    for part in _parts(module):
        _make(part, init, names)


@torch.no_grad()
def make_and_shard(
    module: nn.Module,
    init: Init,
    params: PlainParams,
    plan: ModelPlan,
    groups: ProcessGroups,
    initial_weights: str,
) -> None:
    """Initialize each part, compare or broadcast it, and keep only this rank's shard.

    Collective over the model's stage. Raises LayoutMismatch on all ranks if copies of a weight differ. An error of
    ``init`` is raised on its rank, with a RuntimeError on the others.
    """
    parts = list(_parts(module))
    names = {id(param): name for name, param in plan.named.items()}
    last_use = {id(param): number for number, part in enumerate(parts) for param in part.parameters(recurse=False)}
    sums: dict[str, torch.Tensor] = {}
    error: Exception | None = None
    kept = 0
    for number, part in enumerate(parts):
        try:
            _make(part, init, names)
        except Exception as caught:  # other ranks may be in a broadcast, or about to compare
            error = caught
        if initial_weights == "broadcast":
            agree.refuse(error, control_of_stage(groups), "the initial weights")
        if error is not None:
            break
        # A tied weight stays unsharded until its last module, because each module's init writes it.
        ready = {names[id(p)]: p for p in part.parameters(recurse=False) if last_use[id(p)] == number}
        if initial_weights == "broadcast":
            broadcast_weights(plan, groups, params.collectives, only=ready)
        for name, param in ready.items():
            sums[name] = checksum(param).cpu()
            kept += param.nbytes
            params.shard_param(param)
        if kept >= GIVEN_BACK:
            huge_pages.give_back()
            kept = 0
    agree.refuse(error, control_of_stage(groups), "the initial weights")
    if initial_weights == "check":
        copies = {name: {key: sums[key] for key in params} for name, params in within_stage(plan, groups)}
        refuse_unequal(unequal_weights(copies, groups), groups, step=0)
    params.shard_params(())


@torch.no_grad()
def broadcast_weights(
    plan: ModelPlan, groups: ProcessGroups, collectives: Collectives, only: Collection[str] | None = None
) -> None:
    """Overwrite copies of weights within a stage with those on each group's first rank: all, or ``only`` these.
    Collective.
    """
    for name, held in within_stage(plan, groups):
        for pack in packs_of(param for key, param in held.items() if only is None or key in only):
            in_place = len(pack) == 1 and pack[0].is_contiguous()
            flat = pack[0].data if in_place else flat_of(pack)
            collectives.broadcast(flat, groups.require(name), "the initial weights")
            if not in_place and groups.rank(name) > 0:
                for param, part in zip(pack, flat.split([param.numel() for param in pack]), strict=True):
                    param.data.copy_(part.view_as(param))


def _make(part: nn.Module, init: Init, names: Mapping[int, str]) -> None:
    own = list(part.parameters(recurse=False))
    for param in own:
        is_replaced = param.untyped_storage().nbytes() < param.nbytes  # torch has replaced it by one on another device
        if type(param) is DeferredParameter or is_replaced:
            param.__class__ = nn.Parameter
            param.data = torch.full(param.shape, _unset(param), dtype=param.dtype, device=param.device)
    try:
        init(part)
    except SyncError as error:
        raise ValueError(
            f"init of a {type(part).__name__} has used a parameter of another module, which is sharded by now: {error}"
        ) from error
    for param in own:
        if param.is_floating_point() and bool(param.isnan().any()):
            raise ValueError(
                f"init has not written all of parameter {names[id(param)]!r} of a {type(part).__name__}, or has "
                "written NaN"
            )


def _parts(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """Yield modules that directly have parameters or buffers, in the order of ``apply``: children first."""
    seen = set() if seen is None else seen
    for child in module.children():
        if id(child) not in seen:
            yield from _parts(child, seen)
    seen.add(id(module))
    if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        yield module


def _deferred(param: nn.Parameter, device: torch.device | str) -> DeferredParameter:
    value = torch.full((), _unset(param), dtype=param.dtype, device=device).expand(param.shape)
    made = DeferredParameter(value, requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made


def _unset(param: nn.Parameter) -> float:
    return torch.nan if param.is_floating_point() else 0
