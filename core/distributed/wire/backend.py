"""Backends and timeouts of process groups, and additional communicators."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from core.groups.agree import backends_of
from core.watch.waiting import waiting


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that a group uses for tensors of a device.

    A group may have several backends, and dist.get_backend returns none of them then.
    """
    return backends_of(group).get(device.type) or dist.get_backend(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of a group with a CPU backend, or 30 minutes if the backend does not report one."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return timedelta(minutes=30) if options is None else options._timeout


def new_communicator(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create another communicator for the ranks of a group. Collective.

    A gather in backward must not be paired with a reduction, so the two need separate communicators.
    """
    members, backend = dist.get_process_group_ranks(group), dist.get_backend(group)
    with waiting("another communicator", group):
        made = dist.new_group(members, timeout=timeout_of(group), backend=backend, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank is a member"
    return made
