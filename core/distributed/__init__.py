"""Gradient path: contracts, layout, buffers, buckets, the wrapper, and finalize_model_grads."""

from core.distributed.contract.gradient_contract import ContractError, GradientContract, GradSyncRule, declare_gradient
from core.distributed.contract.placement import MemStats, Placement
from core.distributed.distributed_data_parallel import DistributedDataParallel
from core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from core.distributed.finalize_model_grads import finalize_model_grads
from core.distributed.guard.finite import NonFiniteGradientError, ReplicaDriftError
from core.distributed.materialize import materialize
from core.groups.agree import LayoutMismatch, SyncError
from core.watch.waiting import PeerLost

__all__ = [
    "ContractError",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GradSyncRule",
    "GradientContract",
    "LayoutMismatch",
    "MemStats",
    "NonFiniteGradientError",
    "PeerLost",
    "Placement",
    "ReplicaDriftError",
    "SyncError",
    "declare_gradient",
    "finalize_model_grads",
    "materialize",
]
