"""Right programs that a comparison with one process may blame, because it does not know all that they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from core.distributed import DistributedDataParallel
from core.verify import check_gradients, note
from tests.unit_tests.ranks import ranks
from tests.unit_tests.verify.test_program import data_of
from tests.unit_tests.verify.test_updates import report_of


class Normed(nn.Module):
    """A net with a given norm [5, 6] -> [5, 4]."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up, self.norm, self.down = nn.Linear(6, 8), norm, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(torch.tanh(self.up(x))))
        return out


class ActNorm(nn.Module):
    """Initialises its weights from the first batch: rank 0's, or before the wrap each rank's own."""

    def __init__(self, of_rank: bool = False, by_attribute: bool = False) -> None:
        super().__init__()
        self.scale, self.of_rank, self.by_attribute = nn.Parameter(torch.ones(8)), of_rank, by_attribute
        self.started = False
        self.register_buffer("number", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.started if self.by_attribute else bool(self.number)):
            with torch.no_grad():
                scale = 1 / x.std(0)
                if not self.of_rank:
                    dist.broadcast(scale, 0)
                self.scale.copy_(scale)
            self.started = True
            self.number.fill_(1)
        return x * self.scale


class Centred(nn.Module):
    """Subtracts a moving average of its inputs, whose buffer it writes or replaces."""

    def __init__(self, replaces: bool = False) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = self.mean.lerp(x.mean(0), 0.5)
            if self.replaces:
                self.mean = mean
            else:
                self.mean.copy_(mean)
        return x - self.mean.clone()


class Codebook(nn.Module):
    """Replaces each row by the nearest code, and moves that code towards it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.linspace(-1, 1, 5)[:, None].repeat(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.detach()
        nearest = torch.cdist(rows, self.codes).argmin(1)
        codes = self.codes[nearest]
        self.codes.index_put_((nearest,), 0.1 * (rows - codes), accumulate=True)
        return x + (self.codes[nearest] - rows)


def mse(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def train(
    norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(8),
    *,
    loss: Callable[[Any, Tensor, Tensor], Tensor] | None = None,
    sizes: Callable[[int], list[int]] = lambda rank: [5, 5, 5],
    share: Callable[[int, int], float] = lambda rank, number: 1 / 3,
    warms_up: bool = False,
    broadcasts: bool = True,
    prepare: Callable[[Any], object] = lambda net: None,
) -> None:
    net, rank = Normed(norm()), dist.get_rank()
    if warms_up:
        with torch.no_grad():
            net(data_of(rank)[0][0])
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=broadcasts)
    prepare(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for number, (x, y) in enumerate(data_of(10 * step + rank, (9, 6))):
            x, y = x[: sizes(rank)[number]], y[: sizes(rank)[number]]
            if loss is None:
                note(mse, x, y)
            ((loss or mse)(model, x, y) * share(rank, number)).backward()
        optimizer.step()


def of_others(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A contrastive loss with the other rank's features, without their gradient, and a loss that captures them."""
    features = model(x)
    everyone = [torch.empty_like(features) for _ in range(2)]
    dist.all_gather(everyone, features.detach())
    others = everyone[1 - dist.get_rank()]
    note(lambda whole, x: F.softplus(whole(x) @ others.T).mean(), x)
    return F.softplus(features @ others.T).mean()


def with_statistics(net: Any) -> None:
    """Frozen statistics that were read from a checkpoint after the wrap."""
    net.norm.running_mean.fill_(0.3)
    net.norm.eval()


SIZES = [[5, 3, 7], [2, 4, 9]]
TWINS: dict[str, dict[str, Any]] = {
    "a mean over the samples of each rank": {
        "sizes": lambda rank: SIZES[rank],
        "share": lambda rank, number: SIZES[rank][number] / 15,
    },
    "a mean over the samples of all ranks": {
        "sizes": lambda rank: [[5, 3, 7], [2, 4, 6]][rank],
        "share": lambda rank, number: 2 * [[5, 3, 7], [2, 4, 6]][rank][number] / 27,
    },
    "a mean of means": {"sizes": lambda rank: SIZES[rank]},
    "features of others without their gradient": {"loss": of_others},
    "initialised from rank 0's first batch": {"norm": ActNorm},
    "initialised from it, as an attribute says": {"norm": lambda: ActNorm(by_attribute=True)},
    "initialised before the wrap by rank": {"norm": lambda: ActNorm(of_rank=True), "warms_up": True},
    "frozen batch statistics": {"norm": lambda: nn.BatchNorm1d(8), "prepare": with_statistics},
    "a norm of weights": {"norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))},
    "a spectral norm": {"norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))},
    "the older spectral norm": {"norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8))},
    "batch statistics": {"norm": lambda: nn.BatchNorm1d(8)},
    "a moving average inside": {"norm": Centred},
    "a mean over the batches so far": {"norm": lambda: Centred(replaces=True)},
    "a moving average of each rank": {"norm": Centred, "broadcasts": False},
}


@ranks(2)
@pytest.mark.parametrize("name", TWINS)
def test_a_right_program_is_not_blamed(rank: int, world: int, name: str) -> None:
    report = report_of(lambda: train(**TWINS[name]))
    assert report.ok and "those of one process" in report.weights, str(report)
    assert bool(report.notes) == ("samples" in name or "of each rank" in name), str(report)
    assert ("forwards write the buffer 'norm.mean'" in str(report)) == ("average of each rank" in name), str(report)


WRITTEN: dict[str, Callable[[], nn.Module]] = {
    **{name: twin["norm"] for name, twin in TWINS.items() if "spectral" in name or "so far" in name},
    "a moving average inside": Centred,
    "batch statistics": lambda: nn.BatchNorm1d(8),
    "codes that are moved by hand": Codebook,
}


@ranks(2)
@pytest.mark.parametrize("name", WRITTEN)
def test_check_gradients_starts_each_microbatch_from_its_ranks_buffers(rank: int, world: int, name: str) -> None:
    """For users of spectral norms, whose model was called random; each rank draws the buffers from another seed."""

    def report_of_factor(factor: float) -> Any:
        def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
            return mse(model, *batch) * (factor if isinstance(model, DistributedDataParallel) else 1.0)

        torch.manual_seed(5 + rank)
        return check_gradients(lambda: Normed(WRITTEN[name]()), loss, data_of(0, (12, 6))[0], microbatches=3)

    report = report_of_factor(1.0)
    assert report.ok and report.parameters >= 4, str(report)
    assert ("forwards write the buffer" in str(report)) == ("spectral" in name), str(report)
    assert "dp times too large" in report_of_factor(2.0).cause


@ranks(2)
@pytest.mark.parametrize("of_samples", [False, True])
def test_other_weights_of_microbatches_are_wrong(rank: int, world: int, of_samples: bool) -> None:
    def share(rank: int, number: int) -> float:
        return SIZES[rank][number] / 30 if of_samples else number / 3

    report = report_of(lambda: train(sizes=lambda rank: SIZES[rank], share=share))
    assert not report.ok and len({entry.name for entry in report.wrong}) == 6, str(report)
