"""Cross entropy over a split vocabulary: torch's loss and gradient, and shapes that are refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from core.groups.process_groups import ProcessGroups
from core.tensor_parallel import padded_vocab_size, tensor_parallel_slice, vocab_parallel_cross_entropy
from core.tensor_parallel.chunked_loss import CHUNK, WHOLE, chunk_of, chunked_cross_entropy
from core_plan.live_memory import LiveMemory
from tests.unit_tests.ranks import ranks


def make(vocab: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = scale * torch.randn(5, 2, vocab, generator=generator, dtype=torch.float64)
    target = torch.randint(0, vocab, (5, 2), generator=generator)
    target[0, 0], target[0, 1] = 0, vocab - 1
    return logits, target, torch.rand(5, 2, generator=generator, dtype=torch.float64)


def expected(logits: Tensor, target: Tensor, weights: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf.permute(0, 2, 1), target, reduction="none", label_smoothing=smoothing)
    (loss * weights).sum().backward()
    return loss.detach(), leaf.grad


@ranks(2, 4, nightly=(1,))
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocab", [12, 13, 5], ids=["even", "padded", "a rank of padding only"])
@pytest.mark.in_suite()
def test_loss_and_gradient_are_those_of_torch(rank: int, world: int, smoothing: float, vocab: int) -> None:
    logits, target, weights = make(vocab)
    part = tensor_parallel_slice(logits, 2, world, rank).requires_grad_()
    with torch.no_grad():  # padding takes no part whatever it holds
        part[..., max(0, min(vocab - rank * part.shape[-1], part.shape[-1])) :] = 1e4

    given = part.detach().clone()
    loss = vocab_parallel_cross_entropy(part, target, smoothing, dist.group.WORLD, vocab_size=vocab)
    (loss * weights).sum().backward()
    assert torch.equal(part.detach(), given), "the logits were overwritten"

    want_loss, want_grad = expected(logits, target, weights, smoothing)
    torch.testing.assert_close(loss.detach(), want_loss, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(part.grad, tensor_parallel_slice(want_grad, 2, world, rank), rtol=1e-12, atol=1e-14)


@ranks(2)
def test_logits_of_any_size_are_stable(rank: int, world: int) -> None:
    logits, target, weights = make(12, scale=1e5)
    part = tensor_parallel_slice(logits, 2, world, rank).requires_grad_()
    loss = vocab_parallel_cross_entropy(part, target, tp_group=dist.group.WORLD, vocab_size=12)
    (loss * weights).sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(part.grad).all()
    torch.testing.assert_close(loss.detach(), expected(logits, target, weights, 0.0)[0])


@ranks(2)
def test_loss_of_16_bit_logits_is_computed_in_fp32(rank: int, world: int) -> None:
    logits, target, weights = make(12)
    logits = logits.bfloat16()
    part = tensor_parallel_slice(logits, 2, world, rank).requires_grad_()
    loss = vocab_parallel_cross_entropy(part, target, tp_group=dist.group.WORLD, vocab_size=12)
    (loss * weights).sum().backward()
    want = expected(logits.double(), target, weights, 0.0)
    assert loss.dtype == torch.float32 and part.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.detach().double(), want[0], rtol=1e-6, atol=1e-6)


@ranks(2)
def test_gathered_logits_are_refused_by_shape(rank: int, world: int) -> None:
    logits, target, _ = make(12)
    with pytest.raises(ValueError, match="12 columns, expected 6 = vocab_size 12 / 2 .*gather_output=False"):
        vocab_parallel_cross_entropy(logits, target, tp_group=dist.group.WORLD, vocab_size=12)
    with pytest.raises(ValueError, match="needs vocab_size="):
        vocab_parallel_cross_entropy(logits, target, tp_group=dist.group.WORLD)


@ranks(2)
def test_another_loss_on_the_same_logits_may_run_backward_twice(rank: int, world: int) -> None:
    logits, target, weights = make(12)
    part = tensor_parallel_slice(logits, 2, world, rank).requires_grad_()
    loss = vocab_parallel_cross_entropy(part, target, tp_group=dist.group.WORLD, vocab_size=12)
    (loss * weights).sum().backward(retain_graph=True)
    (loss * weights).sum().backward()
    twice = 2 * expected(logits, target, weights, 0.0)[1]
    torch.testing.assert_close(part.grad, tensor_parallel_slice(twice, 2, world, rank), rtol=1e-12, atol=1e-14)


def test_targets_outside_the_vocabulary_are_refused() -> None:
    logits, target, _ = make(12)
    target[1, 1] = 12
    with pytest.raises(ValueError, match=r"\[0, 12\], expected 0 <= id < vocab_size 12"):
        vocab_parallel_cross_entropy(logits, target, pg_collection=ProcessGroups())
    with pytest.raises(ValueError, match=r"target has shape \[4, 2\], expected \[5, 2\]"):
        vocab_parallel_cross_entropy(logits, target[1:], pg_collection=ProcessGroups())
    with pytest.raises(ValueError, match="label_smoothing is 1.5"):
        vocab_parallel_cross_entropy(logits, target, 1.5, pg_collection=ProcessGroups())


def test_a_vocabulary_is_padded_to_equal_parts() -> None:
    assert [padded_vocab_size(13, size) for size in (1, 2, 4)] == [13, 14, 16]


# -- over chunks of tokens ---------------------------------------------------------------------------------------------


def soft_cap(logits: Tensor) -> Tensor:
    return 2.0 * torch.tanh(0.7 * logits / 2.0)


@ranks(2, 4, nightly=(1,))
@pytest.mark.parametrize("vocab", [13, 5], ids=["padded", "a rank of padding only"])
@pytest.mark.parametrize("capped", [False, True], ids=["", "soft cap"])
@pytest.mark.in_suite()
def test_loss_in_chunks_and_its_gradients_are_those_of_torch(rank: int, world: int, vocab: int, capped: bool) -> None:
    _, target, weights = make(vocab)
    generator = torch.Generator().manual_seed(7)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 2, 6), (vocab, 6), (vocab,))
    )
    whole = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = F.linear(*whole)
    want = F.cross_entropy((soft_cap(logits) if capped else logits).permute(0, 2, 1), target, reduction="none")
    (want * weights).sum().backward()

    own = [hidden.clone(), *(tensor_parallel_slice(tensor, 0, world, rank) for tensor in (weight, bias))]
    own = [tensor.requires_grad_() for tensor in own]
    with torch.no_grad():  # padding takes no part whatever it holds
        for padded in own[1:]:
            padded[max(0, min(vocab - rank * len(padded), len(padded))) :] = 1e4
    loss = chunked_cross_entropy(
        *(own[0], own[1], target, 4),
        bias=own[2],
        transform=soft_cap if capped else None,
        vocab_size=vocab,
        tp_group=dist.group.WORLD,
    )
    (loss * weights).sum().backward()
    dist.all_reduce(own[0].grad)

    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own[0].grad, whole[0].grad, rtol=1e-11, atol=1e-13)
    for got, expected_grad in zip(own[1:], whole[1:], strict=True):
        torch.testing.assert_close(
            got.grad, tensor_parallel_slice(expected_grad.grad, 0, world, rank), rtol=1e-11, atol=1e-13
        )


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_16_bit_gradients_in_chunks_are_as_near_as_those_of_whole_logits(grad_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(9)
    hidden, weight = torch.randn(512, 16, generator=generator), torch.randn(50, 16, generator=generator)
    target = torch.randint(0, 50, (512,), generator=generator)
    given = [tensor.bfloat16() for tensor in (hidden, weight)]
    grads: dict[str, list[Tensor]] = {}
    for name, dtype, chunk in (("exact", torch.float64, 0), ("whole", torch.bfloat16, 0), ("chunks", None, 8)):
        own = [tensor.clone().to(dtype or torch.bfloat16).requires_grad_() for tensor in given]
        if name == "chunks":
            own[1].grad_dtype = grad_dtype
            loss = chunked_cross_entropy(*own, target, chunk)
        else:
            loss = F.cross_entropy(F.linear(*own).to(torch.promote_types(own[0].dtype, torch.float32)), target,
                                   reduction="none")  # fmt: skip
        loss.mean().backward()
        grads[name] = [tensor.grad.double() for tensor in own]
    off = {name: [float((got - want).norm() / want.norm()) for got, want in zip(grads[name], grads["exact"],
           strict=True)] for name in ("whole", "chunks")}  # fmt: skip
    assert own[1].grad.dtype == grad_dtype
    assert all(0.0 < error < 1.1 * of_whole for error, of_whole in zip(off["chunks"], off["whole"], strict=True)), off
    if grad_dtype == torch.float32:  # it was never rounded to 16 bits
        assert off["chunks"][1] < 0.8 * off["whole"][1], off


@pytest.mark.parametrize(("dtype", "capped", "forward", "backward"), [
    (torch.float32, False, 4, 4),
    (torch.bfloat16, False, 2 + 4, 4 + 2),
    (torch.bfloat16, True, 2 + 4, 2 + 2 + 2 + 4 + 2),
], ids=["fp32", "bf16", "bf16, soft cap"])  # fmt: skip
def test_logits_of_one_chunk_exist_at_a_time(dtype: torch.dtype, capped: bool, forward: int, backward: int) -> None:
    """forward, backward: bytes an element of a chunk's logits, in their dtype and in fp32; all else is small."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((64, 2), (20_000, 2))
    )
    target = torch.randint(0, 20_000, (64,), generator=generator)
    peaks = []
    with LiveMemory([hidden, weight, target]) as live:
        loss = chunked_cross_entropy(hidden, weight, target, 16, transform=soft_cap if capped else None).sum()
        peaks.append(max(live.peak.values()))
        live.enter("backward", "")
        loss.backward()
        peaks.append(live.peak[live.place])
    of_weight = 20_000 * 2 * 4  # its gradient, and a product that is added to it
    for peak, nbytes in zip(peaks, (forward, backward), strict=True):
        assert 0 <= peak - 16 * 20_000 * nbytes < 3 * of_weight, (peaks, nbytes)


def test_large_logits_are_computed_in_chunks_by_default() -> None:
    assert chunk_of(None, WHOLE // 1024, 1024) == 0
    assert chunk_of(None, WHOLE // 1024 + 1, 1024) == CHUNK // 1024
    assert chunk_of(None, 1 << 20, 1 << 30) == 1
    assert chunk_of(0, 1 << 20, 1 << 20) == 0 and chunk_of(7, 4, 4) == 7
