"""The root of a run's checkpoints: names, order, the lock, leftovers, and what is on the disk before the commit."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.checkpoint import commit, root_directory, saver
from core.checkpoint.directory import find_intact, latest_step, list_steps
from core.checkpoint.errors import CheckpointError, CheckpointNotFound
from core.checkpoint.root_directory import RootDirectory, SharedHold, list_committed, read_latest
from core.checkpoint.saver import CheckpointSaver
from tests.unit_tests.checkpoint.checkpoint_saves import (
    assert_is_step,
    contents,
    fill_with,
    loaded,
    save_alone,
    save_step,
    state_of,
)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("step", [0, 1, 99_999_999, 100_000_000, 10**15, np.int64(7)])
def test_any_whole_number_is_a_step(step: int, tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path) as once:
        once.save(step, fill_with(state_of(3, 0)), meta={})
    assert latest_step(tmp_path) == step
    assert_is_step(loaded(find_intact(tmp_path, step), 0), 3, 0)


@pytest.mark.parametrize("step", [-1, 1.0, "3", True, None])
def test_what_is_no_step_is_refused_and_leaves_nothing(step: Any, tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path) as once, pytest.raises(ValueError, match="expected an integer of at least 0"):
        once.save(step, fill_with(state_of(0, 0)), meta={})
    assert names(tmp_path) == [".lock"]


def test_what_json_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    with (
        CheckpointSaver(tmp_path) as once,
        pytest.raises(ValueError, match=r"meta\['when'\] cannot be written as JSON"),
    ):
        once.save(0, fill_with(state_of(0, 0)), meta={"fine": 1, "when": object()})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_last": 0}, "keep_last=0: at least the newest"),
        ({"on_error": "ignore"}, "'raise' or 'warn'"),
        ({"timeout_s": 0}, "timeout_s=0 must be a positive number"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        CheckpointSaver(tmp_path, **arguments)


def test_the_root_may_have_spaces_be_made_on_the_way_and_be_a_link(tmp_path: Path) -> None:
    target = tmp_path / "a place" / "für alles"
    link = tmp_path / "link"
    link.symlink_to(target)
    target.mkdir(parents=True)
    save_alone(link, 1)
    save_alone(target / "deeper" / "still", 2)
    assert list_steps(link) == list_steps(target) == [1]
    assert find_intact(link).path.parent == target
    assert latest_step(target / "deeper" / "still") == 2


def test_repointing_a_linked_root_does_not_split_a_run(tmp_path: Path) -> None:
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "link"
    first.mkdir(), second.mkdir()
    link.symlink_to(first)
    with CheckpointSaver(link) as open_saver:
        save_step(open_saver, 1)
        link.unlink()
        link.symlink_to(second)
        save_step(open_saver, 2)
    assert list_steps(first) == [1, 2] and list_steps(second) == []


@pytest.mark.parametrize("name", ["latest", "step_00000009.0009"])
def test_a_link_that_leads_to_itself_hides_no_checkpoint(name: str, tmp_path: Path) -> None:
    """A copy by a tool that mends links leaves such a one; no checkpoint could be listed, loaded or saved."""
    save_alone(tmp_path, 1)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(name)
    assert latest_step(tmp_path) == 1 and find_intact(tmp_path).step == 1
    save_alone(tmp_path, 2)
    assert latest_step(tmp_path) == 2 and read_latest(tmp_path) == list_committed(tmp_path)[-1].path.name


def test_an_empty_or_missing_root_has_no_checkpoint(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "nowhere"):
        assert latest_step(root) is None and list_steps(root) == []
        with pytest.raises(CheckpointNotFound, match="There is no checkpoint in"):
            find_intact(root)
    assert not (tmp_path / "nowhere").exists()


def test_a_step_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    save_alone(tmp_path, 5, 10)
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 7 in .*; there are steps 5, 10"):
        find_intact(tmp_path, 7)


def test_newest_is_what_was_committed_last_not_what_has_the_greatest_number(tmp_path: Path) -> None:
    save_alone(tmp_path, 20, 40, 30)  # gone back from 40 to 20, and come to 30 on another way
    assert list_steps(tmp_path) == [20, 40, 30]
    assert latest_step(tmp_path) == find_intact(tmp_path).step == 30
    assert read_latest(tmp_path) == "step_00000030.0003"


def test_saving_a_step_again_adds_a_directory_and_the_newer_one_is_loaded(tmp_path: Path) -> None:
    save_alone(tmp_path, 5)
    before = contents(list_committed(tmp_path)[0].path)
    with CheckpointSaver(tmp_path) as again:
        again.save(5, fill_with(state_of(6, 0)), meta={})
    assert [found.path.name for found in list_committed(tmp_path)] == ["step_00000005.0001", "step_00000005.0002"]
    assert contents(list_committed(tmp_path)[0].path) == before
    assert_is_step(loaded(find_intact(tmp_path, 5), 0), 6, 0)


def test_the_last_n_are_kept_in_the_order_of_commits(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path, keep_last=2) as two:
        for step in (20, 40, 30, 35):
            save_step(two, step)
    assert list_steps(tmp_path) == [30, 35]
    assert names(tmp_path) == [".lock", "latest", "step_00000030.0003", "step_00000035.0004"]


def test_a_damaged_checkpoint_is_not_counted_and_the_intact_one_stays(tmp_path: Path) -> None:
    with CheckpointSaver(tmp_path, keep_last=2) as two:
        for step in (1, 2):
            save_step(two, step)
        data = bytearray((list_committed(tmp_path)[1].path / "rank_00000_000.distcp").read_bytes())
        data[1000] ^= 4
        (list_committed(tmp_path)[1].path / "rank_00000_000.distcp").write_bytes(data)
        save_step(two, 3)
        assert list_steps(tmp_path) == [1, 2, 3], "steps 1 and 3 are the newest two that are intact"
    with CheckpointSaver(tmp_path, keep_last=2) as again:  # which has written none of them
        save_step(again, 4)
        assert list_steps(tmp_path) == [3, 4]
    os.truncate(list_committed(tmp_path)[0].path / "rank_00000_000.distcp", 10)
    with CheckpointSaver(tmp_path, keep_last=1) as one:
        save_step(one, 5)
    assert list_steps(tmp_path) == [5]


def test_a_linked_archive_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    archive, root = tmp_path / "archive", tmp_path / "root"
    save_alone(archive, 1)
    kept = contents(list_committed(archive)[0].path)
    save_alone(root, 5)
    (root / "step_00000001.0000").symlink_to(list_committed(archive)[0].path)
    (root / ".deleting-step_00000003.0001").symlink_to(list_committed(archive)[0].path)
    (root / "step_00000005.0001" / "notes").symlink_to(archive)
    with CheckpointSaver(root, keep_last=1) as one:
        for step in (6, 7):
            save_step(one, step)
    assert list_steps(root) == [1, 7]
    assert contents(list_committed(archive)[0].path) == kept


def test_a_lock_that_leads_elsewhere_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("not a lock")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="Checkpoints cannot be saved to"):
        CheckpointSaver(tmp_path / "root")
    assert (tmp_path / "precious").read_text() == "not a lock"


def test_everything_is_on_the_disk_before_the_name_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is synced after its last write, each directory after its last entry, in the order of the commit."""
    log: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def logged_fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        size = os.fstat(descriptor).st_size
        log.append(("fsync", f"{path} {sorted(os.listdir(path)) if os.path.isdir(path) else size}"))
        fsync(descriptor)

    def logged_rename(source: Any, target: Any) -> None:
        log.append(("rename", f"{target}"))
        rename(source, target)

    def logged_replace(source: Any, target: Any) -> None:
        log.append(("replace", f"{target}"))
        replace(source, target)

    with CheckpointSaver(tmp_path, keep_last=1, file_bytes=1500) as once:
        save_step(once, 1)
        monkeypatch.setattr(os, "fsync", logged_fsync)
        monkeypatch.setattr(os, "rename", logged_rename)
        monkeypatch.setattr(os, "replace", logged_replace)
        save_step(once, 2)
    committed = tmp_path / "step_00000002.0002"
    commit = log.index(("rename", str(committed)))
    before = [entry for entry in log[:commit] if entry[0] == "fsync"]
    synced = {Path(text.split(" ")[0]).name.removesuffix(".tmp"): text.split(" ")[1] for _, text in before}
    files = contents(committed)
    assert len([name for name in files if name.endswith(".distcp")]) > 1
    for name, data in files.items():
        assert synced[name] == str(len(data)), f"{name} was not synced with all of its bytes before the commit"
    assert before[-1][1].endswith(f"{sorted(files)}"), "the directory was not synced with its final entries"
    after = log[commit + 1 :]
    assert after[0][0] == "fsync" and after[0][1].startswith(f"{tmp_path} ")  # the name itself
    moved = after.index(("replace", str(tmp_path / "latest")))
    deleted = after.index(("rename", str(tmp_path / ".deleting-step_00000001.0001")))
    assert 0 < moved < deleted
    assert any(entry[0] == "fsync" and entry[1].startswith(f"{tmp_path} ") for entry in after[moved:deleted])


def test_two_savers_in_one_root_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "LOCK_LIMIT_S", 0.1)
    first = CheckpointSaver(tmp_path)
    with pytest.raises(
        CheckpointError, match="This process has another CheckpointSaver open for .*close that one, or use"
    ):
        CheckpointSaver(tmp_path)
    save_step(first, 1)  # undisturbed
    first.close()
    save_alone(tmp_path, 2)
    assert list_steps(tmp_path) == [1, 2]


def _hold_root(root: str, ready: Any) -> None:
    directory = RootDirectory(root)
    directory.create()
    directory.lock(1.0)
    saving = directory.begin(1)
    hold = SharedHold(saving / root_directory.TOKEN)
    ready.send(saving.name)
    time.sleep(60)
    hold.release()


def test_a_killed_job_leaves_no_lock_and_its_leftovers_are_cleaned_by_the_next_save(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    job = multiprocessing.get_context("fork").Process(target=_hold_root, args=(str(tmp_path), theirs))
    job.start()
    leftover = tmp_path / ours.recv()
    os.kill(job.pid, signal.SIGKILL)
    job.join()
    (tmp_path / ".deleting-step_00000001.0009").mkdir()
    (tmp_path / "latest.tmp").write_text("step_0000")
    (tmp_path / "notes.txt").write_text("ours to keep")
    assert leftover.exists()
    save_alone(tmp_path, 3)
    assert names(tmp_path) == [".lock", "latest", "notes.txt", "step_00000003.0001"]


def test_a_directory_that_a_live_process_writes_is_not_cleaned(tmp_path: Path) -> None:
    """A job's rank 0 was killed, and with it the lock; another rank of it has not noticed and still writes."""
    directory = RootDirectory(tmp_path)
    directory.lock(1.0)
    saving = directory.begin(1)
    hold = SharedHold(saving / root_directory.TOKEN)
    directory.unlock()
    save_alone(tmp_path, 2)
    assert saving.exists()
    hold.release()
    save_alone(tmp_path, 3)
    assert not saving.exists()


def test_a_directory_in_the_place_of_latest_does_not_stop_saves(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "notes").write_text("of the user")
    for step in (1, 2):
        with pytest.warns(UserWarning, match="latest is a directory, so it names no checkpoint; move it away"):
            save_alone(tmp_path, step)
        assert_is_step(loaded(find_intact(tmp_path), 0), step, 0)
    assert (tmp_path / "latest" / "notes").read_text() == "of the user"
    assert not (tmp_path / "latest.tmp").exists()


def test_latest_is_mended_by_the_next_save(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, 2)
    (tmp_path / "latest").write_text("step_00000001.0001\n")
    with CheckpointSaver(tmp_path) as once, pytest.raises(ValueError, match="did not call dcp.save"):
        once.save(3, lambda writer: None, meta={})
    assert read_latest(tmp_path) == "step_00000002.0002"


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/checkpoints"])
def test_a_root_that_cannot_be_written_is_refused_before_training_starts(place: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    root = {"a file": file, "below a file": file / "root"}.get(place, Path(place))
    with pytest.raises(CheckpointError, match="Checkpoints cannot be saved to .*Give a directory that this user may"):
        CheckpointSaver(root)


def test_a_reader_next_to_a_saver_that_deletes_always_finds_an_intact_checkpoint(tmp_path: Path) -> None:
    save_alone(tmp_path, 0)
    failures: list[BaseException] = []
    found: list[int] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                found.append(find_intact(tmp_path).step)
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with CheckpointSaver(tmp_path, keep_last=1) as one:
            for step in range(1, 13):
                save_step(one, step)
    finally:
        done.set()
        reader.join()
    assert not failures, failures
    assert len(set(found)) > 1 and found == sorted(found)


def _job_with_a_child(root: str, ready: Any) -> None:
    directory = RootDirectory(root)
    directory.lock(1.0)
    child = os.fork()
    if child == 0:  # a data loader's worker, say
        time.sleep(60)
        os._exit(0)
    ready.send(child)
    time.sleep(60)


def test_a_child_of_a_killed_job_does_not_keep_the_lock(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    job = multiprocessing.get_context("fork").Process(target=_job_with_a_child, args=(str(tmp_path), theirs))
    job.start()
    child = ours.recv()
    with pytest.raises(CheckpointError, match=f"Another job .*: process {job.pid} on "):
        RootDirectory(tmp_path).lock(0.1)
    os.kill(job.pid, signal.SIGKILL)
    job.join()
    try:
        os.kill(child, 0)  # it lives
        RootDirectory(tmp_path).lock(1.0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_that_is_cut_off_before_the_commit_is_not_committed(tmp_path: Path) -> None:
    """As where rank 0 does not see all that another rank has written."""

    real = commit.wait_for_parts

    def cut_after(saving: Path, *rest: Any) -> Any:
        parts = real(saving, *rest)
        os.truncate(saving / "rank_00000_000.distcp", 100)
        return parts

    with CheckpointSaver(tmp_path) as once:
        save_step(once, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("core.checkpoint.pending_save.wait_for_parts", cut_after)
            with pytest.raises(CheckpointError, match="rank 0 wrote with .* bytes, has 100 bytes as rank 0 sees it"):
                save_step(once, 2)
    assert list_steps(tmp_path) == [1]
