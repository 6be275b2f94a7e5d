"""ModelPlan: everything about a wrapped model that is known before memory and collectives exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.contract.gradient_contract import (
    DEFAULT_RULES,
    ContractError,
    GradientContract,
    GradSyncRule,
    read_contracts,
    read_tags,
    replicated_over,
)
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.layout.param_layout import (
    BufferKey,
    ParamLayout,
    ParamSpec,
    group_by_key,
    launch_order,
    plan_buffer,
    resolve_bucket_size,
)
from core.distributed.layout.wrap_checks import check_modules, check_param, shared_params
from core.groups.agree import control_device
from core.groups.param_attributes import data_group_of, embeddings_of
from core.groups.process_groups import ProcessGroups
from core.groups.rank_grid import ACTIVATION_KINDS, DATA_KINDS

SHARDED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # for frozen parameters


@dataclass(frozen=True)
class ModelPlan:
    """Contracts, layout and launch order of one model chunk on this rank."""

    named: dict[str, nn.Parameter]  # all, in registration order
    params: dict[str, nn.Parameter]  # parameters that were trainable when wrapped
    frozen: dict[str, nn.Parameter]
    contracts: dict[str, GradientContract]
    copies: dict[str, list[str]]  # group (except data groups) -> parameters that all its ranks hold copies of
    rules: tuple[GradSyncRule, ...]
    layout: ParamLayout
    frozen_layout: ParamLayout  # with sharded parameters, frozen ones are sharded too
    buckets: tuple[tuple[int, int], ...]  # (buffer, bucket) in launch order
    may_overlap: bool  # True if backward may launch buckets: no group carries both gradients and activations
    device: torch.device
    shared: dict[str, str]  # parameter -> description of another tensor of the model in the same memory

    def of_group(self, data_group: str) -> dict[str, nn.Parameter]:
        """Return all parameters of a data group, including frozen ones."""
        return {name: param for name, param in self.named.items() if data_group_of(param) == data_group}

    def copies_over(self, group: str) -> dict[str, nn.Parameter]:
        """Return all parameters that each rank of a group, which is no data group, holds a copy of."""
        return {name: self.named[name] for name in self.copies.get(group, ())}

    def fingerprint(self, group: str) -> list[str]:
        """List the facts that all ranks of a data or tensor-parallel group must share, one line each.

        Tensor-parallel ranks hold slices of different shapes. For split parameters only the reductions are listed.
        """
        of_data = group in DATA_KINDS
        held = self.of_group(group) if of_data else self.copies_over(group)
        return [
            *(
                f"parameter {name!r}: shape {list(param.shape)}, {dtype_name(param.dtype)}, "
                f"{'frozen' if name in self.frozen else 'trained'}"
                for name, param in held.items()
            ),
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


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as 'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _stays_whole(param: nn.Parameter, wanted: bool | str) -> bool:
    """Return True if keep_params_whole places a parameter in one shard: True selects matrices and stacks, "all" any."""
    if getattr(param, "is_embedding_or_output_parameter", False):
        return False
    return wanted == "all" or param.dim() >= 2


def option_table(config: Any, ddp_config: DistributedDataParallelConfig) -> list[str]:
    """Return one line for each option, to compare between ranks. Most options change collectives or their sums."""
    ours = {f.name: getattr(ddp_config, f.name) for f in fields(ddp_config) if f.name != "sync_rules"}
    theirs = {name: getattr(config, name, False) for name in ("calculate_per_token_loss", "deterministic_mode")}
    return [f"option {name} = {value!r}" for name, value in {**ours, **theirs}.items()]


def shard_and_replica(data_group: str, config: DistributedDataParallelConfig) -> tuple[str, str | None]:
    """Name the group that a buffer is sharded over, and the group of the same shard in other optimizer instances.

    The second is None with a single instance.
    """
    if not config.sharded or config.num_distributed_optimizer_instances == 1:
        return data_group, None
    return f"intra_{data_group}", f"inter_{data_group}"


@dataclass(frozen=True, slots=True)
class BucketGroups:
    """Process groups of a bucket: shard x replica = data."""

    data: dist.ProcessGroup  # all ranks whose gradients are added
    shard: dist.ProcessGroup  # the ranks that share one copy of the optimizer's state
    replica: dist.ProcessGroup | None  # the same shard in the other optimizer instances

    @property
    def all(self) -> list[dist.ProcessGroup]:
        return [self.data, self.shard, *([self.replica] if self.replica else [])]


def groups_of(data_group: str, config: DistributedDataParallelConfig, groups: ProcessGroups) -> BucketGroups:
    """Return the process groups for the buckets of one data group."""
    shard, replica = shard_and_replica(data_group, config)
    return BucketGroups(
        groups.require(data_group), groups.require(shard), None if replica is None else groups.require(replica)
    )


def plan_model(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroups,
    *,
    one_bucket: bool,
    owned: Collection[int] = (),
    without_memory: bool = False,
) -> ModelPlan:
    """Read contracts and lay out buffers. Local; changes nothing.

    ``owned`` are ids of parameters that another wrapper already reduces. ``without_memory`` plans a model on the meta
    device that is never wrapped, and skips checks that need memory, such as two parameters that share it.

    Raises:
        ContractError: If a parameter's tags contradict each other, or no rule reduces its partial gradient.
        ValueError: If the module cannot be wrapped, or options contradict each other.
    """
    _check_options(config, ddp_config)
    modules = dict(module.named_modules())
    check_modules(module, modules, reads_seen=ddp_config.shards_parameters)
    named = dict(module.named_parameters())
    params: dict[str, nn.Parameter] = {}
    frozen: dict[str, nn.Parameter] = {}
    first = next(iter(named.items()), None)
    for name, param in named.items():
        assert first is not None, "the model has a parameter, as `name` is one of them"
        if not without_memory:
            check_param(name, param, first)
        if param.requires_grad and id(param) in owned:
            raise ValueError(
                f"parameter {name!r} already belongs to another DistributedDataParallel, which would reduce it a "
                "second time. Delete that wrapper first, or wrap the model once"
            )
        (params if param.requires_grad else frozen)[name] = param
    shared = {} if without_memory else shared_params(modules, params, frozen)
    if shared and ddp_config.sharded:
        name, other = next(iter(shared.items()))
        raise ValueError(
            f"{other} shares memory with parameter {name!r} and would keep old values, because a sharded optimizer "
            "moves the parameter to a buffer. Read the parameter itself, or set "
            "data_parallel_sharding_strategy='no_shard'"
        )
    device = torch.device("meta") if first is None else first[1].device
    rules = (*DEFAULT_RULES, *ddp_config.sync_rules)
    contracts = read_contracts(params.items(), modules.values(), groups, config, rules)
    _check_rules(rules, contracts, groups)
    layout = _plan_layout(param_specs(params, contracts, ddp_config), ddp_config, groups, one_bucket)
    frozen_specs = _frozen_specs(frozen) if ddp_config.shards_parameters else ()
    return ModelPlan(
        named,
        params,
        frozen,
        contracts,
        _copies(modules, named, contracts, groups, ddp_config.sync_rules),
        rules,
        layout,
        _plan_layout(frozen_specs, ddp_config, groups, one_bucket),
        launch_order(layout, list(params)),
        _may_overlap(layout, ddp_config, groups),
        control_device(groups.require("dp_cp")) if first is None and not without_memory else device,
        shared,
    )


def _check_options(config: Any, ddp_config: DistributedDataParallelConfig) -> None:
    if getattr(config, "calculate_per_token_loss", False) and ddp_config.average_in_collective:
        raise ValueError(
            "calculate_per_token_loss divides gradients by the number of tokens in the global batch, so they must be "
            "summed over ranks; set average_in_collective=False"
        )
    chunks = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if ddp_config.reduces_every_microbatch and chunks is not None:
        raise ValueError(
            "reduce_microbatches='every' reduces at the end of every backward, and with virtual pipeline chunks ranks "
            "may differ in which chunks had one; set reduce_microbatches='last'"
        )


def _plan_layout(
    specs: Iterable[ParamSpec], ddp_config: DistributedDataParallelConfig, groups: ProcessGroups, one_bucket: bool
) -> ParamLayout:
    buffers = []
    for key, members in group_by_key(list(specs)).items():
        size = resolve_bucket_size(
            ddp_config.bucket_size,
            ddp_config.num_buckets,
            numel=sum(spec.numel for spec in members),
            data_ranks=groups.size("dp_cp"),
            overlap=ddp_config.overlap_grad_reduce,
            one_bucket=one_bucket,
            shards_gradients=ddp_config.shards_gradients,
        )
        buffers.append(
            plan_buffer(
                members,
                bucket_size=size,
                shards=_count_shards(key.data_group, ddp_config, groups),
                sharded=ddp_config.sharded,
                high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
                strict_size=ddp_config.shards_gradients,
            )
        )
    return ParamLayout(tuple(buffers))


def param_specs(
    params: dict[str, nn.Parameter],
    contracts: dict[str, GradientContract],
    ddp_config: DistributedDataParallelConfig,
) -> Iterator[ParamSpec]:
    """Yield the layout's inputs for the trainable parameters, in registration order."""
    keys: dict[tuple[torch.dtype, str], BufferKey] = {}
    wanted = ddp_config.keep_params_whole
    for name, param in params.items():
        contract = contracts[name]
        kind = param.dtype, contract.data_group
        if kind not in keys:
            grads = ddp_config.grad_dtype_of(param.dtype)
            keys[kind] = BufferKey(dtype_name(param.dtype), dtype_name(grads), contract.data_group)
        whole = bool(wanted) and not contract.crosses_stages and _stays_whole(param, wanted)
        yield ParamSpec(name, tuple(param.shape), keys[kind], contract.crosses_stages, whole)


def _frozen_specs(frozen: dict[str, nn.Parameter]) -> Iterator[ParamSpec]:
    """Yield the layout's inputs for frozen parameters that can be sharded.

    Integer parameters are excluded: they have no NaN that would reveal a read of missing values.
    """
    for name, param in frozen.items():
        if param.dtype in SHARDED_DTYPES:
            dtype = dtype_name(param.dtype)
            yield ParamSpec(name, tuple(param.shape), BufferKey(dtype, dtype, data_group_of(param)))


def _count_shards(data_group: str, ddp_config: DistributedDataParallelConfig, groups: ProcessGroups) -> int:
    """Return the size of the shard group. Raises ValueError if the groups were built for other optimizer instances."""
    name, _ = shard_and_replica(data_group, ddp_config)
    groups.require(data_group)
    groups.require(name)
    instances = ddp_config.num_distributed_optimizer_instances
    if ddp_config.sharded and groups.size(name) * instances != groups.size(data_group):
        raise ValueError(
            f"num_distributed_optimizer_instances is {instances} and group {name!r} has {groups.size(name)} ranks, but "
            f"{data_group!r} has {groups.size(data_group)} and not {instances} x {groups.size(name)}; give the same "
            "number to initialize_model_parallel"
        )
    return groups.size(name)


def _copies(
    modules: dict[str, nn.Module],
    named: dict[str, nn.Parameter],
    contracts: dict[str, GradientContract],
    groups: ProcessGroups,
    rules: Sequence[GradSyncRule],
) -> dict[str, list[str]]:
    """Compute ``ModelPlan.copies``. Frozen parameters count as weights, and a user's rule makes copies too."""
    rules = [rule for rule in rules if groups.size(rule.group) > 1]
    embeddings = embeddings_of(modules.values()) if len(contracts) < len(named) else {}  # for frozen parameters
    copies: dict[str, list[str]] = {}
    for name, param in named.items():
        contract = contracts.get(name)
        if contract is None:
            held = replicated_over(read_tags(param, embeddings), groups)
        else:
            held = (*contract.replicated_over, *(rule.group for rule in rules if rule.serves(contract)))
        for axis in dict.fromkeys(held):
            copies.setdefault(axis, []).append(name)
    return copies


def _may_overlap(layout: ParamLayout, config: DistributedDataParallelConfig, groups: ProcessGroups) -> bool:
    """Return True if no group carries both gradients and activations.

    See Note [Gradient groups] in core/groups/process_groups.py. parallel_state builds separate groups. A user's groups
    may not be separate, and then nothing overlaps.
    """
    activations = [getattr(groups, name) for name in ACTIVATION_KINDS if groups.size(name) > 1]
    names = {
        name
        for buffer in layout.buffers
        for name in (buffer.key.data_group, *shard_and_replica(buffer.key.data_group, config))
        if name is not None
    }
    return not any(groups.require(name) is other for name in names for other in activations)


def _check_rules(rules: Sequence[GradSyncRule], contracts: dict[str, GradientContract], groups: ProcessGroups) -> None:
    """Reject a rule over ranks that the data-parallel reduction already covers, or that hold different slices."""
    data_ranks = {
        data_group: set(groups.ranks(data_group))
        for data_group in {contract.data_group for contract in contracts.values()}
    }
    for rule in rules:
        if groups.size(rule.group) < 2:
            continue
        members = set(groups.ranks(rule.group))
        checked = set()  # results depend on these values only; thousands of parameters share a few of them
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
