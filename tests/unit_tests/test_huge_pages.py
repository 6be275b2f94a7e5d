"""Long tensors in huge pages: the same tensors for everybody who looks, and no more memory."""

from __future__ import annotations

import copy
import io
import mmap
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from core.distributed.wire import huge_pages
from core.distributed.wire.huge_pages import HUGE_PAGE, LEAST_BYTES, Blocks

CPU = torch.device("cpu")
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this system has no transparent huge pages"
)


NUMEL = 17 * HUGE_PAGE // 4 + 5  # above 32 MiB, from where on malloc never hands out memory that was used before


def resident(tensor_or_place: torch.Tensor | tuple[int, int]) -> int:
    """Bytes of a tensor, or of (address, bytes), that lie in memory now, by the kernel's table of this process's pages.

    Of these addresses alone: what the whole process holds changes while other threads and the kernel work.
    """
    address, nbytes = place(tensor_or_place) if isinstance(tensor_or_place, torch.Tensor) else tensor_or_place
    first, last = address // mmap.PAGESIZE, (address + nbytes - 1) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        table.seek(8 * first)
        entries = np.frombuffer(table.read(8 * (last + 1 - first)), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum()) * mmap.PAGESIZE


def place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def bytes_in_huge_pages(address: int) -> int:
    """Of the map that holds `address`."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            start, end = (int(number, 16) for number in words[0].split("-"))
            here = start <= address < end
        elif here and words[0] == "AnonHugePages:":
            return int(words[1]) * 1024
    return 0


@needs_huge_pages
def test_a_long_tensor_lies_in_huge_pages_and_takes_memory_when_it_is_written() -> None:
    tensor = huge_pages.zeros(NUMEL, torch.float32, CPU)
    assert resident(tensor) <= 2 * mmap.PAGESIZE  # its ends may share pages with others
    assert not tensor.any()
    tensor.fill_(1)
    assert (
        bytes_in_huge_pages(tensor.data_ptr() + HUGE_PAGE) >= tensor.nbytes - 2 * HUGE_PAGE
    )  # its ends lie in small ones
    assert tensor.nbytes <= resident(tensor) <= tensor.nbytes + 2 * mmap.PAGESIZE


@pytest.mark.skipif(not ENABLED.exists(), reason="the kernel is asked for resident memory")
def test_freed_blocks_are_the_systems_but_for_those_that_the_next_tensors_get() -> None:
    blocks, numel = Blocks(most=2), 2**18
    tensors = [blocks.borrow(numel, torch.float32).fill_(number) for number in range(8)]
    view = tensors[3][5:9]  # keeps the memory of the fourth
    places = [place(tensor) for tensor in tensors]
    assert all(resident(where) >= 4 * numel for where in places)
    tensors.clear()
    kept = sum(map(resident, places))
    assert 4 * numel <= kept <= 2 * 4 * numel + 2**19 and view.tolist() == [3.0] * 4
    again = blocks.borrow(numel - 7, torch.float32)
    assert not blocks.free and again.data_ptr() != view.data_ptr()
    assert blocks.borrow(numel, torch.bfloat16).data_ptr() != again.data_ptr()
    assert blocks.borrow(0, torch.float32).tolist() == []
    longest = blocks.borrow(2 * numel, torch.float32)
    where = longest.data_ptr()
    del view, longest, again  # the longest of them stay, so that memory fits what comes
    assert not blocks.lent and sorted(map(len, blocks.free)) == [4 * numel, 8 * numel]
    longest = blocks.borrow(2 * numel, torch.float32)
    assert longest.data_ptr() == where


def test_short_tensors_and_other_devices_get_plain_zeros() -> None:
    assert huge_pages.zeros(3, torch.int16, CPU).tolist() == [0, 0, 0]
    assert huge_pages.zeros(LEAST_BYTES, torch.float32, torch.device("meta")).is_meta


def test_a_system_without_them_gives_plain_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    tensor = huge_pages.zeros((2, LEAST_BYTES // 4), torch.float32, CPU)
    assert tensor.shape == (2, LEAST_BYTES // 4) and not tensor.any()


def test_saved_copied_and_pickled_like_any_tensor() -> None:
    tensor = huge_pages.zeros(LEAST_BYTES // 4 + 3, torch.float32, CPU)
    tensor[-2:] = torch.tensor([2.0, 3.0])
    file = io.BytesIO()
    torch.save({"moment": tensor}, file)
    file.seek(0)
    for again in (torch.load(file)["moment"], pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        assert torch.equal(again, tensor) and again.data_ptr() != tensor.data_ptr()
