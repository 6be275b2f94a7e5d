"""Models of the Megatron face in further layouts train as one process does: interleaved stages, experts, bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import core.compat.megatron as mcore
from core import parallel_state
from core.groups.process_groups import ProcessGroups
from core.models.gpt import GPTModel
from core.transformer import TransformerConfig
from tests.unit_tests.ranks import ranks

STEPS, VOCABULARY, LENGTH = 4, 32, 16
LEARNING_RATE = 0.1
SHAPE: dict[str, Any] = dict(
    num_layers=4, hidden_size=16, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.2
)
EXPERTS: dict[str, Any] = dict(num_moe_experts=4, moe_router_topk=2, moe_token_dispatcher_type="alltoall")


def batch(step: int, part: int) -> torch.Tensor:
    """Tokens [b, s + 1]."""
    first = torch.randint(VOCABULARY, (2, 1), generator=torch.Generator().manual_seed(100 * (step % 2) + part))
    return (first + torch.arange(LENGTH + 1)) % VOCABULARY


def forward_step(data_iterator: Any, model: torch.nn.Module) -> Any:
    words = next(data_iterator)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    output = model(words[:, :-1], positions, None, labels=words[:, 1:].contiguous())
    return output, lambda losses: (losses.float().mean(), {"lm loss": losses.float().mean().detach()})


def losses_of(pp: int, vp: int | None, ep: int, bf16: bool, microbatches: int, options: dict[str, Any]) -> list[float]:
    """The mean losses of the last stage, [] elsewhere; trained by Megatron's names."""
    mcore.mpu.initialize_model_parallel(1, pp, vp, expert_model_parallel_size=ep)
    config = mcore.transformer.TransformerConfig(
        **SHAPE,
        **options,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    spec = mcore.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = []
    for chunk in range(vp or 1):
        place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk}
        stage = mcore.models.gpt.GPTModel(
            config,
            spec,
            VOCABULARY,
            LENGTH,
            pre_process=mcore.mpu.is_pipeline_first_stage(**place),
            post_process=mcore.mpu.is_pipeline_last_stage(**place),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=True,
            vp_stage=None if vp is None else chunk,
        )
        model.append(mcore.transformer.module.Float16Module(config, stage) if bf16 else stage)
    ddp_config = mcore.distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=bf16, use_distributed_optimizer=bf16
    )
    model = [mcore.DistributedDataParallel(config, ddp_config, stage, chunk > 0) for chunk, stage in enumerate(model)]
    settings = mcore.optimizer.OptimizerConfig(
        optimizer="sgd", lr=LEARNING_RATE, sgd_momentum=0.0, clip_grad=0.0, bf16=bf16
    )
    settings.weight_decay, settings.use_distributed_optimizer = 0.0, bf16
    optimizer = mcore.optimizer.get_megatron_optimizer(settings, model)
    config.finalize_model_grads_func = mcore.distributed.finalize_model_grads
    config.no_sync_func = [stage.no_sync for stage in model] if len(model) > 1 else model[0].no_sync
    losses = []
    rank, size = mcore.mpu.get_data_parallel_rank(), mcore.mpu.get_data_parallel_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        iterators = [iter([batch(step, rank + size * n) for n in range(microbatches)]) for _ in model]
        reports = mcore.pipeline_parallel.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=model,
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=2,
        )
        optimizer.step()
        if reports:
            total = torch.stack([report["lm loss"] for report in reports]).mean()
            torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
            losses.append(float(total / size))
    return losses


def one_process(parts: int, options: dict[str, Any]) -> list[float]:
    """The same by torch alone, in fp32."""
    torch.manual_seed(0)
    config = TransformerConfig(
        **SHAPE, **options, vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type="rope"
    )
    model = GPTModel(config, ProcessGroups())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (
            sum(model(words[:, :-1], words[:, 1:]).mean() for words in (batch(step, n) for n in range(parts))) / parts
        )
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@ranks(2)
@pytest.mark.parametrize(
    ("pp", "vp", "ep", "bf16", "options", "tolerance"),
    [(2, 2, 1, False, {}, 5e-5), (1, None, 2, False, EXPERTS, 5e-5), (2, None, 1, True, {}, 2e-2)],
    ids=["interleaved", "experts", "bf16"],
)
@pytest.mark.in_suite(1)
def test_losses_are_those_of_one_process(
    rank: int, world: int, pp: int, vp: int | None, ep: int, bf16: bool, options: dict[str, Any], tolerance: float
) -> None:
    losses = losses_of(pp, vp, ep, bf16, 2, options)
    expected = one_process(2 * (2 // pp), options)
    if losses or mcore.mpu.is_pipeline_last_stage():
        assert losses == pytest.approx(expected, abs=tolerance)
        assert expected[0] - expected[-1] > 0.5 > 10 * tolerance
