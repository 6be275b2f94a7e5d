"""Strategy optim_grads_params: what a rank does not hold it cannot use by mistake, and whatever is right has equal bits
to optim_grads. (Random trainings against plain torch: test_training_habits.)
"""

from __future__ import annotations

import copy
import gc
import itertools
import time
import weakref
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
from core.distributed.sharded.param_unit import KeepGathered, ParamUnit
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
        self.whole = torch.zeros(self.layout.numel, dtype=self.shard.dtype)
        self._own_part(self.whole).copy_(self.shard)
        return self.whole

    with mock.patch.object(ParamUnit, "gather", own_part_alone):
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
    gather, most = ParamUnit.gather, []

    def counted(self: ParamUnit, *arguments: Any) -> torch.Tensor:
        whole = gather(self, *arguments)
        most.append(sum(unit.whole is not None for unit in unsharder.units))
        return whole

    with mock.patch.object(ParamUnit, "gather", counted):
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
        return [number for number, unit in enumerate(by_layer) if unit.whole is not None]

    with torch.no_grad():
        ddp(torch.ones(3, 16))
    assert whole() == [4, 5]
    complete = ParamUnit.complete
    with mock.patch.object(ParamUnit, "complete", autospec=True, side_effect=complete) as gathers:
        loss = ddp(torch.ones(3, 16)).sum()
        assert whole() == [0, 1, 2, 3, 4, 5] and gathers.call_count == 4
        loss.backward()
        assert whole() == [] and gathers.call_count == 4
    by_layer[1].keep_gathered, by_layer[2].keep_gathered = KeepGathered.WINDOW, KeepGathered.STEP
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
    with pytest.raises(ValueError, match="reshard_after_forward=False keeps all buckets"):
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
    ddp.note_param_write()
    loaded = evaluated_by(ddp)
    torch.distributed.barrier()
    assert loaded == evaluated_by(ddp) != stepped


@ranks(2)
def test_a_load_of_the_optimizer_waits_for_ranks_that_compute_and_for_nobody_afterwards(rank: int, world: int) -> None:
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


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_a_parameter_that_is_not_gathered_has_a_shape_and_no_values(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(), share_host_memory=share)
    weight, start = ddp.module.words.weight, Model().words.weight
    assert (weight.shape, weight.numel(), weight.dtype, weight.device) == (start.shape, 132, start.dtype, start.device)
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
    assert ("nan" in repr(weight)) == (not share)
    with torch.no_grad():
        for use in (
            lambda: weight.norm(),
            lambda: weight.data,
            lambda: weight[0],
            lambda: F.linear(torch.ones(WIDTH), weight),
            lambda: copy.deepcopy(weight),
            lambda: copy.deepcopy(ddp),
            lambda: ddp.module.state_dict(),
            lambda: ddp.module.blocks[0].state_dict(),
            lambda: ddp.module.blocks[0].load_state_dict({}),
            lambda: ddp.module.half(),
        ):
            with pytest.raises(SyncError, match="gathered"):
                use()
        for write in (
            lambda: weight.zero_(),
            lambda: weight.copy_(start),
            lambda: weight.__setitem__(0, 1.0),
            lambda: setattr(weight, "data", start),
            lambda: nn.init.normal_(weight),
            lambda: torch.add(start, 1, out=weight),
            lambda: torch._foreach_mul_([weight], 2.0),
        ):
            with pytest.raises(SyncError, match="is sharded and not gathered, so it cannot be written"):
                write()
    with ddp.gathered():
        assert type(weight) is nn.Parameter and torch.equal(weight, start)
    with pytest.raises(SyncError, match="gathered"):
        weight.sum()


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_a_model_is_moved_to_where_it_is_and_nowhere_else(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    alone = Tower()
    ddp = sharded(copy.deepcopy(alone), share_host_memory=share)
    inputs = torch.ones(2, 16)
    assert ddp.to("cpu").float().to(dtype=torch.float32) is ddp
    assert torch.equal(ddp(inputs), alone(inputs))
    for move in (ddp.double, lambda: ddp.to(torch.bfloat16), lambda: ddp.to("meta")):
        with pytest.raises(SyncError, match="'layers.0.weight' is used outside of a forward"):
            move()
    assert torch.equal(ddp(inputs), alone(inputs))


@ranks(1)
def test_a_parameter_in_a_structure_that_is_not_searched_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model())
    weight = ddp.module.words.weight
    with pytest.raises(SyncError, match="add was given a sharded parameter inside something else than lists"):
        type(weight).__torch_function__(torch.add, (type(weight),), ({weight},))


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_what_is_written_inside_gathered_stays_on_all_ranks(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(), share_host_memory=share)
    optimizer = get_megatron_optimizer(OptimizerConfig(**SGD), [ddp])
    with ddp.gathered(), torch.no_grad():
        with ddp.gathered():
            ddp.module.words.weight.mul_(2)
        ddp.module.blocks[0].up.weight.data = torch.full((17, WIDTH), 3.0)
        ddp.module.places.data[1] = -0.0
        inside = {name: value.clone() for name, value in ddp.state_dict().items()}
    after = ddp.state_dict()
    assert all(torch.equal(after[name], value) for name, value in inside.items())
    assert torch.equal(after["words.weight"], 2 * Model().words.weight) and after["blocks.0.up.weight"].eq(3).all()
    ddp.load_state_dict(Model().state_dict())
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    optimizer.step()
    moved = ddp.state_dict()["words.weight"]
    assert 0 < (moved - Model().words.weight).abs().max() < 1


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_misuse_is_refused_by_name(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(), share_host_memory=share)
    optimizer = get_megatron_optimizer(OptimizerConfig(**SGD), [ddp])
    early = loss_of(ddp, rank, 1)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    with ddp.gathered(), pytest.raises(SyncError, match=r"an optimizer's step came inside gathered\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    optimizer.step()
    with pytest.raises(RuntimeError, match=WRITTEN[share]):
        early.backward()

    def write(module: nn.Module, inputs: Any) -> None:
        with torch.no_grad():
            module.weight.clamp_(-0.01, 0.01)

    def shown_write(module: nn.Module, inputs: Any) -> None:
        with torch.no_grad():
            float(module.weight.sum())  # gathers it
            module.weight.clamp_(-0.01, 0.01)

    for hook in (write, shown_write):
        handle = ddp.module.blocks[1].up.register_forward_pre_hook(hook)
        with pytest.raises(SyncError, match="'blocks.1.up.weight' (is sharded and|was written while its values were)"):
            loss_of(ddp, rank, 0)
        handle.remove()


@ranks(1)
def test_what_is_no_weight_keeps_the_check_of_writes_in_place(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()))
    saved = ddp(torch.ones(2, 3))
    with torch.no_grad():
        saved.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*is at version 1; expected version 0"):
        saved.sum().backward()


@ranks(1)
def test_a_forward_without_a_backward_leaves_nothing_behind(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    kept: list[weakref.ref[torch.Tensor]] = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Linear(3, 3))
    model[1].register_forward_hook(lambda module, inputs, output: kept.append(weakref.ref(output)))
    ddp = sharded(model)
    ddp(torch.ones(2, 3))
    gc.collect()
    assert [reference() for reference in kept] == [None]


class ByWeight(nn.Module):
    """Takes its input to its weight's dtype, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x.to(self.linear.weight))
        return found


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_an_input_is_converted_to_what_a_weight_is(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    alone = ByWeight()
    ddp = sharded(copy.deepcopy(alone), share_host_memory=share)
    for dtype in (torch.float32, torch.float64):
        inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank), dtype=dtype)
        assert torch.equal(ddp(inputs), alone(inputs))


class Tower(nn.Module):
    """Layers of one bucket each, in an order that can be changed."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(layers)])
        self.order = list(range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = torch.tanh(self.layers[number](x))
        return x


@ranks(1)
def test_options_that_gather_in_the_step_are_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with pytest.raises(ValueError, match="nothing is gathered there"):
        sharded(Model(), overlap_param_gather=True)
    config = OptimizerConfig(overlap_param_gather_with_optimizer_step=True, **SGD)
    with pytest.raises(ValueError, match="the step gathers nothing"):
        get_megatron_optimizer(config, [sharded(Model())])


# -- weights that are saved as themselves -----------------------------------------------------------------------------


class Gate(torch.autograd.Function):
    """Saves three weights at once, more than the window, and looks at their signs in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        one, two, three = weights
        return x @ one.abs() @ two.abs() @ three.abs()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, one, two, three = ctx.saved_tensors
        last = grad @ three.abs().T
        first = last @ two.abs().T
        return (
            first @ one.abs().T,
            x.T @ first * one.sign(),
            (x @ one.abs()).T @ last * two.sign(),
            (x @ one.abs() @ two.abs()).T @ grad * three.sign(),
        )


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(24, 24) / 5) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Gate.apply(x, *list(self.weights)[:3])
        return checkpoint(lambda y, weight: (y @ weight.abs()).tanh(), x, self.weights[3], use_reentrant=False)


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_a_weight_that_is_saved_as_itself_has_its_values_in_backward(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    seen = []
    for strategy in ("optim_grads", "optim_grads_params"):
        model = Gated()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        options = {"bucket_size": 300, "reduce_microbatches": "every", "share_host_memory": share}
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, **options)
        optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=0.0, **SGD), [ddp])
        for step in range(2):
            optimizer.zero_grad()
            loss = ddp(torch.randn(5, 24, generator=torch.Generator().manual_seed(rank + 9 * step))).sum()
            with ddp.gathered():  # a penalty, as outside of any forward
                loss = loss + sum(weight.abs().sum() + weight.clamp(min=0.1).pow(2).sum() for weight in model.weights)
            loss.backward()
            finalize_model_grads([ddp])
            assert optimizer.step()[0]
        seen.append(ddp.state_dict())
    for name, value in seen[0].items():
        assert torch.equal(value, seen[1][name]) and (value - start[name]).abs().min() > 0, name


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_a_write_between_a_forward_and_its_backward_is_seen(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Gated(), share_host_memory=share)
    with ddp.gathered():
        loss = ddp(torch.ones(5, 24)).sum()
        with torch.no_grad():
            ddp.module.weights[1].mul_(1.5)
        with pytest.raises(RuntimeError, match=WRITTEN[share]):
            loss.backward()
    with ddp.gathered():
        views = [weight.view(-1) for weight in ddp.module.weights]
    with torch.no_grad():
        views[0].mul_(2)
    with pytest.raises(SyncError, match="was written, or given other memory, while it was not gathered"):
        ddp(torch.ones(5, 24))


@ranks(2)
def test_hooks_of_others_around_the_forward_are_refused_where_weights_move(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Gated(), share_host_memory=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        with pytest.raises(SyncError, match="inside other saved-tensor hooks"):
            ddp(torch.ones(5, 24))
        with torch.no_grad():
            ddp(torch.ones(5, 24))
    loss_before = float(ddp(torch.ones(5, 24)).sum())
    with pytest.raises(SyncError, match="inside other saved-tensor hooks"):
        checkpoint(ddp, torch.ones(5, 24, requires_grad=True), use_reentrant=False)
    assert float(ddp(torch.ones(5, 24)).sum()) == loss_before


@ranks(1)
def test_an_interrupt_in_a_forward_leaves_nothing_behind(rank: int, world: int) -> None:
    """torch tells no hook of a KeyboardInterrupt that a module's forward has ended."""
    parallel_state.initialize_model_parallel()
    model = Model()
    ddp, other = sharded(model), sharded(Gated())
    expected = float(loss_of(ddp, rank, 0))

    def interrupt(module: nn.Module, inputs: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[1].up.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss_of(ddp, rank, 0)
    handle.remove()
    other(torch.ones(5, 24)).sum().backward()  # refused inside the hooks of another model
    loss = loss_of(ddp, rank, 0)
    loss.backward()
    finalize_model_grads([ddp])
    assert float(loss) == expected
    with ddp.gathered():
        assert model.words.weight.isfinite().all()


@ranks(2)
def test_a_parameter_that_another_wrapper_has_sharded_is_refused_at_the_wrap(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = Gated()
    ddp = sharded(model)
    with pytest.raises(ValueError, match="'weights.0' is sharded by another wrapper"):
        wrap(model)
    del ddp
    gc.collect()
    with pytest.raises(ValueError, match="'weights.0' is sharded by another wrapper"):
        wrap(model)


@ranks(2)
def test_a_bucket_of_nothing_is_gathered(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Linear(24, 24)
    model.nothing = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
    ddp = sharded(model)
    with ddp.gathered():
        assert model.nothing.shape == (0, 3)
    ddp(torch.ones(2, 24)).sum().backward()
    finalize_model_grads([ddp])


@ranks(2)
def test_a_bucket_of_nothing_lies_beside_others_in_mapped_memory(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Linear(24, 24)
    model.nothing, model.more = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(0), requires_grad=False)
    ddp = sharded(model, bucket_size=1)
    ddp(torch.ones(2, 24)).sum().backward()
    finalize_model_grads([ddp])
    with ddp.gathered():
        assert model.nothing.shape == (0, 3)


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_ranks_that_write_different_values_inside_gathered_are_refused(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    ddp = sharded(Model(), share_host_memory=share)
    refusal = "'blocks.1.up.weight' has other values on ranks .* on all ranks, or broadcast"
    with pytest.raises(SyncError, match=refusal), ddp.gathered(), torch.no_grad():
        ddp.module.places.zero_()
        if rank == 0:
            ddp.module.blocks[1].up.weight.fill_(0.5)
    assert all(torch.equal(ddp.state_dict()[name], value) for name, value in Model().state_dict().items())
    with ddp.gathered(), torch.no_grad():
        if rank == 0:
            ddp.module.blocks[1].up.weight.fill_(0.5)
        torch.distributed.broadcast(ddp.module.blocks[1].up.weight, 0)
    assert ddp.state_dict()["blocks.1.up.weight"].eq(0.5).all()


@ranks(4)
def test_writes_of_some_ranks_alone_leave_gathered_on_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False))
    model[0].weight.tensor_model_parallel = True
    model[0].weight.partition_dim, model[0].weight.partition_stride = 0, 1
    model[1].weight.allreduce = False
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    ddp = sharded(model)
    for _ in range(2):
        with ddp.gathered(), torch.no_grad():
            if parallel_state.get_tensor_model_parallel_rank() == 0:
                model[0].weight.add_(1)
    expected = 2.5 if parallel_state.get_tensor_model_parallel_rank() == 0 else 0.5
    assert ddp.state_dict()["0.weight"].eq(expected).all()


@ranks(2)
@pytest.mark.parametrize("share", [True, False])
def test_an_error_inside_gathered_on_one_rank_is_told_to_all(rank: int, world: int, share: bool) -> None:
    parallel_state.initialize_model_parallel()
    alone = Tower()
    ddp = sharded(copy.deepcopy(alone), share_host_memory=share)
    told = "rank 1 failed: KeyError: 'no such file'" if rank == 0 else "no such file"
    with pytest.raises(SyncError if rank == 0 else KeyError, match=told), ddp.gathered(), torch.no_grad():
        ddp.module.layers[0].weight.zero_()
        if rank == 1:
            raise KeyError("no such file")
    assert torch.equal(ddp(torch.ones(2, 16)), alone(torch.ones(2, 16))), "nothing was taken over"
