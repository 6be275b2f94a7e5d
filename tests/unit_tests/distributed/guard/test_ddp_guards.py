"""What is found before the optimizer steps, what the user can look at, and what must stay as the user left it."""

import copy
import dataclasses
from contextlib import nullcontext as silent
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GradSyncRule,
    NonFiniteGradientError,
    ReplicaDriftError,
    finalize_model_grads,
)
from core.model_parallel_config import ModelParallelConfig
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, batch, loss_of, make_net, mean_over_ranks, whole_grads, wrap

SETTINGS = [(strategy, overlap) for strategy in ("no_shard", "optim", "optim_grads") for overlap in (False, True)]


def spoil(param: nn.Parameter, value: float) -> torch.utils.hooks.RemovableHandle:
    return param.register_hook(lambda grad: torch.full_like(grad, value))


@ranks(3)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_names_rank_parameter_and_microbatch_on_all_ranks(
    rank: int, world: int, value: float
) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        for bad_rank, bad_microbatch in ((1, 0), (2, 2)):
            model = make_net()
            plain = copy.deepcopy(model)
            ddp = wrap(
                model,
                data_parallel_sharding_strategy=strategy,
                overlap_grad_reduce=overlap,
                check_for_nan_in_grad=True,
                bucket_size=30,
            )
            for step in range(3):
                ddp.zero_grad_buffer()
                for microbatch in range(3):
                    bad = step == 1 and (rank, microbatch) == (bad_rank, bad_microbatch)
                    handle = spoil(ddp.module.norm.weight, value) if bad else None
                    if microbatch < 2:
                        with ddp.no_sync():
                            loss_of(ddp, rank, microbatch).backward()
                    else:
                        loss_of(ddp, rank, microbatch).backward()
                    if handle is not None:
                        handle.remove()
                if step == 1:
                    message = f"rank {bad_rank}: the gradient of 'norm.weight' .* in microbatch {bad_microbatch}"
                    with pytest.raises(NonFiniteGradientError, match=message):
                        finalize_model_grads([ddp])
                else:  # before it, and after skipping it
                    finalize_model_grads([ddp])
                    assert_same(whole_grads(ddp), mean_over_ranks(plain, world, (0, 1, 2)))


@ranks(2)
def test_a_late_non_finite_gradient_and_one_that_only_the_sum_makes_are_found(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy in ("no_shard", "optim", "optim_grads"):
        ddp = wrap(
            make_net(),
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True,
            check_for_nan_in_grad=True,
            bucket_size=1,
        )
        loss_of(ddp, rank, 0).backward()
        if rank == 1:
            spoil(ddp.module.third.weight, float("nan"))
            loss_of(ddp, rank, 1).backward()
        with pytest.raises(NonFiniteGradientError, match="rank 1: the gradient of 'third.weight' .* in microbatch 1"):
            finalize_model_grads([ddp])

        half = nn.Linear(3, 2, bias=False, dtype=torch.float16)
        with torch.no_grad():
            half.weight.fill_(0.0)
        ddp = wrap(
            half,
            SimpleNamespace(calculate_per_token_loss=True),
            data_parallel_sharding_strategy=strategy,
            check_for_nan_in_grad=True,
        )
        (ddp(torch.ones(1, 3, dtype=torch.float16)) * 40000.0).sum().backward()  # finite on each rank, 80000 is not
        local = [param.main_grad for param in ddp.parameters() if param.main_grad is not None]
        assert all(torch.isfinite(grad).all() for grad in local)
        with pytest.raises(NonFiniteGradientError, match="'weight' became non-finite after backward"):
            finalize_model_grads([ddp], num_tokens=torch.tensor(1))


@ranks(2)
def test_without_the_check_non_finite_gradients_pass_as_in_torch(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net())
    if rank == 1:
        spoil(ddp.module.norm.weight, float("nan"))
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    assert torch.isnan(ddp.module.norm.weight.grad).all()


@ranks(3)
def test_a_drift_between_replicas_is_named_on_all_ranks(rank: int, world: int) -> None:
    """Something of the user's changes a reduced gradient on rank 2 alone."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), check_replicas=True, bucket_size=1, overlap_grad_reduce=True)
    for step in range(2):
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, 0).backward()
        if step == 0:
            finalize_model_grads([ddp])
            continue
        ddp.finish_grad_sync()
        if rank == 2:
            ddp.module.second.weight.grad[0, 0] += 0.1
        with pytest.raises(ReplicaDriftError, match=r"'second.weight' differs between ranks 0 and 2 of group 'dp_cp'"):
            finalize_model_grads([ddp])


@ranks(2)
def test_a_bucket_with_a_large_gradient_is_warned_of_on_the_ranks_that_hold_it(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), check_for_large_grads=True)
    with mock.patch("core.distributed.guard.finite.NORMS_SAMPLED", 1):
        for step, scale in enumerate((1.0, 5.0, 50.0)):
            ddp.zero_grad_buffer()
            (scale * loss_of(ddp, rank, 0)).backward()
            with pytest.warns(UserWarning, match="rank ., step 3: .*check_for_large_grads") if step == 2 else silent():
                finalize_model_grads([ddp])


@ranks(2)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_on_all_copies_is_no_drift_and_on_one_copy_it_is(
    rank: int, world: int, value: float
) -> None:
    """An overflow that all ranks share is the loss scaler's to skip."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), check_replicas=True)
    shared, first_only, elsewhere = {0: [0, 1]}, {0: [0], 1: []}, {0: [0], 1: [1]}
    for places in (shared, first_only, elsewhere):
        ddp.zero_grad_buffer()
        loss_of(ddp, rank, 0).backward()
        ddp.finish_grad_sync()
        ddp.module.second.weight.grad.view(-1)[places.get(rank, places[0])] = value
        if places is shared:
            finalize_model_grads([ddp])
            assert int(torch.isfinite(ddp.module.second.weight.grad).logical_not().sum()) == 2
        else:
            with pytest.raises(ReplicaDriftError, match=r"'second.weight' differs between ranks 0 and 1.* not finite"):
                finalize_model_grads([ddp])


@ranks(2)
def test_copies_that_are_not_finite_in_one_place_are_still_compared_in_the_others(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), check_replicas=True)
    loss_of(ddp, rank, 0).backward()
    ddp.finish_grad_sync()
    ddp.module.second.weight.grad[0, 0] = float("nan")
    ddp.module.second.weight.grad[0, 1] += 0.1 * rank
    with pytest.raises(ReplicaDriftError, match=r"'second.weight' differs between ranks 0 and 1 of group 'dp_cp'"):
        finalize_model_grads([ddp])


@ranks(2)
def test_the_users_config_objects_are_not_changed(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        config = ModelParallelConfig()
        ddp_config = DistributedDataParallelConfig(
            data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, check_for_nan_in_grad=True
        )
        before = copy.deepcopy((vars(config), dataclasses.asdict(ddp_config)))
        ddp = DistributedDataParallel(config, ddp_config, make_net())
        loss_of(ddp, rank, 0).backward()
        finalize_model_grads([ddp])
        assert (vars(config), dataclasses.asdict(ddp_config)) == before
        with pytest.raises(dataclasses.FrozenInstanceError):
            ddp_config.bucket_size = 5  # type: ignore[misc]


def twice_over_tp() -> GradSyncRule:
    return GradSyncRule("of the user", "tp", "mean", lambda contract: contract.name == "norm.weight")


@ranks(4)
def test_describe_names_every_buffer_bucket_parameter_divisor_and_reduction(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for strategy, overlap in SETTINGS:
        model = make_net()
        model.second.weight.sequence_parallel = True
        model.first.weight.tensor_model_parallel = True
        model.third.bias.requires_grad_(False)
        ddp = wrap(
            model,
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=overlap,
            bucket_size=60,
            sync_rules=(twice_over_tp(),),
            initial_weights="ignore",
        )
        text = ddp.describe()
        in_detail = [line for line in text.splitlines() if line.startswith("    ") and "'last'" not in line]
        lines = {line.split()[0]: line for line in in_detail}
        trained = [name for name, param in ddp.module.named_parameters() if param.requires_grad]
        assert list(lines) == trained[::-1]  # in buffer order
        for name, line in lines.items():
            assert str(list(ddp.module.get_parameter(name).shape)) in line
            assert "sum over dp_cp / 2" in line
        assert "frozen: third.bias [3]" in text
        assert lines["second.weight"].index("sum over dp_cp") < lines["second.weight"].index("sum over tp")
        assert "mean over tp (of the user)" in lines["norm.weight"]
        assert "split over tp" in lines["first.weight"]
        (buffer,) = ddp.grad_buffers
        assert f"{buffer.numel} elements ({8 * buffer.numel} bytes)" in text
        assert (f"kept {4 * buffer.numel} bytes" in text) == (strategy == "optim_grads")
        for bucket in buffer.buckets:
            assert f"bucket {bucket.layout.index}: [{bucket.layout.start}, {bucket.layout.end})" in text
        assert str(dist.get_process_group_ranks(parallel_state.get_data_parallel_group())) in text
        assert ("sharded over 2" in text) == (strategy != "no_shard")


@ranks(2)
def test_a_step_report_counts_bytes_collectives_and_orders_each_buckets_times(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    for strategy, overlap in SETTINGS:
        ddp = wrap(
            make_net(),
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=overlap,
            bucket_size=1,
            deterministic_reduction=True,
        )
        for _ in range(3):
            ddp.zero_grad_buffer()
            loss_of(ddp, rank, 0).backward()
            finalize_model_grads([ddp])
            report = ddp.step_report()
            buckets = len(ddp.reducer.buckets)
            assert buckets == (7 if overlap or strategy == "optim_grads" else 1)
            assert report.collectives == buckets
            elements = sum(buffer.numel for buffer in ddp.grad_buffers)
            sent = elements * 8 * (1 if strategy == "no_shard" else 0.5)  # 2 (n-1)/n against (n-1)/n
            assert abs(report.bytes_sent - sent) <= buckets
            assert report.late_buckets == 0
            assert report.exposed_ms > 0 and 0.0 <= report.hidden_share <= 1.0
            assert [event.label for event in report.events] == [f"bucket {number}" for number in range(buckets)]
            for event in report.events:
                assert event.launched_s is not None and event.wait_end_s is not None
                assert event.launched_s <= event.wait_start_s <= event.wait_end_s
                assert event.launched_s <= event.done_s
                assert event.nbytes > 0 and event.name
            launches = [event.launched_s for event in report.events]
            assert launches == sorted(launches)
    again = ddp.step_report()
    assert again == report
    ddp.zero_grad_buffer()
    assert ddp.step_report().collectives == report.collectives  # the last finished step's, until the next one ends


@ranks(4)
def test_across_optimizer_instances_only_the_shard_travels(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    ddp = wrap(
        make_net(),
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=2,
        deterministic_reduction=True,
    )
    loss_of(ddp, rank, 0).backward()
    finalize_model_grads([ddp])
    (buffer,) = ddp.grad_buffers
    inside, across = buffer.numel * 8 / 2, 2 * (buffer.numel / 2) * 8 / 2  # (n-1)/n of all, then 2 (n-1)/n of a half
    assert ddp.step_report().bytes_sent == inside + across
    assert ddp.step_report().collectives == 2


@ranks(2)
def test_a_recorded_nan_raises_nothing_and_names_its_microbatch(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(), record_nan_in_grad=True, overlap_grad_reduce=True, bucket_size=40)
    for step in range(2):
        ddp.zero_grad_buffer()
        for microbatch in range(3):
            x, y = batch(rank, microbatch)
            if (step, rank, microbatch) == (0, 1, 1):
                x = x * float("nan")
            (ddp(x) - y).pow(2).sum().backward()
        finalize_model_grads([ddp])
        first = ddp.nan_watch.first()
        if (step, rank) == (0, 1):
            assert first is not None and first[1] == 1
        else:
            assert first is None
