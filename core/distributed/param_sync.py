"""ParamSync: gathers the shards of updated parameters, if wanted while the next forward is already running.

A module waits for its own parameters before its forward. A parameter that is read without its module's forward (weights
passed to a functional, `MultiheadAttention.out_proj`) is found in the first forward, in which everything is waited for;
from then on it is waited for at the start. What is still read too early is caught by the hook of its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from core.distributed.bucket import Bucket, SyncError
from core.distributed.collectives import Collectives, Handle


class ParamSync:
    """The parameter gathers of one wrapped model chunk with sharded buckets."""

    def __init__(self, order: Sequence[Bucket], collectives: Collectives, module: nn.Module, *, overlap: bool) -> None:
        self.order = list(reversed(order))  # the forward's order
        self.collectives = collectives
        self.overlap = overlap
        self.pending: dict[int, Handle] = {}  # id(bucket) -> its gather in flight
        self.learned = False
        self.fired: set[int] = set()
        self.at_root: list[int] = []
        self.owners: dict[int, list[int]] = {}  # id(module) -> ids of the buckets of its own parameters
        if overlap:
            self._hook_modules(module)

    def _hook_modules(self, root: nn.Module) -> None:
        home = {id(param): bucket for bucket in self.order for param in bucket.params}
        for module in root.modules():
            buckets = list(
                {id(home[id(p)]): home[id(p)] for p in module.parameters(recurse=False) if id(p) in home}.values()
            )
            if buckets:
                self.owners[id(module)] = [id(bucket) for bucket in buckets]
                module.register_forward_pre_hook(self._make_wait(module, buckets))

    def _make_wait(self, owner: nn.Module, buckets: list[Bucket]) -> Any:
        sync_of, key = weakref.ref(self), id(owner)
        bucket_ids = [id(bucket) for bucket in buckets]

        def wait(_module: nn.Module, _inputs: Any) -> None:
            sync = sync_of()
            if sync is None:
                return
            if not sync.learned:
                sync.fired.add(key)
                sync.finish()
            elif sync.pending:
                sync.wait_for(bucket_ids)

        return wait

    def start(self, *, force_sync: bool = False) -> None:
        """Gather every bucket's parameters over its shard group. Waits unless gathers overlap the forward.
        Collective.
        """
        self.finish()
        for bucket in self.order:
            if bucket.param_data is not None:
                self.pending[id(bucket)] = self.collectives.all_gather(bucket.param_data, bucket.groups.shard)
        if force_sync or not self.overlap:
            self.finish()

    def wait_for(self, bucket_ids: Sequence[int]) -> None:
        """Complete the gathers of the buckets with these ids."""
        for bucket_id in bucket_ids:
            handle = self.pending.pop(bucket_id, None)
            if handle is not None:
                handle.wait()

    def finish(self) -> None:
        """Complete every gather in flight."""
        self.wait_for(list(self.pending))

    def before_forward(self) -> None:
        """The wrapper's forward begins."""
        if self.pending:
            if self.learned and torch.is_grad_enabled():
                self.wait_for(self.at_root)
            else:
                self.finish()

    def after_forward(self) -> None:
        """The wrapper's forward ended: remember, once, whose parameters no forward of their own announced."""
        if self.overlap and not self.learned:
            silent = [bucket_ids for module_id, bucket_ids in self.owners.items() if module_id not in self.fired]
            self.at_root = [bucket_id for bucket_ids in silent for bucket_id in bucket_ids]
            self.learned = True

    def check_used(self, bucket: Bucket, index: int) -> None:
        """A gradient arrived for this parameter: refuse it if the parameter's gather was still in flight."""
        if id(bucket) in self.pending:
            raise SyncError(
                f"rank {dist.get_rank()}: {bucket.contracts[index].name!r} was used in a forward before its gather was "
                "complete, so stale weights may have been read. Call the module that owns it, or "
                "start_param_sync(force_sync=True) before this forward"
            )


def finish_gathers(sync: ParamSync | None) -> None:
    """Complete what is in flight, if there is still a wrapper."""
    if sync is not None:
        sync.finish()
