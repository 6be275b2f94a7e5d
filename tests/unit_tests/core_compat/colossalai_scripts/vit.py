"""Train a small vision transformer on made-up pictures with torch's DDP."""

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from transformers import ViTConfig, ViTForImageClassification

BATCH, STEPS = 8, 6


class Pictures(torch.utils.data.Dataset):
    """Noise, brighter in the quarter that is its label."""

    def __len__(self):
        return BATCH * STEPS

    def __getitem__(self, number):
        picture = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(number))
        label = number % 4
        picture[:, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 2.0
        return {"pixel_values": picture, "labels": torch.tensor(label)}


def build_dataset():
    return Pictures()


def build_model():
    sizes = dict(image_size=8, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    return ViTForImageClassification(ViTConfig(**sizes, intermediate_size=64, num_labels=4))


def loss_of(model, batch):
    return model(**batch).loss


def main():
    colossalai.launch_from_torch(seed=42, verbose=False)
    coordinator = DistCoordinator()
    booster = Booster(plugin=TorchDDPPlugin(), mixed_precision="fp32")
    loader = booster.plugin.prepare_dataloader(build_dataset(), batch_size=BATCH // coordinator.world_size)
    model = build_model()
    optimizer = HybridAdam(model.parameters(), lr=2e-3, eps=1e-4, weight_decay=0.1)
    scheduler = CosineAnnealingWarmupLR(optimizer=optimizer, total_steps=STEPS, warmup_steps=2)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    losses = []
    for batch in loader:
        batch = {key: value.to(get_current_device()) for key, value in batch.items()}
        loss = loss_of(model, batch)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        dist.all_reduce(loss.data)
        losses.append(loss.item() / coordinator.world_size)
    return losses
