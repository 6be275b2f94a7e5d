"""Train a Hugging Face model on the Python standard library's source, with the plugin that `--plugin` names.

    torchrun --standalone --nproc-per-node 2 examples/train_hf.py --plugin torch_fsdp

The model is a small Llama with random weights; nothing is downloaded. Needs: pip install -e '.[transformers]'.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from core.booster import Booster
from core.booster.plugin import DPPluginBase, GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from core_plan.job.errors import ConfigError
from core_plan.job.run_directory import check_writable
from core_train.text import standard_library


def new_plugin(options: argparse.Namespace) -> DPPluginBase:
    """The one line that differs between ways of training."""
    if options.plugin == "torch_ddp":
        return TorchDDPPlugin()
    if options.plugin == "torch_fsdp":
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        return TorchFSDPPlugin(auto_wrap_policy={LlamaDecoderLayer})
    if options.plugin == "gemini":
        return GeminiPlugin(precision=options.precision, initial_scale=2**12, min_chunk_size_m=0.1, search_range_m=0.1)
    return LowLevelZeroPlugin(stage=2, precision=options.precision, initial_scale=2**12)


def train(options: argparse.Namespace) -> list[float]:
    """The thirty lines; the same for every plugin. Returns the losses of this rank's steps, averaged over ranks."""
    plugin = new_plugin(options)
    booster = Booster(plugin=plugin, mixed_precision=None if plugin.control_precision() else options.precision)
    loader = plugin.prepare_dataloader(Text(options), options.batch_size, shuffle=True, seed=1, drop_last=True)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    if options.resume:
        booster.load_model(model, options.resume / "model")
        booster.load_optimizer(optimizer, options.resume / "optimizer")
        booster.load_lr_scheduler(scheduler, options.resume / "scheduler")

    losses: list[float] = []
    device = next(model.parameters()).device
    batches = iter(loader)
    for step in range(options.steps):
        optimizer.zero_grad()
        for microbatch in range(options.accumulate):
            tokens = next(batches).to(device)
            last = microbatch == options.accumulate - 1
            with contextlib.nullcontext() if last else booster.no_sync(model, optimizer):
                loss = model(input_ids=tokens, labels=tokens).loss / options.accumulate
                booster.backward(loss, optimizer)
            losses.append(float(mean_of_ranks(loss.detach() * options.accumulate)))
        if options.clip:
            optimizer.clip_grad_by_norm(options.clip)
        optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0 and (step % options.log_every == 0 or step == options.steps - 1):
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)

    if options.save:
        booster.save_model(model, options.save / "model", shard=True, use_safetensors=True)
        booster.save_optimizer(optimizer, options.save / "optimizer", shard=True)
        booster.save_lr_scheduler(scheduler, options.save / "scheduler")
    return losses


class Text(Dataset):
    """Windows of bytes of the standard library's source."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.length = options.length
        wanted = dist.get_world_size() * options.steps * options.accumulate * options.batch_size * self.length
        parts: list[bytes] = []
        for document in standard_library().documents():
            parts.append(document)
            wanted -= len(document)
            if wanted <= 0:
                break
        self.tokens = np.frombuffer(b"\0".join(parts), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, number: int) -> torch.Tensor:
        window = self.tokens[number * self.length : (number + 1) * self.length]
        return torch.from_numpy(window.astype(np.int64))


def new_model() -> Any:
    """A Llama of 0.8 million parameters, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def mean_of_ranks(loss: torch.Tensor) -> torch.Tensor:
    """The loss of the global batch."""
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plugins = ["torch_ddp", "torch_fsdp", "low_level_zero", "gemini"]
    parser.add_argument("--plugin", choices=plugins, default="torch_ddp")
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="bf16")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=8, help="of one rank and microbatch")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches a step")
    parser.add_argument("--length", type=int, default=128, help="bytes of text a sample")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient; 0 clips nothing")
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save", type=Path, help="directory that Hugging Face's from_pretrained reads, in its model/")
    parser.add_argument("--resume", type=Path, help="directory that --save has written, under any plugin")
    options = parser.parse_args(arguments)
    if options.save:
        try:
            check_writable(options.save, "--save")
        except ConfigError as error:
            parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Start torch.distributed unless it is, and train."""
    options = read_options(arguments)
    if dist.is_initialized():
        return train(options)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
        if backend == "nccl":
            torch.cuda.set_device(dist.get_node_local_rank())
    else:  # started without torchrun: one rank
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        return train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
