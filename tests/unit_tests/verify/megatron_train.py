"""A training program as a user of Megatron Core writes it, which `python -m core verify` is run on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

WORDS, LENGTH, SAMPLES, MICROBATCHES = 32, 8, 2, 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for axis in ("tp", "pp", "cp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--loss", default="mean", choices=("mean", "masked", "per token", "smoothed"))
    for flag in ("sharded", "overlap", "tied", "gathered", "sinks", "without-attention", "no-data"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--fault", default="")
    return parser.parse_args()


def batches(options: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """Yield microbatches with other data on each data-parallel rank, cut over context parallelism."""
    generator = torch.Generator().manual_seed(3 + parallel_state.get_data_parallel_rank())
    cp_rank, part = parallel_state.get_context_parallel_rank(), LENGTH // options.cp
    while True:
        words = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=generator)
        batch = {
            "tokens": words[:, :-1],
            "labels": words[:, 1:],
            "positions": torch.arange(LENGTH).repeat(SAMPLES, 1),
            "loss_mask": (torch.rand(SAMPLES, LENGTH, generator=generator) < 0.5).float(),
        }
        batch["loss_mask"][:, 0] = 1.0
        yield {name: value[:, cp_rank * part : (cp_rank + 1) * part] for name, value in batch.items()}


class ForwardStep:
    """Forward step and losses, for get_forward_backward_func."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    def __call__(self, iterator: Any, model: Any) -> Any:
        batch = next(batches(self.options)) if self.options.no_data else next(iterator)
        length = batch["tokens"].shape[1]
        future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        smoothed = self.options.loss == "smoothed"
        labels = None if smoothed else batch["labels"]
        output = model(batch["tokens"], batch["positions"], future, labels=labels)
        if smoothed and parallel_state.is_pipeline_last_stage():
            logits = output.transpose(0, 1).contiguous()
            output = tensor_parallel.vocab_parallel_cross_entropy(logits, batch["labels"].T.contiguous(), 0.2)

        def loss_func(losses: Tensor) -> tuple[Any, ...]:
            if self.options.loss in ("masked", "per token"):
                mask = batch["loss_mask"]
                return (losses * mask).sum(), mask.sum().int(), {}
            return losses.mean(), {"lm loss": losses.mean().detach()}

        return output, loss_func


def build(options: argparse.Namespace) -> GPTModel:
    experts: dict[str, Any] = {}
    if options.ep > 1:
        experts = dict(num_moe_experts=4, moe_router_topk=2, moe_token_dispatcher_type="allgather")
        experts |= dict(moe_ffn_hidden_size=16, add_bias_linear=False, moe_aux_loss_coeff=0.1)
        experts["moe_router_load_balancing_type"] = "aux_loss"
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=options.tp, pipeline_model_parallel_size=options.pp,
        context_parallel_size=options.cp, expert_model_parallel_size=options.ep, pipeline_dtype=torch.float32,
        use_cpu_initialization=True, init_method_std=0.3, softmax_type="learnable" if options.sinks else "vanilla",
        calculate_per_token_loss=options.loss == "per token", **experts,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    if options.without_attention:  # Megatron's own attention refuses context parallelism
        layer.submodules.self_attention, layer.submodules.self_attn_bda = IdentityOp, IdentityFuncOp
    if options.fault != "not reduced":
        config.finalize_model_grads_func = finalize_model_grads
    return GPTModel(
        config, layer, WORDS, LENGTH, parallel_output=not options.gathered, rotary_base=500,
        position_embedding_type="learned_absolute" if options.cp > 1 else "rope",
        share_embeddings_and_output_weights=options.tied,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip


def break_it(fault: str, model: Any) -> None:
    """Plant a fault of a release of Megatron that this one does not have, at the same place of its code."""
    weight = model.module.decoder.layers[0].mlp.linear_fc1.weight if fault in ("doubled", "too early") else None
    if fault == "doubled":  # a buffer of one data rank adds itself to itself in each microbatch
        weight.register_hook(lambda grad: grad + weight.main_grad)
    if fault == "too early" and dist.get_rank() == 0:  # a bucket is reduced before a rank's last gradient is in it
        count = iter(range(1000))
        weight.register_hook(lambda grad: grad * (next(count) % MICROBATCHES != MICROBATCHES - 1))
    if fault == "experts":  # the factor of the dense parameters' data ranks, for parameters with other ones
        for bucket in model.expert_parallel_buffers[0].buckets:
            bucket.gradient_scaling_factor *= 2.0


def main() -> None:
    options = arguments()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        options.tp, options.pp, context_parallel_size=options.cp, expert_model_parallel_size=options.ep
    )
    torch.manual_seed(7)
    model = build(options)
    for name, param in model.named_parameters() if options.sinks else ():  # trained alone
        param.requires_grad_(name.endswith("softmax_offset"))
    sharded = options.sharded
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, overlap_grad_reduce=options.overlap, bucket_size=2000,
        overlap_param_gather=options.overlap,
    )  # fmt: skip
    ddp = DistributedDataParallel(model.config, settings, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=0.01, clip_grad=0.1, use_distributed_optimizer=sharded,
            overlap_param_gather=options.overlap,
        ), [ddp]
    )  # fmt: skip
    break_it(options.fault, ddp)
    data = batches(options)
    for step in range(4):
        if step == 0 or options.fault != "not zeroed":
            ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=ForwardStep(options), data_iterator=data, model=[ddp], num_microbatches=MICROBATCHES,
            seq_length=LENGTH, micro_batch_size=SAMPLES, forward_only=False,
        )  # fmt: skip
        optimizer.step()


if __name__ == "__main__":
    main()
