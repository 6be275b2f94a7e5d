"""Parameters without elements are saved and loaded as others are, by every strategy, for every other."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from core.checkpoint import load_checkpoint, save_checkpoint
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Hollow(nn.Module):
    """A layer without features next to one with, a table without rows that is frozen, and a count of none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.full = nn.Linear(3, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of initializing nothing
            self.empty = nn.Linear(3, 0)
        self.rows = nn.Parameter(torch.empty(0, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.full(x), self.empty(x)], 1)


def trained(rank: int, seed: int, strategy: str) -> tuple[Any, Any]:
    ddp = wrap(Hollow(seed), data_parallel_sharding_strategy=strategy)
    config = OptimizerConfig(optimizer="adam", lr=0.1, weight_decay=0.0, clip_grad=1.0)
    optimizer = get_megatron_optimizer(config, [ddp], config_overrides={})
    ddp(torch.full((2, 3), rank + 1.0)).square().sum().backward()
    finalize_model_grads([ddp])
    assert optimizer.step()[0]
    return ddp, optimizer


@ranks(2)
def test_parameters_without_elements_load_into_every_strategy(rank: int, world: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        ddp, optimizer = trained(rank, 3, strategy)
        save_checkpoint(tmp_path / strategy, 1, [ddp], optimizer)
        expected = {name: value.clone() for name, value in ddp.state_dict().items()}
        assert expected["empty.weight"].shape == (0, 3) and expected["rows"].shape == (0, 4)
        del ddp, optimizer
        for into in STRATEGIES:
            other, its = trained(rank, 4, into)
            load_checkpoint(tmp_path / strategy, [other], its)
            found = other.state_dict()
            assert sorted(found) == sorted(expected)
            for name, value in expected.items():
                assert torch.equal(found[name], value), f"{strategy} into {into}: {name}"
            del other, its


def boosted(kind: str) -> tuple[Any, Any, Any]:
    plugin = GeminiPlugin(precision="fp32") if kind == "Gemini" else LowLevelZeroPlugin(int(kind), precision="fp32")
    booster = Booster(plugin=plugin)
    model = Hollow(3)
    params = [param for param in model.parameters() if param.requires_grad]
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam(params, lr=0.1))
    booster.backward(model(torch.ones(2, 3)).square().sum(), optimizer)
    optimizer.step()
    return booster, model, optimizer


@ranks(2)
def test_parameters_without_elements_pass_through_a_boosters_files(rank: int, world: int, tmp_path: Path) -> None:
    for kind, shard in itertools.product(("1", "2", "Gemini"), (False, True)):
        booster, model, optimizer = boosted(kind)
        name = f"{kind}-{shard}"
        booster.save_model(model, str(tmp_path / f"model-{name}"), shard=shard)
        booster.save_optimizer(optimizer, str(tmp_path / f"optimizer-{name}"), shard=shard)
        torch.distributed.barrier()
        booster.load_model(model, str(tmp_path / f"model-{name}"))
        booster.load_optimizer(optimizer, str(tmp_path / f"optimizer-{name}"))
        booster.backward(model(torch.ones(2, 3)).square().sum(), optimizer)
        optimizer.step()
