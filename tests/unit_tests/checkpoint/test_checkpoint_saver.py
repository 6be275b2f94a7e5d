"""Saves of several ranks: bit-equal back, written now or in a thread, errors on every rank at a step edge."""

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
import warnings
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from core.checkpoint import errors, pending_save, save_points, saver
from core.checkpoint.agreement import Ranks
from core.checkpoint.damage import open_manifest
from core.checkpoint.directory import find_intact, list_steps
from core.checkpoint.errors import CheckpointError
from core.checkpoint.root_directory import RootDirectory, list_committed
from core.checkpoint.saver import CheckpointSaver, SaveReport
from core.checkpoint.snapshot import SnapshotMemory, with_own_storage
from tests.unit_tests.checkpoint.checkpoint_saves import (
    assert_is_step,
    bytes_of,
    fill_with,
    loaded,
    save_alone,
    save_step,
    state_of,
)
from tests.unit_tests.forked_python import run_python
from tests.unit_tests.ranks import ranks


def all_ranks(value: Any) -> list[Any]:
    return Ranks().gather(value)


def save_and_wait(open_saver: CheckpointSaver, step: int) -> SaveReport:
    report = save_step(open_saver, step)
    return open_saver.wait() or report


@ranks(1, 3)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.in_suite()
def test_what_is_loaded_is_bit_for_bit_what_was_saved(
    rank: int, world: int, asynchronous: bool, tmp_path: Path
) -> None:
    with CheckpointSaver(tmp_path / "a b", asynchronous=asynchronous, keep_last=2, file_bytes=1000) as open_saver:
        for step in (1, 2, 3):
            report = save_and_wait(open_saver, step)
            assert report.committed and report.error is None and report.asynchronous == asynchronous
            assert report.directory == tmp_path / "a b" / f"step_0000000{step}.000{step}"
            assert report.bytes > 31 * 17 * 4
    assert list_steps(tmp_path / "a b") == [2, 3]
    directory = find_intact(tmp_path / "a b")
    assert directory.meta == {"layout": {"dp": world}} and directory.world_size == world
    assert directory.tensors[f"rank{world - 1}.weight"].shape == (31, 17)
    assert directory.tensors["rank0.half"].dtype == "bfloat16"
    assert_is_step(loaded(directory, rank), 3, rank)
    assert_is_step(loaded(find_intact(tmp_path / "a b", 2), rank), 2, rank)
    plain = {name: torch.full_like(tensor, 7) for name, tensor in state_of(0, rank).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(plain, storage_reader=dcp.FileSystemReader(directory.path))  # torch's own reader
    assert_is_step(plain, 3, rank)


@ranks(2)
def test_a_rank_with_nothing_to_save_takes_part(rank: int, world: int, tmp_path: Path) -> None:
    mine = state_of(1, 0) if rank == 0 else {}
    for asynchronous in (False, True):
        with CheckpointSaver(tmp_path / str(asynchronous), asynchronous=asynchronous) as open_saver:
            open_saver.save(1, fill_with(mine), meta={})
        directory = find_intact(tmp_path / str(asynchronous))
        assert {file.rank for file in directory.manifest.files} == {0}
        if rank == 0:
            assert directory.tensors.keys() == mine.keys()


@ranks(3)
def test_a_group_without_rank_zero_saves_and_errors_name_the_ranks_of_the_job(
    rank: int, world: int, tmp_path: Path
) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    with CheckpointSaver(tmp_path, group) as open_saver:
        open_saver.save(4, fill_with(state_of(4, rank), group), meta={})
        save_points.set_hook(fail_on("before data", 1, errno.EIO))
        with pytest.raises(CheckpointError, match="rank 2: .*Input/output error.*last good checkpoint is of step 4"):
            open_saver.save(5, fill_with(state_of(5, rank), group), meta={})
        save_points.set_hook(None)
    state = {name: torch.zeros_like(tensor) for name, tensor in state_of(4, rank).items()}
    dcp.load(state, storage_reader=find_intact(tmp_path, group=group).reader(), process_group=group)
    assert_is_step(state, 4, rank)


@ranks(2)
def test_an_asynchronous_save_holds_the_values_of_its_step_whatever_training_does(
    rank: int, world: int, tmp_path: Path
) -> None:
    gate = threading.Event()
    save_points.set_hook(lambda point, by_rank: gate.wait(20) and None if point == "before data" else None)
    state = state_of(1, rank)
    buffer = torch.arange(100.0) + rank  # a parameter is a view of a larger buffer
    state["view"] = buffer[10:20].view(2, 5)
    with CheckpointSaver(tmp_path, asynchronous=True) as open_saver:
        report = open_saver.save(1, fill_with(state), meta={})
        assert not report.committed and report.directory is None and report.asynchronous
        for tensor in state.values():
            tensor.zero_()
        assert open_saver.step_edge() is None, "in flight"
        assert list_steps(tmp_path) == []
        gate.set()
        done = open_saver.wait()
        assert done is not None and done.committed
    save_points.set_hook(None)
    directory = find_intact(tmp_path)
    assert_is_step(loaded(directory, rank), 1, rank)
    sizes = {file.name: file.size for file in directory.manifest.files}
    assert sizes[f"rank_0000{rank}_000.distcp"] < sum(len(bytes_of(tensor.clone())) + 300 for tensor in state.values())


@ranks(2)
def test_a_second_save_waits_for_the_first_and_says_so(rank: int, world: int, tmp_path: Path) -> None:
    def slow(point: str, by_rank: int) -> None:
        if point == "before part" and by_rank == 1:
            time.sleep(0.8)

    save_points.set_hook(slow)
    with CheckpointSaver(tmp_path, asynchronous=True) as open_saver:
        first = save_step(open_saver, 1)
        second = save_step(open_saver, 2)
        third = open_saver.wait()
        kept = open_saver._snapshot.bytes
        save_and_wait(open_saver, 3)
        assert open_saver._snapshot.bytes == kept, "the memory of the snapshot is kept and does not grow"
    save_points.set_hook(None)
    assert first.waited_s == 0 and second.waited_s > 0.5
    assert third is not None and third.step == 2 and third.committed and (rank == 0 or third.write_s > 0.7)
    assert list_steps(tmp_path) == [1, 2, 3]


@ranks(2)
def test_a_rank_whose_copy_would_be_too_large_writes_at_once_and_the_others_do_not(
    rank: int, world: int, tmp_path: Path
) -> None:
    limit = 100 if rank == 1 else None
    with CheckpointSaver(tmp_path, asynchronous=True, snapshot_limit_bytes=limit) as open_saver:
        report = save_step(open_saver, 1)
        assert report.asynchronous == (rank == 0)
        assert open_saver._snapshot.bytes == 0 or rank == 0
    assert_is_step(loaded(find_intact(tmp_path), rank), 1, rank)


def fail_on(point: str, rank: int, number: int) -> save_points.Hook:
    def hook(reached: str, by_rank: int) -> None:
        if (reached, by_rank) == (point, rank):
            raise OSError(number, os.strerror(number), "the file")

    return hook


@ranks(2)
@pytest.mark.parametrize("call", ["lock", "put_token"])
def test_a_root_on_a_full_disk_is_named_on_all_ranks(rank: int, world: int, call: str, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RootDirectory, call, refuse)
        with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}: No space left on device, .* are free at"):
            CheckpointSaver(tmp_path)


AFTER_COMMIT = ("before latest", "half a latest", "before deletion", "between deletions", "during deletion")
IN_A_THREAD = [
    ("half a file", 1),
    ("between files", 0),
    ("before part", 1),
    ("half a manifest", 0),
    ("before latest", 0),
]


@ranks(2, timeout_s=120)
@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_full_disk_at_any_point_is_reported_on_all_ranks_and_the_next_save_works(
    rank: int, world: int, asynchronous: bool, tmp_path: Path
) -> None:
    cases = IN_A_THREAD if asynchronous else [(point, failing) for point in save_points.POINTS for failing in (0, 1)]
    step, failures = 3, 0
    with CheckpointSaver(
        tmp_path, asynchronous=asynchronous, on_error="warn", keep_last=2, file_bytes=1000
    ) as open_saver:
        save_and_wait(open_saver, 1)
        save_and_wait(open_saver, 2)
        for point, failing in cases:
            save_points.set_hook(fail_on(point, failing, errno.ENOSPC))
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                report = save_and_wait(open_saver, step)
            save_points.set_hook(None)
            if failing == 1 and report.committed:  # rank 1 does not come there
                last = step
            elif point in AFTER_COMMIT:
                assert report.committed and report.error is None, "a warning, and no failed save"
                late = [warning for warning in heard if "What comes after a save has failed" in str(warning.message)]
                assert len(late) == (1 if rank == 0 else 0), point
                last = step
            else:
                failures += 1
                last = step if point == "after rename" else step - 1
                assert not report.committed and report.error is not None, (point, failing)
                assert f"rank {failing}" in report.error or failing == 0
                assert "No space left on device" in report.error and "are free at" in report.error
                assert f"The last good checkpoint is of step {last}:" in report.error, (point, report.error)
                assert set(all_ranks(report.error)) == {report.error}
                texts = [str(warning.message) for warning in heard if "Saving step" in str(warning.message)]
                assert len(texts) == (1 if rank == 0 else 0), (point, texts)
                step += 1
                assert save_and_wait(open_saver, step).committed
            assert_is_step(loaded(find_intact(tmp_path, last, strict=True), rank), last, rank)
            step += 1
        save_and_wait(open_saver, step)  # deletes what a save that could not has left
    expected = [point for point, _ in cases if point not in AFTER_COMMIT] if asynchronous else save_points.POINTS
    assert failures == len(expected) + (0 if asynchronous else 6 - len(AFTER_COMMIT)), "rank 1 comes to six points"
    assert len(list_committed(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [".lock"]


@ranks(2)
def test_a_failed_asynchronous_save_is_raised_at_the_next_step_edge_on_all_ranks(
    rank: int, world: int, tmp_path: Path
) -> None:
    with CheckpointSaver(tmp_path, asynchronous=True) as open_saver:
        save_step(open_saver, 1)
        open_saver.wait()
        save_points.set_hook(fail_on("before file fsync", 1, errno.EIO))
        save_step(open_saver, 2)
        with pytest.raises(CheckpointError) as error:
            for _ in range(1000):
                assert open_saver.step_edge() is None
                time.sleep(0.01)
        save_points.set_hook(None)
        message = str(error.value)
        assert "Saving step 2" in message and "rank 1: the file: Input/output error" in message
        assert "The last good checkpoint is of step 1" in message and set(all_ranks(message)) == {message}
        assert open_saver.step_edge() is None, "said once"
    assert list_steps(tmp_path) == [1]


Usage = namedtuple("Usage", "total used free")


@ranks(2)
def test_a_disk_that_is_too_small_is_found_before_anything_is_written(rank: int, world: int, tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path) as open_saver, pytest.MonkeyPatch.context() as patch:
        save_step(open_saver, 1)
        patch.setattr(errors.shutil, "disk_usage", lambda path: Usage(10**6, 10**6 - 5000, 5000))
        written: list[str] = []
        save_points.set_hook(lambda point, by_rank: written.append(point))
        with pytest.raises(CheckpointError) as error:
            save_step(open_saver, 2)
        save_points.set_hook(None)
        assert not written
        message = str(error.value)
        assert "not enough space" in message and "5000 bytes (4.9 KiB) are free at" in message
        assert "nothing was written" in message and "The last good checkpoint is of step 1" in message
    assert list_steps(tmp_path) == [1]


@ranks(2)
def test_ranks_that_do_not_see_the_root_are_named(rank: int, world: int, tmp_path: Path) -> None:
    root = tmp_path / f"machine{rank}"  # as where each machine has a disk of its own under the same path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "SHARED_LIMIT_S", 0.2)
        root.mkdir()
        with pytest.raises(CheckpointError, match=r"ranks 1 \(.*\) cannot see the files that rank 0 \(.*\) writes to"):
            CheckpointSaver(root)
    CheckpointSaver(tmp_path / "machine0").close()  # the lock was given back


@ranks(2)
def test_different_steps_or_a_fill_that_saves_nothing_or_twice_are_errors(
    rank: int, world: int, tmp_path: Path
) -> None:
    with CheckpointSaver(tmp_path) as open_saver:
        with pytest.raises(ValueError, match="step is 5 on rank 0 and 6 on rank 1"):
            save_step(open_saver, 5 + rank)
        with pytest.raises(ValueError, match="`fill` did not call dcp.save"):
            open_saver.save(1, lambda writer: None, meta={})

        def twice(writer: Any) -> None:
            for _ in range(2):
                fill_with(state_of(1, rank))(writer)

        with pytest.raises(CheckpointError, match="called dcp.save twice"):
            open_saver.save(1, twice, meta={})
        assert save_step(open_saver, 2).committed
    assert list_steps(tmp_path) == [2]
    if rank == 0:
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".saving")] == []


@ranks(2)
def test_an_error_of_the_content_is_not_taken_for_one_of_the_storage(rank: int, world: int, tmp_path: Path) -> None:
    class Broken(torch.distributed.checkpoint.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise ZeroDivisionError("not the disk's fault")

    with CheckpointSaver(tmp_path, on_error="warn") as open_saver:
        save_step(open_saver, 1)
        with pytest.raises(BaseException, match="not the disk's fault"):
            open_saver.save(
                2, lambda writer: dcp.save(state_of(2, rank), storage_writer=writer, planner=Broken()), meta={}
            )
        assert save_step(open_saver, 3).committed
    assert list_steps(tmp_path) == [1, 3]


@ranks(2)
def test_a_save_that_takes_too_long_is_given_up_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    gate = threading.Event()
    with (
        pytest.MonkeyPatch.context() as patch,
        CheckpointSaver(tmp_path, asynchronous=True, timeout_s=1.0) as open_saver,
    ):
        patch.setattr(saver, "LOCK_LIMIT_S", 0.2)
        save_and_wait(open_saver, 1)
        if rank == 1:
            save_points.set_hook(lambda point, by_rank: gate.wait(20) and None if point == "before part" else None)
        save_step(open_saver, 2)
        with pytest.raises(CheckpointError, match=r"within 1 s.*The last good checkpoint is of step 1"):
            open_saver.wait()
        # Rank 1 still writes: its directory must not be deleted under it, by this save or the next.
        stuck = [path for path in tmp_path.iterdir() if path.name.startswith(".saving")]
        save_points.set_hook(None)
        save_and_wait(open_saver, 3)
        assert len(stuck) == 1 and stuck[0].exists()
        all_ranks(None)
        gate.set()
        for _ in range(200):
            if not any(thread.name == "save of step 2" for thread in threading.enumerate()):
                break
            time.sleep(0.05)
        all_ranks(None)
        save_and_wait(open_saver, 4)
        assert list_steps(tmp_path) == [1, 3, 4]


def wait_for_saves() -> None:
    """Until the threads that end what an exception has left have ended."""
    for thread in threading.enumerate():
        if "save of step" in thread.name:
            thread.join(30)


@ranks(2)
@pytest.mark.parametrize("slow_s", [0.0, 4.0])
def test_an_exception_in_training_still_commits_what_is_in_flight_and_frees_the_root(
    rank: int, world: int, slow_s: float, tmp_path: Path
) -> None:
    """Rank 1 may write a while longer than rank 0 waits when nothing happens."""
    waits = iter(range(4))

    def slow(point: str, by_rank: int) -> None:
        wanted = point in ("half a file", "between files", "before file fsync", "before part")
        if by_rank == 1 and wanted and next(waits, None) is not None:
            time.sleep(slow_s / 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending_save, "AFTER_THE_END_S", 3.0 if slow_s else 20.0)  # a busy machine may be slow itself
        save_points.set_hook(slow)
        with (
            pytest.raises(ZeroDivisionError),
            CheckpointSaver(tmp_path, asynchronous=True, file_bytes=1000) as open_saver,
        ):
            save_step(open_saver, 1)
            raised_s = time.monotonic()
            raise ZeroDivisionError
        assert time.monotonic() - raised_s < 3.0, "raised at once, not when the save has ended"
        wait_for_saves()
        save_points.set_hook(None)
    dist.barrier()
    assert list_steps(tmp_path) == [1]
    CheckpointSaver(tmp_path).close()


def test_a_file_that_is_renamed_while_sizes_are_read_does_not_end_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 once gave the save up with "No such file or directory", although every rank had written."""
    (tmp_path / "whole").write_bytes(b"12345")
    (tmp_path / "written to").write_bytes(b"123")

    @contextlib.contextmanager
    def while_another_rank_renames(directory: Path) -> Iterator[list[os.DirEntry[str]]]:
        entries = list(scandir(directory))
        (tmp_path / "written to").rename(tmp_path / "written")
        yield entries

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", while_another_rank_renames)
    assert pending_save._bytes_in(tmp_path) == 5


@ranks(2)
def test_an_exception_in_training_does_not_wait_long_for_a_rank_that_is_gone(
    rank: int, world: int, tmp_path: Path
) -> None:
    save_points.set_hook(fail_on("before part", 1, errno.EIO))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending_save, "AFTER_THE_END_S", 0.5)
        start_s = time.monotonic()
        with pytest.raises(ZeroDivisionError), CheckpointSaver(tmp_path, asynchronous=True) as open_saver:
            save_step(open_saver, 1)
            raise ZeroDivisionError
        wait_for_saves()
        assert time.monotonic() - start_s < 20
    save_points.set_hook(None)
    assert list_steps(tmp_path) == []


def test_a_process_that_ends_without_closing_still_commits(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from tests.unit_tests.checkpoint.checkpoint_saves import save_step
from core.checkpoint.saver import CheckpointSaver
from core.checkpoint import save_points
import time
save_points.set_hook(lambda point, rank: time.sleep(0.3) if point == "before data" else None)
saver = CheckpointSaver(Path({str(tmp_path / "checkpoints")!r}), asynchronous=True)
save_step(saver, 1)
raise SystemExit(3)
"""
    (tmp_path / "program.py").write_text(program)
    done = run_python(tmp_path / "program.py", folder=tmp_path)
    assert done.returncode == 3, done.stderr
    assert list_steps(tmp_path / "checkpoints") == [1]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="a small file system needs root")
def test_a_file_system_that_is_really_full_leaves_the_last_checkpoint_intact(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        save_alone(tmp_path, 1)
        big = {"big": torch.zeros(30_000)}
        with CheckpointSaver(tmp_path, on_error="warn") as open_saver:
            with pytest.warns(RuntimeWarning, match="not enough space: .* are needed"):
                report = open_saver.save(2, fill_with({"big": torch.zeros(60_000)}), meta={})
            assert report.error is not None and not report.committed
            message = "No space left on device; .* are needed, .* are free at"
            with pytest.MonkeyPatch.context() as patch, pytest.warns(RuntimeWarning, match=message):
                patch.setattr(saver, "free_bytes", lambda path: 10**9)  # as where another job fills the disk meanwhile
                (tmp_path / "other").write_bytes(bytes(80_000))
                open_saver.save(3, fill_with(big), meta={})
            (tmp_path / "other").unlink()
            assert list_steps(tmp_path) == [1]
            assert_is_step(loaded(find_intact(tmp_path), 0), 1, 0)
            assert open_saver.save(4, fill_with(big), meta={}).committed
        assert list_steps(tmp_path) == [1, 4]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@ranks(1)
def test_a_root_that_disappears_is_an_error_and_training_may_go_on(rank: int, world: int, tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path / "root", on_error="warn") as open_saver:
        save_step(open_saver, 1)
        shutil.rmtree(tmp_path / "root")
        with pytest.warns(RuntimeWarning, match="failed: .*No such file or directory.*no earlier checkpoint"):
            assert save_step(open_saver, 2).error is not None


def test_snapshots_are_copies_of_any_shape_and_dtype_in_kept_memory() -> None:
    base = torch.randn(6, 8, dtype=torch.float64)
    tensors = [
        base, base.t(), base[1:3, ::2], base.bool(), torch.tensor(3, dtype=torch.int16), torch.empty(0, 5),
        torch.randn(3, dtype=torch.bfloat16), torch.view_as_complex(base.reshape(-1, 2)).conj(), base.expand(2, 6, 8),
    ]  # fmt: skip
    expected = [tensor.clone() for tensor in tensors]
    memory = SnapshotMemory()
    copies = memory.take(tensors)
    held = memory.bytes
    base.zero_()
    for copy, value in zip(copies, expected, strict=True):
        assert copy.dtype == value.dtype and copy.shape == value.shape and torch.equal(copy, value)
        assert with_own_storage(copy).untyped_storage().nbytes() == value.numel() * value.element_size()
    assert held == SnapshotMemory.bytes_for(tensors) and held % 64 == 0
    memory.take(tensors[:2])
    assert memory.bytes == held
    assert not torch.equal(copies[0], expected[0]), "one snapshot at a time: the next overwrites it"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_snapshots_of_tensors_on_a_device_are_complete_when_take_returns() -> None:
    check_snapshots(torch.device("cuda"))


def check_snapshots(device: torch.device) -> None:
    """Write to tensors after a snapshot; the tests of the second device do so too."""
    tensors = [torch.randn(1 << 22, device=device), torch.randn(7, 3, device=device).t(), torch.randn(5)]
    expected = [tensor.cpu().clone() for tensor in tensors]
    memory = SnapshotMemory()
    copies = memory.take(tensors)
    for tensor in tensors:
        tensor.zero_()
    torch.accelerator.synchronize(device)
    for copy, value in zip(copies, expected, strict=True):
        assert copy.device.type == "cpu" and torch.equal(copy, value)


def test_a_tensor_for_torch_save_shares_memory_and_its_storage_holds_nothing_else() -> None:
    buffer = torch.arange(100.0)
    part = with_own_storage(buffer[10:30].view(4, 5))
    assert part.untyped_storage().nbytes() == 80 and part.data_ptr() == buffer[10:].data_ptr()
    assert torch.equal(part, torch.arange(10.0, 30).view(4, 5))
    strided = with_own_storage(buffer.view(10, 10)[:, ::2])
    assert strided.untyped_storage().nbytes() == 200 and torch.equal(strided, buffer.view(10, 10)[:, ::2])


def test_the_space_that_is_asked_for_is_a_little_more_than_what_is_written(tmp_path: Path) -> None:
    asked: list[int] = []
    with CheckpointSaver(tmp_path) as open_saver, pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointSaver, "_require_space", lambda self, needed: asked.append(needed))
        save_step(open_saver, 1)
    written = sum(file.size for file in find_intact(tmp_path).manifest.files if file.name.endswith(".distcp"))
    assert written <= asked[0] < written + 5 * 1000


def test_the_root_lock_is_for_one_job_only_and_the_kernel_frees_it(tmp_path: Path) -> None:
    first, second = RootDirectory(tmp_path), RootDirectory(tmp_path)
    first.lock(0.1)
    with pytest.raises(CheckpointError, match="another CheckpointSaver"):
        second.lock(0.1)
    first.unlock()
    second.lock(0.1)
    second.unlock()


@ranks(2)
def test_a_rank_that_does_not_see_the_checkpoints_is_refused_when_loading(
    rank: int, world: int, tmp_path: Path
) -> None:
    root = tmp_path / "machine0"
    with CheckpointSaver(root) as open_saver:
        save_step(open_saver, 1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # the same path leads to another disk here
            elsewhere = open_manifest(tmp_path / "machine1" / "step_00000001.0001")
            patch.setattr("core.checkpoint.directory.open_manifest", lambda path: elsewhere)
        with pytest.raises(CheckpointError, match=r"whole directory; do all ranks see the same.*\[found by rank 1\]"):
            find_intact(root)


@ranks(2)
def test_a_fill_that_plans_on_each_rank_alone_is_refused_on_all(rank: int, world: int, tmp_path: Path) -> None:
    def alone(writer: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state_of(1, rank), storage_writer=writer, no_dist=True)

    with CheckpointSaver(tmp_path) as open_saver:
        with pytest.raises(
            CheckpointError, match="rank 1: .*coordinator elsewhere than on rank 0 of the saver's group"
        ):
            open_saver.save(1, alone, meta={})
        assert save_step(open_saver, 2).committed


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_view_of_a_large_buffer_is_saved_without_the_rest_of_it(asynchronous: bool, tmp_path: Path) -> None:
    buffer = torch.randn(1 << 18)
    with CheckpointSaver(tmp_path, asynchronous=asynchronous) as open_saver:
        open_saver.save(1, fill_with({"view": buffer[10:20]}), meta={})
    assert find_intact(tmp_path).manifest.total_bytes < 10_000
