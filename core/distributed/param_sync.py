"""ParamSync: gathers the shards of updated parameters, if wanted while the next forward is already running.

A module waits for its own parameters before its forward. A parameter that is read without its module's forward, or
before it (weights passed to a functional, `MultiheadAttention.out_proj`), is found in the first forward, in which
everything is waited for; from then on it is waited for at the start. A model that begins later to read a weight too
early is refused in backward where that can be seen: by the hook of the parameter's gradient if the gather is still in
flight then, or by autograd, because a gather counts as an in-place change of what the forward has saved. What autograd
does not save (a bias) is not seen: a model whose reads change from step to step should not overlap its gathers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from core.distributed.bucket import Bucket, SyncError
from core.distributed.collectives import Collectives, InFlight
from core.distributed.step_clock import BucketEvent


class ParamSync:
    """The parameter gathers of one wrapped model chunk with sharded buckets."""

    def __init__(self, order: Sequence[Bucket], collectives: Collectives, module: nn.Module, *, overlap: bool) -> None:
        self.order = list(reversed(order))  # the forward's order
        self.collectives = collectives
        self.overlap = overlap
        self.pending: dict[int, tuple[Bucket, InFlight, BucketEvent]] = {}  # by id(bucket): the gathers in flight
        self.finished: dict[int, BucketEvent] = {}  # by id(bucket): the gather that was last waited for
        self.at_root: list[int] = []  # ids of the buckets that the start of a forward waits for
        self.learned = False
        self.reads: _FirstReads | None = None
        if overlap:
            self._hook_modules(module)

    # -- gathers ----------------------------------------------------------------------------------------------------

    def start(self, *, force_sync: bool = False) -> None:
        """Gather every bucket's parameters over its shard group; wait unless gathers overlap the forward.
        Collective.
        """
        self.finish()
        for bucket in self.order:
            self.start_bucket(bucket)
        if force_sync or not self.overlap:
            self.finish()

    def start_bucket(self, bucket: Bucket) -> None:
        """Gather one bucket's parameters and return at once. Collective, in one order of buckets on all ranks."""
        self.wait_for([id(bucket)])
        if bucket.param_data is not None:
            event = BucketEvent(bucket.layout.index, bucket.name, bucket.param_data.nbytes)
            bucket.clock.mark(event, "launched_s")
            handle = self.collectives.all_gather(bucket.param_data, bucket.groups.shard)
            bucket.clock.follow(event, handle)
            self.pending[id(bucket)] = bucket, handle, event

    def wait_for(self, bucket_ids: Iterable[int]) -> None:
        """Complete the gathers of the buckets with these ids."""
        for bucket_id in bucket_ids:
            entry = self.pending.get(bucket_id)
            if entry is not None:
                bucket, handle, event = entry
                bucket.clock.look(event, handle)
                bucket.clock.mark(event, "wait_start_s")
                handle.wait()
                self.pending.pop(bucket_id, None)  # not before: whoever saves the weights takes up an interrupted wait
                bucket.clock.end(event)
                self.finished[bucket_id] = event
                increment_version(bucket.params)

    def finish(self) -> None:
        """Complete every gather in flight."""
        self.wait_for(list(self.pending))

    def events(self) -> list[BucketEvent]:
        """Of each bucket the gather that was last waited for, in the order of their launch."""
        return [self.finished[id(bucket)] for bucket in self.order if id(bucket) in self.finished]

    def check_used(self, bucket: Bucket, index: int) -> None:
        """A gradient arrived for this parameter: refuse it if the parameter's gather was still in flight."""
        if id(bucket) in self.pending:
            raise SyncError(
                f"rank {dist.get_rank()}: {bucket.contracts[index].name!r} was used in a forward before its gather was "
                "complete, so stale weights may have been read. Call the module that owns it, or "
                "start_param_sync(force_sync=True) before this forward"
            )

    # -- the forward that waits for them ----------------------------------------------------------------------------

    def before_forward(self) -> None:
        """The forward of the whole module begins."""
        if not self.overlap:
            return
        if self.learned and torch.is_grad_enabled():
            self.wait_for(self.at_root)
            return
        self.finish()
        if not self.learned and self.reads is None:
            self.reads = _FirstReads({id(param): id(bucket) for bucket in self.order for param in bucket.params})
            self.reads.__enter__()

    def after_forward(self) -> None:
        """The forward ended, by an error perhaps: remember, once, which parameters were read too early for a wait."""
        if self.reads is None:
            return
        reads, self.reads = self.reads, None
        reads.__exit__(None, None, None)
        self.at_root = list(dict.fromkeys(reads.too_early))
        self.learned = True

    def _hook_modules(self, root: nn.Module) -> None:
        home = {id(param): id(bucket) for bucket in self.order for param in bucket.params}
        for module in root.modules():
            owned = [id(param) for param in module.parameters(recurse=False) if id(param) in home]
            if owned:
                module.register_forward_pre_hook(self._make_wait(owned, list(dict.fromkeys(home[p] for p in owned))))

    def _make_wait(self, param_ids: list[int], bucket_ids: list[int]) -> Callable[[nn.Module, Any], None]:
        sync_of = weakref.ref(self)  # the hook outlives a wrapper that is deleted

        def wait(_module: nn.Module, _inputs: Any) -> None:
            sync = sync_of()
            if sync is None:
                return
            if sync.reads is not None:
                sync.reads.announced.update(param_ids)
            if sync.pending:
                sync.wait_for(bucket_ids)

        return wait


class _FirstReads(TorchFunctionMode):
    """Sees every torch call of one forward: which parameters are read before the forward of a module that owns them?"""

    def __init__(self, home: dict[int, int]) -> None:
        super().__init__()
        self.home = home  # id(parameter) -> id(bucket)
        self.announced: set[int] = set()  # ids of parameters whose module's forward has begun
        self.too_early: list[int] = []  # ids of buckets

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in _tensors((args, kwargs)):
            if id(value) in self.home and id(value) not in self.announced:
                self.too_early.append(self.home[id(value)])
        return func(*args, **kwargs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def finish_gathers(sync: ParamSync | None) -> None:
    """Complete what is in flight, if there is still a wrapper."""
    if sync is not None:
        sync.finish()
