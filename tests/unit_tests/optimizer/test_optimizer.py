"""Steps of the replicated and the sharded optimizer against plain torch.optim on one process, unsplit.

SGD with a large step first: Adam would hide a wrong scale. Every comparison also asserts that the reference moved.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.groups.agree import SyncError
from core.optimizer import DistributedOptimizer, OptimizerConfig, ReplicatedOptimizer, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap

STRATEGIES = ("no_shard", "optim")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.02, "sgd_momentum": 0.9, "weight_decay": 0.1},
    "adamw": {"optimizer": "adam", "lr": 0.05, "weight_decay": 0.1, "adam_eps": 1e-3},
    "adam": {"optimizer": "adam", "lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": False},
}


def torch_optimizer(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Plain torch on the whole model, matrices with weight decay and vectors without."""
    params = list(model.parameters())
    decay = options["weight_decay"]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if options["optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=options["lr"], momentum=options["sgd_momentum"])
    cls = torch.optim.AdamW if options.get("decoupled_weight_decay", True) else torch.optim.Adam
    return cls(groups, lr=options["lr"], eps=options.get("adam_eps", 1e-8))


class Reference:
    """One process that sees the batches of all data ranks."""

    def __init__(self, model: nn.Module, world: int, *, clip_grad: float = 0.0, **options: Any) -> None:
        self.model = copy.deepcopy(model)
        self.start = copy.deepcopy(model)
        self.world = world
        self.clip_grad = clip_grad
        self.optimizer = torch_optimizer(self.model, **options)

    def step(self, microbatch: int) -> float:
        self.optimizer.zero_grad()
        for rank in range(self.world):
            (loss_of(self.model, rank, microbatch) / self.world).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad or float("inf"))
        self.optimizer.step()
        return norm.item()

    def assert_equals(self, ddp: DistributedDataParallel, *, rtol: float = 1e-10) -> None:
        expected = dict(self.model.named_parameters())
        start = dict(self.start.named_parameters())
        for name, param in ddp.module.named_parameters():
            want = expected[name]
            moved = (want - start[name]).norm()
            if want.requires_grad:
                assert moved > 1e-3, f"{name}: the reference moved by {moved} only"
            error = (param.to(want.dtype) - want).norm()
            assert error <= rtol * max(moved, want.norm()), f"{name}: off by {error} after a move of {moved}"


def train_step(ddp: DistributedDataParallel, optimizer: Any, rank: int, microbatch: int) -> Any:
    optimizer.zero_grad()
    loss_of(ddp, rank, microbatch).backward()
    finalize_model_grads([ddp])
    return optimizer.step()


@ranks(1, 3, nightly=(2, 4))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.in_suite()
def test_steps_equal_those_of_one_process_on_the_whole_batch(
    rank: int, world: int, strategy: str, algorithm: str
) -> None:
    parallel_state.initialize_model_parallel()
    for overlap, clip_grad in ((False, 0.0), (True, 3.0)):
        model = make_net(width=61)
        reference = Reference(model, world, clip_grad=clip_grad, **ALGORITHMS[algorithm])
        ddp = wrap(
            model,
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and strategy == "optim",
            bucket_size=60,
        )
        optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=clip_grad, **ALGORITHMS[algorithm]), [ddp])
        assert type(optimizer) is (DistributedOptimizer if strategy == "optim" else ReplicatedOptimizer)
        if strategy == "optim" and world > 1:
            shards = [shard for masters in optimizer.masters for shard in masters.shards]
            cut = torch.tensor(sum(shard.numel < shard.param.numel() for shard in shards))
            dist.all_reduce(cut)
            assert cut > 0, "no parameter crosses a shard's border"
        for microbatch in range(4):
            updated, norm, zeros = train_step(ddp, optimizer, rank, microbatch)
            expected_norm = reference.step(microbatch)
            assert updated and zeros is None
            assert norm == pytest.approx(expected_norm, rel=1e-12)
            assert clip_grad == 0 or expected_norm > 2 * clip_grad, "nothing was clipped"
        reference.assert_equals(ddp)


@ranks(4)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_optimizer_instances_step_like_one_process(rank: int, world: int, algorithm: str) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    model = make_net(width=61)
    reference = Reference(model, world, clip_grad=3.0, **ALGORITHMS[algorithm])
    ddp = wrap(model, use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
    optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=3.0, **ALGORITHMS[algorithm]), [ddp])
    for microbatch in range(3):
        _, norm, _ = train_step(ddp, optimizer, rank, microbatch)
        assert norm == pytest.approx(reference.step(microbatch), rel=1e-12)
    reference.assert_equals(ddp)


@ranks(2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("grads_in_fp32", [True, False])
@pytest.mark.in_suite()
def test_bf16_parameters_keep_small_updates_in_fp32_masters(
    rank: int, world: int, strategy: str, grads_in_fp32: bool
) -> None:
    """Each update is far below bf16's resolution: without masters no parameter would ever move."""
    parallel_state.initialize_model_parallel()
    model = make_net(torch.bfloat16)
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, grad_reduce_in_fp32=grads_in_fp32, bucket_size=60)
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=3e-4, weight_decay=0.0, clip_grad=0.0, bf16=True)
    optimizer = get_megatron_optimizer(config, [ddp])
    params = [p for _, p in ddp.module.named_parameters()]
    start = [p.detach().clone() for p in params]
    expected = [p.float() for p in start]
    for _ in range(100):
        optimizer.zero_grad()
        for p in params:
            p.grad.fill_(2.0**-3 * (rank + 1))  # exact in bf16, mean over ranks exact as well
        ddp.reducer.note_forward()
        finalize_model_grads([ddp])
        assert optimizer.step()[0]
        mean = 2.0**-3 * (world + 1) / 2
        expected = [e - 3e-4 * mean for e in expected]
    moved = [bool((p != s).any()) for p, s in zip(params, start, strict=True)]
    assert all(moved)
    for p, want in zip(params, expected, strict=True):
        assert torch.equal(p, want.to(torch.bfloat16)), f"off by {(p.float() - want).abs().max()}"
    assert {m.dtype for m in optimizer.get_parameters()} <= {torch.float32}
    owned = torch.tensor(sum(shard.numel for masters in optimizer.masters for shard in masters.shards))
    dist.all_reduce(owned)
    copies = world if strategy == "no_shard" else 1
    assert owned == copies * sum(p.numel() for p in params)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(
    rank: int, world: int, strategy: str, caplog: Any = None
) -> None:
    parallel_state.initialize_model_parallel()
    for bad in (float("nan"), float("inf")):
        model = make_net()
        ddp = wrap(model, data_parallel_sharding_strategy=strategy)
        optimizer = get_megatron_optimizer(OptimizerConfig(**ALGORITHMS["adamw"]), [ddp])
        train_step(ddp, optimizer, rank, 0)
        before = [p.clone() for p in model.parameters()]
        optimizer.zero_grad()
        loss_of(ddp, rank, 1).backward()
        finalize_model_grads([ddp])
        bucket = ddp.grad_buffers[0].buckets[0]
        if rank == 1:  # after the reduction, on one rank alone
            bucket.valid_part(len(bucket.params) - 1)[-1:].fill_(bad)
            bucket.valid_part(0)[-1:].fill_(bad)
        assert optimizer.step() == (False, None, None)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        updated, norm, _ = train_step(ddp, optimizer, rank, 1)
        assert updated and norm is not None
        assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@ranks(2)
def test_finite_gradients_whose_squares_overflow_are_clipped_and_not_skipped(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net(torch.float32)
    ddp = wrap(model, use_distributed_optimizer=True)
    config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=1.0, weight_decay=0.0, clip_grad=1.0)
    optimizer = get_megatron_optimizer(config, [ddp])
    optimizer.zero_grad()
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    numel = sum(p.numel() for p in model.parameters())
    for bucket in ddp.grad_buffers[0].buckets:
        for i in range(len(bucket.params)):
            bucket.valid_part(i).fill_(1e30)
    before = [p.clone() for p in model.parameters()]
    updated, norm, _ = optimizer.step()
    assert updated and norm == pytest.approx(1e30 * numel**0.5, rel=1e-6)
    for p, b in zip(model.parameters(), before, strict=True):
        assert torch.allclose(b - p, torch.full_like(p, numel**-0.5), rtol=1e-4, atol=1e-6)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_parameter_frozen_after_the_wrap_stands_still_and_moves_again_when_thawed(
    rank: int, world: int, strategy: str, algorithm: str
) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    reference = Reference(model, world, clip_grad=3.0, **ALGORITHMS[algorithm])
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=3.0, **ALGORITHMS[algorithm]), [ddp])
    for microbatch in range(6):
        for net in (model, reference.model):
            net.second.weight.requires_grad_(microbatch not in (2, 3))
            net.first.bias.requires_grad_(microbatch not in (3, 4))
        still = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
        _, norm, _ = train_step(ddp, optimizer, rank, microbatch)
        assert norm == pytest.approx(reference.step(microbatch), rel=1e-12)
        for name, value in still.items():
            assert torch.equal(model.get_parameter(name), value), f"{name} is frozen and moved"
    reference.assert_equals(ddp)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_frozen_before_the_wrap_are_left_out(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    model.second.weight.requires_grad_(False)
    reference = Reference(model, world, **ALGORITHMS["sgd"])
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=0.0, **ALGORITHMS["sgd"]), [ddp])
    for microbatch in range(2):
        train_step(ddp, optimizer, rank, microbatch)
        reference.step(microbatch)
    reference.assert_equals(ddp)


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stepping_before_finalize_is_refused(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), data_parallel_sharding_strategy=strategy)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [ddp])
    loss_of(ddp, rank, 0).backward()
    with pytest.raises(SyncError, match="finalize_model_grads"):
        optimizer.step()


@ranks(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zeros_are_counted_once(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, log_num_zeros_in_grad=True), [ddp])
    optimizer.zero_grad()
    loss_of(ddp, rank, 0).backward()
    model.second.weight.grad.zero_()
    model.first.bias.grad[:2] = 0
    finalize_model_grads([ddp])
    assert optimizer.step()[2] == model.second.weight.numel() + 2


@ranks(1)
def test_groups_keep_their_learning_rate_and_decay(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    ddp = wrap(model, use_distributed_optimizer=True)
    config = OptimizerConfig(lr=0.1, min_lr=0.01, weight_decay=0.5)
    no_decay: Callable[[str, nn.Parameter], bool] = lambda name, param: name.startswith("third")  # noqa: E731
    optimizer = get_megatron_optimizer(config, [ddp], no_decay, lambda name, param: name == "norm.weight", 3.0)
    found = {name: (group["lr"], group["weight_decay"]) for name, group in group_of_each_param(optimizer).items()}
    assert found.pop("norm.weight") == (pytest.approx(0.3), 0.5)
    for name, numbers in found.items():
        assert numbers == (0.1, 0.0 if name.startswith("third") else 0.5), name
    assert sorted(group["min_lr"] * group["lr_mult"] for group in optimizer.param_groups) == pytest.approx(
        [0.01, 0.01, 0.03]
    )


def group_of_each_param(optimizer: Any) -> dict[str, dict[str, Any]]:
    """The torch param group that updates each parameter, looked up through the tensors."""
    groups = {id(master): group for group in optimizer.param_groups for master in group["params"]}
    return {
        shard.contract.name: groups[id(segment.master)]
        for masters in optimizer.masters
        for segment in masters.segments
        for shard in segment.shards
    }


def test_config_refuses_what_cannot_be_meant() -> None:
    for bad in ({"optimizer": "adamw"}, {"fp16": True, "bf16": True}, {"clip_grad": -1.0}, {"adam_beta1": 1.0}):
        with pytest.raises(ValueError, match="|".join(bad)):
            OptimizerConfig(**bad)


@ranks(1)
def test_contradictions_with_the_wrapped_model_are_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net())
    with pytest.raises(ValueError, match="use_distributed_optimizer is True"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, use_distributed_optimizer=True), [ddp])
    with pytest.raises(ValueError, match=r"bf16 is True and no parameter is in torch\.bfloat16 \(the first"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, bf16=True), [ddp])
    with pytest.raises(ValueError, match=r"params_dtype is torch\.bfloat16 and no parameter is in torch\.bfloat16"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1, params_dtype=torch.bfloat16), [ddp])
    with pytest.raises(ValueError, match="lr is None"):
        get_megatron_optimizer(OptimizerConfig(), [ddp])
    assert dist.get_world_size() == 1


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_pipeline_stage_without_trainable_parameters_steps_along(
    rank: int, world: int, strategy: str, frozen: bool
) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model = nn.Module()
    if rank == 0 or frozen:
        model.register_parameter("weight", nn.Parameter(torch.ones(9), requires_grad=rank == 0))
    ddp = wrap(model, data_parallel_sharding_strategy=strategy)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=1.0, clip_grad=1.0), [ddp])
    for _ in range(2):
        optimizer.zero_grad()
        if rank == 0:
            (model.weight.sum() * 2).backward()
        else:
            ddp.reducer.note_forward()
        finalize_model_grads([ddp])
        assert optimizer.step() == (True, pytest.approx(6.0), None)
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    if rank == 0:
        assert torch.allclose(model.weight, torch.full((9,), 1 - 2 * 2 / 6.0), rtol=1e-5)
