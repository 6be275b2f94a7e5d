"""Train a small GPT-2 on random text with parameters sharded in chunks."""

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.lazy import LazyInitContext
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, STEPS = 8, 5


def build_dataset():
    first = torch.randint(0, 64, (BATCH * STEPS, 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset((first + torch.arange(16)) % 64)  # each word tells the next one


def build_model():
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def loss_of(model, batch):
    (tokens,) = batch
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens, use_cache=False).loss


def main():
    colossalai.launch_from_torch(config={}, seed=42, verbose=False)
    world = dist.get_world_size()
    plugin = GeminiPlugin(precision="fp32", min_chunk_size_m=0.004, search_range_m=0.01, max_norm=1.0)
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(build_dataset(), batch_size=BATCH // world)
    with LazyInitContext(default_device=get_current_device()):
        model = build_model()
    optimizer = HybridAdam(model.parameters(), lr=2e-2, eps=1e-4)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    losses = []
    for batch in loader:
        loss = loss_of(model, [part.to(get_current_device()) for part in batch])
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.data)
        losses.append(loss.item() / world)
    return losses
