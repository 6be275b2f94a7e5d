"""Train a convolutional network on made-up pictures, save it half way, and go on from the files."""

import os

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import MultiStepLR
from colossalai.nn.optimizer import FusedSGD
from torch import nn
from torch.utils.data import TensorDataset

BATCH, STEPS = 8, 6


def build_dataset():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (BATCH * STEPS,), generator=generator)
    return TensorDataset(
        torch.randn(len(labels), 3, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1).float(), labels
    )


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
    )


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def boosted(booster: Booster):
    model = build_model()
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = MultiStepLR(optimizer, STEPS, milestones=[2, 4], gamma=0.5)
    return booster.boost(model, optimizer, nn.CrossEntropyLoss(), None, scheduler)


def main():
    colossalai.launch_from_torch(seed=42, verbose=False)
    coordinator = DistCoordinator()
    folder = os.environ["CHECKPOINT_FOLDER"]
    losses = []
    plugins = [TorchDDPPlugin(), LowLevelZeroPlugin(stage=1, precision="fp32")]
    for half, plugin in enumerate(plugins):
        assert isinstance(plugin, DPPluginBase)
        booster = Booster(plugin=plugin)
        model, optimizer, criterion, _, scheduler = boosted(booster)
        if half:
            booster.load_model(model, f"{folder}/model")
            booster.load_optimizer(optimizer, f"{folder}/optimizer")
            booster.load_lr_scheduler(scheduler, f"{folder}/scheduler.pt")
        loader = plugin.prepare_dataloader(build_dataset(), batch_size=BATCH // coordinator.world_size)
        for step, (pictures, labels) in enumerate(loader):
            if step // (STEPS // 2) != half:
                continue
            loss = criterion(model(pictures), labels)
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            dist.all_reduce(loss.data)
            losses.append(loss.item() / coordinator.world_size)
        booster.save_model(model, f"{folder}/model", shard=True)
        booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=True)
        booster.save_lr_scheduler(scheduler, f"{folder}/scheduler.pt")
        coordinator.block_all()
    return losses
