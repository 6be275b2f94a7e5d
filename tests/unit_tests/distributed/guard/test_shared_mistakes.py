"""Mistakes that all ranks share, and that their outputs, names or tables show in the first two steps all the same."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.plan_jobs import peak_of
from core import parallel_state
from core.distributed.guard.outputs import BLOCK, sums_of
from tests.unit_tests.distributed.guard.loops import WIDTH, Net, _Sum, report_of, samples
from tests.unit_tests.distributed.guard.test_first_steps import Steps, check, sgd, train
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap


def targets(step: int) -> torch.Tensor:
    return samples(step)[:, :3].sum(dim=1)


class Column(Net):
    """[b, WIDTH] to [b, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 1)


def regression(loss: Callable[[torch.Tensor, int], torch.Tensor], make: type[nn.Module] = Column) -> Steps:
    model = wrap(make())
    return train(model, sgd(model), lambda step: loss(model(samples(step)), step))


class Recomputed(Net):
    """Its first layers are recomputed in backward. spoil: what happens to their inputs in between."""

    def __init__(self, reentrant: bool = False, spoil: bool = False, dropout: float = 0.0, keeps_state: bool = True):
        super().__init__()
        self.reentrant, self.spoil, self.keeps_state = reentrant, spoil, keeps_state
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        for layer in self.layers:
            before = x.clone()
            options: dict[str, Any] = {"use_reentrant": self.reentrant, "preserve_rng_state": self.keeps_state}
            x = before + torch.tanh(checkpoint(self._layer, layer, before, **options))
            if self.spoil:
                before.data.mul_(0.5)
        return self.last(x)

    def _layer(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(self.dropout(x) if self.dropout.p else x)


def recomputed(*, microbatches: int = 1, **options: Any) -> Steps:
    model = wrap(Recomputed(**options))
    optimizer = sgd(model)
    for step in range(5):
        for number in range(microbatches):
            with model.no_sync():
                model(samples(10 * step + number)).pow(2).mean().backward()
        copy.deepcopy(model.module)
        torch.save(model.module, io.BytesIO())
        yield from one_finalize(model)
        optimizer.step()
        optimizer.zero_grad()


def one_finalize(model: Any) -> Steps:
    from core.distributed import finalize_model_grads

    finalize_model_grads([model])
    yield


WRONG: dict[str, tuple[Callable[[], Steps], str]] = {
    "targets broadcast against a column": (
        lambda: regression(lambda out, step: (out - targets(step)).pow(2).mean()),
        r"not on its own target.*\[n, n\]",
    ),
    "a column of targets broadcasts against outputs": (
        lambda: regression(lambda out, step: (out.squeeze(1) - targets(step)[:, None]).pow(2).mean()),
        "not on its own target",
    ),
    "an input is written to before a recomputation": (lambda: recomputed(spoil=True), "'layers.1' is recomputed"),
    "the same, reentrant": (lambda: recomputed(spoil=True, reentrant=True), "'layers.1' is recomputed"),
    "other random numbers in a recomputation": (
        lambda: recomputed(dropout=0.5, keeps_state=False, microbatches=2),
        r"'layers.1' is recomputed .*preserve_rng_state",
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_that_all_ranks_share_is_found(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel()
    program, text = WRONG[name]
    check(report_of(program()), "warning", 2, text, alike=False)


def gan_of_squares(out: torch.Tensor, step: int) -> torch.Tensor:
    """Real ones are to give 1, the others 0."""
    return (out[:2] - 1).pow(2).mean() + out[2:].pow(2).mean()


RIGHT: dict[str, Callable[[], Steps]] = {
    "a column of targets": lambda: regression(lambda out, step: (out - targets(step)[:, None]).pow(2).mean()),
    "a constant target": lambda: regression(lambda out, step: (out - 1.0).pow(2).mean()),
    "a critic": lambda: regression(lambda out, step: out.mean()),
    "two constants": lambda: regression(gan_of_squares),
    "logistic, near 0": lambda: regression(
        lambda out, step: nn.functional.binary_cross_entropy_with_logits(0.01 * out, torch.ones_like(out))
    ),
    "targets that are far away": lambda: regression(
        lambda out, step: (out + 1000 - targets(step)[:, None]).pow(2).mean()
    ),
    "recomputation": recomputed,
    "recomputation, reentrant": lambda: recomputed(reentrant=True, microbatches=3),
    "recomputation with dropout": lambda: recomputed(dropout=0.5, microbatches=2),
}


@ranks(2)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_with_such_outputs_hears_nothing(rank: int, world: int, name: str) -> None:
    parallel_state.initialize_model_parallel()
    reported = report_of(RIGHT[name](), steps=4)
    assert reported is None, reported


# -- evaluation --------------------------------------------------------------------------------------------------------


def said_in_evaluation(model: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        model(samples(0, rank=0))
        model(samples(0, rank=0))
    return [str(each.message) for each in caught if "training mode" in str(each.message)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (2, 3, 5), (8 * BLOCK,), (1, 8, BLOCK), (3, 2 * BLOCK)])
def test_an_input_is_summed_without_a_copy_of_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    taken = peak_of(lambda: sums_of(values), [], alone=True)
    assert taken <= max(BLOCK, shape[-1] if shape else 1) * 4 + 4096
    wide = values.double()
    torch.testing.assert_close(sums_of(values).double(), torch.stack([wide.sum(), wide.abs().sum()]), rtol=1e-4, atol=1)


@ranks(1, 2)
def test_an_evaluation_with_dropout_is_named_once(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for share, option, mode, count in (
        *((0.5, "check", True, 1), (0.5, "check", False, 0), (0.0, "check", True, 0), (0.5, "ignore", True, 0)),
    ):
        model = wrap(nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(share)), first_steps=option)
        said = said_in_evaluation(model.train(mode))
        assert len(said) == (count if rank == 0 else 0), said
        assert all("'1' has dropped 0.5 of its elements. Call model.eval()" in text for text in said)


# -- a table of words, split by rows -----------------------------------------------------------------------------------


class Words(nn.Module):
    """Tokens to their rows; each of two ranks has half of the words."""

    def __init__(self, words: int, masks: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.masks, self.first = masks, parallel_state.get_tensor_model_parallel_rank() * words // 2
        whole = torch.randn(words, WIDTH)
        self.weight = nn.Parameter(whole[self.first : self.first + words // 2].clone())
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0  # type: ignore[attr-defined]
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        here = tokens - self.first
        x = self.weight[here.clamp(0, len(self.weight) - 1)]
        if self.masks:
            x = x * ((here >= 0) & (here < len(self.weight))).unsqueeze(-1)
        return self.head(_Sum.apply(x, parallel_state.get_tensor_model_parallel_group()))  # type: ignore[no-untyped-call]


def words_program(tokens: Callable[[int, int], torch.Tensor], *, masks: bool) -> Steps:
    model = wrap(Words(64, masks))
    data_rank = parallel_state.get_data_parallel_rank()
    return train(model, sgd(model), lambda step: model(tokens(step, data_rank)).pow(2).mean())


def some_words(step: int, data_rank: int) -> torch.Tensor:
    """Data ranks have other words; of the two at the seam, 31 and 32, one data rank may have one."""
    words = torch.tensor([[2, 5, 40, 60], [3, 33, 8, 50]])[data_rank]
    return words.roll(step)


def words_at_the_seam(step: int, data_rank: int) -> torch.Tensor:
    return torch.tensor([[2, 5, 40, 60], [31, 32, 8, 50]])[data_rank]


@ranks(4)
def test_a_table_of_words_without_a_mask_is_found(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    reported = report_of(words_program(some_words, masks=False))
    check(reported, "warning", 1, r"rows \[(31|0)\] of 'weight' \[32, 8\] have a gradient, and no token", alike=False)
    for words in (some_words, words_at_the_seam):
        assert report_of(words_program(words, masks=True)) is None
    every_word = report_of(words_program(lambda step, data_rank: torch.arange(64), masks=True))
    assert every_word is None


# -- a parameter on two stages -----------------------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self, names: dict[str, str], *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layer, self.word = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.word.shared_embedding = tied  # type: ignore[attr-defined]
        self.global_names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.word


def report_of_stages(*names: dict[str, str], tied: bool = False) -> Any:
    def steps() -> Iterator[None]:
        model = wrap(Stage(names[dist.get_rank()], tied=tied))
        yield from train(model, sgd(model), lambda step: model(samples(step, rank=0)).pow(2).mean())

    return report_of(steps())


@ranks(2)
def test_a_parameter_of_two_stages_that_nothing_ties_is_found(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    reported = report_of_stages({"layer": "layers.0", "word": "table"}, {"layer": "layers.1", "word": "table"})
    check(reported, "error", 1, r"'table' .* on ranks 0 and 1 of pipeline \[0, 1\].*shared_embedding", alike=True)
    reported = report_of_stages({"layer": "layers.0", "word": "a"}, {"layer": "layers.0", "word": "b"})
    check(reported, "error", 1, "'layers.0.weight' .* held by two stages", alike=True)
    assert report_of_stages({}, {}) is None, "stages number their own layers"
    names = {"layer": "layers.0", "word": "table"}, {"layer": "layers.1", "word": "table"}
    assert report_of_stages(*names, tied=True) is None


@ranks(2)
def test_a_model_that_is_dropped_after_a_backward_leaves_no_hook_on_all_modules(rank: int, world: int) -> None:
    from torch.nn.modules import module as of_torch

    parallel_state.initialize_model_parallel()
    before = len(of_torch._global_forward_pre_hooks)
    model = wrap(Net())
    model(samples(0)).pow(2).mean().backward()
    assert len(of_torch._global_forward_pre_hooks) == before + 1
    del model
    gc.collect()
    assert len(of_torch._global_forward_pre_hooks) == before
