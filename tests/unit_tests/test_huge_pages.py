"""Long tensors in huge pages: the same tensors for everybody who looks, and no more memory."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch

from core import huge_pages
from core.huge_pages import HUGE_PAGE, LEAST_BYTES

CPU = torch.device("cpu")
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_huge_pages = pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="this system has no transparent huge pages"
)


NUMEL = 17 * HUGE_PAGE // 4 + 5  # above 32 MiB, from where on malloc never hands out memory that was used before


def memory_of_this_process() -> tuple[int, int]:
    """(bytes in huge pages, resident bytes) without files, by the kernel."""
    found = {"AnonHugePages:": 0, "Pss_Anon:": 0}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        words = line.split()
        if words[0] in found:
            found[words[0]] = int(words[1]) * 1024
    return found["AnonHugePages:"], found["Pss_Anon:"]


@needs_huge_pages
def test_a_long_tensor_lies_in_huge_pages_and_takes_no_more_memory() -> None:
    huge_before, resident_before = memory_of_this_process()
    tensor = huge_pages.zeros(NUMEL, torch.float32, CPU)
    huge, resident = memory_of_this_process()
    assert huge - huge_before >= tensor.nbytes - 2 * HUGE_PAGE  # its ends lie in small ones
    assert abs(resident - resident_before - tensor.nbytes) <= HUGE_PAGE
    assert not tensor.any()


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
