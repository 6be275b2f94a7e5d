"""Pretrain a small Llama with ZeRO-2, clipping and a cosine schedule; microbatches without reductions."""

import contextlib

import colossalai
import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.cluster import DistCoordinator
from colossalai.lazy import LazyInitContext
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import MultiTimer
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, STEPS = 8, 6


def build_dataset():
    first = torch.randint(0, 64, (BATCH * STEPS, 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset((first + torch.arange(16)) % 64)  # each word tells the next one


def build_model():
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=16))


def loss_of(model, batch):
    return model(input_ids=batch[0], labels=batch[0], use_cache=False).loss


def main():
    colossalai.launch_from_torch(seed=42, verbose=False)
    coordinator = DistCoordinator()
    device = get_accelerator().get_current_device()
    plugin = LowLevelZeroPlugin(stage=2, precision="fp32", max_norm=0.5, reduce_bucket_size_in_m=0.01)
    booster = Booster(plugin=plugin)
    init = LazyInitContext(default_device=device) if coordinator.world_size > 1 else contextlib.nullcontext()
    with init:
        model = build_model()
    optimizer = HybridAdam(model.parameters(), lr=2e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=STEPS, warmup_steps=2, eta_min=5e-4)
    loader = plugin.prepare_dataloader(build_dataset(), batch_size=BATCH // 2 // coordinator.world_size)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    timer = MultiTimer()
    losses = []
    for number, batch in enumerate(loader):
        timer.start("step")
        loss = loss_of(model, [part.to(device) for part in batch])
        last = number % 2 == 1
        with contextlib.nullcontext() if last else booster.no_sync(model, optimizer):
            booster.backward(loss / 2, optimizer)
        dist.all_reduce(loss.data)
        losses.append(loss.item() / coordinator.world_size)
        if last:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        timer.stop("step", keep_in_history=True)
    get_accelerator().synchronize()
    mean = timer.get_timer("step").get_history_mean()
    coordinator.print_on_master(f"{mean:.4f} s a step, {get_accelerator().max_memory_allocated()} bytes")
    return [sum(losses[i : i + 2]) / 2 for i in range(0, len(losses), 2)]
