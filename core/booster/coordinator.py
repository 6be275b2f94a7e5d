"""DistCoordinator: who prints, who goes first."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch.distributed as dist

from core.groups import agree
from core.watch.waiting import waiting

Group: TypeAlias = "dist.ProcessGroup | None"


class DistCoordinator:
    """This process's place among the ranks. A group of None is the world. Make it after the ranks are started."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "DistCoordinator needs started ranks; call core.booster.launch.launch_from_torch(), or "
                "torch.distributed.init_process_group(), first"
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # On this machine, as the launcher says; without a launcher all ranks are on one machine.
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))

    def is_master(self, process_group: Group = None) -> bool:
        """True on the first rank of the group."""
        return dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """True on the first rank of each machine."""
        return self.local_rank == 0

    def is_last_process(self, process_group: Group = None) -> bool:
        """True on the last rank of the group."""
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: Group = None) -> None:
        """Print on the first rank of the group."""
        if self.is_master(process_group):
            print(msg, flush=True)

    def print_on_node_master(self, msg: str) -> None:
        """Print on the first rank of each machine."""
        if self.is_node_master():
            print(msg, flush=True)

    @contextmanager
    def priority_execution(self, executor_rank: int = 0, process_group: Group = None) -> Iterator[None]:
        """The body runs on one rank of the group first, then on the others. Collective.

        An error of the first rank is raised on every rank; in ColossalAI the others would wait.
        """
        what = f"priority_execution of rank {executor_rank}"
        if dist.get_rank(process_group) != executor_rank:
            agree.refuse(None, process_group, what)
            yield
            return
        with agree.together(process_group, what):
            yield

    def destroy(self, process_group: Group = None) -> None:
        """Destroy a group; None destroys all."""
        dist.destroy_process_group(process_group)

    def block_all(self, process_group: Group = None) -> None:
        """Return when every rank of the group has called. Collective."""
        with waiting("block_all", process_group or dist.group.WORLD):
            dist.barrier(process_group)

    def on_master_only(self, process_group: Group = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: the function runs on the group's first rank, and is None on the others."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def on_master(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return on_master

        return decorate
