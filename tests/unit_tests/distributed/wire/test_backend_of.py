"""A group may carry each device's tensors by another backend, as `init_process_group()` without a name makes it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from core.distributed.wire.collectives import Collectives, backend_of
from core.distributed.wire.shared_memory import HostMemory
from tests.unit_tests.ranks import ranks


@pytest.mark.parametrize(
    ("config", "device", "backend"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:gloo", "cuda", "gloo"),
    ],
)
def test_the_backend_is_that_of_the_device(
    config: str, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "undefined")  # what torch says of such a group
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: config)
    assert backend_of(None, torch.device(device)) == backend


@ranks(2)
def test_a_group_of_several_backends_shares_memory_and_reduces_as_one_of_gloo(rank: int, world: int) -> None:
    group = dist.new_group(backend="cpu:gloo")
    assert dist.get_backend(group) != "gloo" and backend_of(group, torch.device("cpu")) == "gloo"
    shared = HostMemory.share(6, torch.float32, torch.device("cpu"), [group])
    assert shared is not None
    shared.tensor.copy_(torch.arange(6.0) * (rank + 1))
    Collectives(channels=shared.channels).all_reduce(shared.tensor, group, "test").wait()
    assert shared.tensor.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0, 15.0]
    over_gloo = torch.zeros(4)
    over_gloo[2 * rank : 2 * rank + 2] = rank + 1.0
    Collectives().all_gather(over_gloo, group, "test").wait()
    assert over_gloo.tolist() == [1.0, 1.0, 2.0, 2.0]
