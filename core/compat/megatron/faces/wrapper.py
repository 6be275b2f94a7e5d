"""DistributedDataParallel with the arguments and the further methods that Megatron's has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.compat.arguments import arguments
from core.compat.megatron.faces import configs
from core.compat.megatron.faces.checkpoint import sharded_state_dict
from core.distributed import DistributedDataParallel as OurWrapper
from core.distributed.buffer.bucket import Bucket


def refusal(sentence: str) -> Callable[..., None]:
    """A method that is not here: NotImplementedError with the sentence."""

    def refused(self: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(sentence)

    return refused


class DistributedDataParallel(OurWrapper):
    """core.distributed.DistributedDataParallel, which takes Megatron's configurations too.

    ddp_config is read once, when the model is wrapped; `self.ddp_config` is what was made of it. A gather is over when
    the optimizer's step returns, so that the hooks before a forward have nothing to wait for, enabled or not.
    """

    @arguments(
        "self config ddp_config=None module=None disable_bucketing=False pg_collection=None !full_param_layout=None",
        {"full_param_layout": "the layout follows from the model"},
    )
    def __init__(self, config: Any, ddp_config: Any, **given: Any) -> None:
        ours = ddp_config.ours() if isinstance(ddp_config, configs.DistributedDataParallelConfig) else ddp_config
        super().__init__(config, ours, **given)

    @property
    def bucket_groups(self) -> list[Bucket]:
        """The buckets of dense parameters, each a group of its own, in the order in which backward completes them."""
        return [bucket for buffer in self.grad_buffers for bucket in buffer.buckets]

    @property
    def expert_parallel_bucket_groups(self) -> list[Bucket]:
        """The buckets of experts."""
        return [bucket for buffer in self.expert_parallel_buffers for bucket in buffer.buckets]

    def enable_forward_pre_hook(self) -> None:
        """Nothing: parameters are whole before every forward, and no gather is dispatched by one."""

    reset_param_sync_dispatch_state = free_overlap_buffers = enable_forward_pre_hook

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Complete the parameters, which is all that a program can wait for. Collective where a gather is under way."""
        self.finish_param_sync()

    offload_grad_buffers = restore_grad_buffers = refusal(
        "offload_grad_buffers frees the gradient memory between training phases, which is not built; delete the "
        "wrapper and the optimizer, and load them again from a checkpoint, or shard more: "
        "data_parallel_sharding_strategy='optim_grads_params'"
    )

    sharded_state_dict = sharded_state_dict
