"""start_param_sync: no forward reads a weight before its gather is complete, whoever reads it and however."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from core import parallel_state
from core.distributed import DistributedDataParallel, SyncError, finalize_model_grads
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

    ddp.param_sync.collectives.all_gather = all_gather
    return handles


def sgd_on_shards(ddp: DistributedDataParallel) -> None:
    """A plain optimizer: each rank steps its shard of every bucket, and nothing else."""
    with torch.no_grad():
        for buffer in ddp.grad_buffers:
            for bucket in buffer.buckets:
                low, high = bucket.shard_range
                bucket.param_data[low:high].add_(bucket.grad[low:high], alpha=-LR)


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


class Recomputed(Functional):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def functional_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 10 * step)
    x = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    return model(x).pow(2).sum() * (1 + rank)


@ranks(1, 3, nightly=(2,))
def test_training_with_overlapped_gathers_equals_one_process(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    cases: list[tuple[Any, Any]] = [
        (make_net, loss_of),
        (Functional, functional_loss),
        (Recomputed, functional_loss),
    ]
    for build, loss in cases:
        for overlap_param_gather in (False, True):
            for slow in (False, True):
                model = build()
                plain = copy.deepcopy(model)
                ddp = wrap(
                    model,
                    use_distributed_optimizer=True,
                    overlap_grad_reduce=True,
                    overlap_param_gather=overlap_param_gather,
                    bucket_size=1,
                )
                if slow:
                    gather_slowly(ddp)
                before = {name: param.detach().clone() for name, param in plain.named_parameters()}
                for step in range(5):
                    ddp.zero_grad_buffer()
                    loss(ddp, rank, step).backward()
                    finalize_model_grads([ddp])
                    sgd_on_shards(ddp)
                    ddp.start_param_sync()
                    one_process_step(plain, world, step, loss)
                    assert overlap_param_gather or not ddp.param_sync.pending
                if overlap_param_gather:
                    assert len(ddp.param_sync.pending) == len(ddp.reducer.order)
                ddp.finish_param_sync()
                assert_weights(ddp, plain, step)
                moved = sum((param - before[name]).norm().item() for name, param in plain.named_parameters())
                assert moved > 0.1, "the reference did not move"


@ranks(2)
def test_a_forward_under_no_grad_and_a_state_dict_wait_for_all_gathers(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for what in ("eval", "state_dict", "module.state_dict", "load", "force_sync", "twice"):
        model = Functional()
        plain = copy.deepcopy(model)
        ddp = wrap(model, use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True)
        handles = gather_slowly(ddp)
        for step in range(3):
            ddp.zero_grad_buffer()
            functional_loss(ddp, rank, step).backward()
            finalize_model_grads([ddp])
            sgd_on_shards(ddp)
            ddp.start_param_sync(force_sync=what == "force_sync")
            one_process_step(plain, world, step, functional_loss)
            if what == "force_sync":
                assert_weights(ddp, plain, step)
            elif what == "eval":
                ddp.eval()
                with torch.no_grad():
                    got, want = (functional_loss(m, rank, 99) for m in (ddp, plain))
                ddp.train()
                assert torch.allclose(got, want, rtol=1e-9)
            elif what == "load":
                ddp.load_state_dict(plain.state_dict())
                assert_weights(ddp, plain, step)
            elif what == "twice":
                ddp.start_param_sync()
            else:
                state = ddp.state_dict() if what == "state_dict" else ddp.module.state_dict()
                for name, want in plain.state_dict().items():
                    assert torch.allclose(state[name], want, rtol=1e-9, atol=1e-12), (what, name)
        ddp.finish_param_sync()
        assert handles and all(handle.waited for handle in handles), f"{what}: a gather was given up in flight"
        assert_weights(ddp, plain, step)


class Changing(nn.Module):
    """Reads a weight functionally from its third call on: learnt behaviour does not hold any more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.calls = 0
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.second = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x)
        if self.calls > 2:
            return nn.functional.linear(x, self.second.weight, self.second.bias)
        return self.second(x)


class ChangingAhead(Changing):
    """The same, and then the module's own forward: when backward comes the gather is complete."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x)
        if self.calls > 2:
            x = nn.functional.linear(x, self.second.weight, self.second.bias)
        return self.second(x)


REFUSALS = {
    Changing: (SyncError, "'second.(weight|bias)' was used in a forward before its gather"),
    ChangingAhead: (RuntimeError, "has been modified by an inplace operation"),
}


@ranks(2)
@pytest.mark.parametrize("build", REFUSALS)
def test_a_weight_that_was_read_before_its_gather_is_refused(rank: int, world: int, build: type[Changing]) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(
        build(), use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True, bucket_size=1
    )
    for step in range(3):
        ddp.zero_grad_buffer()
        generator = torch.Generator().manual_seed(rank + step)
        value = ddp(torch.randn(2, 6, generator=generator, dtype=torch.float64)).pow(2).sum()
        if step == 2:
            kind, words = REFUSALS[build]
            with pytest.raises(kind, match=words):
                value.backward()
            return
        value.backward()
        finalize_model_grads([ddp])
        sgd_on_shards(ddp)
        ddp.start_param_sync()


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
    gather = ddp.param_sync.collectives.all_gather

    def gather_and_interrupt(full: torch.Tensor, group: dist.ProcessGroup) -> SlowHandle:
        handle = gather(full, group)
        real = handle.wait

        def wait() -> None:
            handle.wait = real
            raise KeyboardInterrupt

        handle.wait = wait
        return handle

    ddp.param_sync.collectives.all_gather = gather_and_interrupt
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
    ddp.finish_param_sync()
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


class ReadsAhead(nn.Module):
    """Reads a weight before the forward of the module that owns it, in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.second = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(nn.functional.linear(x, self.second.weight))))


@ranks(2)
@pytest.mark.parametrize("called_by", ["the wrapper", "the module", "the module under no_grad"])
def test_a_weight_that_is_read_before_its_modules_forward_is_never_stale(rank: int, world: int, called_by: str) -> None:
    """Either the reader waits, or the step is refused; a stale weight must not pass in silence."""
    parallel_state.initialize_model_parallel()
    for build in (ReadsAhead, Functional):
        model = build()
        plain = copy.deepcopy(model)
        ddp = wrap(
            model, use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True, bucket_size=1
        )
        gather_slowly(ddp)
        for step in range(3):
            ddp.zero_grad_buffer()
            value = functional_loss(ddp if called_by == "the wrapper" else ddp.module, rank, step)
            try:
                value.backward()
            except SyncError as refused:
                assert "was used in a forward before its gather" in str(refused)
                assert called_by == "the module"  # through the wrapper it has to work
                break
            finalize_model_grads([ddp])
            sgd_on_shards(ddp)
            ddp.start_param_sync()
            one_process_step(plain, world, step, functional_loss)
            if called_by == "the module under no_grad":
                with torch.no_grad():
                    got, want = (functional_loss(m, rank, 99) for m in (ddp.module, plain))
                assert torch.allclose(got, want, rtol=1e-9), f"step {step}: an evaluation read stale weights"
        else:
            ddp.finish_param_sync()
            assert_weights(ddp, plain, step)


class OtherwiseInEvaluation(Changing):
    """Reads a weight functionally in evaluation only, so that training never shows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.training else nn.functional.linear(x, self.second.weight, self.second.bias)


@ranks(2)
def test_an_evaluation_that_reads_weights_in_its_own_way_waits_for_all(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    model = OtherwiseInEvaluation()
    plain = copy.deepcopy(model)
    ddp = wrap(
        model, use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True, bucket_size=1
    )
    gather_slowly(ddp)
    for step in range(2):
        ddp.zero_grad_buffer()
        functional_loss(ddp, rank, step).backward()
        finalize_model_grads([ddp])
        sgd_on_shards(ddp)
        ddp.start_param_sync()
        one_process_step(plain, world, step, functional_loss)
        ddp.eval()
        with torch.no_grad():
            got, want = (functional_loss(m, rank, 99) for m in (ddp, plain))
        ddp.train()
        assert torch.allclose(got, want, rtol=1e-9), f"step {step}"


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
            bucket.param_data[low:high].add_(bucket.owned_grad, alpha=-LR)
            ddp.start_bucket_param_sync(bucket)
        if not overlap:
            ddp.finish_param_sync()
        assert ddp.param_sync.collectives.traffic.collectives - sent == (len(buckets) if world > 1 else 0)
        one_process_step(plain, world, step, loss_of)
    for name, value in ddp.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-10, atol=1e-12)
