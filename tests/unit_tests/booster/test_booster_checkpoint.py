"""What one plugin has written, every other reads; training goes on as if it had not stopped."""

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.booster import Booster
from core.booster.checkpoint_io.checks import match_groups
from core.booster.mixed_precision import FP16TorchMixedPrecision
from core.checkpoint.weights import sharded
from tests.unit_tests.booster.booster_reference import (
    BOUNDS,
    assert_same_training,
    full_weights,
    mean_loss,
    new_model,
    new_optimizer,
    run_steps,
    train,
    trained_on_one_process,
)
from tests.unit_tests.booster.test_booster_training import PLUGINS, new_plugin
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import make_net

FORMS = {
    "whole": {},
    "whole-safetensors": {"use_safetensors": True},
    "shards": {"shard": True, "size_per_shard": 2e-4},
    "shards-safetensors": {"shard": True, "size_per_shard": 2e-4, "use_safetensors": True},
    "async": {"use_async": True},
    "async-shards": {"shard": True, "size_per_shard": 2e-4, "use_async": True},
}


def save(booster: Booster, model: nn.Module, optimizer: Any, folder: Path, form: str) -> None:
    options = FORMS[form]
    booster.save_model(model, folder / "model", **options)
    optimizer_options = {name: value for name, value in options.items() if name != "use_safetensors"}
    booster.save_optimizer(optimizer, folder / "optimizer", **optimizer_options)


def other_start() -> nn.Module:
    """A model that is not the one that was trained."""
    return make_net(torch.float32, seed=99)


def goes_on(booster: Booster, rank: int, world: int, folder: Path) -> None:
    """Load into a new model and optimizer, with other values and options; train the last two of five steps."""
    model = other_start()
    optimizer = new_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 100.0  # the saved one must come back
    model, optimizer, criterion, _, _ = booster.boost(model, optimizer, mean_loss)
    booster.load_model(model, folder / "model")
    booster.load_optimizer(optimizer, folder / "optimizer")
    run_steps(booster, model, optimizer, criterion, rank, steps=range(3, 5))
    assert_same_training(model, trained_on_one_process(world, 1, False)[0], BOUNDS["fp32"])


def shared(tmp_path: Path) -> Path:
    """Rank 0's folder, on all ranks."""
    paths = [tmp_path]
    dist.broadcast_object_list(paths, 0)
    return paths[0]


@ranks(2, 3)
@pytest.mark.parametrize("reader", PLUGINS)
@pytest.mark.parametrize("writer", PLUGINS)
@pytest.mark.in_suite()
def test_training_goes_on_under_another_plugin(rank: int, world: int, tmp_path: Path, writer: str, reader: str) -> None:
    folder = shared(tmp_path)
    booster = Booster(plugin=new_plugin(writer))
    model, optimizer, _ = train(booster, rank, steps=range(3))
    forms = [form for form in FORMS if find_spec("safetensors") or "safetensors" not in form]
    forms = forms if world == 2 else ["shards", "whole"]
    for form in forms:
        save(booster, model, optimizer, folder / form, form)
    booster.checkpoint_io.synchronize()
    for form in forms:
        goes_on(Booster(plugin=new_plugin(reader)), rank, world, folder / form)


@ranks(2)
def test_torch_alone_reads_the_files_and_the_booster_reads_torchs(rank: int, world: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    booster = Booster(plugin=new_plugin("torch_fsdp"))
    model, optimizer, _ = train(booster, rank, steps=range(3))
    save(booster, model, optimizer, folder, "whole")
    plain = other_start()
    plain_optimizer = new_optimizer(plain)
    plain.load_state_dict(torch.load(folder / "model", weights_only=True))
    plain_optimizer.load_state_dict(torch.load(folder / "optimizer", weights_only=True))
    assert [group["lr"] for group in plain_optimizer.param_groups] == [0.2, 0.45]
    ours = full_weights(model)
    assert all(torch.equal(ours[name], param) for name, param in plain.named_parameters())
    if rank == 0:
        torch.save(plain.state_dict(), folder / "theirs")
        torch.save(plain_optimizer.state_dict(), folder / "theirs_optimizer")
    dist.barrier()
    (folder / "model").unlink() if rank == 0 else None
    (folder / "optimizer").unlink() if rank == 0 else None
    dist.barrier()
    if rank == 0:
        (folder / "theirs").rename(folder / "model")
        (folder / "theirs_optimizer").rename(folder / "optimizer")
    dist.barrier()
    for plugin in PLUGINS:
        goes_on(Booster(plugin=new_plugin(plugin)), rank, world, folder)


@ranks(2)
def test_an_asynchronous_save_holds_what_was_there_when_it_was_called(rank: int, world: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    write = sharded.write
    for plugin in PLUGINS:
        booster = Booster(plugin=new_plugin(plugin))
        model, *_ = booster.boost(new_model(), None, mean_loss)
        wanted = full_weights(model)
        wanted = {name: weight.clone() for name, weight in wanted.items()}
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(sharded, "write", lambda *a, **k: (time.sleep(0.3), write(*a, **k)))
            for number in range(2):  # the second uses the first's memory
                booster.save_model(model, folder / f"{plugin}{number}", use_async=True)
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(1.0)
            booster.checkpoint_io.synchronize()
        for number in range(2):
            saved = torch.load(folder / f"{plugin}{number}", weights_only=True)
            for name, want in wanted.items():
                torch.testing.assert_close(saved[name], want + number)


@ranks(2)
def test_an_error_of_the_rank_that_writes_is_raised_on_all(rank: int, world: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    (folder / "file").write_text("not a directory")
    for plugin in PLUGINS:
        booster = Booster(plugin=new_plugin(plugin))
        model, *_ = booster.boost(new_model())
        expected = (OSError, "") if rank == 0 else (RuntimeError, "rank 0 failed")
        for options in ({}, {"shard": True, "size_per_shard": 1e-4}):
            with pytest.raises(expected[0], match=expected[1]):
                booster.save_model(model, folder / "file" / "model", **options)
        booster.save_model(model, folder / "file" / "model", use_async=True)
        with pytest.raises(expected[0], match=expected[1]):
            booster.load_model(model, folder / "nothing")


@ranks(1, 2)
def test_a_loss_scale_and_a_scheduler_are_saved_and_loaded(rank: int, world: int, tmp_path: Path) -> None:
    """ColossalAI saves no loss scale."""
    folder = shared(tmp_path)

    def new(init_scale: float) -> tuple[Any, ...]:
        model = new_model()
        optimizer = new_optimizer(model)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
        precision = FP16TorchMixedPrecision(init_scale=init_scale, growth_interval=3)
        booster = Booster(mixed_precision=precision, plugin=new_plugin("torch_ddp"))
        return booster, *booster.boost(model, optimizer, mean_loss, None, scheduler)

    booster, model, optimizer, criterion, _, scheduler = new(2.0**8)
    run_steps(booster, model, optimizer, criterion, rank, steps=range(4))
    scheduler.step()
    assert optimizer.scaler.state_dict() == {"scale": 2.0**9, "growth_tracker": 1, "hysteresis_tracker": 1}
    for shard in (False, True):
        booster.save_optimizer(optimizer, folder / f"optimizer{shard}", shard=shard)
        booster.save_lr_scheduler(scheduler, folder / "scheduler")
        again, _, loaded, _, _, loaded_scheduler = new(2.0**3)
        again.load_optimizer(loaded, folder / f"optimizer{shard}")
        again.load_lr_scheduler(loaded_scheduler, folder / "scheduler")
        assert loaded.scaler.state_dict() == optimizer.scaler.state_dict()
        assert loaded_scheduler.last_epoch == 1 and loaded.param_groups[0]["lr"] == pytest.approx(0.1)
        loaded_scheduler.step()
        loaded_scheduler.step()
        assert loaded.param_groups[0]["lr"] == pytest.approx(0.05)


def test_names_in_a_directory_are_those_of_colossalai_and_hugging_face(tmp_path: Path) -> None:
    booster = Booster(device="cpu")
    model, optimizer, *_ = booster.boost(*(lambda m: (m, new_optimizer(m)))(new_model()))
    booster.backward(model(torch.ones(2, 5)).sum(), optimizer)
    optimizer.step()
    booster.save_model(model, tmp_path / "bin", shard=True, size_per_shard=3e-4)
    booster.save_model(model, tmp_path / "bin", shard=True, size_per_shard=3e-4, prefix="ema")
    booster.save_optimizer(optimizer, tmp_path / "optim", shard=True, size_per_shard=1e-3)
    names = sorted(path.name for path in (tmp_path / "bin").iterdir())
    assert [name for name in names if not name.startswith("ema")] == [
        "pytorch_model-00001.bin",
        "pytorch_model-00002.bin",
        "pytorch_model-00003.bin",
        "pytorch_model.bin.index.json",
    ]
    assert "ema.pytorch_model.bin.index.json" in names and "ema.pytorch_model-00003.bin" in names
    index = json.loads((tmp_path / "bin" / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"].keys() == model.unwrap().state_dict().keys()
    assert index["metadata"]["total_size"] == sum(4 * param.numel() for param in model.parameters())
    optim = json.loads((tmp_path / "optim" / "pytorch_optim.bin.index.json").read_text())
    assert optim["metadata"]["param_groups"] == "pytorch_optim_group.bin"
    assert sorted(optim["weight_map"], key=int) == [str(number) for number in range(7)]
    # Saved again in one file, nothing is left of the three.
    booster.save_model(model, tmp_path / "bin", shard=True)
    left = [path.name for path in (tmp_path / "bin").glob("pytorch_model*")]
    assert sorted(left) == ["pytorch_model-00001.bin", "pytorch_model.bin.index.json"]


def test_shards_are_filled_in_order_and_a_larger_tensor_is_alone() -> None:
    mib = [torch.zeros(int(size * sharded.MIB), dtype=torch.uint8) for size in (0.4, 0.4, 0.4, 3.0, 0.1)]
    shards = list(sharded.shards_of(zip("abcde", mib, strict=True), 1.0))
    assert ["".join(shard) for shard, _ in shards] == ["ab", "c", "d", "e"]
    assert [size for _, size in shards] == [2 * mib[0].numel(), mib[0].numel(), mib[3].numel(), mib[4].numel()]


@pytest.mark.parametrize("index", [False, True])
def test_of_two_kinds_of_files_safetensors_are_meant_unless_both_are_ours(tmp_path: Path, index: bool) -> None:
    booster = Booster(device="cpu")
    model, old = new_model(), new_model()
    booster.save_model(model, tmp_path, shard=True, size_per_shard=3e-4, use_safetensors=True)
    if index:  # as repositories of the Hub have both
        torch.save(old.state_dict(), tmp_path / "a.bin")
        content = {"weight_map": dict.fromkeys(old.state_dict(), "a.bin")}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(content))
    else:
        torch.save(old.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = new_model()
    for param in (*old.parameters(), *loaded.parameters()):
        param.data.zero_()
    booster.load_model(loaded, tmp_path)
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))
    booster.save_model(old, tmp_path / "pytorch_model.bin")
    if not index:  # one of ours of each kind: nothing says which is meant
        with pytest.raises(ValueError, match="Found multiple index files"):
            booster.load_model(loaded, tmp_path)


def test_what_does_not_fit_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    booster = Booster(device="cpu")
    model, optimizer, *_ = booster.boost(*(lambda m: (m, new_optimizer(m)))(new_model()))
    before = {name: weight.clone() for name, weight in full_weights(model).items()}
    torch.save({**model.unwrap().state_dict(), "extra": torch.ones(1)}, tmp_path / "more")
    torch.save({**other_start().state_dict(), "second.weight": torch.ones(3, 3)}, tmp_path / "shape")
    torch.save({"first.weight": torch.ones(7, 5)}, tmp_path / "less")
    for name, words in (("more", "1 that the model lacks.*'extra'"), ("shape", r"second.weight.*\[3, 3\].*\[11, 7\]"),
                        ("less", "lacks 6 names.*'first.bias'")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            booster.load_model(model, tmp_path / name)
    assert all(torch.equal(before[name], now) for name, now in full_weights(model).items())
    booster.load_model(model, tmp_path / "less", strict=False)
    assert (model.unwrap().first.weight == 1).all()
    with pytest.raises(ValueError, match="is a directory"):
        booster.save_model(model, tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        booster.save_model(model, tmp_path / "more", shard=True)
    with pytest.raises(ValueError, match="size_per_shard is 0"):
        booster.save_model(model, tmp_path / "new", shard=True, size_per_shard=0)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        booster.load_model(model, tmp_path / "nowhere")
    one_group = torch.optim.SGD(new_model().parameters(), lr=1.0)
    torch.save(one_group.state_dict(), tmp_path / "one")
    with pytest.raises(ValueError, match=r"groups of \[7\] parameters.*\[3, 4\]"):
        booster.load_optimizer(optimizer, tmp_path / "one")
    with pytest.raises(ValueError, match="more holds no state of an optimizer.*save_model"):
        booster.load_optimizer(optimizer, tmp_path / "more")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "missing.bin"}}))
    with pytest.raises(FileNotFoundError, match=r"missing.bin"):
        booster.load_model(model, tmp_path / "two")


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_strict_and_gather_dtensor_are_honoured(rank: int, world: int, tmp_path: Path, plugin: str) -> None:
    folder = shared(tmp_path)
    if rank == 0:
        torch.save({"second.weight": torch.ones(11, 7)}, folder / "less")
    dist.barrier()
    booster = Booster(plugin=new_plugin(plugin))
    model, *_ = booster.boost(new_model())
    before = full_weights(model)["first.weight"].clone()
    with pytest.raises(ValueError, match="lacks 6 names"):
        booster.load_model(model, folder / "less")
    booster.load_model(model, folder / "less", strict=False)
    after = full_weights(model)
    assert (after["second.weight"] == 1).all() and torch.equal(after["first.weight"], before)
    if plugin == "torch_fsdp":
        with pytest.raises(ValueError, match="gather_dtensor=False would write one rank's shards"):
            booster.save_model(model, folder / "never", gather_dtensor=False)


def test_a_save_that_fails_leaves_the_file_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    booster = Booster(device="cpu")
    model, *_ = booster.boost(new_model())
    booster.save_model(model, tmp_path / "model")
    before = (tmp_path / "model").read_bytes()

    def half(content: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        booster.save_model(model, tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_tensor_that_is_a_part_of_a_large_one_is_written_alone(tmp_path: Path) -> None:
    booster = Booster(device="cpu")
    model = new_model()
    flat = torch.zeros(100_000)
    for param in model.parameters():
        param.data = flat[: param.numel()].view_as(param)
    model, *_ = booster.boost(model)
    booster.save_model(model, tmp_path / "model")
    assert (tmp_path / "model").stat().st_size < 20_000


def test_parameters_are_matched_by_name_where_both_sides_have_names() -> None:
    def group(*names: str) -> dict[str, Any]:
        return {"params": list(range(len(names))), "param_names": list(names)}

    assert match_groups([group("a", "b", "c")], [group("c", "a", "b")]) == {0: 1, 1: 2, 2: 0}
    assert match_groups([{"params": [0, 1, 2]}], [group("c", "a", "b")]) == {0: 0, 1: 1, 2: 2}
    with pytest.raises(ValueError, match="parameter 'b' of the saved group 0 is not in this optimizer"):
        match_groups([group("a", "b")], [group("a", "c")])


def test_a_file_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "it ran",)

    torch.save({"first.weight": Harmful()}, tmp_path / "model")
    model, *_ = Booster(device="cpu").boost(new_model())
    with pytest.raises(Exception, match="holds other things than tensors .* can run code.*--trust-foreign-files"):
        Booster(device="cpu").load_model(model, tmp_path / "model")
    assert not (tmp_path / "it ran").exists()


def test_the_kind_of_a_file_is_read_from_its_content_and_not_by_its_name(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    booster = Booster(device="cpu")
    plain = new_model()
    model, optimizer, *_ = booster.boost(plain, new_optimizer(plain))
    booster.save_optimizer(optimizer, tmp_path / "optimizer.bin")
    (tmp_path / "optimizer.bin").rename(tmp_path / "optimizer.safetensors")
    booster.load_optimizer(optimizer, tmp_path / "optimizer.safetensors")
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    for name, use_safetensors in (("torch.safetensors", False), ("safe.bin", True)):
        booster.save_model(model, tmp_path / "model", use_safetensors=use_safetensors)
        (tmp_path / "model").rename(tmp_path / name)
        for value in plain.state_dict().values():
            value.zero_()
        booster.load_model(model, tmp_path / name)
        assert all(torch.equal(value, weights[key]) for key, value in plain.state_dict().items())


def test_a_name_that_says_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    booster = Booster(device="cpu")
    plain = new_model()
    model, optimizer, *_ = booster.boost(plain, new_optimizer(plain))
    with pytest.raises(ValueError, match="m.safetensors would be a file of torch.save under a name that"):
        booster.save_model(model, tmp_path / "m.safetensors")
    for suffix in (".bin", ".pt", ".pth"):
        with pytest.raises(ValueError, match=f"m{suffix} would be a file of safetensors under a name"):
            booster.save_model(model, tmp_path / f"m{suffix}", use_safetensors=True)
    assert not list(tmp_path.iterdir())
    booster.save_optimizer(optimizer, tmp_path / "o.safetensors", shard=True)  # of a directory


@ranks(2, timeout_s=20)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_an_argument_that_is_wrong_on_one_rank_alone_is_refused_on_all(
    rank: int, world: int, tmp_path: Path, plugin: str
) -> None:
    """The others would wait in a collective until the group's timeout."""
    folder = shared(tmp_path)
    booster = Booster(plugin=new_plugin(plugin))

    def odd(wrong: Any, right: Any) -> Any:
        return wrong if rank == 1 else right

    def refused(words: str) -> Any:
        error = (ValueError, TypeError) if rank == 1 else RuntimeError
        return pytest.raises(error, match=words if rank == 1 else f"rank 1 failed: .*{words}")

    with refused("boost got a str for the model"):
        booster.boost(odd("model", new_model()), None)
    with refused("is not a parameter of the model"):
        model = new_model()
        booster.boost(model, new_optimizer(odd(new_model(), model)))
    model, optimizer, _ = train(booster, rank, steps=range(1))
    booster.save_model(model, folder / "there")
    booster.save_optimizer(optimizer, folder / "state")
    for ask_wrongly, words in (
        (lambda: booster.save_model(odd(None, model), folder / "m"), "save_model got a NoneType"),
        (lambda: booster.save_optimizer(odd(None, optimizer), folder / "o"), "save_optimizer got a NoneType"),
        (lambda: booster.save_model(model, odd(None, folder / "m")), "NoneType"),
        (lambda: booster.save_model(model, folder / "m", True, size_per_shard=odd("1", 1)), "size_per_shard is '1'"),
        (lambda: booster.save_model(model, folder / "m", True, size_per_shard=odd(0, 1)), "size_per_shard is 0"),
        (lambda: booster.save_model(model, folder / "m", prefix=odd(3, None)), "prefix is 3"),
        (lambda: booster.save_optimizer(optimizer, folder / odd("", "o")), "is a directory"),
        (lambda: booster.load_model(odd(None, model), folder / "there"), "load_model got a NoneType"),
        (lambda: booster.load_optimizer(odd("o", optimizer), folder / "state"), "load_optimizer got a str"),
        (lambda: booster.load_model(model, odd(None, folder / "there")), "NoneType"),
    ):
        with refused(words):
            ask_wrongly()
    assert sorted(path.name for path in folder.iterdir()) == ["state", "there"]
    booster.save_model(model, folder / "m")
    booster.load_model(model, folder / "m")


@ranks(2, timeout_s=20)
def test_an_asynchronous_save_that_failed_is_reported_on_all_ranks_by_the_next_save(
    rank: int, world: int, tmp_path: Path
) -> None:
    """Under FSDP the others are in the next tensor's gather otherwise."""
    folder = shared(tmp_path)
    booster = Booster(plugin=new_plugin("torch_fsdp"))
    model, _, _ = train(booster, rank, steps=range(1))
    if rank == 0:
        (folder / "file").write_text("no directory")
    booster.save_model(model, folder / "file" / "model", use_async=True)
    with pytest.raises(OSError if rank == 0 else RuntimeError, match="file"):
        booster.save_model(model, folder / "model")
    booster.save_model(model, folder / "model")
    assert (folder / "model").exists()


def test_reading_with_threads_gives_the_same(tmp_path: Path) -> None:
    booster = Booster(device="cpu")
    model, *_ = booster.boost(new_model())
    booster.save_model(model, tmp_path / "model", shard=True, size_per_shard=1e-4)
    other, *_ = booster.boost(other_start())
    booster.load_model(other, tmp_path / "model", low_cpu_mem_mode=False, num_threads=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_hugging_face_reads_the_directory(rank: int, world: int, tmp_path: Path, plugin: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = shared(tmp_path)
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    booster = Booster(plugin=new_plugin("torch_ddp") if plugin == "torch_ddp" else PLUGINS[plugin]())
    model, *_ = booster.boost(transformers.GPT2LMHeadModel(config))
    for name, options in (("bin", {}), ("safe", {"use_safetensors": True})):
        booster.save_model(model, folder / name, shard=True, size_per_shard=0.01, **options)
        index = next((folder / name).glob("*.index.json"))
        tied = "lm_head.weight" in json.loads(index.read_text())["weight_map"]
        assert tied == (name == "bin"), "Hugging Face writes a tied weight once"
        if name == "safe":  # Hugging Face no longer reads torch's files
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
            ours = full_weights(model)
            assert all(torch.equal(ours[key], param) for key, param in theirs.named_parameters())
        fresh, *_ = booster.boost(transformers.GPT2LMHeadModel(config))
        booster.load_model(fresh, folder / name)
        reloaded = full_weights(fresh)
        assert all(torch.equal(reloaded[key], weight) for key, weight in full_weights(model).items())
        assert fresh.unwrap().lm_head.weight is fresh.unwrap().transformer.wte.weight
