"""Long tensors in huge pages: the same tensors for everybody who looks, and no more memory."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch

from core import huge_pages
from core.huge_pages import HUGE_PAGE, LEAST_BYTES, HugeZeros, ask_for_huge_pages

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


@needs_huge_pages
def test_moments_that_an_optimizer_makes_do_too() -> None:
    param = torch.nn.Parameter(torch.ones(NUMEL))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], lr=0.5, weight_decay=0.0, fused=True)
    before, _ = memory_of_this_process()
    with HugeZeros():
        optimizer.step()
    moment = optimizer.state[param]["exp_avg"]
    assert memory_of_this_process()[0] - before >= 2 * (moment.nbytes - 2 * HUGE_PAGE)
    assert moment.unique().tolist() == pytest.approx([0.1]) and param[:3].tolist() == pytest.approx([0.5] * 3)


def test_nothing_is_asked_for_short_tensors_and_views_with_gaps() -> None:
    assert not ask_for_huge_pages(torch.empty(LEAST_BYTES // 4 - 1))
    assert not ask_for_huge_pages(torch.empty(LEAST_BYTES, 4)[:, 0])
    assert not ask_for_huge_pages(torch.empty(LEAST_BYTES, device="meta"))
    assert huge_pages.zeros(3, torch.int16, CPU).tolist() == [0, 0, 0]


def test_a_system_without_them_gives_plain_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_madvise", lambda: None)
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


def test_zeros_like_keeps_dtype_shape_and_strides() -> None:
    like = torch.ones(3, 5, dtype=torch.bfloat16).t()
    with HugeZeros():
        made = torch.zeros_like(like, memory_format=torch.preserve_format)
        other = torch.zeros_like(like, dtype=torch.float64)
        ones = torch.ones_like(like)
    assert (made.dtype, made.shape, made.stride()) == (like.dtype, like.shape, like.stride()) and not made.any()
    assert other.dtype is torch.float64 and not other.any() and ones.sum() == 15


def test_a_compiled_update_that_makes_its_state_is_traced_as_ever() -> None:
    def update(param: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        if "moment" not in state:
            state["moment"] = torch.zeros_like(param)
        state["moment"].mul_(0.5).add_(grad)
        param.sub_(state["moment"])

    compiled = torch.compile(update, backend="eager", fullgraph=True)
    for numel in (3, LEAST_BYTES // 4):
        param, state = torch.full((numel,), 10.0), {}
        with HugeZeros():
            compiled(param, torch.full((numel,), 2.0), state)
            compiled(param, torch.full((numel,), 2.0), state)
        assert torch.equal(state["moment"], torch.full((numel,), 3.0))
        assert torch.equal(param, torch.full((numel,), 5.0))


def test_zeros_that_are_no_plain_memory_are_torchs() -> None:
    with HugeZeros():
        leaf = torch.zeros_like(torch.ones(4), requires_grad=True)
        sparse = torch.zeros_like(torch.eye(4).to_sparse())
        mapped = torch.vmap(torch.zeros_like)(torch.ones(2, LEAST_BYTES // 4))
    (3 * leaf).sum().backward()
    assert leaf.is_leaf and leaf.grad is not None and leaf.tolist() == [0.0] * 4 and leaf.grad.tolist() == [3.0] * 4
    assert sparse.is_sparse and not sparse.to_dense().any()
    assert mapped.shape == (2, LEAST_BYTES // 4) and not mapped.any()
