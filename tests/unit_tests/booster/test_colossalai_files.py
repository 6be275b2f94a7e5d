"""Files that ColossalAI's asynchronous saves write of optimizers; and a save that one rank calls alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.booster import Booster
from core.booster.checkpoint_io import TorchDDPCheckpointIO
from core.watch.waiting import PeerLost, use_watch
from tests.unit_tests.booster.booster_reference import new_model
from tests.unit_tests.booster.test_booster_checkpoint import shared
from tests.unit_tests.booster.test_booster_training import new_plugin
from tests.unit_tests.ranks import ranks
from tests.unit_tests.test_waiting import Ended


def test_an_optimizer_as_safetensors_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """ColossalAI's asynchronous saves write such files, with pickles inside."""
    booster = Booster(device="cpu")
    model = new_model()
    _, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters()))
    words = "holds tensors only, and an optimizer's state has numbers too; name it .bin.*without use_async"
    with pytest.raises(ValueError, match=words):
        booster.save_optimizer(optimizer, tmp_path / "o.safetensors")
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"state.0.exp_avg": torch.ones(3)}, tmp_path / "o.safetensors")
    index = {"metadata": {"param_groups": "o.safetensors"}, "weight_map": {"0": "o.safetensors"}}
    (tmp_path / "optimizer.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=words):
        booster.load_optimizer(optimizer, tmp_path)
    with pytest.raises(ValueError, match="holds no state of an optimizer.*or by ColossalAI with use_async"):
        booster.load_optimizer(optimizer, tmp_path / "o.safetensors")


@ranks(2, timeout_s=30)
def test_a_save_by_the_master_alone_is_an_error_and_a_late_master_is_none(
    rank: int, world: int, tmp_path: Path
) -> None:
    folder = shared(tmp_path)
    booster = Booster(plugin=new_plugin("torch_ddp"))
    model, *_ = booster.boost(new_model())
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(TorchDDPCheckpointIO, "ALONE_LIMIT_S", 1.0)
        if rank == 0:
            time.sleep(1.5)
        booster.save_model(model, folder / "model")
        if rank == 0:
            began = time.monotonic()
            with pytest.raises(RuntimeError, match=r"rank 0 called and ranks \[1\] have not in 1 s.*is_master"):
                booster.save_model(model, folder / "again")
            assert 1 < time.monotonic() - began < 15
        if rank == 0:  # the watch is asked before the user is blamed
            use_watch(Ended())
            began = time.monotonic()
            with pytest.raises(PeerLost, match=r"all ranks to save .*again.*\(rank 1 will not come\); rank 1 has"):
                booster.save_model(model, folder / "again")
            assert time.monotonic() - began < 1.0
            use_watch(parallel_state.get_rank_watch())
    dist.barrier()  # where rank 1 was all the time
