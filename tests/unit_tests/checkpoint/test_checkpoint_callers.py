"""What a caller hands to save and load: models in other modules, compiled ones, and a saver made for something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from core.checkpoint import CheckpointError, CheckpointSaver, list_steps, load_checkpoint, save_checkpoint
from core.checkpoint.root_directory import list_committed
from core.distributed import finalize_model_grads
from core.groups.global_names import global_name
from tests.unit_tests.checkpoint.test_checkpoint_content import Net, build, flat_state, same, train, weights
from tests.unit_tests.ranks import ranks


class Around(nn.Module):
    """A wrapper of the caller's own around ours."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_modules_around_the_wrapper_change_nothing(rank: int, world: int, strategy: str, tmp_path: Path) -> None:
    model, optimizer = build(strategy=strategy)
    around = Around(Around(model))
    around(torch.ones(3, 4)).sum().backward()
    finalize_model_grads([around])
    optimizer.step()
    save_checkpoint(tmp_path, 1, [around], optimizer)
    other, its_optimizer = build(Net(), strategy=strategy)
    load_checkpoint(tmp_path, [other], its_optimizer)
    assert same(weights(other), weights(model))
    assert flat_state(its_optimizer) == flat_state(optimizer)
    again, its_optimizer = build(Net(), strategy=strategy)
    load_checkpoint(tmp_path, [Around(again)], its_optimizer)
    assert same(weights(again), weights(model))
    assert flat_state(its_optimizer) == flat_state(optimizer)


@ranks(2)
def test_a_compiled_model_has_the_names_of_the_model(rank: int, world: int, tmp_path: Path) -> None:
    net = Net()
    net.first = torch.compile(net.first)  # type: ignore[assignment]
    model, optimizer = build(torch.compile(net), strategy="optim")  # type: ignore[arg-type]
    optimizer.zero_grad()
    for param in net.parameters():
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    finalize_model_grads([model])
    optimizer.step()
    save_checkpoint(tmp_path, 1, [model], optimizer)
    plain, its_optimizer = build(Net(), strategy="optim")
    report = load_checkpoint(tmp_path, [plain], its_optimizer)
    assert report.notes == ()
    expected = {name.replace("_orig_mod.", ""): value for name, value in weights(model).items()}
    assert same(weights(plain), expected)
    # And back: plain weights into a compiled model.
    for param in net.parameters():
        param.data.zero_()
    load_checkpoint(tmp_path, [model], optimizer)
    assert same({name.replace("_orig_mod.", ""): value for name, value in weights(model).items()}, expected)


def test_modules_that_torch_puts_around_others_are_in_no_name() -> None:
    stage = nn.Sequential(nn.Linear(2, 2))
    stage.global_names = {"0": "layers.7"}  # type: ignore[assignment]
    compiled: Any = torch.compile(stage)
    assert [name for name, _ in compiled.named_parameters()] == ["_orig_mod.0.weight", "_orig_mod.0.bias"]
    assert global_name(compiled, "_orig_mod.0.weight") == "layers.7.weight"


@ranks(2)
def test_a_saver_of_another_root_or_with_another_keep_last_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer, 1)
    mine, other = tmp_path / "mine", tmp_path / "other"
    with CheckpointSaver(mine, keep_last=2) as saver:
        with pytest.raises(CheckpointError, match="saver was made for .*mine"):
            save_checkpoint(other, 1, [model], optimizer, saver=saver)
        with pytest.raises(CheckpointError, match="keep_last is 1 and the saver's is 2"):
            save_checkpoint(mine, 1, [model], optimizer, saver=saver, keep_last=1)
        save_checkpoint(tmp_path / "other" / ".." / "mine", 1, [model], optimizer, saver=saver, keep_last=2)
    assert not other.exists()
    assert load_checkpoint(mine, [model], optimizer).step == 1


@ranks(2)
def test_arguments_that_differ_between_ranks_are_refused(rank: int, world: int, tmp_path: Path) -> None:
    model, optimizer = build(strategy="optim")
    train(model, optimizer, 1)
    with pytest.raises(CheckpointError, match=r"ranks \[1\] were given no optimizer and the others an optimizer"):
        save_checkpoint(tmp_path, 1, [model], optimizer if rank == 0 else None)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
    with pytest.raises(CheckpointError, match=r"ranks \[0\] were given no scheduler and the others a scheduler"):
        save_checkpoint(tmp_path, 1, [model], optimizer, scheduler if rank == 1 else None)
    for step in (1, 2):
        save_checkpoint(tmp_path, step, [model], optimizer)
    for step in (1 + rank, 1 if rank else None):
        with pytest.raises(CheckpointError, match="step is .* on rank 0 and .* on rank 1"):
            load_checkpoint(tmp_path, [model], optimizer, step=step)


@ranks(2, timeout_s=20)
def test_an_argument_that_is_wrong_on_one_rank_alone_is_refused_on_all_and_nothing_is_lost(
    rank: int, world: int, tmp_path: Path
) -> None:
    """The others would wait in a collective until the group's timeout."""
    model, optimizer = build(strategy="optim")
    train(model, optimizer, 1)
    save_checkpoint(tmp_path, 1, [model], optimizer)

    def odd(wrong: Any, right: Any) -> Any:
        return wrong if rank == 1 else right

    def refused(words: str, error: type[Exception] = CheckpointError) -> Any:
        return pytest.raises(error, match=f"^(cannot load a checkpoint: )?rank 1: [^;]*{words}")

    def save(root: Any = tmp_path, step: Any = 2, keep_last: Any = None, saver: Any = None) -> None:
        save_checkpoint(root, step, [model], optimizer, keep_last=keep_last, saver=saver)

    with refused("step=-1; expected an integer"):
        save(step=odd(-1, 2))
    with refused("step='2'; expected an integer"):
        save(step=odd("2", 2))
    with refused("keep_last=0: at least the newest"):
        save(keep_last=odd(0, 1))
    with refused("keep_last='3'; expected an integer"):
        save(keep_last=odd("3", 1))
    with refused("root is None; it is the path"):
        save(root=odd(None, tmp_path))
    for option, value, words in (
        ("keep_last", 0, "keep_last=0: at least the newest"),
        ("on_error", "ignore", "on_error='ignore'"),
        ("asynchronous", "yes", "asynchronous='yes'; it is True or False"),
        ("timeout_s", "60", "timeout_s='60' must be a positive number"),
        ("file_bytes", 0, "file_bytes=0 must be a positive number"),
        ("snapshot_limit_bytes", -1, "snapshot_limit_bytes=-1; it is a number of bytes"),
    ):
        with refused(words, ValueError):
            CheckpointSaver(tmp_path, **({option: value} if rank == 1 else {}))
    with refused("root=None; it is the path", ValueError):
        CheckpointSaver(odd(None, tmp_path))
    with CheckpointSaver(tmp_path, asynchronous=True) as saver:
        save(step=2, saver=saver)
        with refused("step=-1; expected an integer"):
            save(step=odd(-1, 3), saver=saver)
        with refused("step=None; expected an integer", ValueError):
            saver.save(odd(None, 3), lambda writer: None, meta={})
        with refused("meta is a list", ValueError):
            saver.save(3, lambda writer: None, meta=odd([], {}))
        with refused("saver is a str; pass a CheckpointSaver"):
            save(saver=odd("saver", saver))
    for arguments, words in (
        ({"root": odd(None, tmp_path)}, "root is None; it is the path"),
        ({"step": odd("1", 1)}, "step is '1'; expected an integer"),
    ):
        with refused(words):
            load_checkpoint(**{"root": tmp_path, "model_chunks": [model], "optimizer": optimizer, **arguments})
    assert list_steps(tmp_path) == [1, 2]  # the save in flight was committed
    assert load_checkpoint(tmp_path, [model], optimizer).step == 2


@ranks(2, timeout_s=20)
def test_options_that_decide_what_ranks_do_together_are_the_same_on_every_rank(
    rank: int, world: int, tmp_path: Path
) -> None:
    model, optimizer = build(strategy="optim")
    train(model, optimizer, 1)
    for option, values in (("asynchronous", (False, True)), ("on_error", ("raise", "warn")), ("keep_last", (None, 2))):
        words = rf"{option} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1; pass the same"
        with pytest.raises(ValueError, match=words):
            CheckpointSaver(tmp_path, **{option: values[rank]})
    with (
        CheckpointSaver(tmp_path) as saver,
        pytest.raises(CheckpointError, match=r"ranks \[1\] were given no saver and the others a saver"),
    ):
        save_checkpoint(tmp_path, 1, [model], optimizer, saver=saver if rank == 0 else None)
    save_checkpoint(tmp_path, 1, [model], optimizer)
    before = weights(model)
    train(model, optimizer, 1)
    after = weights(model)
    assert not same(after, before)
    for option, first in (("strict", True), ("load_random_state", False), ("load_hyperparameters", False)):
        odd = 1 if first else 0
        words = rf"ranks \[{odd}\] were given not {option}=True and the others {option}=True.*Nothing was changed"
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(tmp_path, [model], optimizer, **{option: first if rank == 0 else not first})
    with pytest.raises(CheckpointError, match=r"ranks \[0\] were given no optimizer and the others an optimizer"):
        load_checkpoint(tmp_path, [model], optimizer if rank == 1 else None)
    assert same(weights(model), after)


@ranks(2, timeout_s=20)
def test_what_a_scheduler_raises_on_one_rank_is_reported_to_all_and_both_are_as_before(
    rank: int, world: int, tmp_path: Path
) -> None:
    class Odd:
        def __init__(self) -> None:
            self.at = 3

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if rank == 1:
                raise AttributeError("no such phase")
            self.at = state["at"]

    model, _ = build()
    save_checkpoint(tmp_path, 1, [model], scheduler=Odd())
    with pytest.raises(CheckpointError, match="rank 1: .*scheduler refuses its state: AttributeError: no such phase"):
        load_checkpoint(tmp_path, [model], scheduler=Odd())


@ranks(1)
@pytest.mark.parametrize("name", ["ExponentialLR", "SequentialLR"])
def test_a_scheduler_of_torch_goes_on_with_its_rate(rank: int, world: int, name: str, tmp_path: Path) -> None:
    """It computes the next rate from the last one."""

    def make() -> tuple[Any, Any, Any]:
        model, optimizer = build()
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
        if name == "SequentialLR":
            warmup = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 0.25, total_iters=4)
            scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer.optimizer, [warmup, scheduler], [5])
        return model, optimizer, scheduler

    model, optimizer, scheduler = make()
    for step in range(3):
        train(model, optimizer, 1, step)
        scheduler.step()
    save_checkpoint(tmp_path, 3, [model], optimizer, scheduler)
    again, resumed, its_scheduler = make()
    load_checkpoint(tmp_path, [again], resumed, its_scheduler)
    for step in range(3, 8):
        for one in ((model, optimizer, scheduler), (again, resumed, its_scheduler)):
            train(one[0], one[1], 1, step)
            one[2].step()
        assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in optimizer.param_groups]
    assert same(weights(again), weights(model))


@ranks(1)
def test_a_warning_of_a_damaged_checkpoint_shows_the_line_that_loads(rank: int, world: int, tmp_path: Path) -> None:
    model, _ = build()
    for step in (1, 2):
        save_checkpoint(tmp_path, step, [model])
    (list_committed(tmp_path)[-1].path / "manifest.json").unlink()
    with pytest.warns(RuntimeWarning, match="step 2 .* is damaged") as heard:
        assert load_checkpoint(tmp_path, [model]).step == 1
    assert [warning.filename for warning in heard] == [__file__]


@ranks(1)
def test_a_step_may_be_of_any_kind_of_integer(rank: int, world: int, tmp_path: Path) -> None:
    model, _ = build()
    save_checkpoint(tmp_path, np.int64(4), [model])  # type: ignore[arg-type]
    assert load_checkpoint(tmp_path, [model]).step == 4
    with pytest.raises(CheckpointError, match="step=5.0; expected an integer"):
        save_checkpoint(tmp_path, 5.0, [model])  # type: ignore[arg-type]
