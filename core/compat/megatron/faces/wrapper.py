"""DistributedDataParallel with the arguments and the further methods that Megatron's has."""

from __future__ import annotations

from typing import Any

from torch import nn

from core.compat.megatron.faces import configs
from core.distributed import DistributedDataParallel as OurWrapper
from core.distributed.buffer.bucket import Bucket
from core.process_groups import ProcessGroups


class DistributedDataParallel(OurWrapper):
    """core.distributed.DistributedDataParallel, which takes Megatron's configurations too.

    ddp_config is read once, when the model is wrapped; `self.ddp_config` is what was made of it. full_param_layout must
    be None: the layout follows from the model. A gather is over when the optimizer's step returns, so that the hooks
    before a forward have nothing to wait for, enabled or not.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any = None,
        module: nn.Module | None = None,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroups | None = None,
        full_param_layout: Any = None,
    ) -> None:
        if full_param_layout is not None:
            raise ValueError("full_param_layout is not supported: the layout follows from the model; leave it out")
        if isinstance(ddp_config, configs.DistributedDataParallelConfig):
            ddp_config = ddp_config.ours()
        super().__init__(config, ddp_config, module, disable_bucketing, pg_collection)

    @property
    def bucket_groups(self) -> list[Bucket]:
        """The buckets of dense parameters, each a group of its own, in the order in which backward completes them."""
        return [bucket for buffer in self.grad_buffers for bucket in buffer.buckets]

    @property
    def expert_parallel_bucket_groups(self) -> list[Bucket]:
        """The buckets of experts."""
        return [bucket for buffer in self.expert_parallel_buffers for bucket in buffer.buckets]

    def enable_forward_pre_hook(self) -> None:
        """Nothing: parameters are whole before every forward."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Complete the parameters, which is all that a program can wait for. Collective where a gather is under way."""
        self.finish_param_sync()

    def reset_param_sync_dispatch_state(self) -> None:
        """Nothing: no gather is dispatched by a forward."""

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Refused: the memory of a buffer stays as long as its wrapper."""
        raise NotImplementedError(
            "offload_grad_buffers frees the gradient memory between training phases, which is not built; delete the "
            "wrapper and the optimizer, and load them again from a checkpoint, or shard more: "
            "data_parallel_sharding_strategy='optim_grads_params'"
        )

    restore_grad_buffers = offload_grad_buffers
    free_overlap_buffers = enable_forward_pre_hook

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The wrapped module's, for dist_checkpointing; see `sharded_state_dict_of`."""
        from core.compat.megatron.faces.checkpoint import sharded_state_dict_of

        return sharded_state_dict_of(self, prefix, sharded_offsets)
