"""How much memory ranks may use: the machine's, less where a control group around them says so, or a GPU's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from core_plan import dry_run
from core_plan.job.config_file import load_config
from core_plan.job.errors import ConfigError
from core_plan.machine.launch import Launch
from core_plan.machine.memory import host_memory_bytes
from core_plan.machine.own_ranks import become_rank
from core_train import main as command
from core_train.main import check_room

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def machine(tmp_path: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return tmp_path / "self", tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max"}, PHYSICAL),
        ("0::/\n", {}, PHYSICAL),
        ("0::/\n", {"memory.max": f"{64 * MIB}"}, 64 * MIB),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": f"{32 * MIB}"}, 32 * MIB),  # of a group around it
        ("0::/a/b\n", {"a/b/memory.max": f"{16 * MIB}", "a/memory.max": f"{32 * MIB}"}, 16 * MIB),
        ("0::/the/hosts/path\n", {"memory.max": f"{8 * MIB}"}, 8 * MIB),  # a container sees its group as the root
        ("0::/\n", {"memory.max": f"{PHYSICAL * 4}"}, PHYSICAL),
        ("5:memory:/job\n1:cpu:/\n0::/\n", {"memory/job/memory.limit_in_bytes": f"{24 * MIB}"}, 24 * MIB),
        ("5:cpu,memory:/job\n", {"memory/memory.limit_in_bytes": f"{24 * MIB}"}, 24 * MIB),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, PHYSICAL),
    ],
)
def test_the_lowest_limit_of_all_control_groups_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    assert host_memory_bytes(*machine(tmp_path, cgroup, files)) == expected


def test_where_there_are_no_control_groups_the_machines_memory_counts(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path / "nothing", tmp_path / "nothing") == PHYSICAL


@pytest.mark.parametrize(("devices", "refused"), [(2, "1 rank on a GPU would hold"), (1, None), (0, None)])
def test_a_model_must_fit_into_the_gpus_that_ranks_take(devices: int, refused: str | None) -> None:
    flags = ["--tp", "1", "--model.hidden-size", "4096", "--model.num-layers", "4", "--run.ranks", "2"]
    config = load_config(flags)  # 6.4 GiB a rank with gradients
    small = SimpleNamespace(total_memory=1 << 30)
    with (
        mock.patch("core_plan.machine.memory.Path.exists", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=devices),
        mock.patch("torch.cuda.get_device_properties", return_value=small) as asked,
        mock.patch("core_train.main.host_memory_bytes", return_value=1 << 40),
    ):
        if refused is None:  # the ranks run on CPUs, with the machine's memory
            check_room(config, 2)
            assert not asked.called
        else:
            with pytest.raises(ConfigError, match=refused):
                check_room(config, 2)
        check_room(load_config([*flags, "--run.device", "cpu"]), 2)


def test_a_job_whose_parameters_alone_are_too_large_is_refused_with_what_would_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The plan speaks before the sizes do, the flag lifts both, and a plan of many layers is not waited for."""
    monkeypatch.chdir(tmp_path)
    flags = ["--run.device", "cpu", "--logging.no-plots", "--run.ranks", "4", "--tp", "1"]
    large = [*flags, "--model.hidden-size", "1024", "--model.num-layers", "4", "--model.sequence-length", "64"]
    started: list[int] = []
    monkeypatch.setattr(command, "start_ranks", lambda ranks: started.append(ranks) or 0)
    for where in (dry_run, command):
        monkeypatch.setattr(where, "host_memory_bytes", lambda: 1500 * MIB)
    with pytest.raises(ConfigError, match="with their gradients 4 ranks on this machine would hold"):
        check_room(load_config(large), 4)
    assert command.main(large) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "at the peak of a step" in said and "it would fit with --" in said
    assert command.main([*large, "--run.no-check-memory"]) == 0
    assert started == [4]
    monkeypatch.setattr(dry_run, "plan_run", None)
    assert command.main([*flags, "--model.hidden-size", "1024", "--model.num-layers", "65536"]) == 2
    assert "use a smaller --model.hidden-size or --model.num-layers" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="the name of the loopback interface")
def test_ports_of_one_machine_stay_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for world, expected in ((4, "lo"), (8, None)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", {})
            become_rank(Launch(0, world, 0, 4, "127.0.0.1", 1, "torchrun"))
            assert [os.environ.get(name) for name in names] == [expected] * 2
