"""A gradient of a loss without the loss scale is refused by name before a step; programs that are right are not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, LowLevelZeroPlugin
from core.distributed import finalize_model_grads
from core.groups.agree import SyncError
from core.optimizer import ChainedOptimizer, GradScaler, OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel import MicrobatchLoss, gpt_forward_step, plan_pipeline
from tests.unit_tests.pipeline_parallel.pipeline_reference import microbatch, start_pipeline
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap

SCALE = 1024.0
REFUSED = r"the gradient of '[a-z]+\.(weight|bias)' comes from a loss that was not multiplied by the loss scale 1024"


def made(strategy: str = "no_shard", scale: float = SCALE, seed: int = 3) -> tuple[Any, Any]:
    """A wrapped model in fp16, and SGD with a loss scale."""
    ddp = wrap(make_net(torch.float16, seed=seed), data_parallel_sharding_strategy=strategy)
    options = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.01, "weight_decay": 0.0, "clip_grad": 0.0}
    config = OptimizerConfig(fp16=True, initial_loss_scale=scale, min_loss_scale=1.0, **options)
    return ddp, get_megatron_optimizer(config, [ddp])


def weights(ddp: Any) -> list[torch.Tensor]:
    with ddp.gathered() if ddp.ddp_config.shards_parameters else nullcontext():
        return [param.detach().float().clone() for param in ddp.module.parameters()]


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("unscaled", ["second", "first", "all", "one rank's second"])
@pytest.mark.in_suite()
def test_a_loss_without_the_scale_is_refused_on_all_ranks_before_the_step(
    rank: int, world: int, strategy: str, unscaled: str
) -> None:
    parallel_state.initialize_model_parallel()
    ddp, optimizer = made(strategy)
    start = weights(ddp)
    for number in (0, 1):
        loss = loss_of(ddp, rank, number).float()
        skips = {"second": number == 1, "first": number == 0, "all": True}.get(unscaled, number == 1 and rank == 1)
        with ddp.no_sync() if number == 0 else nullcontext():
            (loss if skips else optimizer.scale_loss(loss)).backward()
    finalize_model_grads([ddp])
    with pytest.raises(SyncError, match=REFUSED):
        optimizer.step()
    for now, before in zip(weights(ddp), start, strict=True):
        assert torch.equal(now, before)
    optimizer.zero_grad()  # nothing is lost
    optimizer.scale_loss(loss_of(ddp, rank, 0).float()).backward()
    finalize_model_grads([ddp])
    assert optimizer.step()[0]


@ranks(2)
@pytest.mark.parametrize("name", ["stage 1", "stage 2", "gemini"])
def test_one_of_two_losses_is_refused_under_plugins(rank: int, world: int, name: str) -> None:
    plugin = GeminiPlugin() if name == "gemini" else LowLevelZeroPlugin(int(name[-1]))
    booster, net = Booster(plugin=plugin), make_net(torch.float32)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.01))
    for scaled in ((True, False), (False, True), (False, False)):
        optimizer.zero_grad()
        for number, is_scaled in enumerate(scaled):
            loss = loss_of(model, rank, number)
            with booster.no_sync(model, optimizer) if number == 0 else nullcontext():
                booster.backward(loss, optimizer) if is_scaled else loss.backward()
        with pytest.raises(SyncError, match=r"gradient of '.*' comes from .* by the loss scale .* booster.backward"):
            optimizer.step()


@ranks(2)
def test_right_programs_are_not_blamed(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()

    def end_step(ddp: Any, optimizer: Any) -> None:
        finalize_model_grads([ddp])
        assert optimizer.step()[0]
        optimizer.zero_grad()

    ddp, optimizer = made("optim")
    for _ in range(2):  # several losses, microbatches, one graph used twice, a sum of scaled losses, reentrant parts
        with ddp.no_sync():
            optimizer.scale_loss(loss_of(ddp, rank, 0).float()).backward()
        first, second = (loss_of(ddp, rank, number).float() for number in (1, 2))
        optimizer.scale_loss(first).backward(retain_graph=True)
        (optimizer.scale_loss(first) + optimizer.scale_loss(second)).div(2).backward()
        x = torch.randn(4, 5, dtype=torch.float16, requires_grad=True)
        again = checkpoint(ddp, x, use_reentrant=True)
        optimizer.scale_loss(again.float().square().mean()).backward()
        end_step(ddp, optimizer)
    ddp.module(torch.randn(4, 5, dtype=torch.float16)).float().mean().backward()
    optimizer.zero_grad()  # a loss that is dropped, as of a GAN's other half
    optimizer.scale_loss(loss_of(ddp, rank, 0).float()).backward()
    end_step(ddp, optimizer)

    ddp, optimizer = made(seed=4)  # gradients of outputs, which carry the scale, go on in parts
    for _ in range(2):
        outputs = [ddp(torch.full((2, 5), 0.1 * part + rank, dtype=torch.float16)) for part in (1, 2)]
        leaves = [output.detach().requires_grad_() for output in outputs]
        optimizer.scale_loss(torch.cat(leaves).float().square().mean()).backward()
        for output, leaf in zip(outputs, leaves, strict=True):
            with ddp.no_sync():
                output.backward(leaf.grad)
        end_step(ddp, optimizer)

    ddp, optimizer = made(seed=5)  # the scale by hand, asked for in time
    for _ in range(2):
        (loss_of(ddp, rank, 0).float() * optimizer.get_loss_scale()).sum().backward()
        end_step(ddp, optimizer)

    ddp, optimizer = made(seed=6, scale=1.0)
    loss_of(ddp, rank, 0).float().backward()
    end_step(ddp, optimizer)


@ranks(2)
def test_several_models_share_a_loss_and_its_scale(rank: int, world: int) -> None:
    """Two optimizers over one loss, a chain with one scale, and a model without a scale next to them."""
    parallel_state.initialize_model_parallel()
    pairs = [made(seed=seed) for seed in (3, 4)]
    chained = [made(seed=seed) for seed in (5, 6)]
    plain = wrap(make_net(torch.float32), data_parallel_sharding_strategy="no_shard")
    of_plain = get_megatron_optimizer(OptimizerConfig(lr=0.01), [plain])
    steppers = [optimizer for _, optimizer in pairs]
    chain = ChainedOptimizer([optimizer for _, optimizer in chained])
    for _ in range(2):
        for group, scale_of in ((pairs, steppers[0]), (chained, chain)):
            loss = sum(loss_of(ddp, rank, 0).float() for ddp, _ in group)
            scale_of.scale_loss(loss).backward()
        loss_of(plain, rank, 0).backward()
        finalize_model_grads([ddp for ddp, _ in (*pairs, *chained)] + [plain])
        for optimizer in (*steppers, chain, of_plain):
            assert optimizer.step()[0]
            optimizer.zero_grad()


@ranks(2)
def test_torchs_way_of_scaling_is_not_blamed(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(torch.float32), data_parallel_sharding_strategy="optim")
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.01), [ddp])
    scaler = GradScaler("cpu", init_scale=SCALE)
    scaler.scale(loss_of(ddp, rank, 0)).backward()
    finalize_model_grads([ddp])
    scaler.step(optimizer)
    scaler.update()
    assert not optimizer.step_was_skipped


@ranks(2)
@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_pipeline_without_grad_scale_func_is_refused(rank: int, world: int, schedule: str) -> None:
    """With it, or with a forward step that scales, it trains; passes for weights alone are not blamed."""
    chunks = 2 if schedule == "ZBVZeroBubble" else 1
    runner = start_pipeline(plan_pipeline(4, 2, schedule=schedule, chunks=chunks), schedule)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01, loss_scale=64.0), runner.chunks)

    def scaling(*given: Any) -> Any:
        output = gpt_forward_step(*given)
        if not isinstance(output, MicrobatchLoss):
            return output
        return MicrobatchLoss(optimizer.scale_loss(output.value), output.num_tokens)

    for scale_of, forward_step in (
        (optimizer.scale_loss, gpt_forward_step),
        (None, scaling),
        (None, gpt_forward_step),
    ):
        runner.config.grad_scale_func, runner.forward_step = scale_of, forward_step
        optimizer.zero_grad()
        runner.step([microbatch(0, number) for number in range(4)])
        if scale_of is not None or forward_step is scaling:
            assert optimizer.step()[0]
        else:
            with pytest.raises(SyncError, match=r"set config.grad_scale_func = optimizer.scale_loss"):
                optimizer.step()
