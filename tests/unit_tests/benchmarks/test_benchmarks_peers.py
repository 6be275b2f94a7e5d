"""The arms of other frameworks, in an environment that has none of them."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import peers_right
from benchmarks.arms import all_arms
from benchmarks.arms_megatron import _cuda_names_mean_cpu
from tests.unit_tests.ranks import ranks

ROOT = Path(__file__).parents[3]
PEERS = {
    "megatron ddp": ("megatron", "no_shard"),
    "megatron distributed optimizer": ("megatron", "optim"),
    "deepspeed zero 1": ("deepspeed", "optim"),
    "deepspeed zero 2": ("deepspeed", "optim_grads"),
    "deepspeed zero 3": ("deepspeed", "optim_grads_params"),
    "colossalai zero 1": ("colossalai", "optim"),
    "colossalai zero 2": ("colossalai", "optim_grads"),
}


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_competes_in_its_stage_and_its_version_is_the_one_that_peers_md_installs(name):
    arm = all_arms()[0][name]
    assert (arm.kind, arm.stage) == ("peer", PEERS[name][1])
    package, version = arm.measured_with.split()
    assert f"{package}=={version}" in (ROOT / "benchmarks/peers.md").read_text().split()


# Torch comes from site-packages, so the arms are read first and site-packages leave the path before the question.
ASK = """
import sys
from benchmarks.arms import all_arms
arms = all_arms()[0]
sys.path[:] = [path for path in sys.path if "site-packages" not in path]
for name in sys.argv[1:]:
    print(name, arms[name].why_absent(), sep="|")
"""


def _answers(folder: Path) -> dict[str, str]:
    """why_absent of every peer in a new interpreter, whose only packages are those in `folder`."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, "-c", ASK, *PEERS], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return dict(line.split("|") for line in ran.stdout.splitlines())


def test_a_peer_that_is_not_installed_is_absent_with_its_package_and_the_measured_version(tmp_path):
    answers = _answers(tmp_path)
    for name, (package, _) in PEERS.items():
        assert f"'{package}' is not installed" in answers[name]
        assert all_arms()[0][name].measured_with in answers[name]


def test_listing_arms_imports_no_peer(tmp_path):
    for package, _ in PEERS.values():
        (tmp_path / f"{package}.py").write_text("raise RuntimeError('imported before it was needed')")
    assert _answers(tmp_path) == dict.fromkeys(PEERS, "None")


def test_cuda_names_mean_cpu_only_while_megatron_is_built():
    weight = torch.nn.Parameter(torch.ones(2))
    with _cuda_names_mean_cpu():
        assert weight.type() == "torch.cuda.FloatTensor"
        assert torch.tensor([3.0], device="cuda").tolist() == [3.0]
        assert torch.zeros(1, device=torch.cuda.current_device()).device == torch.device("cpu")
    assert weight.type() == "torch.FloatTensor"


@ranks(2)
def test_right_loops_of_torch_are_equal_and_a_wrong_one_is_named(rank: int, world: int) -> None:
    for layout in peers_right.PROGRAMS["torch"]:
        answer, why = peers_right.answer_on_rank("torch", layout)
        assert answer == "equal", why

    def doubled() -> torch.nn.Module:
        net = peers_right._net()
        net[2].weight.register_hook(lambda grad: 2 * grad)
        return torch.nn.parallel.DistributedDataParallel(net)

    def apart() -> torch.nn.Module:
        """Shard over a mesh that lacks the dimension of the replicas, as a parallelizer of experts once did."""
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
        model: torch.nn.Module = fully_shard(peers_right._net(), mesh=mesh["dp_shard"])
        return model

    for build, words in ((doubled, "2.weight: "), (apart, "0.weight: ")):
        wrong = {"torch": {"wrong": partial(peers_right._torch_report, build)}}
        with mock.patch.object(peers_right, "PROGRAMS", wrong):
            answer, why = peers_right.answer_on_rank("torch", "wrong")
        assert answer == "wrong" and why.startswith(words), why
