"""Train a small residual network with LARS and gradient accumulation, the state sharded."""

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.nn.optimizer import Lars
from torch import nn
from torch.utils.data import TensorDataset

BATCH, STEPS = 8, 6


class Block(nn.Module):
    """Two convolutions around which the input is led."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width)),
        )

    def forward(self, x):
        return torch.relu(x + self.layers(x))


def build_dataset():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (BATCH * STEPS,), generator=generator)
    return TensorDataset(
        torch.randn(len(labels), 3, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1).float(), labels
    )


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), Block(8), nn.AvgPool2d(2), Block(8), nn.Flatten(), nn.Linear(128, 3)
    )


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main():
    colossalai.launch_from_torch({}, seed=42, verbose=False)
    world = dist.get_world_size()
    plugin = LowLevelZeroPlugin(stage=2, precision="fp32")
    booster = Booster(plugin=plugin)
    loader = plugin.prepare_dataloader(build_dataset(), batch_size=BATCH // 2 // world)
    model = build_model()
    optimizer = Lars(model.parameters(), lr=0.5, momentum=0.9, eeta=0.05, weight_decay=1e-3)
    scheduler = LinearWarmupLR(optimizer, total_steps=STEPS, warmup_steps=2)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses = []
    for number, batch in enumerate(loader):
        loss = loss_of(model, batch)
        booster.backward(loss / 2, optimizer)
        dist.all_reduce(loss.data)
        losses.append(loss.item() / world)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return [sum(losses[i : i + 2]) / 2 for i in range(0, len(losses), 2)]
