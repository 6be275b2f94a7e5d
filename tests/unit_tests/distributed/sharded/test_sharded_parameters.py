"""Strategy optim_grads_params: what a rank does not hold it cannot use by mistake, and whatever is right has equal bits
to optim_grads. (Random trainings against plain torch: test_training_habits.)
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from core import parallel_state
from core.distributed import DistributedDataParallel, Placement, SyncError, finalize_model_grads
from core.distributed.sharded.eviction import WINDOW
from core.distributed.sharded.param_unit import KeepUnsharded, ParamUnit
from core.distributed.sharded.unsharder import Unsharder
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.optimizer_state import MASTER
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap

# Of a backward whose weights have changed since its forward: by torch where they lie, or by us where they are gathered.
WRITTEN = {True: "modified by an inplace operation", False: "have been written since"}
WIDTH = 12
STEPS = 3


class Block(nn.Module):
    """A layer that needs two buckets, with an attention that takes another module's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, 17)
        self.down = nn.Linear(17, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.norm(x)
        x = x + self.attention(words, words, words, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """An embedding whose weight is the head's too, blocks, and a parameter of the root's own."""

    def __init__(self, dtype: torch.dtype = torch.float32, recompute: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(11, WIDTH)
        self.places = nn.Parameter(torch.randn(6, WIDTH) / 3)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.recompute = recompute  # `use_reentrant`, or None
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return F.linear(x, self.words.weight)


def tokens_of(rank: int, number: int) -> torch.Tensor:
    return torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(100 * rank + number))


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    tokens = tokens_of(rank, number)
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def add_adapters(model: Model) -> None:
    """The base is frozen, as for LoRA; each block's first layer gets a trained detour."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.up = nn.utils.parametrizations.weight_norm(block.up)
    for block in model.blocks:
        block.norm.requires_grad_(True)
        block.up.parametrizations.weight.original0.requires_grad_(True)


def one_backward(ddp: DistributedDataParallel, rank: int, step: int) -> Any:
    loss = loss_of(ddp, rank, step)
    loss.backward()
    return loss


def accumulated(ddp: DistributedDataParallel, rank: int, step: int) -> Any:
    for microbatch in range(3):
        with ddp.no_sync() if microbatch < 2 else nullcontext():
            loss_of(ddp, rank, 10 * step + microbatch).backward()


def two_forwards(ddp: DistributedDataParallel, rank: int, step: int) -> Any:
    losses = [loss_of(ddp, rank, 10 * step + number) for number in range(2)]
    (losses[0] - 0.3 * losses[1]).backward()


def twice(ddp: DistributedDataParallel, rank: int, step: int) -> Any:
    loss = loss_of(ddp, rank, step)
    loss.backward(retain_graph=True)
    loss.backward()


def penalty(ddp: DistributedDataParallel, rank: int, step: int) -> Any:
    ddp.module.blocks[0].attention.requires_grad_(True)
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank + step), requires_grad=True)
    up, down = ddp.module.blocks[1].up, ddp.module.blocks[1].down
    (grad,) = torch.autograd.grad(down(torch.tanh(up(x))).pow(2).sum(), x, create_graph=True)
    (loss_of(ddp, rank, step) + grad.pow(2).sum()).backward()


def evaluated(ddp: DistributedDataParallel, rank: int, step: int) -> Any:
    with torch.inference_mode():
        before = float(loss_of(ddp, rank, 7))
    loss = loss_of(ddp, rank, step)
    with torch.no_grad():
        assert float(loss_of(ddp, rank, 7)) == before
    loss.backward()
    with ddp.gathered(), torch.no_grad():
        tokens = tokens_of(rank, 8)
        for _ in range(1 + 2 * rank):  # ranks generate texts of different lengths
            tokens = torch.cat([tokens[:, 1:], ddp.module(tokens)[:, -1:].argmax(-1)], 1)
    return loss + tokens.sum()


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "one backward": (one_backward, {}),
    "bf16 with masters": (one_backward, {"dtype": torch.bfloat16}),
    "microbatches": (accumulated, {}),
    "two forwards, one backward": (two_forwards, {}),
    "one graph twice": (twice, {}),
    "a backward of a backward": (penalty, {"submodules": True}),
    "recomputed": (one_backward, {"recompute": False}),
    "recomputed, reentrant": (one_backward, {"recompute": True}),
    "evaluated in between": (evaluated, {}),
    "adapters on a frozen base": (one_backward, {"adapters": True}),
}


def trained(
    strategy: str, case: str, rank: int, optimizer: dict[str, Any], **options: Any
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What the case's steps return and the norms, and the weights after them."""
    backward, about = CASES[case]
    model = Model(about.get("dtype", torch.float32), about.get("recompute"))
    if about.get("adapters"):
        add_adapters(model)
    options = {"bucket_size": 300, "deterministic_reduction": True, "reduce_microbatches": "every", **options}
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, **options)
    config = OptimizerConfig(clip_grad=0.5, bf16=about.get("dtype") is torch.bfloat16, **optimizer)
    steps = get_megatron_optimizer(config, [ddp])
    notes: list[Any] = []
    for step in range(STEPS):
        steps.zero_grad()
        value = backward(ddp, rank, step)
        finalize_model_grads([ddp])
        notes += [None if value is None else float(value), *steps.step()[:2]]
    return notes, {name: value.clone() for name, value in ddp.state_dict().items()}


SGD = {"optimizer": "sgd", "lr": 0.5}
ADAM = {"optimizer": "adam", "lr": 0.05}


@ranks(2, nightly=(1, 3, 4))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.in_suite(3)
def test_weights_and_losses_are_those_of_optim_grads_bit_for_bit(rank: int, world: int, case: str) -> None:
    parallel_state.initialize_model_parallel()
    for optimizer, share in ((SGD, True), (ADAM, False)):
        notes, weights = trained("optim_grads", case, rank, optimizer, share_host_memory=share)
        got, others = trained("optim_grads_params", case, rank, optimizer, share_host_memory=share)
        assert got == notes
        start = Model(weights["places"].dtype)
        assert any(
            not torch.equal(weights[name], value) for name, value in start.state_dict().items() if name in weights
        )
        assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


def gathers_with_equal_bits(rank: int, case: str, **options: Any) -> None:
    """Training with parameters that are gathered, with these options, against optim_grads."""
    notes, weights = trained("optim_grads", case, rank, ADAM, share_host_memory=False)
    got, others = trained("optim_grads_params", case, rank, ADAM, share_host_memory=False, **options)
    assert got == notes
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


@ranks(2)
@pytest.mark.parametrize("case", ["microbatches", "recomputed, reentrant", "evaluated in between"])
@pytest.mark.in_suite(1)
def test_buckets_that_stay_until_backward_change_no_bit(rank: int, world: int, case: str) -> None:
    parallel_state.initialize_model_parallel()
    gathers_with_equal_bits(rank, case, reshard_after_forward=False)


@ranks(2)
def test_muon_steps_whole_matrices_in_one_shard(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    muon = {"optimizer": "muon", "lr": 0.02}
    notes, weights = trained("optim_grads", "one backward", rank, muon, keep_params_whole="all")
    got, others = trained("optim_grads_params", "one backward", rank, muon, keep_params_whole="all")
    assert got == notes and all(torch.equal(weights[name], others[name]) for name in weights)


@ranks(1)
def test_a_module_that_reads_its_parameters_unseen_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with pytest.raises(ValueError, match="module '0' is a ScriptModule"):
        sharded(nn.Sequential(torch.jit.script(nn.Linear(3, 3))))


@contextmanager
def a_gather_that_is_left_out() -> Iterator[None]:
    def own_part_alone(self: ParamUnit, *arguments: Any) -> torch.Tensor:
        self.full = torch.zeros(self.layout.numel, dtype=self.shard.dtype)
        self._own_part(self.full).copy_(self.shard)
        return self.full

    with mock.patch.object(ParamUnit, "all_gather", own_part_alone):
        yield


@contextmanager
def old_values_that_stay() -> Iterator[None]:
    with mock.patch.object(Unsharder, "finish_update", lambda self: self.barrier()):
        yield


@contextmanager
def weights_of_another_place() -> Iterator[None]:
    pack = Unsharder._pack

    def shifted(self: Unsharder, tensor: torch.Tensor) -> object:
        saved = pack(self, tensor)
        return saved._replace(offset=0) if hasattr(saved, "offset") else saved

    with mock.patch.object(Unsharder, "_pack", shifted):
        yield


@ranks(2)
@pytest.mark.parametrize("spoil", [a_gather_that_is_left_out, old_values_that_stay, weights_of_another_place])
def test_a_spoilt_gather_turns_the_comparison_red(rank: int, world: int, spoil: Callable[[], Any]) -> None:
    parallel_state.initialize_model_parallel()
    notes, weights = trained("optim_grads", "one backward", rank, SGD, share_host_memory=False)
    with spoil():
        got, others = trained("optim_grads_params", "one backward", rank, SGD, share_host_memory=False)
    assert got != notes
    assert not torch.equal(weights["places"], others["places"])


# -- what a rank holds ------------------------------------------------------------------------------------------------


def sharded(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return wrap(model, data_parallel_sharding_strategy="optim_grads_params", **{"bucket_size": 300, **options})


def unsharder_of(ddp: DistributedDataParallel) -> Unsharder:
    unsharder = ddp.engine.params
    assert isinstance(unsharder, Unsharder)
    return unsharder


@ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_no_more_than_the_window_is_whole_at_any_time(rank: int, world: int, frozen: bool) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    for layer in list(model)[:-1] if frozen else ():
        layer.requires_grad_(False)
    whole_bytes = sum(param.nbytes for param in model.parameters())
    ddp = sharded(model, bucket_size=256, share_host_memory=False)
    unsharder = unsharder_of(ddp)
    gather, most = ParamUnit.all_gather, []

    def counted(self: ParamUnit, *arguments: Any) -> torch.Tensor:
        whole = gather(self, *arguments)
        most.append(sum(unit.full is not None for unit in unsharder.units))
        return whole

    with mock.patch.object(ParamUnit, "all_gather", counted):
        ddp(torch.ones(3, 16)).sum().backward()
    gathers = len(unsharder.units) if frozen else 2 * len(unsharder.units) - WINDOW - 1
    assert len(unsharder.units) == 8 and max(most) == WINDOW
    assert len(most) == gathers  # the first layer's weight is not needed in backward, nor a frozen one's below
    kept = {unit.shard.untyped_storage().data_ptr() for unit in unsharder.units}
    assert len(kept) == 1 + frozen  # the memory of trained parameters, and that of frozen ones
    assert whole_bytes / world <= sum(unit.shard.nbytes for unit in unsharder.units) < 1.5 * whole_bytes / world
    assert all(param.untyped_storage().nbytes() <= 8 for param in plain(ddp))


@ranks(2)
def test_frozen_weights_that_a_recomputation_saves_keep_their_values(rank: int, world: int) -> None:
    """torch's checkpoint keeps a tensor without gradients itself; a norm's weight is such a one under adapters."""
    parallel_state.initialize_model_parallel()
    gradients = []
    for strategy in ("optim_grads", "optim_grads_params"):
        model = Model(recompute=False)
        model.requires_grad_(False)
        for block in model.blocks:
            block.up.requires_grad_(True)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=200, share_host_memory=False)
        optimizer = get_megatron_optimizer(OptimizerConfig(**SGD), [ddp])
        loss_of(ddp, rank, 1).backward()
        finalize_model_grads([ddp])
        assert optimizer.step()[0]
        with ddp.gathered() if strategy == "optim_grads_params" else nullcontext():
            gradients.append([block.up.weight.detach().clone() for block in model.blocks])
    assert all(map(torch.equal, *gradients))


@ranks(2)
def test_writes_that_differ_between_optimizer_instances_are_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    ddp = sharded(model, num_distributed_optimizer_instances=2, share_host_memory=False)
    with pytest.raises(SyncError, match="ranks have written different values"), ddp.gathered(), torch.no_grad():
        model[0].weight.fill_(rank)


@ranks(1)
def test_a_parameter_of_a_class_of_its_own_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Linear(4, 4)
    model.weight = type("Quantized", (nn.Parameter,), {})(torch.ones(4, 4))
    with pytest.raises(ValueError, match="parameter 'weight' is a Quantized"):
        sharded(model)


@ranks(2)
def test_what_stays_whole_between_forward_and_backward_is_chosen_by_bucket(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    ddp = sharded(model, bucket_size=256, reshard_after_forward=False, share_host_memory=False)
    optimizer = get_megatron_optimizer(OptimizerConfig(**SGD), [ddp])
    unsharder = unsharder_of(ddp)
    by_layer = [unsharder.unit_of[id(layer.weight)] for layer in model]

    def whole() -> list[int]:
        return [number for number, unit in enumerate(by_layer) if unit.full is not None]

    with torch.no_grad():
        ddp(torch.ones(3, 16))
    assert whole() == [4, 5]
    complete = ParamUnit.finish_all_gather
    with mock.patch.object(ParamUnit, "finish_all_gather", autospec=True, side_effect=complete) as gathers:
        loss = ddp(torch.ones(3, 16)).sum()
        assert whole() == [0, 1, 2, 3, 4, 5] and gathers.call_count == 4
        loss.backward()
        assert whole() == [] and gathers.call_count == 4
    by_layer[1].keep_unsharded, by_layer[2].keep_unsharded = KeepUnsharded.WINDOW, KeepUnsharded.STEP
    loss = ddp(torch.ones(3, 16)).sum()
    assert whole() == [0, 1, 2, 3, 4, 5]  # the window holds the second one alone
    loss.backward()
    assert whole() == [1, 2]
    finalize_model_grads([ddp])
    optimizer.step()
    assert whole() == []


@ranks(1)
def test_keeping_parameters_is_refused_where_it_has_no_effect_or_another_one(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with pytest.raises(ValueError, match="nothing is gathered under strategy 'optim_grads'"):
        wrap(Model(), data_parallel_sharding_strategy="optim_grads", reshard_after_forward=False)
    for wrong in (0, 1, 2, 2.0, "2", None):
        with pytest.raises(ValueError, match="reshard_after_forward must be True or False, got"):
            sharded(Model(), reshard_after_forward=wrong)
    placed = Placement(memory_budget_bytes=10_000, directory=".", offload_param_frac=1.0, offload_optim_frac=1.0)
    with pytest.raises(ValueError, match="reshard_after_forward=False keeps every bucket unsharded"):
        sharded(Model(), reshard_after_forward=False, placement=placed)


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_one_lost_write_does_not_leave_other_buckets_with_values(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    ddp = sharded(model, bucket_size=256, reshard_after_forward=False, share_host_memory=share)

    def write(*_: Any) -> None:
        for layer in model:
            layer.weight.detach().zero_()

    model.register_forward_hook(write)
    with pytest.raises(SyncError, match="was written while its values were gathered"):
        ddp(torch.ones(3, 16))
    assert not any(unit.is_unsharded for unit in unsharder_of(ddp).units)
    assert len(list(plain(ddp))) == 3


def plain(ddp: DistributedDataParallel) -> Iterator[torch.Tensor]:
    """What parameters are that are not gathered."""
    for unit in unsharder_of(ddp).units:
        for param, home in zip(unit.params, unit.home, strict=True):
            assert type(param) is unit.param_classes[0]
            with torch._C.DisableTorchFunctionSubclass():
                assert param.data_ptr() == home.data_ptr() and bool(param.isnan().all()) == unit.is_copied
                yield param.detach()


def evaluated_by(ddp: DistributedDataParallel) -> float:
    with torch.no_grad():
        return float(loss_of(ddp, 0, 7))


@ranks(2)
def test_no_rank_computes_with_values_that_another_one_writes(rank: int, world: int) -> None:
    """Ranks of one host compute in one memory. What one does late another one must not have overwritten, or read."""
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model())
    unsharder = unsharder_of(ddp)
    assert not any(unit.is_copied for unit in unsharder.units)
    assert "is always whole in memory that its ranks map from each other" in ddp.describe()
    start = evaluated_by(ddp)

    def late(*_: Any) -> None:
        time.sleep(0.3 * rank)

    def write() -> None:
        for unit in unsharder.units:
            unit.shard.mul_(0.5)

    handle = ddp.module.blocks[1].register_forward_pre_hook(late)
    if rank == 1:  # rank 0 is about to write
        assert evaluated_by(ddp) == start
    handle.remove()
    ddp.begin_param_update()  # a step, as an optimizer makes it
    late()
    write()
    ddp.start_param_sync()
    stepped = evaluated_by(ddp)  # rank 1 has just written
    torch.distributed.barrier()
    assert stepped == evaluated_by(ddp) != start
    torch.distributed.barrier()
    ddp.begin_param_update()
    late()
    write()  # a load
    ddp.record_param_write()
    loaded = evaluated_by(ddp)
    torch.distributed.barrier()
    assert loaded == evaluated_by(ddp) != stepped


@ranks(2)
def test_a_load_of_the_optimizer_waits_for_ranks_that_compute_and_for_no_one_afterwards(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(torch.bfloat16), grad_reduce_in_fp32=True)
    remainders = {"use_precision_aware_optimizer": True, "store_param_remainders": True}
    optimizer = get_megatron_optimizer(OptimizerConfig(bf16=True, **ADAM, **remainders), [ddp])
    start, state = evaluated_by(ddp), copy.deepcopy(optimizer.state_dict())
    for entry in itertools.chain.from_iterable(state["state"].values()):
        entry[MASTER].mul_(0.5)
    handle = ddp.module.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(0.3))
    if rank == 1:  # rank 0 is about to write what rank 1 reads
        assert evaluated_by(ddp) == start
    handle.remove()
    optimizer.load_state_dict(state)
    unsharder_of(ddp).channels[0].timeout_s = 3
    if rank == 0:  # alone, as for an evaluation after a resume
        assert evaluated_by(ddp) != start
    torch.distributed.barrier()
    with unsharder_of(ddp).loading(), torch.no_grad():
        ddp.module.places.copy_(torch.ones(6, WIDTH))
    if rank == 0:
        evaluated_by(ddp)
    torch.distributed.barrier()
