"""When an optimizer's step or start_param_sync has returned, every read of a parameter is right, whoever makes it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap

LR = 0.05


class SlowHandle:
    """A gather that gives nothing before it is waited for, as a slow network would."""

    def __init__(self, full: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.full, self.group = full, group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        part = full.numel() // size
        self.part = full[rank * part : (rank + 1) * part].clone()
        self.waited = False
        full.fill_(float("nan"))  # what a reader without a wait gets
        full[rank * part : (rank + 1) * part].copy_(self.part)

    def is_done(self) -> bool:
        return self.waited

    def wait(self) -> None:
        self.waited = True
        parts = [torch.empty_like(self.part) for _ in range(dist.get_world_size(self.group))]
        # Ranks may wait in different orders; a gather by object would not mind, so this one must not either.
        dist.all_gather(parts, self.part, group=self.group)
        self.full.copy_(torch.cat(parts))


def gather_slowly(ddp: DistributedDataParallel) -> list[SlowHandle]:
    """Returns the list that all gathers from now on are put in."""
    handles: list[SlowHandle] = []

    def all_gather(full: torch.Tensor, group: dist.ProcessGroup) -> SlowHandle:
        handles.append(SlowHandle(full, group))
        return handles[-1]

    ddp.param_sync.collectives.start_all_gather = all_gather
    return handles


def sgd_on_shards(ddp: DistributedDataParallel) -> None:
    """A plain optimizer: each rank steps its shard of every bucket, and nothing else."""
    with torch.no_grad():
        for buffer in ddp.grad_buffers:
            for bucket in buffer.buckets:
                low, high = bucket.shard_range
                bucket.memory.param_data[low:high].add_(bucket.memory.grad[low:high], alpha=-LR)


def one_process_step(plain: nn.Module, world: int, step: int, loss: Any) -> None:
    plain.zero_grad(set_to_none=True)
    for rank in range(world):
        (loss(plain, rank, step) / world).backward()
    with torch.no_grad():
        for param in plain.parameters():
            if param.grad is not None:
                param.add_(param.grad, alpha=-LR)


def assert_weights(ddp: DistributedDataParallel, plain: nn.Module, step: int) -> None:
    for name, want in plain.named_parameters():
        have = ddp.module.get_parameter(name)
        assert torch.isfinite(have).all(), f"step {step}: {name} was not gathered"
        assert torch.allclose(have, want, rtol=1e-9, atol=1e-12), f"step {step}: {name}"


class Functional(nn.Module):
    """Weights that are read without their own module's forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.inner = nn.Linear(6, 6, dtype=torch.float64)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)
        self.weight_holder = nn.Linear(6, 6, dtype=torch.float64)
        self.table = nn.ParameterList([nn.Parameter(torch.randn(6, dtype=torch.float64))])
        self.output = nn.Linear(6, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.tanh(nn.functional.linear(x, self.weight_holder.weight, self.weight_holder.bias)) * self.table[0]
        return self.output(x)


def functional_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * step)
    x = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    return model(x).pow(2).sum() * (1 + rank)


def trained(strategy: str, switched_on_by: str) -> tuple[nn.Module, DistributedDataParallel, Any]:
    """The same model in one process, wrapped with gathers that overlap the step, and its optimizer."""
    model = Functional()
    plain = copy.deepcopy(model)
    ddp = wrap(
        model,
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=True,
        overlap_param_gather=switched_on_by == "the wrapper",
        bucket_size=40,
    )
    bucketwise = switched_on_by == "the optimizer"
    config = OptimizerConfig(
        optimizer="sgd", lr=LR, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0,
        overlap_param_gather_with_optimizer_step=bucketwise,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(config, [ddp])
    gather_slowly(ddp)
    return plain, ddp, optimizer


def step_both(plain: nn.Module, ddp: DistributedDataParallel, optimizer: Any, rank: int, world: int, step: int) -> None:
    optimizer.zero_grad()
    functional_loss(ddp, rank, step).backward()
    finalize_model_grads([ddp])
    assert optimizer.step()[0]
    one_process_step(plain, world, step, functional_loss)


X = torch.arange(12, dtype=torch.float64).view(2, 6) / 7

READS: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda module: [param.detach() for param in module.parameters()],
    "named_parameters": lambda module: [dict(module.named_parameters())["output.weight"].detach()],
    "a submodule's state_dict": lambda module: list(module.attention.state_dict().values()),
    "a copy of the module": lambda module: [param.detach() for param in copy.deepcopy(module).parameters()],
    "an average": lambda module: list(torch._foreach_lerp([torch.zeros_like(p) for p in module.parameters()],
                                                          [p.detach() for p in module.parameters()], 0.25)),
    "a functional": lambda module: [nn.functional.linear(X, module.output.weight).detach()],
    "a norm": lambda module: [torch.linalg.vector_norm(nn.utils.parameters_to_vector(module.parameters()).detach())],
    "an evaluation": lambda module: [module.eval()(X.view(2, 1, 6)).detach(), module.train()(X.view(2, 1, 6)).detach()],
}  # fmt: skip


@ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@pytest.mark.parametrize("switched_on_by", ["the wrapper", "the optimizer"])
@pytest.mark.in_suite()
def test_every_read_right_after_a_step_is_that_of_one_process(
    rank: int, world: int, strategy: str, switched_on_by: str
) -> None:
    parallel_state.initialize_model_parallel()
    for step, (what, read) in enumerate(READS.items()):
        if step % 3 == 0:
            plain, ddp, optimizer = trained(strategy, switched_on_by)
            assert len(ddp.param_sync.buckets) > 2
        before = [value.clone() for value in read(plain)]
        step_both(plain, ddp, optimizer, rank, world, step)
        wants = read(plain)
        for have, want in zip(read(ddp.module), wants, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-12, msg=lambda m, what=what: f"{what}: {m}")
        assert max((a - b).abs().max().item() for a, b in zip(before, wants, strict=True)) > 1e-3, what


@ranks(2)
@pytest.mark.parametrize("gathers_first", [True, False])
def test_a_model_that_gathers_in_the_step_and_one_of_sharded_parameters_share_an_optimizer(
    rank: int, world: int, gathers_first: bool
) -> None:
    parallel_state.initialize_model_parallel()
    plains = [Functional(), Functional()]
    options: list[dict[str, Any]] = [
        {"data_parallel_sharding_strategy": "optim", "overlap_param_gather": True},
        {"data_parallel_sharding_strategy": "optim_grads_params", "share_host_memory": False},
    ]
    if not gathers_first:
        options.reverse()
    chunks = [wrap(copy.deepcopy(plain), **each) for plain, each in zip(plains, options, strict=True)]
    config = OptimizerConfig(optimizer="sgd", lr=LR, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, chunks)
    x = X.view(2, 1, 6)
    for step in range(3):
        optimizer.zero_grad()
        for chunk, plain in zip(chunks, plains, strict=True):
            functional_loss(chunk, rank, step).backward()
            with torch.no_grad():  # gathers weights that stay until the step
                torch.testing.assert_close(chunk(x), plain(x), rtol=1e-9, atol=1e-12)
        finalize_model_grads(chunks)
        assert optimizer.step()[0]
        for chunk, plain in zip(chunks, plains, strict=True):
            one_process_step(plain, world, step, functional_loss)
            with torch.no_grad():
                torch.testing.assert_close(chunk(x), plain(x), rtol=1e-9, atol=1e-12)


@ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_weights_that_are_loaded_into_a_submodule_after_a_step_stay(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    plain, ddp, optimizer = trained(strategy, "the wrapper")
    torch.manual_seed(5)
    loaded = {name: torch.randn_like(value) for name, value in plain.inner.state_dict().items()}
    for step in range(3):
        step_both(plain, ddp, optimizer, rank, world, step)
        if step == 0:
            ddp.module.inner.load_state_dict(loaded)
            plain.inner.load_state_dict(loaded)
        assert_weights(ddp, plain, step)


class Stumbling(Functional):
    """Raises in its first forward, after it has read some of its weights."""

    stumbled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.stumbled:
            self.stumbled = True
            self.inner(x)
            raise ValueError("the first batch is bad")
        return super().forward(x)


@ranks(2)
@pytest.mark.parametrize("first", ["a copy", "a forward that raises"])
def test_what_happens_before_the_first_forward_changes_no_later_step(rank: int, world: int, first: str) -> None:
    parallel_state.initialize_model_parallel()
    plain, ddp, optimizer = trained("optim", "the wrapper")
    if first == "a copy":
        copied = copy.deepcopy(ddp.module)
        copied(X.view(2, 1, 6))
    else:
        ddp.module.__class__ = Stumbling
        with pytest.raises(ValueError, match="the first batch is bad"):
            ddp(X.view(2, 1, 6))
    for step in range(3):
        step_both(plain, ddp, optimizer, rank, world, step)
        assert_weights(ddp, plain, step)


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("force_sync", [False, True])
def test_a_gather_by_hand_is_complete_when_it_returns(rank: int, world: int, overlap: bool, force_sync: bool) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    plain = copy.deepcopy(model)
    ddp = wrap(model, use_distributed_optimizer=True, overlap_param_gather=overlap, bucket_size=1)
    handles = gather_slowly(ddp)
    for step in range(3):
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, step).backward()
        finalize_model_grads([ddp])
        sgd_on_shards(ddp)
        ddp.start_param_sync(force_sync=force_sync)
        one_process_step(plain, world, step, loss_of)
        assert_weights(ddp, plain, step)
    assert len(handles) == (3 * len(ddp.reducer.buckets) if world > 1 else 0) and all(
        handle.waited for handle in handles
    )


@ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_that_are_saved_after_an_interrupted_gather_are_whole(rank: int, world: int, overlap: bool) -> None:
    """Ctrl-C while a rank waits; the user's handler saves."""
    parallel_state.initialize_model_parallel()
    plain = make_net()
    ddp = wrap(make_net(), use_distributed_optimizer=True, overlap_param_gather=overlap)
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    sgd_on_shards(ddp)
    one_process_step(plain, world, 0, loss_of)
    handles = gather_slowly(ddp)
    gather = ddp.param_sync.collectives.start_all_gather

    def gather_and_interrupt(full: torch.Tensor, group: dist.ProcessGroup) -> SlowHandle:
        handle = gather(full, group)
        real = handle.wait

        def wait() -> None:
            handle.wait = real
            raise KeyboardInterrupt

        handle.wait = wait
        return handle

    ddp.param_sync.collectives.start_all_gather = gather_and_interrupt
    with pytest.raises(KeyboardInterrupt):
        ddp.start_param_sync(force_sync=True)
    for name, want in plain.state_dict().items():
        assert torch.allclose(ddp.state_dict()[name], want, rtol=1e-9), name
    assert all(handle.waited for handle in handles)


@ranks(4)
def test_gathers_stay_inside_an_optimizer_instance(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    model = make_net()
    plain = copy.deepcopy(model)
    ddp = wrap(
        model,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=2,
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        bucket_size=30,
    )
    gather_slowly(ddp)
    for step in range(3):
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, step).backward()
        finalize_model_grads([ddp])
        sgd_on_shards(ddp)
        ddp.start_param_sync()
        one_process_step(plain, world, step, loss_of)
    assert_weights(ddp, plain, step)


@ranks(2)
def test_unsharded_parameters_have_nothing_to_gather(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net())
    if rank == 0:  # alone: a collective would wait for ever
        ddp.start_param_sync()
        ddp.finish_param_sync()
    with pytest.raises(ValueError, match="use_distributed_optimizer=True"):
        wrap(make_net(), overlap_param_gather=True)


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("overlap", [False, True])
def test_buckets_gathered_one_by_one_are_gathered_once_each(rank: int, world: int, overlap: bool) -> None:
    parallel_state.initialize_model_parallel()
    plain = make_net()
    ddp = wrap(
        make_net(),
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        bucket_size=40,
        overlap_param_gather=overlap,
    )
    buckets = ddp.grad_buffers[0].buckets
    assert len(buckets) > 2
    for step in range(3):
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, step).backward()
        finalize_model_grads([ddp])
        sent = ddp.param_sync.collectives.traffic.collectives
        for bucket in buckets:
            low, high = bucket.shard_range
            bucket.memory.param_data[low:high].add_(bucket.memory.owned_grad, alpha=-LR)
            ddp.param_sync.start_bucket(bucket)
        ddp.finish_param_sync()
        assert ddp.param_sync.collectives.traffic.collectives - sent == (len(buckets) if world > 1 else 0)
        one_process_step(plain, world, step, loss_of)
    for name, value in ddp.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-10, atol=1e-12)
