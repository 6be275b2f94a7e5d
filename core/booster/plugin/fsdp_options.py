"""Options of FSDP1 (FullyShardedDataParallel), translated to FSDP2 (``fully_shard``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from core.groups import agree
from core.watch.warn_user import warn_user

HYBRID = tuple(strategy for strategy in ShardingStrategy if "HYBRID_SHARD" in strategy.name)
RESHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "process_group": (
        (dist.ProcessGroup, DeviceMesh, tuple, list),
        "a process group, a pair of them, or a DeviceMesh",
    ),
    "cpu_offload": (
        (CPUOffload, OffloadPolicy, bool),
        "torch.distributed.fsdp.CPUOffload(offload_params=True), or a policy of fully_shard",
    ),
    "backward_prefetch": ((BackwardPrefetch,), "torch.distributed.fsdp.BackwardPrefetch.BACKWARD_PRE or BACKWARD_POST"),
    "mixed_precision": (
        (MixedPrecision, MixedPrecisionPolicy),
        "torch.distributed.fsdp.MixedPrecision(param_dtype=...); names are for Booster(mixed_precision='bf16')",
    ),
}


@dataclass(frozen=True)
class Unit:
    """Module whose parameters are gathered and reduced together, with the dtypes of its computation."""

    name: str
    module: nn.Module
    policy: MixedPrecisionPolicy


def units_of(
    model: nn.Module,
    auto_wrap_policy: Any,
    mixed_precision: MixedPrecision | MixedPrecisionPolicy | None,
    ignored: set[nn.Module],
) -> list[Unit]:
    """Return the units of a model, inner ones first and the model itself last.

    ``auto_wrap_policy`` is as for FSDP: a function (module, recurse, nonwrapped_numel) -> bool, a policy object of
    torch.distributed.fsdp.wrap, a set of module classes, or ``None`` for one unit. Modules that mixed precision exempts
    become units that compute in fp32. Raises ValueError if two units share a parameter.
    """
    inner, root = (policy_of(mixed_precision, root=root) for root in (False, True))
    names = {module: name for name, module in model.named_modules()}
    chosen: dict[nn.Module, MixedPrecisionPolicy] = {}
    if auto_wrap_policy is not None:
        for module in _wrapped_by(auto_wrap_policy, model, ignored):
            chosen[module] = inner
        if not chosen and isinstance(auto_wrap_policy, (set, frozenset, list, tuple)):
            warn_user(
                f"auto_wrap_policy: the model has no module of {sorted(kind.__name__ for kind in auto_wrap_policy)}, "
                "so it is one unit, all of which is gathered at once"
            )
    if isinstance(mixed_precision, MixedPrecision) and mixed_precision.param_dtype is not None:
        exempt = MixedPrecisionPolicy(
            param_dtype=torch.float32, output_dtype=mixed_precision.param_dtype, cast_forward_inputs=True
        )
        for module in names:
            if isinstance(module, tuple(mixed_precision._module_classes_to_ignore)) and module not in ignored:
                chosen[module] = exempt
    chosen[model] = root
    # named_modules gives a parent before its children.
    units = [Unit(name, module, chosen[module]) for module, name in reversed(names.items()) if module in chosen]
    _check_shared_parameters(units)
    return units


def check_policy(policy: Any) -> None:
    """Raise TypeError if an object cannot select modules to wrap."""
    if isinstance(policy, (set, frozenset, list, tuple)):
        fits = all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in policy)
    else:
        fits = policy is None or hasattr(policy, "_run_policy") or (callable(policy) and not isinstance(policy, type))
    if not fits:
        raise TypeError(
            f"auto_wrap_policy is {policy!r}; expected a function (module, recurse, nonwrapped_numel) -> bool, a "
            "policy of torch.distributed.fsdp.wrap, or a set of module classes, such as {torch.nn.Linear}"
        )


def check_kinds(**options: Any) -> None:
    """Raise TypeError for an FSDP option of a wrong type, which torch would reject late or never."""
    check_policy(options.pop("auto_wrap_policy"))
    for name, (kinds, expected) in KINDS.items():
        if options[name] is not None and not isinstance(options[name], kinds):
            raise TypeError(f"{name} is {options[name]!r}; expected {expected}")
    if options["param_init_fn"] is not None and not callable(options["param_init_fn"]):
        raise TypeError(f"param_init_fn is {options['param_init_fn']!r}; expected a function of one module")


def _wrapped_by(policy: Any, model: nn.Module, ignored: set[nn.Module]) -> Iterable[nn.Module]:
    if hasattr(policy, "_run_policy"):  # ModuleWrapPolicy, CustomPolicy
        return [module for module in policy._run_policy(model, ignored, {}) if module is not model]
    check_policy(policy)
    if isinstance(policy, (set, frozenset, list, tuple)):
        classes = tuple(policy)
        return [module for module in model.modules() if isinstance(module, classes) and module is not model]
    wrapped: list[nn.Module] = []
    _ask(policy, model, ignored, wrapped)
    return [module for module in wrapped if module is not model]


def _ask(policy: Callable[..., bool], module: nn.Module, ignored: set[nn.Module], wrapped: list[nn.Module]) -> int:
    """Call a function policy for a module, children first. Return the number of elements in wrapped modules."""
    numel = sum(param.numel() for param in module.parameters())
    if module in ignored or module in wrapped:
        return 0
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    inside = sum(_ask(policy, child, ignored, wrapped) for child in module.children())
    if policy(module=module, recurse=False, nonwrapped_numel=numel - inside):
        wrapped.append(module)
        return numel
    return inside


def _check_shared_parameters(units: Sequence[Unit]) -> None:
    owner: dict[nn.Parameter, tuple[Unit, str]] = {}
    inside = {unit.module for unit in units}
    for unit in units:
        prefix = f"{unit.name}." if unit.name else ""
        for path, module in own_modules(unit.module, inside, prefix):
            for name, param in module.named_parameters(recurse=False):
                other, other_name = owner.setdefault(param, (unit, path + name))
                if other is not unit:
                    raise ValueError(
                        f"TorchFSDPPlugin: {other_name!r} in unit {other.name or 'the model'!r} and {path + name!r} in "
                        f"unit {unit.name or 'the model'!r} are one parameter (tied), and would become two. Let "
                        "auto_wrap_policy leave both to one unit, for example by wrapping only the layers between them"
                    )


def own_modules(module: nn.Module, others: set[nn.Module], prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a unit's modules with their names, without ``others`` (other units, ignored modules) and their
    submodules.
    """
    yield prefix, module
    for name, child in module.named_children():
        if child not in others:
            yield from own_modules(child, others, f"{prefix}{name}.")


def policy_of(mixed_precision: MixedPrecision | MixedPrecisionPolicy | None, *, root: bool) -> MixedPrecisionPolicy:
    """Return a unit's dtypes from FSDP1's or FSDP2's. By default the model casts its inputs, and inner units do not."""
    if mixed_precision is None:
        return MixedPrecisionPolicy()
    if isinstance(mixed_precision, MixedPrecisionPolicy):
        return mixed_precision
    cast = mixed_precision.cast_forward_inputs or (root and mixed_precision.cast_root_forward_inputs)
    return MixedPrecisionPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype,
        cast_forward_inputs=cast,
    )


def offload_of(cpu_offload: Any, device: torch.device) -> OffloadPolicy:
    """Return the policy for shards between their uses, from a CPUOffload, a bool, or a policy of ``fully_shard``."""
    if isinstance(cpu_offload, OffloadPolicy):
        wanted = isinstance(cpu_offload, CPUOffloadPolicy)
    else:
        wanted = bool(getattr(cpu_offload, "offload_params", cpu_offload))
    if not wanted:
        return OffloadPolicy()
    if isinstance(cpu_offload, CPUOffloadPolicy):
        return cpu_offload
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")


def mesh_of(process_group: Any, strategy: ShardingStrategy, device: torch.device) -> DeviceMesh:
    """Create the mesh of ranks that shard and ranks that replicate: [shard] or [replicate, shard]. Collective.

    ``process_group`` is ``None``, a group, (shard group, replicate group) for hybrid strategies, or a DeviceMesh.
    Raises ValueError if the ranks of a machine do not divide the world, for a hybrid strategy without groups.
    """
    if isinstance(process_group, DeviceMesh):
        if strategy is ShardingStrategy.NO_SHARD:
            return _mesh(process_group.mesh.view(-1, 1), device)
        return process_group
    if isinstance(process_group, (tuple, list)):
        shard, replicate = process_group
        return _mesh_of_two(shard, replicate, device)
    if strategy is ShardingStrategy.NO_SHARD:
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        return _mesh(torch.tensor(ranks, device="cpu").view(-1, 1), device)
    if strategy in HYBRID:
        world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        if world % local:
            raise ValueError(
                f"TorchFSDPPlugin: {strategy.name} shards over the {local} ranks of a machine (LOCAL_WORLD_SIZE), "
                f"which do not divide the world of {world}; give process_group=(shard group, replicate group)"
            )
        return _mesh(torch.arange(world, device="cpu").view(-1, local), device)
    if process_group is None:
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    return DeviceMesh.from_group(process_group, device.type, mesh_dim_names=("shard",))


def _mesh(ranks: torch.Tensor, device: torch.device) -> DeviceMesh:
    return DeviceMesh(device.type, ranks, mesh_dim_names=("replicate", "shard"))


def _mesh_of_two(shard: dist.ProcessGroup, replicate: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    rows = list(agree.gather(dist.get_process_group_ranks(shard), replicate, "the shard groups").values())
    return DeviceMesh.from_group(
        [replicate, shard], device.type, mesh=torch.tensor(rows, device="cpu"), mesh_dim_names=("replicate", "shard")
    )
