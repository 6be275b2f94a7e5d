"""Fine-tune a small OPT, all parameters in shards of FSDP."""

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchFSDPPlugin
from colossalai.cluster import DistCoordinator
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import PolynomialWarmupLR
from colossalai.nn.optimizer import FusedAdam
from colossalai.utils import set_seed
from torch.utils.data import TensorDataset
from transformers import OPTConfig, OPTForCausalLM

BATCH, STEPS = 8, 5


def build_dataset():
    return TensorDataset(torch.randint(3, 64, (BATCH * STEPS, 16), generator=torch.Generator().manual_seed(0)))


def build_model():
    sizes = dict(vocab_size=64, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2)
    config = OPTConfig(**sizes, num_attention_heads=4, max_position_embeddings=16, dropout=0.0, attention_dropout=0.0)
    return OPTForCausalLM(config)


def loss_of(model, batch):
    return model(input_ids=batch[0], attention_mask=torch.ones_like(batch[0]), labels=batch[0]).loss


def main():
    colossalai.launch_from_torch(verbose=False)
    set_seed(42)
    coordinator = DistCoordinator()
    booster = Booster(plugin=TorchFSDPPlugin())
    model = build_model()
    optimizer = FusedAdam(model.parameters(), lr=5e-3, eps=1e-4, weight_decay=0.01)
    scheduler = PolynomialWarmupLR(optimizer, total_steps=STEPS, warmup_steps=2, end_lr=1e-3, power=2.0)
    loader = booster.plugin.prepare_dataloader(build_dataset(), batch_size=BATCH // coordinator.world_size)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        scheduler.step()
        dist.all_reduce(loss.data)
        losses.append(loss.item() / coordinator.world_size)
    get_dist_logger().info("trained", ranks=[0])
    return losses
