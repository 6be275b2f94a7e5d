"""A training loop as programs for Megatron Core write it; nothing in it knows of this package.

Tests run it with `megatron.core` replaced in its import lines, or installed. The model comes from a provider, as in
Megatron's programs: (tensor_parallel, pipeline_parallel, sequence_parallel) -> the model of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor
from torch.optim import SGD, Optimizer

SEQUENCE_LENGTH, MICRO_BATCH_SIZE, VOCABULARY = 16, 2, 32
LEARNING_RATE = 0.5


def initialize_distributed(tensor_parallel: int, pipeline_parallel: int) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel)
    model_parallel_cuda_manual_seed(123)


def samples(seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [b, s]: each token is the one before it and one more, from a first one by chance."""
    first = torch.randint(VOCABULARY, (MICRO_BATCH_SIZE, 1), generator=torch.Generator().manual_seed(seed))
    words = (first + torch.arange(SEQUENCE_LENGTH + 1)) % VOCABULARY
    return words[:, :-1], words[:, 1:]


def train_data_iterator() -> Iterator[dict[str, Tensor]]:
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    seed = rank
    while True:
        tokens, labels = samples(seed)
        position_ids = torch.arange(SEQUENCE_LENGTH).expand_as(tokens)
        causal = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool).triu(1)
        loss_mask = torch.ones(labels.shape)
        yield dict(tokens=tokens, labels=labels, loss_mask=loss_mask, attention_mask=causal, position_ids=position_ids)
        seed += size


def forward_step_func(data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> tuple[Tensor, Callable]:
    def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses = output_tensor.float().view(-1)
        loss_mask = loss_mask.view(-1).float()
        loss = torch.sum(losses * loss_mask) / loss_mask.sum()
        return loss, {"lm loss": loss}

    data = next(data_iterator)
    output_tensor = model(data["tokens"], data["position_ids"], data["attention_mask"], labels=data["labels"])
    return output_tensor, partial(loss_func, data["loss_mask"])


def save_distributed_checkpoint(checkpoint_path: Path, gpt_model: torch.nn.Module) -> None:
    dist_checkpointing.save(
        sharded_state_dict=gpt_model.sharded_state_dict(prefix=""), checkpoint_dir=str(checkpoint_path)
    )


def load_distributed_checkpoint(checkpoint_path: Path, gpt_model: torch.nn.Module) -> torch.nn.Module:
    sharded_state_dict = gpt_model.sharded_state_dict(prefix="")
    checkpoint = dist_checkpointing.load(sharded_state_dict=sharded_state_dict, checkpoint_dir=str(checkpoint_path))
    gpt_model.load_state_dict(checkpoint)
    return gpt_model


def train(
    model_provider: Callable[[int, int, bool], torch.nn.Module],
    steps: int,
    microbatches: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    sequence_parallel: bool = False,
    distributed_optimizer: bool | None = None,
    checkpoint_path: Path | None = None,
) -> list[float]:
    """The losses of the last stage, the mean of the data ranks' own; distributed_optimizer None for torch's."""
    initialize_distributed(tensor_parallel, pipeline_parallel)
    gpt_model = model_provider(tensor_parallel, pipeline_parallel, sequence_parallel)
    ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    ddp_config.use_distributed_optimizer = bool(distributed_optimizer)
    gpt_model = DistributedDataParallel(config=get_model_config(gpt_model), ddp_config=ddp_config, module=gpt_model)
    config = get_model_config(gpt_model)
    assert get_attr_wrapped_model(gpt_model, "pre_process") == parallel_state.is_pipeline_first_stage()

    optimizer: Optimizer
    if distributed_optimizer is None:
        optimizer = SGD(gpt_model.parameters(), lr=LEARNING_RATE)
    else:
        options = OptimizerConfig(optimizer="sgd", lr=LEARNING_RATE, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
        options.use_distributed_optimizer = distributed_optimizer
        optimizer = get_megatron_optimizer(options, [gpt_model])
        config.grad_scale_func = optimizer.scale_loss
        config.no_sync_func = gpt_model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
    train_iterator = train_data_iterator()
    forward_backward_func = get_forward_backward_func()

    losses = []
    for _ in range(steps):
        gpt_model.zero_grad_buffer()
        optimizer.zero_grad()
        losses_reduced = forward_backward_func(
            forward_step_func=forward_step_func,
            data_iterator=train_iterator,
            model=gpt_model,
            num_microbatches=microbatches,
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            decoder_seq_length=SEQUENCE_LENGTH,
            forward_only=False,
        )
        if distributed_optimizer is None:
            finalize_model_grads([gpt_model])
        optimizer.step()
        if parallel_state.is_pipeline_last_stage():
            mean = torch.stack([reduced["lm loss"].detach() for reduced in losses_reduced]).mean()
            torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
            losses.append(float(mean / parallel_state.get_data_parallel_world_size()))
    if checkpoint_path is not None:
        save_distributed_checkpoint(checkpoint_path, gpt_model)
        before = {name: param.detach().clone() for name, param in gpt_model.named_parameters()}
        with torch.no_grad():
            for param in gpt_model.parameters():
                param.zero_()
        gpt_model = load_distributed_checkpoint(checkpoint_path, gpt_model)
        assert all(torch.equal(param, before[name]) for name, param in gpt_model.named_parameters())
    return losses
