"""torch's own profiler shows every collective of a step by its bucket or its purpose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from core import parallel_state
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.first.weight.sequence_parallel = False
        self.norm.weight.sequence_parallel = self.norm.bias.sequence_parallel = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).sum() + self.first(x).square().sum()


def named_above(event: Any) -> bool:
    """True if a span of ours surrounds an event."""
    while event is not None and not event.name.startswith("core::"):
        event = event.cpu_parent
    return event is not None


def profiled_step(share: bool, strategy: str) -> tuple[Any, list[Any]]:
    """The wrapped model, and the events of one step."""
    torch.manual_seed(0)
    ddp = wrap(
        Layers(),
        SimpleNamespace(tensor_model_parallel_size=2, sequence_parallel=True, calculate_per_token_loss=True),
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=True,
        bucket_size=1,
        share_host_memory=share,
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1), [ddp])
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        ddp(torch.ones(2, 8)).backward()
        finalize_model_grads([ddp], torch.tensor(4))
        optimizer.step()
    return ddp, list(seen.events())


@ranks(4)
@pytest.mark.parametrize("share", [True, False])
def test_every_collective_of_a_step_is_found_by_bucket_or_purpose(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for strategy, kind in (("no_shard", "all_reduce"), ("optim", "reduce_scatter"), ("optim_grads", "reduce_scatter")):
        ddp, events = profiled_step(share, strategy)
        spans = [event.name.removeprefix("core::") for event in events if event.name.startswith("core::")]
        backends = [event for event in events if event.name.startswith("c10d::")]
        assert len(backends) > 5 and not [event.name for event in backends if not named_above(event)]
        for bucket in ddp.reducer.buckets:
            assert spans.count(f"{kind} {bucket.name}") == spans.count(f"wait {kind} {bucket.name}") == 1
            gathers = 0 if strategy == "no_shard" else 1
            assert spans.count(f"all_gather parameters of {bucket.name}") == gathers
        launched = [span for span in spans if not span.startswith("wait ")]
        purposes = {span.partition(" ")[2] for span in launched} - {bucket.name for bucket in ddp.reducer.buckets}
        expected = {"num_tokens", "the gradient norm"}
        if strategy == "no_shard":  # else a rank's shard may hold nothing that a rule serves
            expected.add("the sync rule tensor-parallel sum")
        assert expected <= purposes
        assert any(span.startswith("agree ") for span in spans)
        # Whatever was launched was waited for.
        waits = [span.removeprefix("wait ") for span in spans if span.startswith("wait ")]
        assert sorted(waits) == sorted(span for span in launched if not span.startswith("agree "))
