"""The loss of a language model's last layer: peak memory and time, with whole logits and over chunks of tokens.

Arms: plain torch (all logits, in fp32 for the loss); ours (`logits_chunk`); and two other ways of chunking, written
here without their libraries, which need a GPU or other versions of torch: as torchtune does it (logits of chunks, all
kept for backward) and as Liger does it (gradients computed in the forward, chunk by chunk). One process. Every arm's
gradients are compared with the plain ones.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.report import add_json, write_json
from core.tensor_parallel.chunked_loss import chunked_cross_entropy
from core_plan.live_memory import LiveMemory

Loss = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # hidden, weight, target, tokens of a chunk -> the mean loss


def plain(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
    """All logits at once."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def ours(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
    """Logits of a chunk, computed again in backward."""
    return chunked_cross_entropy(hidden, weight, target, chunk).mean()


def kept(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
    """As torchtune: a product and a loss for each chunk, which autograd keeps."""
    parts = zip(hidden.split(chunk), target.split(chunk), strict=True)
    losses = [F.cross_entropy(F.linear(part, weight).float(), ids, reduction="sum") for part, ids in parts]
    return torch.stack(losses).sum() / len(target)


class _InForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = torch.zeros(())
        for begin in range(0, len(target), chunk):
            rows = slice(begin, begin + chunk)
            logits = F.linear(hidden[rows], weight)
            probs = torch.softmax(logits.float(), dim=-1)
            predicted = probs.gather(1, target[rows].unsqueeze(1))
            total += -predicted.log().sum()
            probs.scatter_add_(1, target[rows].unsqueeze(1), -torch.ones_like(predicted))
            grad_logits = probs.div_(len(target)).to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight.addmm_(grad_logits.t(), hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / len(target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight.mul_(grad), None, None


def in_forward(hidden: Tensor, weight: Tensor, target: Tensor, chunk: int) -> Tensor:
    """As Liger: gradients of a chunk together with its loss."""
    loss: Tensor = _InForward.apply(hidden, weight, target, chunk)
    return loss


ARMS: dict[str, Loss] = {"plain torch": plain, "ours": ours, "as torchtune": kept, "as Liger": in_forward}


@dataclass(frozen=True)
class Row:
    """One arm at one vocabulary. peak_bytes: above parameters and input, with both gradients. off: of gradients."""

    arm: str
    vocabulary: int
    peak_bytes: int
    median_s: float
    off: float


def measure(vocabulary: int, tokens: int, width: int, chunk: int, runs: int) -> list[Row]:
    """All arms in turn, so that other load meets all alike."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width), torch.randn(vocabulary, width) * width**-0.5
    target = torch.randint(vocabulary, (tokens,))
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    peaks, grads = dict[str, int](), dict[str, list[Tensor]]()
    for run in range(runs + 1):
        for name, loss in ARMS.items():
            leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
            if run == 0:
                with LiveMemory([*leaves, target]) as live:
                    loss(leaves[0], leaves[1], target, chunk).backward()
                peaks[name] = max(live.peak.values())
                grads[name] = [leaf.grad for leaf in leaves if leaf.grad is not None]
                continue
            begun_s = time.perf_counter()
            loss(leaves[0], leaves[1], target, chunk).backward()
            times[name].append(time.perf_counter() - begun_s)
    wanted = grads["plain torch"]
    off = {
        name: max(float((g - w).norm() / w.norm()) for g, w in zip(found, wanted, strict=True))
        for name, found in grads.items()
    }
    return [Row(name, vocabulary, peaks[name], statistics.median(times[name]), off[name]) for name in ARMS]


def main(arguments: list[str]) -> None:
    """Print a table; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks loss", description=__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=128, help="tokens whose logits exist at a time")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each arm")
    add_json(parser)
    options = parser.parse_args(arguments)
    rows = [
        row
        for vocabulary in options.vocabularies
        for row in measure(vocabulary, options.tokens, options.width, options.chunk, options.runs)
    ]
    print("| vocabulary | arm | peak | time | over plain | gradients off by |\n| --- | --- | --- | --- | --- | --- |")
    base = {row.vocabulary: row.median_s for row in rows if row.arm == "plain torch"}
    for row in rows:
        print(
            f"| {row.vocabulary:,} | {row.arm} | {row.peak_bytes / 2**20:,.0f} MiB | {row.median_s:.2f} s | "
            f"{row.median_s / base[row.vocabulary]:.2f} | {row.off:.0e} |"
        )
    write_json(options.json, "loss", arguments, [asdict(row) for row in rows])
