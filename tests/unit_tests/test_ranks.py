"""The pool of ranks itself: what a test gets, and what a failing one leaves behind."""

import ctypes
import gc
import importlib
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import rewrite

from tests.unit_tests import ranks as pool
from tests.unit_tests import rewritten
from tests.unit_tests.ranks import RankFailure, ranks, run_on_ranks


@ranks(1, 2, 4)
@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_each_rank_has_its_number_and_a_group_that_sums(rank: int, world: int, factor: float) -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    value = torch.tensor([factor * (rank + 1)])
    dist.all_reduce(value)
    assert value.item() == factor * sum(range(1, world + 1))


@ranks(2)
def test_fixtures_reach_the_ranks(rank: int, tmp_path) -> None:
    (tmp_path / str(rank)).write_text("here")
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@ranks(2)
@pytest.mark.parametrize("repetition", [0, 1])
def test_every_test_starts_from_the_same_seed_and_with_one_thread(rank: int, repetition: int) -> None:
    assert torch.get_num_threads() == 1
    torch.testing.assert_close(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(pool.SEED)))


class TestInAClass:
    @ranks(2)
    def test_a_method_runs_on_ranks_too(self, rank: int, world: int) -> None:
        assert world == 2


def _skip(rank: int) -> None:
    pytest.skip("as asked")


def _fail_on_rank_1_while_others_wait(rank: int) -> None:
    expected = [rank, 5]
    if rank == 1:
        assert expected == [1, 6]
    dist.barrier()


def _read_address_0(rank: int) -> None:
    ctypes.string_at(0)


def _crash_on_rank_2(rank: int) -> None:
    if rank == 2:
        os._exit(7)
    dist.barrier()


def _hang_on_rank_1(rank: int) -> None:
    while rank == 1:
        time.sleep(0.1)
    dist.barrier()


def _sum(rank: int) -> None:
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == dist.get_world_size()


def _default_dtype_is_changed(rank: int) -> None:
    torch.set_default_dtype(torch.float64)


def _default_dtype_is_float32(rank: int) -> None:
    assert torch.get_default_dtype() == torch.float32


def _has_many_groups(rank: int) -> None:
    os.environ["THREADS_BEFORE"] = str(_threads_of_groups())  # torch's caches keep groups of earlier tests' meshes
    groups = [dist.new_group([0, 1]) for _ in range(5)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    assert _threads_of_groups() >= int(os.environ["THREADS_BEFORE"]) + 5


def _has_the_default_group_only(rank: int) -> None:
    assert _threads_of_groups() <= int(os.environ.pop("THREADS_BEFORE")) + 2  # a group has 1 to 3


def _threads_of_groups() -> int:
    names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)


def _import_a_module(rank: int, name: str) -> None:
    assert name not in sys.modules
    importlib.import_module(name)


def _module_is_frozen(rank: int, name: str) -> None:
    assert name in sys.modules
    assert not any(held is sys.modules[name].__dict__ for held in gc.get_objects())


def test_a_failure_shows_the_values_of_the_first_failing_rank_only() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_on_ranks(_fail_on_rank_1_while_others_wait, 4, {})
    message = str(failure.value)
    assert "rank 1 of 4" in message and "assert [1, 5] == [1, 6]" in message
    assert message.count("Traceback") == 1
    assert time.monotonic() - begin < 30
    run_on_ranks(_sum, 4, {})


def test_a_skip_on_a_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="as asked"):
        run_on_ranks(_skip, 2, {})


def test_a_crash_is_named_with_its_exit_code_and_the_next_test_runs() -> None:
    with pytest.raises(RankFailure, match="rank 2 of 4:\nthe process ended with exit code 7"):
        run_on_ranks(_crash_on_rank_2, 4, {})
    run_on_ranks(_sum, 4, {})


def test_a_crash_of_native_code_shows_where_it_was() -> None:
    with pytest.raises(RankFailure, match=r"(?s)exit code -11 .*Segmentation fault.*in _read_address_0"):
        run_on_ranks(_read_address_0, 1, {})


def test_a_hang_is_ended_at_the_limit_and_shows_where_it_was() -> None:
    with pytest.raises(RankFailure, match=r"(?s)had not ended after 1\.5 s; rank 0 was here:.*_hang_on_rank_1"):
        run_on_ranks(_hang_on_rank_1, 2, {}, timeout_s=1.5)
    run_on_ranks(_sum, 2, {})


def _pids(world: int) -> list[int | None]:
    workers = pool._the_pool().workers
    return [workers[rank].process.pid for rank in range(world)]


def test_a_passing_test_keeps_its_workers_and_a_failed_one_replaces_them() -> None:
    run_on_ranks(_sum, 4, {})
    before = _pids(4)
    run_on_ranks(_sum, 2, {})
    assert _pids(4) == before
    with pytest.raises(RankFailure):
        run_on_ranks(_crash_on_rank_2, 3, {})
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in before[:3])
    run_on_ranks(_sum, 4, {})
    assert _pids(4)[3] == before[3]  # still of rank 3


def test_a_default_dtype_set_by_one_test_does_not_reach_the_next() -> None:
    run_on_ranks(_default_dtype_is_changed, 2, {})
    run_on_ranks(_default_dtype_is_float32, 2, {})


@pytest.mark.skipif(not Path("/proc").exists(), reason="counts threads in /proc")
def test_the_groups_of_a_test_are_gone_in_the_next() -> None:
    run_on_ranks(_has_many_groups, 2, {})
    run_on_ranks(_has_the_default_group_only, 2, {})


def test_collections_after_a_test_leave_out_what_was_imported() -> None:
    pool.close_pool()  # workers that have imported nothing yet
    run_on_ranks(_import_a_module, 2, {"name": "tests.unit_tests.rank_codes"})
    run_on_ranks(_module_is_frozen, 2, {"name": "tests.unit_tests.rank_codes"})


def test_asserts_of_a_file_are_rewritten_once_for_all_processes_and_again_after_an_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    seen: list[Path] = []

    def rewrite_file(path: Path, config: pytest.Config) -> tuple[bytes, types.CodeType]:
        seen.append(path)
        return b"hash", compile(path.read_text(), str(path), "exec")

    monkeypatch.setattr(rewrite, "_rewrite_test", rewrite_file)
    rewritten.share(tmp_path)
    files = [tmp_path / folder / "test_it.py" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"value = {file.parent.name!r}")
        os.utime(file, (1, 1))  # as of one archive
    for _ in range(2):
        rewritten.rewrite_a_part([str(tmp_path)], 0, 1, pytestconfig)
    assert seen == files
    files[0].write_text("value = 'c'")
    for file, value in zip(files, "cb", strict=True):
        names: dict[str, object] = {}
        exec(rewrite._rewrite_test(file, pytestconfig)[1], names)
        assert names["value"] == value
    assert seen == [*files, files[0]]


def test_a_function_inside_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match="defined inside a function"):
        run_on_ranks(lambda rank: None, 2, {})


@pytest.mark.nightly
def test_no_worker_and_no_file_outlives_a_killed_pytest_process(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from tests.unit_tests import ranks, test_ranks\n"
        "ranks.PRELOADED = ()\n"  # these two need nothing of the package
        "ranks.run_on_ranks(test_ranks._sum, 2, {})\n"
        "print(*[worker.process.pid for worker in ranks._the_pool().workers.values()], flush=True)\n"
        "ranks.run_on_ranks(test_ranks._hang_on_rank_1, 2, {})\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2 and all(psutil.pid_exists(pid) for pid in workers)
    time.sleep(0.5)  # into the hanging test
    parent.kill()
    parent.wait()
    limit = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in workers) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in workers)
    assert not list(tmp_path.glob("ranks-*"))
