"""DistributedDataParallelConfig: how gradients are kept and reduced. Frozen; the wrapper never writes to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch

from core.distributed.contract.gradient_contract import GradSyncRule
from core.distributed.contract.placement import Placement
from core.number_ranges import COUNT, check_ranges, whole


class Spread(NamedTuple):
    """The number of ranks over which the memory of each kind is spread."""

    params: int
    grads: int
    states: int


@dataclass(frozen=True, slots=True)
class Residency:
    """Parts of a model that a rank holds under a sharding strategy.

    sharded: True if each rank's optimizer updates its own shard, so that gradients are reduce-scattered. keeps_whole:
    True if the memory of whole gradients stays; otherwise the shard stays, and whole gradients borrow memory from a
    BucketPool while they fill and travel. keeps_params: the same of parameters; if False the shard stays, and a bucket
    is gathered around its use.
    """

    sharded: bool
    keeps_whole: bool
    keeps_params: bool = True

    def spread(self, shards: int) -> Spread:
        """Numbers of ranks that share the memory of each kind, of `shards` ranks that hold the model."""
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
    """Options of the wrapper: reduction of gradients, and sharding. Names are Megatron Core's; the last block is ours.

    grad_reduce_in_fp32: accumulate and reduce in fp32 for any dtype of the parameter.
    overlap_grad_reduce: backward launches a bucket's collective as soon as its gradients are there.
    overlap_param_gather: the optimizer's step gathers a bucket's parameters while it updates the next bucket (needs a
        sharded strategy). When `step()` returns all are complete; nothing is gathered under the next forward.
    align_param_gather: refused, because nothing is gathered under the forward.
    use_distributed_optimizer: shard the optimizer's state over data parallelism; the same as strategy 'optim'.
    num_distributed_optimizer_instances: shard inside data / instances ranks, replicate across.
    check_for_nan_in_grad: find NaN and Inf before they are reduced; all ranks raise together, naming the first.
    record_nan_in_grad: note where and in which microbatch a gradient first became NaN or Inf without raising, for an
        optimizer that skips such steps and says why.
    check_for_large_grads: refused, because the optimizer's step returns the norm of all gradients.
    bucket_size: elements a bucket holds before it closes; None for max(40 000 000, 1 000 000 x data ranks). Only used
        under overlap, and with 'optim_grads': there a bucket holds at most so many, or one parameter, and None is a
        sixteenth of the buffer, but at least 1 000 000 and at most the number above. Two such buckets are in memory.
    num_buckets: the number of buckets instead of their size; with 'optim_grads' there may be more, as none is larger.
    pad_buckets_for_high_nccl_busbw: pad bucket ends to multiples of 2**16 elements.
    reduce_scatter_with_fp32_accumulation: 16-bit gradients on the wire, added in fp32. While buckets are in flight it
        keeps a second copy of them, as deterministic_reduction does.
    average_in_collective: let the collective divide.
    data_parallel_sharding_strategy: 'no_shard', 'optim' (the optimizer's state is sharded), 'optim_grads' (gradients
        too: whole ones exist only while a bucket fills and travels, so backward reduces with or without overlap), or
        'optim_grads_params' (parameters too: see docs/source/sharded_parameters.md).
    reduce_microbatches: where gradients are sharded, under accumulation, keep whole ones until the 'last' microbatch
        (they travel once a step), or reduce 'every' one into the shard, also inside no_sync (less memory, more traffic;
        what was reduced can no longer be cleared through `.grad`). With 'every' a rank that has fewer backwards in a
        step adds zeros to those of the others; where backward gathers parameters over all ranks, or experts have other
        data ranks, all raise SyncError. `describe()` prints the bytes of both. None: 'every' where parameters are
        sharded too, else 'last'.

    initial_weights: 'check' that all ranks which hold copies of a weight start equal (data ranks, tensor-parallel ranks
        of what is not split, stages), 'broadcast' the first rank's, or 'ignore'. Copies on several stages are checked
        in the first finalize_model_grads and are not broadcast.
    check_weights_interval: compare all of those copies in every so many finalize_model_grads, by checksums of their
        memory, and name a drift; 0 for never, and never with initial_weights='ignore'. Megatron's
        check_weight_hash_across_dp_replicas_interval, for all copies.
    check_replicas: debug mode; after the last reduction of every step compare gradients of copies, and name a drift. It
        does not see weights that drift: the reduction has just made the gradients of data ranks equal.
    deterministic_reduction: add in rank order, so that bucket size, overlap and strategy do not change a bit.
    scale_in_optimizer: leave the division by data ranks and tokens to the optimizer of `core.optimizer`, which applies
        it together with its own factors in one pass. Until then `main_grad` holds sums: the gradient is `main_grad`
        times its bucket's `pending_scale`. Other optimizers are refused.
    keep_params_whole: where gradients are sharded, every matrix lies in one rank's shard, for optimizers that need it
        whole (Muon); 'all': every parameter does. Embedding and output may be cut. Costs padding where a bucket holds
        few parameters for its ranks.
    grad_communication_dtype: buckets are cast to it for their reduction and back: fp32, bf16, fp16, or float8_e4m3fn
        (in blocks with scales, see wire/fp8_communication.py, and without overlap). None: as they are kept.
    share_host_memory: keep buffers in memory that the ranks of one host map from each other where they are on CPU with
        gloo, and reduce there instead of through sockets. Groups that span hosts do not. A forked process shares them
        as well: it has no snapshot of them, and its parent sees what it writes there.
    sync_rules: further reductions of yours. Rules within a stage run before those across stages, and yours after the
        built-in ones of their kind.
    reshard_after_forward: with 'optim_grads_params', True gives a bucket of parameters up when two others have been
        used, and backward gathers it again. False keeps all buckets that a forward has gathered until the end of the
        next backward: fewer gathers, and memory for the whole model.
    placement: which buckets stay whole, and which are offloaded. None: all is sharded,
        as the strategy says, and lies on the device.
    first_steps: 'check' that copies of gradients and weights are equal in the first two steps (see
        core/distributed/guard/first_steps.py), 'warn' in place of an error, or 'ignore' it.
    broadcast_buffers: torch DDP's option of this name. True: a forward begins with the first data rank's buffers of
        modules, such as a BatchNorm's statistics, if the forward before it recorded gradients outside no_sync; in one
        broadcast, and in none where there are no buffers. Where gradients are sharded, once a step. All ranks then run
        equally many forwards of the wrapper. False: each rank keeps its own. None: False, with a warning where there
        are BatchNorms, but True in core.integrations, as with torch's DDP.
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
            raise ValueError(
                "align_param_gather=True aligns gathers that run under the forward, and here they are complete when "
                "the optimizer's step returns. Leave it False; overlap_param_gather=True overlaps them within the step"
            )
        if self.check_for_large_grads:
            raise ValueError(
                "check_for_large_grads=True would look at the norm of each bucket. Leave it False; the step of the "
                "optimizer returns the norm of all gradients, and OptimizerConfig(clip_grad=...) bounds it"
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
                f"{placed.offload_param_frac} and prefetch {placed.prefetch}, and strategy {self.strategy!r} keeps all "
                "parameters whole; set data_parallel_sharding_strategy='optim_grads_params', or leave them 1, 0, None"
            )
        if placed.offload_grad_frac and not self.shards_gradients:
            raise ValueError(
                f"placement has offload_grad_frac {placed.offload_grad_frac}, and strategy {self.strategy!r} keeps "
                "whole gradients, which autograd adds to; set data_parallel_sharding_strategy='optim_grads' or "
                "'optim_grads_params', or leave it 0"
            )
        if placed.memory_budget_bytes is not None and not self.reshard_after_forward:
            raise ValueError(
                "reshard_after_forward=False keeps all buckets, and the "
                f"placement allows {placed.memory_budget_bytes} bytes for whole ones; leave it True"
            )

    @property
    def strategy(self) -> Strategy:
        """The sharding strategy, whichever option has asked for it."""
        if self.use_distributed_optimizer and self.data_parallel_sharding_strategy == "no_shard":
            return "optim"
        return self.data_parallel_sharding_strategy

    @property
    def residency(self) -> Residency:
        """Parts that a rank holds under the strategy."""
        return RESIDENCIES[self.strategy]

    @property
    def sharded(self) -> bool:
        """True if the optimizer's state is sharded over data parallelism."""
        return self.residency.sharded

    def grad_dtype_of(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter's dtype are added up and reduced."""
        return torch.promote_types(dtype, torch.float32) if self.grad_reduce_in_fp32 else dtype

    @property
    def shards_gradients(self) -> bool:
        """True if a rank keeps only its shard of a reduced gradient."""
        return not self.residency.keeps_whole

    @property
    def shards_parameters(self) -> bool:
        """True if a rank keeps only its shard of a parameter."""
        return not self.residency.keeps_params

    @property
    def reduces_every_microbatch(self) -> bool:
        """True if each backward reduces, also inside no_sync."""
        every = self.reduce_microbatches == "every" or (self.reduce_microbatches is None and self.shards_parameters)
        return self.shards_gradients and every
