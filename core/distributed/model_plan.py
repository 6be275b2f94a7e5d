"""ModelPlan: everything about a wrapped model that can be known before any storage or collective exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from core.distributed.collectives import control_device
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.gradient_contract import (
    DEFAULT_RULES,
    ContractError,
    GradientContract,
    GradSyncRule,
    data_group_of,
    read_contracts,
)
from core.distributed.param_layout import (
    BufferKey,
    ParamLayout,
    ParamSpec,
    group_by_key,
    launch_order,
    plan_buffer,
    resolve_bucket_size,
)
from core.process_groups import ProcessGroups


@dataclass(frozen=True)
class ModelPlan:
    """Contracts, layout and launch order of one model chunk on this rank."""

    named: dict[str, nn.Parameter]  # all, in registration order
    params: dict[str, nn.Parameter]  # those that were trainable when wrapped
    frozen: dict[str, nn.Parameter]
    contracts: dict[str, GradientContract]
    rules: tuple[GradSyncRule, ...]
    layout: ParamLayout
    order: tuple[tuple[int, int], ...]  # (buffer, bucket) in launch order
    device: torch.device

    def table(self, data_group: str) -> list[str]:
        """One line a fact that all ranks of a data group must agree on."""
        lines = []
        for name, param in self.named.items():
            if data_group_of(param) == data_group:
                trained = "trained" if name in self.params else "frozen"
                lines.append(f"parameter {name!r}: shape {list(param.shape)}, {dtype_name(param.dtype)}, {trained}")
        for name, contract in self.contracts.items():
            if contract.data_group == data_group:
                lines.append(f"parameter {name!r}: {'; '.join(contract.reductions)}")
        for number, buffer in enumerate(self.layout.buffers):
            if buffer.key.data_group != data_group:
                continue
            for bucket in buffer.buckets:
                lines.append(
                    f"buffer {number} ({buffer.key}) of {buffer.shards} shards: {bucket.describe()} "
                    f"[{bucket.start}, {bucket.end})"
                )
        return lines


def stays_whole(param: nn.Parameter, wanted: bool | str) -> bool:
    """Does a parameter lie in one shard under this value of whole_param_shards?

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


def plan_model(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: ProcessGroups,
    *,
    one_bucket: bool,
) -> ModelPlan:
    """Read contracts and lay out buffers. Local: raises ContractError or ValueError, touches nothing."""
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
    named = dict(module.named_parameters())
    params = {name: param for name, param in named.items() if param.requires_grad}
    for name, param in params.items():
        owner = getattr(param, "grad_reducer", None)
        if owner is not None and owner() is not None:
            raise ValueError(
                f"parameter {name!r} already belongs to another DistributedDataParallel, which would reduce it a "
                "second time. Delete that wrapper first, or wrap the model once"
            )
    device = _one_device(named) if named else control_device(groups.require("dp_cp"))
    rules = (*DEFAULT_RULES, *ddp_config.sync_rules)
    contracts = read_contracts(params.items(), module, groups, config, rules)
    _check_rules(rules, contracts, groups)
    specs = []
    for name, param in params.items():
        grad_dtype = torch.promote_types(param.dtype, torch.float32) if ddp_config.grad_reduce_in_fp32 else param.dtype
        key = BufferKey(dtype_name(param.dtype), dtype_name(grad_dtype), contracts[name].data_group)
        crosses = contracts[name].crosses_stages
        whole = stays_whole(param, ddp_config.whole_param_shards) and not crosses
        specs.append(ParamSpec(name, tuple(param.shape), key, own_bucket=crosses, whole=whole))
    buffers = []
    for key, members in group_by_key(specs).items():
        groups.require(key.data_group)
        shards = groups.size(_checked_shard_group(key.data_group, ddp_config, groups))
        size = resolve_bucket_size(
            ddp_config.bucket_size,
            ddp_config.num_buckets,
            numel=sum(spec.numel for spec in members),
            data_ranks=groups.size("dp_cp"),
            overlap=ddp_config.overlap_grad_reduce or ddp_config.shards_gradients,
            one_bucket=one_bucket and not ddp_config.shards_gradients,
        )
        buffers.append(
            plan_buffer(
                members,
                bucket_size=size,
                shards=shards,
                sharded=ddp_config.sharded,
                high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
            )
        )
    layout = ParamLayout(tuple(buffers))
    frozen = {name: param for name, param in named.items() if not param.requires_grad}
    return ModelPlan(named, params, frozen, contracts, rules, layout, launch_order(layout, list(params)), device)


def _one_device(named: dict[str, nn.Parameter]) -> torch.device:
    device, first = torch.device("cpu"), ""
    for name, param in named.items():
        if param.is_complex():
            raise ValueError(
                f"parameter {name!r} is {param.dtype}; gradient buffers hold real numbers. Keep its real and imaginary "
                "parts as two parameters (torch.view_as_complex in the forward)"
            )
        if param.device.type == "meta":
            raise ValueError(
                f"parameter {name!r} is on the meta device; give it storage (module.to_empty) before wrapping"
            )
        if not first:
            device, first = param.device, name
        elif param.device != device:
            raise ValueError(
                f"parameter {name!r} is on {param.device} and {first!r} on {device}; the parameters of one model chunk "
                "share a gradient buffer and must be on one device"
            )
    return device


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
        for name, contract in contracts.items():
            if not rule.serves(contract):
                continue
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
