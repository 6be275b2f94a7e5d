"""NCCL's manners on the second device: calls that gloo carries, and NCCL would refuse, mix up or wait in for ever."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit_tests.second_device import device as second
from tests.unit_tests.second_device.conftest import Runner
from tests.unit_tests.second_device.manners import Call, Meeting, hang

pytestmark = [
    pytest.mark.skipif(second.why_not() is not None, reason=str(second.why_not())),
    pytest.mark.timeout(300),
]


def refusals(device: torch.device) -> dict[str, str]:
    """For each call that NCCL refuses, the error's words; all ranks are refused, so none waits."""
    ones = torch.ones(4, 4, device=device)
    group = dist.new_group(backend=f"{second.NAME}:second")
    calls: dict[str, Callable[[], Any]] = {
        "int16": lambda: dist.all_reduce(ones.short()),
        "complex": lambda: group.allreduce([ones.to(torch.complex64)]),
        "not contiguous": lambda: dist.all_reduce(ones.t()[:3]),
        "bitwise": lambda: dist.all_reduce(ones.int(), op=dist.ReduceOp.BAND),
        "8 bits": lambda: dist.all_reduce(ones.to(torch.float8_e4m3fn)),
        "of the CPU": lambda: dist.all_reduce(torch.ones(4), group=group),
        "objects": lambda: dist.all_gather_object([None, None], "an object", group=group),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found[name] = str(error)
    return found


def test_calls_that_nccl_refuses_are_refused_with_its_reasons(run: Runner) -> None:
    reasons = {
        "int16": "Input tensor data type is not supported for NCCL process group: Short",
        "complex": "Input tensor data type is not supported for NCCL process group: ComplexFloat",
        "not contiguous": "Tensors must be contiguous",
        "bitwise": "Cannot use bitwise reductions with NCCL",
        "8 bits": "Float8 dtypes are not supported for NCCL reductions",
        "of the CPU": "No backend type associated with device type cpu",
        "objects": "Duplicate GPU detected.*no set_device was called on rank",
    }
    found = run(refusals, 2)
    assert found.keys() == reasons.keys()
    for name, words in found.items():
        assert re.search(reasons[name], words), (name, words)


# -- calls that do not fit ---------------------------------------------------------------------------------------------


def different(device: torch.device, kind: str) -> None:
    rank = dist.get_rank()
    values = torch.ones(8, device=device)
    if kind == "dtype":
        dist.all_reduce(values if rank == 0 else values.to(torch.int32))
    elif kind == "length":
        dist.all_reduce(values[: 8 - rank])
    elif kind == "reduction":
        dist.all_reduce(values, op=(dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank])
    elif kind == "root":
        dist.broadcast(values, rank)
    elif kind == "call":
        dist.all_reduce(values) if rank == 0 else dist.broadcast(values, 0)
    elif kind == "tags":
        if rank == 0:
            [work.wait() for work in (dist.isend(values, 1, tag=1), dist.isend(values + 1, 1, tag=2))]
        else:
            [work.wait() for work in (dist.irecv(values, 0, tag=2), dist.irecv(values, 0, tag=1))]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dtype", "8 x (Float|Int).* on rank .* and all_reduce of 8 x (Float|Int).*"),
        ("length", "all_reduce of (7|8) x Float.* on rank .* and all_reduce of (7|8) x Float"),
        ("reduction", "Float (SUM|MAX) on rank .* Float (SUM|MAX) on rank"),
        ("root", "from (0|1) on rank .* from (0|1) on rank"),
        ("call", "(broadcast|all_reduce) .* on rank .* and (broadcast|all_reduce) "),
        ("tags", "message 1 from rank 0 to rank 1 .* tag (1|2) on rank .*tag (1|2) on rank"),
    ],
)
@pytest.mark.in_suite(1)
def test_calls_that_differ_between_ranks_are_named(run: Runner, kind: str, words: str) -> None:
    with pytest.raises(Exception, match=words) as caught:
        run(different, 2, kind)
    assert "test_manners.py" in str(caught.value) and "NCCL pairs calls by their order alone" in str(caught.value)


# -- calls that wait for each other ------------------------------------------------------------------------------------


def crossed(device: torch.device, kind: str) -> None:
    """Calls that gloo carries: its threads wait for messages side by side."""
    rank = dist.get_rank()
    values = [torch.ones(8, device=device) for _ in range(2)]
    groups = [dist.new_group(), dist.new_group()]
    in_order = groups if rank == 0 else groups[::-1]
    if kind != "first use":
        for group in groups:
            dist.all_reduce(values[0], group=group)
    if kind in ("first use", "orders"):
        works = [dist.all_reduce(value, group=group, async_op=True)
                 for value, group in zip(values, in_order, strict=True)]  # fmt: skip
    elif kind == "messages":
        works = [dist.isend(values[0], 1 - rank), dist.irecv(values[1], 1 - rank)]
    elif kind == "one in a batch":
        if rank == 0:
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, values[0], 1)])
        else:
            works = [dist.irecv(values[0], 0)]
    elif kind == "batches":
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, values[0], 1 - rank), dist.P2POp(dist.irecv, values[1], 1 - rank)]
        )
        assert len(works) == 1
    elif kind == "to itself":
        works = [dist.isend(values[0], rank), dist.irecv(values[1], rank)]
    elif kind == "to itself, in a batch":
        values[1].zero_()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, values[1], rank), dist.P2POp(dist.isend, values[0], rank)]
        )
    for work in works:
        work.wait()
    if "batches" in kind or "itself" in kind:
        assert torch.equal(values[0], values[1])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("first use", "NCCL would hang: rank 0 is in the first use of group .* waits for rank 1; rank 1 is in the"),
        ("orders", "NCCL may hang, once a device runs one communicator at a time: rank 0 .* waits for rank 1; rank 1 "),
        ("messages", "NCCL would hang: rank 0 is in send .*pair .* waits for rank 1; rank 1 is in send"),
        ("one in a batch", "NCCL would hang: .*rank 1 which never comes"),
        ("to itself", "NCCL would hang: rank 0 is in send .* ranks .0, 1., pair .0., at .* waits for rank 0;"),
        ("batches", ""),
        ("to itself, in a batch", ""),
    ],
)
@pytest.mark.in_suite(2)
def test_calls_that_wait_for_each_other_are_named(run: Runner, kind: str, words: str) -> None:
    if not words:
        run(crossed, 2, kind)
        return
    with pytest.raises(Exception, match=words) as caught:
        run(crossed, 2, kind)
    assert "test_manners.py" in str(caught.value)


def logs_of(*orders: str) -> list[list[Call]]:
    """A log for each rank: a letter is a call of a communicator of all ranks that have it."""
    ranks = {letter: tuple(rank for rank, order in enumerate(orders) if letter in order) for letter in "".join(orders)}
    return [[Call(letter, (Meeting(letter, ranks[letter]),), letter) for letter in order] for order in orders]


@pytest.mark.parametrize(
    ("orders", "hangs"),
    [
        (("ab", "ab"), False),
        (("ab", "ba"), True),
        (("ab", "bc", "ca"), True),  # a cycle over three ranks: no two of them differ in the order of two calls
        (("ab", "bc", "ac"), False),
        (("abc", "ab", "c"), False),
    ],
)
def test_a_cycle_over_ranks_and_communicators_is_found(orders: tuple[str, ...], hangs: bool) -> None:
    assert bool(hang(logs_of(*orders))) == hangs
