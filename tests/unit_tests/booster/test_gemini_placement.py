"""Where GeminiPlugin's chunks lie changes no bit; bytes on the device are those that were asked for."""

import ctypes
import errno
import gc
import itertools
import os
import shutil
import signal
import sys
import threading
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.workloads import Workload
from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin
from core.distributed import Placement, finalize_model_grads, materialize
from core.distributed.buffer.file_tier import FileTier
from core.distributed.contract.placement import first_of
from core.distributed.wire import huge_pages
from core.distributed.wire.shared_memory import HostMemory
from core.groups.agree import SyncError
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests import ranks as pool
from tests.unit_tests.booster.booster_reference import full_weights
from tests.unit_tests.booster.test_booster_checkpoint import shared
from tests.unit_tests.booster.test_gemini import TINY_CHUNKS
from tests.unit_tests.ranks import LOOPBACK, ranks
from tests.unit_tests.reference import wrap

FRACTIONS = (0.0, 0.5, 1.0)
FINE = (0.0, 0.25, 0.5, 0.75, 1.0)


def layers() -> nn.Module:
    """Chunks of different lengths."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, n), nn.Tanh(), nn.Linear(n, 8)) for n in (8, 40, 16, 8, 24, 8)))


def boosted(precision: str, model: nn.Module | None = None, **options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=GeminiPlugin(precision=precision, initial_scale=2.0**8, **{**TINY_CHUNKS, **options}))
    model = layers() if model is None else model
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def losses_of(booster: Booster, model: Any, optimizer: Any, rank: int, steps: int = 3) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 8, generator=generator)
        loss = (model(x).float() - x).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(float(loss))
    return losses


class Files:
    """The memory of this process that lies in files of a directory, as the kernel tells it."""

    def __init__(self, directory: Path) -> None:
        self.ranges = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            if f" {directory}" in line:
                self.ranges.append(tuple(int(end, 16) for end in line.split(" ")[0].split("-")))

    def bytes_of(self, tensors: list[torch.Tensor]) -> int:
        return sum(t.nbytes for t in tensors if any(low <= t.data_ptr() < high for low, high in self.ranges))


def shards(model: Any) -> list[torch.Tensor]:
    return [unit.shard for unit in model.module.engine.params.units]


def over_ranks(nbytes: int) -> int:
    both = torch.tensor(nbytes)
    dist.all_reduce(both)
    return int(both)


def grads(model: Any) -> list[torch.Tensor]:
    return [bucket.memory.owned_grad for bucket in model.module.reducer.buckets]


def states(optimizer: Any) -> list[torch.Tensor]:
    """Masters and moments, as the optimizer holds them."""
    kept = [masters.kept for masters in optimizer.engine.masters if masters.kept.numel()]
    return kept + [value for state in optimizer.optim.state.values() for value in state.values() if value.dim()]


def check_grid(rank: int, folder: Path, precision: str, fractions: tuple[float, ...]) -> None:
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()  # else each boost makes groups, with nine threads that wake
    booster, model, optimizer = boosted(precision)
    wanted = losses_of(booster, model, optimizer, rank)
    weights = full_weights(model)
    total, of_states = sum(t.nbytes for t in shards(model)), sum(t.nbytes for t in states(optimizer))
    of_grads = sum(t.nbytes for t in grads(model))
    largest = max(t.nbytes for t in shards(model))
    assert len(shards(model)) > 5 and wanted[2] < wanted[0]
    last: dict[Any, int] = {}
    for shard, optim, param in itertools.product(fractions, repeat=3):
        if param > shard:
            continue
        offload = {"offload_directory": folder} if optim or param else {}
        booster, model, optimizer = boosted(
            precision, shard_param_frac=shard, offload_optim_frac=optim, offload_param_frac=param, **offload
        )
        case = f"shard {shard}, optim {optim}, param {param}"
        assert losses_of(booster, model, optimizer, rank) == wanted, case
        ours = full_weights(model)
        assert all(torch.equal(ours[name], weight) for name, weight in weights.items()), case
        files = Files(folder)
        params, moments = files.bytes_of(shards(model)), files.bytes_of(states(optimizer))
        assert abs(files.bytes_of(grads(model)) - param * of_grads) <= largest * of_grads // total, case
        assert abs(params - param * total) <= largest, case
        below, of_all = over_ranks(moments), over_ranks(of_states)  # a rank's part of a chunk may be padding
        assert abs(below - optim * of_all) <= largest * of_all // total, case
        assert last.get((shard, optim), 0) <= params and last.get(("states", shard, param), 0) <= moments, case
        assert params == (total if param == 1 else params if param else 0), case
        assert moments == (of_states if optim == 1 else moments if optim else 0), case
        last[shard, optim], last["states", shard, param] = params, moments
        with torch.no_grad():
            model(torch.ones(1, 8))
        used = [unit.full for unit in model.module.engine.params.units if unit.full is not None]
        assert used and not files.bytes_of(used), "a chunk is used on the device"
        text = model.module.describe()
        assert (f"ranks, in a file in {folder}" in text) == ("gradients offloaded" in text) == (param > 0)
        assert (f"masters and moments in a file in {folder}" in text) == (optim > 0)
        assert not list(folder.iterdir()), "the files have a name"
        del booster, model, optimizer, ours
        gc.collect()


@ranks(2)
def test_no_placement_changes_a_bit_and_bytes_lie_where_they_were_asked_to(
    rank: int, world: int, tmp_path: Path
) -> None:
    folder = shared(tmp_path)
    check_grid(rank, folder, "bf16", FRACTIONS)
    with mock.patch.object(HostMemory, "share", lambda *_: None):
        check_grid(rank, folder, "fp32", (0.0, 1.0))


@pytest.mark.nightly
@ranks(1, 2, 3, timeout_s=300.0)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_placement_changes_a_bit_in_a_fine_grid(rank: int, world: int, tmp_path: Path, precision: str) -> None:
    folder = shared(tmp_path)
    check_grid(rank, folder, precision, FINE)
    with mock.patch.object(HostMemory, "share", lambda *_: None):
        check_grid(rank, folder, precision, FINE)


@ranks(2)
def test_chunks_that_stay_whole_are_gathered_once_a_step(rank: int, world: int) -> None:
    gathers = []
    with mock.patch.object(HostMemory, "share", lambda *_: None):
        for fraction in FINE:
            booster, model, optimizer = boosted("fp32", shard_param_frac=fraction)
            losses_of(booster, model, optimizer, rank, 1)
            unsharder = model.module.engine.params
            with mock.patch.object(unsharder.collectives, "all_gather", wraps=unsharder.collectives.all_gather) as one:
                losses_of(booster, model, optimizer, rank, 1)
            gathers.append(one.call_count)
    count = len(shards(model))
    assert gathers == sorted(gathers) and gathers[0] == count and gathers[-1] > 1.5 * count


def test_fractions_are_of_bytes_and_a_chunk_counts_once() -> None:
    sizes = [30, 10, 50, 10]
    assert [sorted(first_of(sizes, f)) for f in (0, 0.1, 0.2, 0.36, 0.6, 0.66, 1)] == [
        [], [], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3]
    ]  # fmt: skip
    assert sorted(first_of(sizes[::-1], 0.2)) == [0] and sorted(first_of(sizes[::-1], 0.5)) == [0, 1]
    for fraction in range(101):
        last = {3 - i for i in first_of(sizes[::-1], fraction / 100)}
        for chosen in (first_of(sizes, fraction / 100), last):
            assert abs(sum(sizes[i] for i in chosen) - fraction) <= 25
        assert not first_of(sizes, 1 - fraction / 100) & last
    with pytest.raises(ValueError, match="shard_param_frac must be a number of at least 0 and at most 1, got 2"):
        Placement(shard_param_frac=2)


@ranks(2)
def test_checkpoints_go_in_and_out_of_files(rank: int, world: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    (folder / "files").mkdir(exist_ok=True)
    placed = {"offload_optim_frac": 1, "offload_param_frac": 1, "offload_directory": folder / "files"}
    booster, model, optimizer = boosted("bf16", **placed)
    losses_of(booster, model, optimizer, rank, 2)
    booster.save_model(model, folder / "model", shard=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)
    wanted = losses_of(booster, model, optimizer, rank, 2)
    for options in ({}, placed):
        again, other, other_optimizer = boosted("bf16", **options)
        losses_of(again, other, other_optimizer, rank, 1)  # the files are there already
        count = other.module.engine.tier.nbytes if options else 0
        for _ in range(2):
            again.load_model(other, folder / "model")
            again.load_optimizer(other_optimizer, folder / "optimizer")
        if options:
            assert other.module.engine.tier.nbytes == count
            files = Files(folder / "files")
            assert files.bytes_of(states(other_optimizer)) == sum(t.nbytes for t in states(other_optimizer)) > 0
        assert losses_of(again, other, other_optimizer, rank, 2) == wanted
    other_optimizer.load_state_dict(other_optimizer.state_dict())


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_each_rank_may_have_a_directory_of_its_own(rank: int, world: int, tmp_path: Path, share: bool) -> None:
    booster, model, optimizer = boosted("bf16")
    wanted = losses_of(booster, model, optimizer, rank)
    folder = shared(tmp_path) / str(rank)
    folder.mkdir(exist_ok=True)
    placed = {"offload_optim_frac": 1, "offload_param_frac": 1, "offload_directory": folder}
    with nullcontext() if share else mock.patch.object(HostMemory, "share", lambda *_: None):
        booster, model, optimizer = boosted("bf16", **placed)
    assert losses_of(booster, model, optimizer, rank) == wanted
    assert Files(folder).bytes_of(states(optimizer)) == sum(t.nbytes for t in states(optimizer)) > 0


@ranks(2)
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_gradients_alone_may_lie_in_files(rank: int, world: int, tmp_path: Path, strategy: Any) -> None:
    parallel_state.initialize_model_parallel()
    folder, found = shared(tmp_path), []
    for fraction in (0.0, 0.5, 1.0):
        placement = Placement(offload_grad_frac=fraction, directory=folder) if fraction else None
        ddp = wrap(layers(), data_parallel_sharding_strategy=strategy, bucket_size=300, placement=placement)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0), [ddp])
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            finalize_model_grads([ddp])
            optimizer.step()
        of_all = sum(bucket.memory.owned_grad.nbytes for bucket in ddp.reducer.buckets)
        below = Files(folder).bytes_of([bucket.memory.owned_grad for bucket in ddp.reducer.buckets])
        assert 0.2 * of_all < below < 0.8 * of_all if fraction == 0.5 else below == fraction * of_all
        found.append({name: value.clone() for name, value in ddp.state_dict().items()})
        assert all(torch.equal(found[0][name], value) for name, value in found[-1].items()), fraction
    assert not torch.equal(found[0]["0.0.weight"], layers().state_dict()["0.0.weight"])
    with pytest.raises(ValueError, match="offload_grad_frac 0.5, but strategy 'optim' does not shard gradients"):
        wrap(
            layers(),
            data_parallel_sharding_strategy="optim",
            placement=Placement(offload_grad_frac=0.5, directory="/tmp"),
        )


# -- files that are not there, or not as they were --------------------------------------------------------------------


@ranks(2)
def test_a_directory_without_room_is_refused_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    folder = shared(tmp_path)
    everything: dict[str, Any] = {"offload_optim_frac": 1, "offload_param_frac": 1}
    with pytest.raises((OSError, RuntimeError), match="no file for offloaded shards can be made in .*missing"):
        boosted("fp32", **everything, offload_directory=folder / "missing")
    read_only = mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    with (
        mock.patch.object(os, "open", read_only if rank == 1 else os.open),
        pytest.raises(
            (OSError, RuntimeError), match="no file for offloaded shards.*Read-only file system.*can be written"
        ),
    ):
        boosted("fp32", **everything, offload_directory=folder)
    for shares in (True, False):
        share = HostMemory.share if shares else lambda *_: None
        with (
            mock.patch.object(os, "posix_fallocate", full if rank == 0 else os.posix_fallocate),
            mock.patch.object(HostMemory, "share", share),
            pytest.raises((OSError, RuntimeError), match="could not be reserved in .*No space left on device.*Free"),
        ):
            boosted("fp32", **everything, offload_directory=folder)
    booster, model, optimizer = boosted("fp32", offload_optim_frac=1, offload_directory=folder)
    with mock.patch.object(os, "posix_fallocate", full if rank == 1 else os.posix_fallocate):
        losses_of(booster, model, optimizer, rank, 1)  # right, with moments in RAM on rank 1
    with pytest.raises(SyncError, match="rank 1.*could not be reserved"):
        losses_of(booster, model, optimizer, rank, 1)
    assert not list(folder.iterdir())


NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # CLONE_NEWUSER and CLONE_NEWNS of unshare(2)


def fill_a_disk(rank: int, folder: str) -> None:
    """On a disk of 8 MB: parameters have no room at the boost, and moments none in the first step."""
    free = os.statvfs(folder).f_bavail
    offload: dict[str, Any] = {"offload_optim_frac": 1, "offload_directory": folder}

    def wide(width: int, **options: Any) -> tuple[Booster, Any, Any]:
        booster = Booster(plugin=GeminiPlugin(precision="bf16", **options))
        torch.manual_seed(1)
        plain: nn.Module = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
        model, optimizer, *_ = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
        return booster, model, optimizer

    for options in ({"offload_param_frac": 1}, {"offload_param_frac": 1, "max_prefetch": 1}):
        with pytest.raises((OSError, RuntimeError), match="could not be reserved in .*No space left on device.*Free"):
            wide(300_000, **offload, **options)
    found = []
    for options in ({}, offload):
        booster, model, optimizer = wide(80_000, **options)
        losses = losses_of(booster, model, optimizer, rank, 1)
        found.append((losses, full_weights(model)))
    (wanted, weights), (losses, ours) = found
    assert losses == wanted and all(torch.equal(ours[name], weight) for name, weight in weights.items())
    with pytest.raises(SyncError, match=r"rank \d.*could not be reserved in .*No space left on device"):
        losses_of(booster, model, optimizer, rank, 1)
    assert os.statvfs(folder).f_bavail < free
    del booster, model, optimizer
    gc.collect()
    dist.barrier()
    assert os.statvfs(folder).f_bavail == free and not os.listdir(folder)
    booster, model, optimizer = wide(1000, **offload)
    losses_of(booster, model, optimizer, rank, 2)
    assert Files(Path(folder)).bytes_of(states(optimizer)) == sum(t.nbytes for t in states(optimizer)) > 0


NO_MOUNT = 77  # an exit status: a user may mount no file system here


def fill_a_disk_in_a_namespace(folder: Path) -> None:
    """The body of a process without threads: mount a disk of 8 MB that ends with it, and fork two ranks."""
    signal.alarm(150)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
    libc = ctypes.CDLL(None)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_USER | NEW_MOUNTS) != 0:
        os._exit(NO_MOUNT)
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", file).write_text(text)
    if libc.mount(b"tmpfs", bytes(folder / "disk"), b"tmpfs", 0, b"size=8m") != 0:
        os._exit(NO_MOUNT)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            signal.alarm(140)
            try:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
                fill_a_disk(rank, str(folder / "disk"))
                dist.destroy_process_group()
                os._exit(0)
            except BaseException:
                (folder / f"failure-{rank}").write_text(traceback.format_exc())
            finally:
                os._exit(1)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    os._exit(1 if failed else 0)


def test_a_disk_that_is_really_full_is_reported_on_all_ranks(tmp_path: Path) -> None:
    """The disk is a file system in a namespace of its own, which ends with the ranks."""
    (tmp_path / "disk").mkdir()
    process = pool._the_pool().context.Process(target=fill_a_disk_in_a_namespace, args=(tmp_path,))
    process.start()
    process.join()
    if process.exitcode == NO_MOUNT:
        pytest.skip("a user may mount no file system here")
    failures = [file.read_text() for file in sorted(tmp_path.glob("failure-*"))]
    assert process.exitcode == 0 and not failures, "\n".join(failures)


@ranks(1)
def test_files_without_a_temporary_kind_have_no_name_either(rank: int, world: int, tmp_path: Path) -> None:
    plain = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return plain(path, flags, *rest, **more)

    with mock.patch.object(os, "open", refuse):
        booster, model, optimizer = boosted("fp32", offload_optim_frac=1, offload_directory=tmp_path)
        losses_of(booster, model, optimizer, rank, 1)
        child = os.fork()
        if child == 0:  # a job that is killed
            FileTier(tmp_path).zeros(5, torch.float32).fill_(1)
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not list(tmp_path.iterdir()) and Files(tmp_path).bytes_of(states(optimizer)) > 0


def test_a_directory_in_ram_is_warned_of(tmp_path: Path) -> None:
    mounts = f"disk / ext4 rw 0 0\nnone {tmp_path.parent} tmpfs rw 0 0\n"
    with mock.patch("builtins.open", mock.mock_open(read_data=mounts)):
        with pytest.warns(UserWarning, match=f"{tmp_path} is a tmpfs, whose files are RAM"):
            FileTier(tmp_path)
        mounts_of_disk = mounts + f"disk {tmp_path} ext4 rw 0 0\n"
    with mock.patch("builtins.open", mock.mock_open(read_data=mounts_of_disk)), warnings.catch_warnings():
        warnings.simplefilter("error")
        FileTier(tmp_path)


# -- memory -----------------------------------------------------------------------------------------------------------


class Peak:
    """The most RAM that this process has, pages of files apart, while it is entered."""

    def __enter__(self) -> "Peak":
        self.most = resident()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def _look(self) -> None:
        while not self.ended.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        self.thread.join()


def resident() -> int:
    """Bytes of anonymous and of shared memory."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[kind].split()[0]) for kind in ("RssAnon", "RssShmem")) * 1024


def skip_in_ram(folder: Path) -> None:
    kinds = {line.split()[1]: line.split()[2] for line in Path("/proc/mounts").read_text().splitlines()}
    mount = max((path for path in kinds if str(folder).startswith(path)), key=len)
    if kinds[mount] in ("tmpfs", "ramfs"):
        pytest.skip(f"{folder} lies in RAM")


@pytest.mark.nightly
@ranks(2, timeout_s=900.0)
def test_a_gpt_with_six_gigabytes_of_states_is_made_and_trained_in_two_of_memory(
    rank: int, world: int, tmp_path: Path
) -> None:
    folder = shared(tmp_path)
    skip_in_ram(folder)
    if shutil.disk_usage(folder).free < 12e9:
        pytest.skip(f"{folder} has no room for 6 GB")
    offload: dict[str, Any] = {"offload_optim_frac": 1, "offload_param_frac": 1, "offload_directory": folder}
    booster = Booster(plugin=GeminiPlugin(precision="bf16", min_chunk_size_m=1, search_range_m=0, **offload))
    gpt = Workload("382 M", units=29, layers=1, width=1024, heads=16, vocabulary=8192, tokens=16, samples=1)
    with torch.device("meta"):
        plain = gpt.model()
    assert 16 * sum(param.numel() for param in plain.parameters()) > 6e9

    def init(part: nn.Module) -> None:
        for name, param in part.named_parameters(recurse=False):
            if isinstance(part, nn.LayerNorm) and name == "weight":
                nn.init.ones_(param)
            else:
                nn.init.normal_(param, std=0.02)

    before, losses, model = resident(), [], materialize(plain, init)
    (inputs, targets), *_ = gpt.microbatches(0, rank, 1)
    with Peak() as peak:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer, *_ = booster.boost(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(inputs, targets)
            booster.backward(loss, optimizer)
            optimizer.step()
            losses.append(loss.item())
    of_all = torch.tensor(float(peak.most - before))
    dist.all_reduce(of_all)
    assert of_all < 2e9 and 0 < losses[1] < losses[0], (of_all, losses)


@pytest.mark.nightly
@ranks(2, timeout_s=300.0)
def test_states_in_files_are_trained_in_a_fraction_of_their_memory(rank: int, world: int, tmp_path: Path) -> None:
    """Parameters, masters, moments and gradients of 42 million parameters, 16 bytes for each."""
    folder = shared(tmp_path)
    skip_in_ram(folder)
    grown = {}
    for placed in (True, False):
        options: dict[str, Any] = {"offload_optim_frac": 1, "offload_param_frac": 1, "offload_directory": folder}
        plugin = GeminiPlugin(precision="bf16", min_chunk_size_m=1, search_range_m=0, **(options if placed else {}))
        booster = Booster(plugin=plugin)
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(40)))
        states_bytes = 16 * sum(param.numel() for param in plain.parameters())
        before = resident() - sum(param.nbytes for param in plain.parameters())
        model: Any
        model, optimizer, *_ = booster.boost(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4))
        huge_pages.give_back()  # the memory of the whole model, which was built first
        with Peak() as peak:
            for _ in range(2):
                optimizer.zero_grad()
                booster.backward(model(torch.ones(4, 1024)).float().square().mean(), optimizer)
                optimizer.step()
        of_all = torch.tensor(float(peak.most - before))
        dist.all_reduce(of_all)
        grown[placed] = float(of_all) / states_bytes
        del model, optimizer, plain, booster
        gc.collect()
    assert grown[True] < 1 / 3 and grown[False] > 1, f"RAM of all ranks over the states' bytes: {grown}"
