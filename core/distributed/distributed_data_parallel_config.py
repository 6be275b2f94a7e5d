"""DistributedDataParallelConfig: options for reducing and sharding gradients. The wrapper never modifies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch

from core.distributed.contract.gradient_contract import GradSyncRule
from core.distributed.contract.placement import Placement
from core.number_ranges import COUNT, check_ranges, whole
from core.watch.warn_user import warn_user


class Spread(NamedTuple):
    """Number of ranks that share the memory for each kind of state."""

    params: int
    grads: int
    states: int


@dataclass(frozen=True, slots=True)
class Residency:
    """Model state that stays on a rank under a sharding strategy.

    Args:
        sharded: Each rank's optimizer updates its own shard, so gradients are reduce-scattered.
        keeps_whole: Full gradients have permanent memory. Otherwise only the shard has, and full gradients borrow
            memory from a BucketPool while they fill and are reduced.
        keeps_params: Full parameters have permanent memory. Otherwise only the shard has, and a bucket is gathered
            around its use.
    """

    sharded: bool
    keeps_whole: bool
    keeps_params: bool = True

    def spread(self, shards: int) -> Spread:
        """Return the number of ranks that share each kind of memory in a shard group of ``shards`` ranks."""
        return Spread(
            1 if self.keeps_params else shards,
            1 if self.keeps_whole else shards,
            shards if self.sharded else 1,
        )


Strategy: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
# A new sharding strategy is a row here.
RESIDENCIES: dict[Strategy, Residency] = {
    "no_shard": Residency(sharded=False, keeps_whole=True),
    "optim": Residency(sharded=True, keeps_whole=True),
    "optim_grads": Residency(sharded=True, keeps_whole=False),
    "optim_grads_params": Residency(sharded=True, keeps_whole=False, keeps_params=False),
}
STRATEGIES = tuple(RESIDENCIES)
CHOICES: dict[str, tuple[object, ...]] = {
    "data_parallel_sharding_strategy": STRATEGIES,
    "reduce_microbatches": ("every", "last", None),
    "grad_communication_dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, None),
    "keep_params_whole": (False, True, "all"),
    "initial_weights": ("check", "broadcast", "ignore"),
    "first_steps": ("check", "warn", "ignore"),
}
RANGES = {
    **{"bucket_size": COUNT, "num_buckets": COUNT, "num_distributed_optimizer_instances": COUNT},
    "check_weights_interval": whole(0),
}


@dataclass(frozen=True)
class DistributedDataParallelConfig:
    """Configures how gradients are reduced and sharded.

    Fields before initial_weights have Megatron Core's names. Start with ``overlap_grad_reduce=True``, and choose a
    ``data_parallel_sharding_strategy`` if the model does not fit.

    Args:
        grad_reduce_in_fp32: Accumulate and reduce gradients in fp32, regardless of the parameter's dtype.
        overlap_grad_reduce: Launch a bucket's collective during backward, as soon as all its gradients are ready.
        overlap_param_gather: Gather a bucket's parameters while the optimizer's step updates the next bucket (needs a
            sharded strategy). All gathers complete before ``step()`` returns; none runs during the next forward.
        align_param_gather: No effect, because no gather runs during the forward; a warning if True.
        use_distributed_optimizer: Shard the optimizer state over data parallelism, like the strategy 'optim'.
        num_distributed_optimizer_instances: Number of replicas of the sharded state. State is sharded within groups of
            data ranks / instances ranks.
        check_for_nan_in_grad: Check for NaN and Inf before gradients are reduced. All ranks raise the same error, which
            names the first such parameter.
        record_nan_in_grad: Record in which parameter and microbatch a gradient first became NaN or Inf without raising,
            for an optimizer that skips such steps and reports the cause.
        check_for_large_grads: Warn about a bucket whose local gradient norm is more than 10 times the largest of the
            first 100 norms. Synchronizes with the device once per step.
        bucket_size: Number of elements after which a bucket is closed. Defaults to max(40 000 000, 1 000 000 x data
            ranks). Only used with overlap and with 'optim_grads'. For 'optim_grads' it is an upper limit that a single
            larger parameter may exceed, and defaults to a sixteenth of the buffer, between 1 000 000 and the number
            above, because two such buckets are in memory.
        num_buckets: Number of buckets, instead of their size; more with 'optim_grads', if some would be larger.
        pad_buckets_for_high_nccl_busbw: Pad bucket ends to multiples of 2**16 elements.
        reduce_scatter_with_fp32_accumulation: Send 16-bit gradients and add them in fp32. Like deterministic_reduction,
            it needs a second copy of the buckets in flight.
        average_in_collective: Average in the collective itself instead of scaling gradients separately.
        data_parallel_sharding_strategy: 'no_shard'; 'optim' (shards the optimizer state); 'optim_grads' (also shards
            gradients: full ones exist only while a bucket fills and is reduced, so backward reduces with or without
            overlap); or 'optim_grads_params' (also shards parameters: see docs/source/sharded_parameters.md).
        reduce_microbatches: With sharded gradients and accumulation, keep full gradients until the 'last' microbatch
            (one reduction per step), or reduce 'every' microbatch into the shard, also inside no_sync (less memory,
            more traffic; reduced gradients can no longer be cleared through ``.grad``). With 'every', a rank that runs
            fewer backwards in a step adds zeros to the other ranks' gradients. If backward gathers parameters over all
            ranks, or experts have other data ranks, all ranks raise SyncError instead. ``describe()`` prints the bytes
            of both choices. Defaults to 'every' if parameters are sharded too, else to 'last'.
        initial_weights: 'check' that all copies of a weight start equal (on data ranks, on tensor-parallel ranks if the
            weight is not split, and on stages), 'broadcast' the first rank's copy, or 'ignore'. Copies on several
            stages are checked in the first finalize_model_grads and are not broadcast.
        check_weights_interval: Compare checksums of these copies every this many calls of finalize_model_grads, and
            raise an error that names the first difference. 0 disables the check, as does initial_weights='ignore'.
            Megatron's check_weight_hash_across_dp_replicas_interval, for all copies.
        check_replicas: Debug mode that compares the copies' gradients after the last reduction of every step, and
            raises an error that names the first difference. It does not detect weights that drift apart, because the
            reduction has just made the gradients on data ranks equal.
        deterministic_reduction: Add in rank order, so that results are bitwise independent of bucket size, overlap and
            strategy.
        scale_in_optimizer: Leave the division by data ranks and tokens to ``core.optimizer``, which applies it together
            with its own factors in one pass. Until then ``main_grad`` contains sums: the gradient is ``main_grad``
            times the bucket's ``step.pending_scale``. Other optimizers are rejected.
        keep_params_whole: With sharded gradients, place every matrix in one rank's shard, for optimizers that need
            unsharded matrices (Muon); 'all' does so for every parameter. Embedding and output may still be split. Costs
            padding if a bucket has few parameters relative to the number of ranks.
        grad_communication_dtype: Cast buckets to this dtype for communication and back: fp32, bf16, fp16, or
            float8_e4m3fn (in blocks with scales, see wire/fp8_communication.py, and without overlap). Defaults to the
            buffer's dtype.
        share_host_memory: On CPU with gloo, allocate buffers in memory that the ranks of a host share, and reduce there
            instead of through sockets. Groups that span hosts use sockets. A forked process shares this memory too: it
            gets no snapshot, and its parent sees its writes.
        sync_rules: Additional reductions. Rules within a stage run before rules across stages, and user rules run after
            the built-in ones of their kind.
        reshard_after_forward: With 'optim_grads_params', True frees a bucket of parameters once two others have been
            used, and gathers it again in backward. False keeps the gathered buckets until the end of the next backward,
            which needs fewer gathers but memory for the full model.
        placement: Buckets that stay unsharded or are offloaded. By default everything is sharded according to the
            strategy, and stays on the device.
        first_steps: 'check' that copies of gradients and weights are equal in the first two steps (see
            core/distributed/guard/first_steps.py), 'warn' instead of raising an error, or 'ignore'.
        broadcast_buffers: Torch DDP's option. True: begin a forward by broadcasting the first data rank's module
            buffers, such as BatchNorm statistics, if the forward before it recorded gradients outside no_sync. With
            sharded gradients this happens once per step. All ranks must then run equally many forwards of the wrapper.
            False: each rank keeps its own. None: False, with a warning if there are BatchNorms, but True in
            core.integrations, as with torch's DDP.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    bucket_size: int | None = None
    num_buckets: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    average_in_collective: bool = False
    data_parallel_sharding_strategy: Strategy = "no_shard"
    reduce_microbatches: Literal["last", "every"] | None = None

    initial_weights: Literal["check", "broadcast", "ignore"] = "check"
    check_weights_interval: int = 1000
    check_replicas: bool = False
    deterministic_reduction: bool = False
    record_nan_in_grad: bool = False
    scale_in_optimizer: bool = False
    keep_params_whole: bool | Literal["all"] = False
    grad_communication_dtype: torch.dtype | None = None
    share_host_memory: bool = True
    sync_rules: tuple[GradSyncRule, ...] = ()
    reshard_after_forward: bool = True
    placement: Placement | None = None
    first_steps: Literal["check", "warn", "ignore"] = "check"
    broadcast_buffers: bool | None = None

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(map(str, allowed))}")
        if not self.reshard_after_forward and not self.shards_parameters:
            raise ValueError(
                "reshard_after_forward=False keeps gathered parameters, and nothing is gathered under strategy "
                f"{self.strategy!r}; set data_parallel_sharding_strategy='optim_grads_params', or leave it True"
            )
        if self.placement is not None:
            self._check_placement(self.placement)
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ValueError(
                f"bucket_size ({self.bucket_size}) and num_buckets ({self.num_buckets}) exclude each other; give one"
            )
        if self.overlap_param_gather and not self.sharded:
            raise ValueError(
                "overlap_param_gather gathers sharded parameters, and nothing is sharded; "
                "set use_distributed_optimizer=True as well"
            )
        if self.overlap_param_gather and self.shards_parameters:
            raise ValueError(
                "overlap_param_gather gathers parameters within the optimizer's step, and with 'optim_grads_params' "
                "nothing is gathered there; set it False"
            )
        if self.align_param_gather:
            warn_user(
                "align_param_gather=True changes nothing here: it aligns gathers under the forward with those of other "
                "stages, and here they are complete when the optimizer's step returns"
            )
        if self.reduce_scatter_with_fp32_accumulation and self.grad_reduce_in_fp32:
            raise ValueError(
                "reduce_scatter_with_fp32_accumulation keeps 16-bit gradients on the wire, and grad_reduce_in_fp32 "
                "puts fp32 ones there; choose one"
            )
        if self.scale_in_optimizer and self.average_in_collective:
            raise ValueError(
                "scale_in_optimizer leaves the division by the data ranks to the optimizer, and "
                "average_in_collective to the collective; choose one"
            )
        if self.reduce_scatter_with_fp32_accumulation and self.average_in_collective:
            raise ValueError("reduce_scatter_with_fp32_accumulation adds; average_in_collective must be False with it")

    def _check_placement(self, placed: Placement) -> None:
        if not self.shards_parameters and (
            placed.shard_param_frac < 1 or placed.offload_param_frac or placed.prefetch is not None
        ):
            raise ValueError(
                f"placement has shard_param_frac {placed.shard_param_frac}, offload_param_frac "
                f"{placed.offload_param_frac} and prefetch {placed.prefetch}, but strategy {self.strategy!r} does not "
                "shard parameters; set data_parallel_sharding_strategy='optim_grads_params', or leave them 1, 0 and "
                "None"
            )
        if placed.offload_grad_frac and not self.shards_gradients:
            raise ValueError(
                f"placement has offload_grad_frac {placed.offload_grad_frac}, but strategy {self.strategy!r} does not "
                "shard gradients; set data_parallel_sharding_strategy='optim_grads' or 'optim_grads_params', or leave "
                "it 0"
            )
        if placed.memory_budget_bytes is not None and not self.reshard_after_forward:
            raise ValueError(
                "reshard_after_forward=False keeps every bucket unsharded, but placement.memory_budget_bytes limits "
                f"unsharded buckets to {placed.memory_budget_bytes} bytes; leave reshard_after_forward True"
            )

    @property
    def strategy(self) -> Strategy:
        """Sharding strategy, regardless of which option selected it."""
        if self.use_distributed_optimizer and self.data_parallel_sharding_strategy == "no_shard":
            return "optim"
        return self.data_parallel_sharding_strategy

    @property
    def residency(self) -> Residency:
        """Model state that stays on a rank under this strategy."""
        return RESIDENCIES[self.strategy]

    @property
    def sharded(self) -> bool:
        """``True`` if the optimizer state is sharded over data parallelism."""
        return self.residency.sharded

    def grad_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter's gradients are accumulated and reduced."""
        return torch.promote_types(dtype, torch.float32) if self.grad_reduce_in_fp32 else dtype

    @property
    def shards_gradients(self) -> bool:
        """``True`` if a rank keeps only its shard of a reduced gradient."""
        return not self.residency.keeps_whole

    @property
    def shards_parameters(self) -> bool:
        """``True`` if a rank keeps only its shard of a parameter."""
        return not self.residency.keeps_params

    @property
    def reduces_every_microbatch(self) -> bool:
        """``True`` if each backward reduces gradients, also inside ``no_sync``."""
        every = self.reduce_microbatches == "every" or (self.reduce_microbatches is None and self.shards_parameters)
        return self.shards_gradients and every
