"""torch's rules for `.grad`, in every sharding strategy: backward adds, None is no gradient, an edit is followed."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from core import parallel_state
from core.distributed import DistributedDataParallel, SyncError, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, loss_of, make_net, mean_over_ranks, whole_grads, wrap

STRATEGIES = ("no_shard", "optim", "optim_grads")
ADAMW = {"optimizer": "adam", "lr": 0.1, "weight_decay": 0.3, "clip_grad": 0.0, "adam_eps": 1e-8}


def make_optimizer(ddp: DistributedDataParallel, **options: Any) -> Any:
    return get_megatron_optimizer(OptimizerConfig(**{**ADAMW, **options}), [ddp], config_overrides={})


def torch_adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3, betas=(0.9, 0.999), eps=1e-8)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_finalize_after_every_microbatch_adds_up_as_torch_ddp_does(rank: int, world: int, overlap: bool) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model = make_net()
        peer = TorchDDP(copy.deepcopy(model))
        expected = mean_over_ranks(model, world, (0, 1, 2))
        for options in ({}, {"reduce_microbatches": "every"}) if strategy == "optim_grads" else ({},):
            ddp = wrap(
                copy.deepcopy(model),
                data_parallel_sharding_strategy=strategy,
                overlap_grad_reduce=overlap,
                bucket_size=30,
                **options,
            )
            for _ in range(2):  # the second time after zeroing
                ddp.zero_grad_buffer()
                peer.zero_grad()
                for microbatch in range(3):
                    loss_of(ddp, rank, microbatch).backward()
                    finalize_model_grads([ddp])
                    loss_of(peer, rank, microbatch).backward()
                assert_same(whole_grads(ddp), expected)
                assert_same({name: param.grad for name, param in peer.module.named_parameters()}, expected)


@ranks(2)
def test_adding_to_gradients_that_are_scaled_in_the_optimizer_is_exact(rank: int, world: int) -> None:
    """100 and 1 make 101, whatever is left for the optimizer to multiply."""
    parallel_state.initialize_model_parallel()
    for strategy in ("optim", "optim_grads"):
        model = nn.Linear(3, 1, bias=False)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, scale_in_optimizer=True)
        for value in (100.0, 1.0):
            ddp(torch.full((1, 3), value)).sum().backward()
            finalize_model_grads([ddp])
        for bucket in ddp.reducer.buckets:
            numel = bucket.valid_part(0).numel()
            assert (bucket.memory.owned_grad * bucket.step.pending_scale)[:numel].tolist() == [101.0] * numel


@ranks(2)
def test_gradients_dropped_in_part_between_two_finalizes_begin_again_there(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        for zero in (False, True):
            model = make_net()
            both, second = mean_over_ranks(model, world, (0, 1)), mean_over_ranks(model, world, (1,))
            ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=30)
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            if zero:
                ddp.module.second.weight.grad.zero_()
            else:
                ddp.module.second.weight.grad = None
            loss_of(ddp, rank, 1).backward()
            finalize_model_grads([ddp])
            assert_same(whole_grads(ddp), {**both, "second.weight": second["second.weight"]})


@ranks(2)
def test_a_rank_without_a_backward_adds_nothing_to_what_is_there(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model = make_net()
        expected = mean_over_ranks(model, world, (0,))
        for name, grad in mean_over_ranks(model, 1, (1,)).items():
            expected[name] += grad / world  # rank 0's second microbatch alone
        ddp = wrap(model, data_parallel_sharding_strategy=strategy)
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        loss = loss_of(ddp, rank, 1)
        if rank == 0:
            loss.backward()
        finalize_model_grads([ddp])
        assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_force_all_reduce_after_a_sharded_finalize_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), use_distributed_optimizer=True)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    loss_of(ddp, rank, 1).backward()
    with pytest.raises(SyncError, match="force_all_reduce=True came on a rank of data group 'dp_cp'"):
        finalize_model_grads([ddp], force_all_reduce=rank == 0)  # asked for by one of them


# -- edits between finalize and step ------------------------------------------------------------------------------


def times_ten(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = param.grad * 10


def in_place(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad.mul_(10)


def drop_one(model: nn.Module) -> None:
    model.second.weight.grad = None


def clip_by_torch(model: nn.Module) -> None:
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.02


@ranks(2)
@pytest.mark.parametrize("edit", [times_ten, in_place, drop_one, clip_by_torch])
def test_edits_of_whole_gradients_reach_the_step(rank: int, world: int, edit: Any) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model = make_net()
        plain = copy.deepcopy(model)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=30)
        config = OptimizerConfig(optimizer="sgd", lr=0.5, weight_decay=0.1, clip_grad=0.0)
        optimizer = get_megatron_optimizer(config, [ddp], config_overrides={})
        reference = torch.optim.SGD(plain.parameters(), lr=0.5, weight_decay=0.1, momentum=0.9)
        before = weights(plain)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            finalize_model_grads([ddp], force_all_reduce=True)
            edit(ddp.module)
            optimizer.step()
            for name, grad in mean_over_ranks(plain, world, (step,)).items():
                plain.get_parameter(name).grad = grad.clone()
            edit(plain)
            reference.step()
        assert_same(weights(model), weights(plain))
        assert all((weights(plain)[name] - before[name]).norm() > 1e-4 for name in before if "second" not in name)


def clip_value(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def log_norms(model: nn.Module) -> None:
    print(sum(param.grad.norm() for param in model.parameters()))


def copy_gradient(model: nn.Module) -> None:
    copy.deepcopy(model.second.weight.grad)


@ranks(2)
@pytest.mark.parametrize("use", [clip_by_torch, clip_value, in_place, times_ten, log_norms, copy_gradient])
def test_a_gradient_that_is_not_there_refuses_to_be_used_by_name(rank: int, world: int, use: Any) -> None:
    """Sharded, still to be scaled, or in flight."""
    parallel_state.initialize_model_parallel()
    cases = [
        {"data_parallel_sharding_strategy": "optim"},
        {"data_parallel_sharding_strategy": "optim_grads"},
        {"scale_in_optimizer": True},
        {"overlap_grad_reduce": True},
    ]
    for options in cases:
        ddp = wrap(make_net(), **options)
        expected = mean_over_ranks(ddp.module, world)
        loss_of(ddp, rank, 0).backward()
        if "overlap_grad_reduce" not in options:
            finalize_model_grads([ddp])
        assert ddp.module.second.weight.grad.shape == ddp.module.second.weight.shape
        with pytest.raises(SyncError, match=r"gradient of '.*(weight|bias)', which is not in `.grad` now"):
            use(ddp.module)
        if "overlap_grad_reduce" in options:
            finalize_model_grads([ddp])
        for bucket in ddp.reducer.buckets:
            due, bucket.step.pending_scale = bucket.step.pending_scale, 1.0
            bucket.scale_gradients(due)
        assert_same(whole_grads(ddp), expected)


def by_torch(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()


def to_zeros(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


@ranks(2)
@pytest.mark.parametrize(
    ("drop", "dropped_on"), [(by_torch, (0, 1)), (by_torch, (1,)), (to_zeros, (0, 1)), (drop_one, (1,))]
)
@pytest.mark.parametrize(
    "options",
    [
        {"overlap_grad_reduce": True},
        {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
        {"data_parallel_sharding_strategy": "optim_grads"},
        {"data_parallel_sharding_strategy": "optim_grads", "reduce_microbatches": "every"},
    ],
)
@pytest.mark.in_suite()
def test_a_gradient_dropped_after_its_reduction_has_begun_is_refused_on_all_ranks(
    rank: int, world: int, options: dict[str, Any], drop: Any, dropped_on: tuple[int, ...]
) -> None:
    """It cannot be taken back; zero_grad_buffer() drops it, and training goes on."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), **options)
    expected = mean_over_ranks(ddp.module, world, (1,))
    loss_of(ddp, rank, 0).backward()
    if rank in dropped_on:
        drop(ddp.module)
    loss_of(ddp, rank, 1).backward()
    with pytest.raises(SyncError, match="was dropped through `.grad`.*after its reduction had begun"):
        finalize_model_grads([ddp])
    ddp.zero_grad_buffer()
    loss_of(ddp, rank, 1).backward()
    finalize_model_grads([ddp])
    assert_same(whole_grads(ddp), expected)


@ranks(2)
@pytest.mark.parametrize("reduced", ["last", "every"])
def test_gradients_zeroed_after_a_failed_backward_are_refused_if_they_are_in_the_bucket(
    rank: int, world: int, reduced: str
) -> None:
    """A loop that catches an error of backward and calls torch's zero_grad: part of the bucket has been collected."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), data_parallel_sharding_strategy="optim_grads", reduce_microbatches=reduced)
    expected = mean_over_ranks(ddp.module, world, (1,))

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("of the user")

    handle = ddp.module.first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="of the user"):
        loss_of(ddp, rank, 0).backward()
    handle.remove()
    to_zeros(ddp.module)
    loss_of(ddp, rank, 1).backward()
    with pytest.raises(SyncError, match="was dropped through `.grad`.*after its reduction had begun"):
        finalize_model_grads([ddp])
    ddp.zero_grad_buffer()
    loss_of(ddp, rank, 1).backward()
    finalize_model_grads([ddp])
    assert_same(whole_grads(ddp), expected)


@ranks(2)
def test_a_hook_of_the_users_that_runs_after_the_launch_is_refused(rank: int, world: int) -> None:
    """Registered after the wrap it runs after ours, which may have launched the bucket; before the wrap it is right."""
    parallel_state.initialize_model_parallel()

    def halve(param: torch.Tensor) -> None:
        param.grad.mul_(0.5)

    for options in ({"overlap_grad_reduce": True}, {"data_parallel_sharding_strategy": "optim_grads"}):
        for before in (True, False):
            model = nn.Linear(1, 1, bias=False)
            if before:
                model.weight.register_post_accumulate_grad_hook(halve)
            ddp = wrap(model, **options)
            if before:
                ddp(torch.full((1, 1), 2.0)).sum().backward()
                finalize_model_grads([ddp], force_all_reduce="overlap_grad_reduce" not in options)
                assert model.weight.grad.item() == 1.0
            else:
                model.weight.register_post_accumulate_grad_hook(halve)
                with pytest.raises(SyncError, match="mul_.* was asked of the gradient of 'weight'"):
                    ddp(torch.full((1, 1), 2.0)).sum().backward()
                ddp.zero_grad_buffer()
            del ddp


@ranks(2)
def test_an_edit_that_a_shard_cannot_follow_is_refused_on_all_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in ("optim", "optim_grads"):
        for edit in ("set to None", "replaced", "added to"):
            model = make_net()
            before = weights(model)
            ddp = wrap(model, data_parallel_sharding_strategy=strategy)
            optimizer = make_optimizer(ddp)
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            if rank == 1:
                weight = ddp.module.second.weight
                if edit == "added to":
                    weight.grad.add_(1.0)
                else:
                    weight.grad = None if edit == "set to None" else torch.ones_like(weight)
            with pytest.raises(
                SyncError, match=f"rank 1: the step was not made: the `.grad` of 'second.weight' was {edit}"
            ):
                optimizer.step()
            assert_same(weights(model), before)


# -- parameters that no rank used ---------------------------------------------------------------------------------


class Branches(nn.Module):
    """Three layers; which of them run is said from outside."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        self.double()

    def forward(self, inputs: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for number in used:
            inputs = torch.tanh(self.layers[number](inputs))
        return inputs.square().sum()


# Which layers each rank's microbatch runs, step by step.
PATTERN = [((0, 1), (0, 1, 2)), ((0, 1), (0, 1)), ((0,), (2,)), ((1,), (1,)), ((0, 1, 2), (0, 1, 2))]


@ranks(2)
@pytest.mark.parametrize("engine", ["torch optimizer", "no_shard", "optim", "optim_grads"])
def test_a_parameter_that_no_rank_used_neither_decays_nor_moves(rank: int, world: int, engine: str) -> None:
    """torch's rule: no gradient, no update. Adam's step counts follow, so later updates are equal as well."""
    parallel_state.initialize_model_parallel()
    for overlap in (False, True):
        model = Branches()
        plain = copy.deepcopy(model)
        strategy = "no_shard" if engine == "torch optimizer" else engine
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=17)
        optimizer = torch_adamw(model) if engine == "torch optimizer" else make_optimizer(ddp)
        reference = torch_adamw(plain)
        start = weights(plain)
        data = torch.randn(len(PATTERN), world, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        for step, used in enumerate(PATTERN):
            optimizer.zero_grad() if step % 2 else ddp.zero_grad_buffer()
            ddp(data[step, rank], used[rank]).backward()
            finalize_model_grads([ddp])
            optimizer.step()
            reference.zero_grad()
            (sum(plain(data[step, r], used[r]) for r in range(world)) / world).backward()
            reference.step()
            assert_same(weights(model), weights(plain), rtol=1e-9)
        assert all((weights(plain)[name] - start[name]).norm() > 0.1 for name in start)


@ranks(2)
def test_a_gradient_written_by_hand_counts_as_one(rank: int, world: int) -> None:
    """Without a backward no hook runs: what the user writes into the buffer himself is found there."""
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim"):
        model = make_net()
        plain = copy.deepcopy(model)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy)
        optimizer, reference = make_optimizer(ddp), torch_adamw(plain)
        for step in range(2):
            optimizer.zero_grad()
            for number, param in enumerate(model.parameters()):
                if rank == 1 and number % 2:
                    param.main_grad.fill_(1.0 + step)
            finalize_model_grads([ddp])
            optimizer.step()
            for number, param in enumerate(plain.parameters()):
                param.grad = torch.full_like(param, (1.0 + step) / world) if number % 2 else None
            reference.step()
        assert_same(weights(model), weights(plain))


@ranks(4)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_a_copy_used_on_one_tensor_parallel_rank_is_updated_on_all(rank: int, world: int, strategy: str) -> None:
    """Partial gradients of a replicated parameter: one rank has used it, so no copy may be left behind."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model = Branches()
    for param in model.parameters():
        param.sequence_parallel = True
    plain = copy.deepcopy(model)
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    optimizer, reference = make_optimizer(ddp), torch_adamw(plain)
    tp = parallel_state.get_tensor_model_parallel_rank()
    data = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for used in (((0, 1), (0,)), ((0,), (0, 2)), ((0,), (0,))):
        optimizer.zero_grad()
        ddp(data, used[tp]).backward()
        finalize_model_grads([ddp])
        optimizer.step()
        reference.zero_grad()
        sum(plain(data, layers) for layers in used).backward()
        reference.step()
        assert_same(weights(model), weights(plain), rtol=1e-9)


@ranks(4)
def test_a_copy_frozen_on_one_tensor_parallel_rank_is_refused_on_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for strategy in ("no_shard", "optim"):
        ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy)
        loss_of(ddp, 0, 0).backward()
        finalize_model_grads([ddp])
        ddp.zero_grad_buffer()
        if parallel_state.get_tensor_model_parallel_rank() == 1:
            ddp.module.second.weight.requires_grad_(False)
        loss_of(ddp, 0, 0).backward()
        with pytest.raises(
            SyncError, match=r"'second.weight' is frozen on ranks \[[13]\] and trained on .* group 'tp'"
        ):
            finalize_model_grads([ddp])


@ranks(2)
def test_momentum_of_a_parameter_that_is_first_used_later_starts_then(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in STRATEGIES:
        model = Branches()
        plain = copy.deepcopy(model)
        ddp = wrap(model, data_parallel_sharding_strategy=strategy)
        config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.9, lr=0.1, weight_decay=0.3, clip_grad=0.0)
        optimizer = get_megatron_optimizer(config, [ddp], config_overrides={})
        reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, weight_decay=0.3)
        data = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        for used in ((0,), (0, 1), (1, 2), (0, 1, 2)):
            optimizer.zero_grad()
            ddp(data, used).backward()
            finalize_model_grads([ddp])
            optimizer.step()
            reference.zero_grad()
            plain(data, used).backward()
            reference.step()
        assert_same(weights(model), weights(plain), rtol=1e-9)
