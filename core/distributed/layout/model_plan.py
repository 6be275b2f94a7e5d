"""ModelPlan: everything about a wrapped model that can be known before any storage or collective exists."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from core.agree import control_device
from core.distributed.contract.gradient_contract import (
    DEFAULT_RULES,
    ContractError,
    GradientContract,
    GradSyncRule,
    data_group_of,
    read_contracts,
    read_tags,
    replicated_over,
    shared_copies,
)
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.layout.model_walk import walk_model
from core.distributed.layout.param_layout import (
    BufferKey,
    ParamLayout,
    ParamSpec,
    group_by_key,
    launch_order,
    plan_buffer,
    resolve_bucket_size,
    tuples_of,
)
from core.distributed.layout.wrap_checks import check_kinds, check_storage, shared_params
from core.process_groups import ProcessGroups
from core.rank_grid import ACTIVATION_KINDS, COPY_AXES, DATA_KINDS


class ParamKind(NamedTuple):
    """What parameters have in common. Of equal ones there is one instance in a plan: a model has few kinds."""

    key: BufferKey  # of the buffer that it lies in if it trains
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool


class Kinds(dict[tuple[str, tuple[Any, ...]], ParamKind]):
    """(data group, (does it train, dtype, shape, ...)) -> the kind, made when it is first asked for."""

    def __init__(self, grad_reduce_in_fp32: bool) -> None:
        super().__init__()
        self.grad_reduce_in_fp32 = grad_reduce_in_fp32

    def __missing__(self, about: tuple[str, tuple[Any, ...]]) -> ParamKind:
        data_group, (trains, dtype, shape, *_) = about
        grads = torch.promote_types(dtype, torch.float32) if self.grad_reduce_in_fp32 else dtype
        key = BufferKey(dtype_name(dtype), dtype_name(grads), data_group)
        kind = self[about] = ParamKind(key, tuple(shape), dtype, trains)
        return kind


@dataclass(frozen=True)
class ModelPlan:
    """Contracts, layout and launch order of one model chunk on this rank."""

    modules: list[nn.Module]  # all that there are, until they are watched
    named: dict[str, nn.Parameter]  # all, in registration order
    kinds: dict[str, ParamKind]  # of each of them
    params: dict[str, nn.Parameter]  # those that were trainable when wrapped
    frozen: dict[str, nn.Parameter]
    contracts: dict[str, GradientContract]
    copies: dict[str, list[str]]  # group, data groups apart -> parameters of which all its ranks hold copies
    rules: tuple[GradSyncRule, ...]
    layout: ParamLayout
    order: tuple[tuple[int, int], ...]  # (buffer, bucket) in launch order
    wire_is_free: bool  # may backward launch buckets: do no activations travel on the groups of gradients?
    device: torch.device
    shared: dict[str, str]  # parameters whose memory another tensor of the model uses too, and that one in words

    def of_group(self, data_group: str) -> dict[str, nn.Parameter]:
        """All parameters of a data group, frozen ones too."""
        return {name: self.named[name] for name in self._kinds_of(data_group)}

    def copies_over(self, group: str) -> dict[str, nn.Parameter]:
        """All parameters of which each rank of this group holds a copy; not for data groups."""
        return {name: self.named[name] for name in self.copies.get(group, ())}

    def fingerprint(self, group: str) -> list[str]:
        """What the ranks of a data group or a tensor-parallel group must have in common, one line a fact.

        Tensor-parallel ranks hold slices of different shapes: of what they split, only the reductions are listed.
        """
        of_data = group in DATA_KINDS
        held = self._kinds_of(group) if of_data else {name: self.kinds[name] for name in self.copies.get(group, ())}
        return [
            *(describe_param(name, kind) for name, kind in held.items()),
            *(
                f"parameter {name!r}: {'; '.join(contract.reductions)}"
                for name, contract in self.contracts.items()
                if not of_data or contract.data_group == group
            ),
            *(
                f"buffer {number} ({buffer.key}) of {buffer.shards} shards: {bucket.describe()} "
                f"[{bucket.start}, {bucket.end})"
                for number, buffer in enumerate(self.layout.buffers)
                if buffer.key.data_group == group
                for bucket in buffer.buckets
            ),
        ]

    def _kinds_of(self, data_group: str) -> dict[str, ParamKind]:
        return {name: kind for name, kind in self.kinds.items() if kind.key.data_group == data_group}


def describe_param(name: str, kind: ParamKind) -> str:
    """A line of the table that ranks compare."""
    trains = "trained" if kind.trains else "frozen"
    return f"parameter {name!r}: shape {list(kind.shape)}, {dtype_name(kind.dtype)}, {trains}"


def stays_whole(param: nn.Parameter, wanted: bool | str) -> bool:
    """Does a parameter lie in one shard under this value of keep_params_whole?

    True is for optimizers of matrices, and stacks of them; those leave embedding and output to another algorithm.
    """
    if getattr(param, "is_embedding_or_output_parameter", False):
        return False
    return wanted == "all" or (wanted is True and param.dim() >= 2)


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def option_table(config: Any, ddp_config: DistributedDataParallelConfig) -> list[str]:
    """One line an option: most of them change which collectives run or what they add, so they must be equal on all
    ranks.
    """
    ours = {f.name: getattr(ddp_config, f.name) for f in fields(ddp_config) if f.name != "sync_rules"}
    theirs = {name: getattr(config, name, False) for name in ("calculate_per_token_loss", "deterministic_mode")}
    return [f"option {name} = {value!r}" for name, value in {**ours, **theirs}.items()]


def shard_group_name(data_group: str, config: DistributedDataParallelConfig) -> str:
    """The field of ProcessGroups over which a buffer of `data_group` is sharded."""
    if not config.sharded or config.num_distributed_optimizer_instances == 1:
        return data_group
    return {"dp_cp": "intra_dp_cp", "expt_dp": "intra_expt_dp"}[data_group]


def replica_group_name(data_group: str, config: DistributedDataParallelConfig) -> str | None:
    """The field of ProcessGroups with the same shard in the other optimizer instances; None where there is only one."""
    if shard_group_name(data_group, config) == data_group:
        return None
    return {"dp_cp": "inter_dp_cp", "expt_dp": "inter_expt_dp"}[data_group]


def plan_model(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroups,
    *,
    one_bucket: bool,
    owned: Collection[int] = (),
) -> ModelPlan:
    """Read contracts and lay out buffers. Local: raises ContractError or ValueError, touches nothing.

    owned: ids of parameters that another wrapper reduces already.
    """
    if getattr(config, "calculate_per_token_loss", False) and ddp_config.average_in_collective:
        raise ValueError(
            "calculate_per_token_loss divides by the number of tokens of the whole batch, so gradients must be summed; "
            "set average_in_collective=False"
        )
    chunks = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if ddp_config.reduces_every_microbatch and chunks is not None:
        raise ValueError(
            "reduce_microbatches='every' reduces at the end of every backward, and with virtual pipeline chunks ranks "
            "may differ in which chunks had one; set reduce_microbatches='last'"
        )
    modules, named = walk_model(module)
    check_kinds(module, modules, named)
    device = next(iter(named.values())).device if named else control_device(groups.require("dp_cp"))
    params: dict[str, nn.Parameter] = {}
    frozen: dict[str, nn.Parameter] = {}
    on_meta, on_cpu = device.type == "meta", device.type == "cpu"
    # One call a parameter for all that is read of it: with many parameters each one's memory is far away.
    read = attrgetter("requires_grad", "dtype", "shape", "is_cpu" if on_cpu else "device", "layout")
    place = True if on_cpu else device
    looks = list(map(read, named.values()))  # many parameters look alike
    unfit = {
        look for look in set(looks) if on_meta or look[3] != place or look[1].is_complex or look[4] is not torch.strided
    }
    for (name, param), look in zip(named.items(), looks, strict=True):
        if unfit and look in unfit:
            raise ValueError(_unfit(name, param, next(iter(named)), device))
        if not look[0]:
            frozen[name] = param
            continue
        if id(param) in owned:
            raise ValueError(
                f"parameter {name!r} already belongs to another DistributedDataParallel, which would reduce it a "
                "second time. Delete that wrapper first, or wrap the model once"
            )
        params[name] = param
    check_storage(named)
    shared = shared_params(module, modules, params, frozen)
    if shared and ddp_config.sharded:
        name, other = next(iter(shared.items()))
        raise ValueError(
            f"{other} lies in the memory of parameter {name!r}, which a sharded optimizer moves; it would keep the old "
            "values. Read the parameter where it is used, or set data_parallel_sharding_strategy='no_shard'"
        )
    rules = (*DEFAULT_RULES, *ddp_config.sync_rules)
    contracts = read_contracts(params.items(), modules, groups, config, rules)
    _check_rules(rules, contracts, groups)
    known = Kinds(ddp_config.grad_reduce_in_fp32)
    abouts = zip(map(data_group_of, named.values()), looks, strict=True)
    kinds = dict(zip(named, map(known.__getitem__, abouts), strict=True))
    buffers = []
    for key, members in group_by_key(_specs(params, contracts, kinds, ddp_config.keep_params_whole)).items():
        groups.require(key.data_group)
        shards = groups.size(_checked_shard_group(key.data_group, ddp_config, groups))
        size = resolve_bucket_size(
            ddp_config.bucket_size,
            ddp_config.num_buckets,
            numel=sum(map(math.prod, map(itemgetter(1), members))),  # of their shapes
            data_ranks=groups.size("dp_cp"),
            overlap=ddp_config.overlap_grad_reduce,
            one_bucket=one_bucket,
            streamed=ddp_config.shards_gradients,
        )
        buffers.append(
            plan_buffer(
                members,
                bucket_size=size,
                shards=shards,
                sharded=ddp_config.sharded,
                high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
                streamed=ddp_config.shards_gradients,
            )
        )
    layout = ParamLayout(tuple(buffers))
    wire_is_free = not _wire_carries_activations(layout, ddp_config, groups)
    return ModelPlan(
        modules,
        named,
        kinds,
        params,
        frozen,
        contracts,
        _copies(named, contracts, modules, groups, ddp_config.sync_rules),
        rules,
        layout,
        launch_order(layout, list(params)),
        wire_is_free,
        device,
        shared,
    )


def _copies(
    named: dict[str, nn.Parameter],
    contracts: dict[str, GradientContract],
    modules: list[nn.Module],
    groups: ProcessGroups,
    rules: Sequence[GradSyncRule],
) -> dict[str, list[str]]:
    """`ModelPlan.copies`: frozen parameters are weights too, and what a rule of the user's makes equal is a copy."""
    rules = [rule for rule in rules if groups.size(rule.group) > 1]
    copies: dict[str, list[str]] = {}
    if not rules and all(groups.size(axis) == 1 for axis in (*COPY_AXES, "pp")):
        return copies
    word, position = shared_copies(modules)
    for name, param in named.items():
        contract = contracts.get(name)
        if contract is None:
            tags = read_tags(param, word_embedding=id(param) in word, position_embedding=id(param) in position)
            held = replicated_over(tags, groups)
        else:
            held = (*contract.replicated_over, *(rule.group for rule in rules if rule.serves(contract)))
        for axis in dict.fromkeys(held):
            copies.setdefault(axis, []).append(name)
    return copies


def _specs(
    params: dict[str, nn.Parameter],
    contracts: dict[str, GradientContract],
    kinds: dict[str, ParamKind],
    wanted: bool | str,
) -> list[ParamSpec]:
    """What the layout has to know of each parameter that trains; wanted: the value of keep_params_whole."""
    rows = ((name, kinds[name], contract.crosses_stages) for name, contract in contracts.items())
    if wanted is False:
        return tuples_of(ParamSpec, ((name, kind.shape, kind.key, crosses, False) for name, kind, crosses in rows))
    return [
        ParamSpec(name, kind.shape, kind.key, crosses, not crosses and stays_whole(params[name], wanted))
        for name, kind, crosses in rows
    ]


def _unfit(name: str, param: nn.Parameter, first: str, device: torch.device) -> str:
    """Why a parameter cannot be wrapped with the first one, which is on `device`."""
    if param.is_complex():
        return (
            f"parameter {name!r} is {param.dtype}; gradient buffers hold real numbers. Keep its real and imaginary "
            "parts as two parameters (torch.view_as_complex in the forward)"
        )
    if param.device.type == "meta":
        return f"parameter {name!r} is on the meta device; give it storage (module.to_empty) before wrapping"
    if param.layout is not torch.strided:
        return f"parameter {name!r} is {param.layout}; gradient buffers hold dense tensors: make it one (to_dense())"
    return (
        f"parameter {name!r} is on {param.device} and {first!r} on {device}; the parameters of one model chunk "
        "share a gradient buffer and must be on one device"
    )


def _checked_shard_group(data_group: str, ddp_config: DistributedDataParallelConfig, groups: ProcessGroups) -> str:
    name = shard_group_name(data_group, ddp_config)
    groups.require(name)
    instances = ddp_config.num_distributed_optimizer_instances
    if ddp_config.sharded and groups.size(name) * instances != groups.size(data_group):
        raise ValueError(
            f"num_distributed_optimizer_instances is {instances} and group {name!r} has {groups.size(name)} ranks, but "
            f"{data_group!r} has {groups.size(data_group)} and not {instances} x {groups.size(name)}; give the same "
            "number to initialize_model_parallel"
        )
    return name


def _wire_carries_activations(
    layout: ParamLayout, config: DistributedDataParallelConfig, groups: ProcessGroups
) -> bool:
    """Would backward mix buckets with exchanges of activations? See Note [Lanes] in core/process_groups.py.

    The groups that parallel_state builds are apart; those that a user passes may not be, and then nothing overlaps.
    """
    activations = [getattr(groups, name) for name in ACTIVATION_KINDS if groups.size(name) > 1]
    for data_group in {buffer.key.data_group for buffer in layout.buffers}:
        replica = replica_group_name(data_group, config)
        names = [data_group, shard_group_name(data_group, config), *([replica] if replica else [])]
        if any(groups.require(name) is other for name in names for other in activations):
            return True
    return False


def _check_rules(rules: Sequence[GradSyncRule], contracts: dict[str, GradientContract], groups: ProcessGroups) -> None:
    """A rule must not reduce over ranks that the data-parallel reduction has covered, or that hold another slice."""
    data_ranks = {
        data_group: set(groups.ranks(data_group))
        for data_group in {contract.data_group for contract in contracts.values()}
    }
    for rule in rules:
        if groups.size(rule.group) < 2:
            continue
        members = set(groups.ranks(rule.group))
        checked = set()  # what the check goes by; thousands of parameters share a few of these
        for name, contract in contracts.items():
            reach = contract.data_group, contract.sharded_over
            if not rule.serves(contract) or reach in checked:
                continue
            checked.add(reach)
            data = data_ranks[contract.data_group]
            for axis in contract.sharded_over:
                if axis != "pp" and len(members & set(groups.ranks(axis))) > 1:
                    raise ContractError(
                        f"parameter {name!r}: rule {rule.name!r} reduces over {rule.group!r} {sorted(members)}, and "
                        f"ranks {sorted(members & set(groups.ranks(axis)))} of it hold different slices of the "
                        f"parameter, which is split over {axis!r} {groups.ranks(axis)}"
                    )
            if len(members & data) > 1:
                raise ContractError(
                    f"parameter {name!r}: rule {rule.name!r} reduces over {rule.group!r} {sorted(members)}, which "
                    f"shares ranks {sorted(members & data)} with its data group {contract.data_group!r}; they would be "
                    "reduced twice"
                )
