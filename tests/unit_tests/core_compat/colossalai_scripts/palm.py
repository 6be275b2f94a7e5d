"""Train a small PaLM-like model (attention and feed-forward side by side) with ZeRO's optimizer, without a Booster."""

import colossalai
import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.nn.optimizer import HybridAdam
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, STEPS = 8, 5


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + feed-forward(norm(x)), with one key and value for all heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.inner = nn.Linear(width, width + 2 * width // heads + 4 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward_out = nn.Linear(2 * width, width, bias=False)
        self.sizes, self.heads = (width, width // heads, width // heads, 2 * width, 2 * width), heads

    def forward(self, x):
        query, key, value, gate, up = self.inner(self.norm(x)).split(self.sizes, dim=-1)
        query = query.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (part.unsqueeze(1).expand_as(query) for part in (key, value))
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        both = self.attention_out(seen.transpose(1, 2).flatten(2))
        return x + both + self.feed_forward_out(nn.functional.silu(gate) * up)


class Palm(nn.Module):
    """The embedding is the output layer too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.Sequential(ParallelBlock(32, 4), ParallelBlock(32, 4), nn.LayerNorm(32, bias=False))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens):
        return self.blocks(self.embedding(tokens)) @ self.embedding.weight.t()


def build_dataset():
    first = torch.randint(0, 64, (BATCH * STEPS, 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset((first + torch.arange(17)) % 64)  # each word tells the next one


def build_model():
    return Palm()


def loss_of(model, batch):
    (tokens,) = batch
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main():
    colossalai.launch_from_torch(config={}, seed=42, verbose=False)
    world = dist.get_world_size()
    device = get_accelerator().get_current_device()
    model = build_model().to(device)
    optimizer = LowLevelZeroOptimizer(
        HybridAdam(model.parameters(), lr=2e-2, eps=1e-4), partition_grad=True, clip_grad_norm=0.5
    )
    dataset = build_dataset()
    loader = DataLoader(dataset, BATCH // world, sampler=DistributedSampler(dataset, shuffle=False))
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, [part.to(device) for part in batch])
        optimizer.backward(loss)
        optimizer.step()
        dist.all_reduce(loss.data)
        losses.append(loss.item() / world)
    return losses
