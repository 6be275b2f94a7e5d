"""GeminiPlugin with tp_size > 1: slices in chunks train as one process does in fp64, wherever they lie; their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, HybridParallelPlugin
from core.booster.plugin.hybrid_parallel_model import HybridParallelModel
from core.distributed import materialize
from tests.unit_tests.booster.test_booster_checkpoint import shared
from tests.unit_tests.booster.test_hybrid_parallel import STEPS, batch_of, new_optimizer
from tests.unit_tests.hugging_face.models import small
from tests.unit_tests.ranks import ranks

CHUNKS = {"min_chunk_size_m": 0, "search_range_m": 0, "hidden_dim": 4096, "precision": "fp32"}


SIZES = {"llama": {"num_hidden_layers": 2}, "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}


def model_of(family: str = "llama") -> Any:
    return small(family, torch.float64, **SIZES[family])


def boosted(options: dict[str, Any], family: str = "llama") -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=GeminiPlugin(**{**CHUNKS, **options}))
    model = model_of(family)
    model, optimizer, *_ = booster.boost(model, new_optimizer(model))
    return booster, model, optimizer


def loss_of(model: Any, step: int, data_rank: int) -> torch.Tensor:
    """Of whole logits, in fp64: transformers' own loss is in fp32."""
    ids = batch_of(step, data_rank)["input_ids"]
    logits = model(input_ids=ids).logits
    assert logits.dtype is torch.float64
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def trained_alone(model: Any, max_norm: float) -> tuple[list[float], float]:
    """Losses of steps on the whole batch, and the last norm."""
    optimizer = new_optimizer(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, step, rank) for rank in range(2)]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or 1e9)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, float(norm)


def steps_of(booster: Booster, model: Any, optimizer: Any, which: range) -> list[float]:
    """The losses, each the mean over data ranks."""
    losses = []
    for step in which:
        optimizer.zero_grad()
        loss = loss_of(model, step, booster.plugin.data_rank())
        booster.backward(loss, optimizer)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=booster.plugin.groups().dp)
        losses.append(float(mean))
    return losses


def whole(booster: Booster, model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in booster.checkpoint_io.model_tensors(model)}


CASES: list[dict[str, Any]] = [
    {"max_norm": 0.5},
    {"enable_sequence_parallelism": True, "shard_param_frac": 0.5, "extra_dp_size": 2},
    {"enable_flash_attention": True, "offload_param_frac": 0.5, "offload_optim_frac": 1.0},
    {"placement_policy": "auto", "memory_budget_bytes": 4_000_000, "enable_gradient_accumulation": True},
]


@ranks(4, timeout_s=120.0)
def test_slices_in_chunks_train_as_one_process(rank: int, world: int, tmp_path: Path) -> None:
    for family, options in [*(("llama", case) for case in CASES), ("gpt2", CASES[1])]:
        if options.keys() & {"offload_param_frac", "memory_budget_bytes"}:
            options = {**options, "offload_directory": str(tmp_path)}
        reference = model_of(family)
        start = {name: value.clone() for name, value in reference.state_dict().items()}
        expected, norm = trained_alone(reference, options.get("max_norm", 0.0))
        booster, model, optimizer = boosted({"tp_size": 2, **options}, family)
        assert (
            isinstance(model, HybridParallelModel)
            and booster.plugin.data_size() == booster.plugin.groups().size("dp") == 2
        )
        assert steps_of(booster, model, optimizer, range(STEPS)) == pytest.approx(expected, abs=1e-11), options
        assert optimizer.get_grad_norm() == pytest.approx(norm, rel=1e-9)
        values = whole(booster, model)
        for name, wanted in reference.state_dict().items():
            assert float((values[name] - wanted).abs().max()) < 1e-10, (options, name)
        assert any(float((wanted - start[name]).abs().max()) > 1e-2 for name, wanted in reference.state_dict().items())
        assert model.module.ddp_config.shards_parameters
        assert (model.memstats is not None) == ("memory_budget_bytes" in options)
        assert len(model.module.reducer.buckets) > 2
        parallel_state.destroy_model_parallel()


@ranks(4, timeout_s=120.0)
@pytest.mark.nightly
def test_files_of_slices_load_in_other_layouts_bit_for_bit(rank: int, world: int, tmp_path: Path) -> None:
    folder = shared(tmp_path)
    booster, model, optimizer = boosted({"tp_size": 2, "max_norm": 0.5})
    steps_of(booster, model, optimizer, range(2))
    booster.save_model(model, folder / "model", shard=True, use_safetensors=True)
    booster.save_optimizer(optimizer, folder / "optimizer", shard=True)
    wanted, states = whole(booster, model), optimizer.state_dict()["state"]
    expected = steps_of(booster, model, optimizer, range(2, 4))
    parallel_state.destroy_model_parallel()
    plugins: tuple[Any, ...] = (
        lambda: GeminiPlugin(**CHUNKS, tp_size=2, extra_dp_size=2, max_norm=0.5),
        lambda: GeminiPlugin(**CHUNKS, tp_size=4, max_norm=0.5),
        lambda: GeminiPlugin(**CHUNKS, max_norm=0.5),
        lambda: HybridParallelPlugin(2, 1, precision="fp32", parallel_output=False, max_norm=0.5),
    )
    for number, make in enumerate(plugins):
        again = Booster(plugin=make())
        fresh: Any = model_of()
        with torch.no_grad():
            for param in fresh.parameters():
                param.zero_()
        fresh, fresh_optimizer, *_ = again.boost(fresh, new_optimizer(fresh))
        again.load_model(fresh, folder / "model")
        again.load_optimizer(fresh_optimizer, folder / "optimizer")
        got = whole(again, fresh)
        assert [name for name, value in wanted.items() if not torch.equal(got[name], value)] == [], number
        loaded = fresh_optimizer.state_dict()["state"]
        for place, state in states.items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(loaded[place][key]), torch.as_tensor(value)), (number, place, key)
        if again.plugin.data_size() == 2:  # other numbers of replicas have other batches
            assert steps_of(again, fresh, fresh_optimizer, range(2, 4)) == pytest.approx(expected, abs=1e-11)
        parallel_state.destroy_model_parallel()


@ranks(2)
def test_outputs_are_whole_and_fp32_if_asked_for_and_what_cannot_be_cut_is_refused(rank: int, world: int) -> None:
    booster = Booster(plugin=GeminiPlugin(**{**CHUNKS, "precision": "bf16"}, tp_size=2, force_outputs_fp32=True))
    model: Any = small("llama", torch.float32, num_hidden_layers=2)
    vocabulary = model.config.vocab_size
    model, *_ = booster.boost(model, new_optimizer(model))
    logits = model(input_ids=batch_of(0, 0)["input_ids"]).logits
    assert logits.dtype is torch.float32 and logits.shape[-1] == vocabulary
    with model.gathered():
        assert all(param.isfinite().all() for param in model.unwrap().parameters())
    with torch.device("meta"):
        empty: Any = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="materialize.. creates a model module by module.*tp_size=2"):
        booster.boost(materialize(empty), torch.optim.SGD(empty.parameters(), lr=0.1))
