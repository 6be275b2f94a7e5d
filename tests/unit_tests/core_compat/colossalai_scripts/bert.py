"""Fine-tune a small BERT to tell two kinds of sentences apart, with a Booster and a warm-up of the rate."""

import colossalai
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.cluster import DistCoordinator
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.optimizer import HybridAdam
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

BATCH, STEPS = 8, 6


def build_dataset():
    words = torch.randint(1, 64, (BATCH * STEPS, 12), generator=torch.Generator().manual_seed(0))
    return TensorDataset(words, (words.float().mean(1) > 32).long())


def build_model():
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2)
    return BertForSequenceClassification(config)


def loss_of(model, batch):
    words, labels = batch
    return model(input_ids=words, attention_mask=torch.ones_like(words), labels=labels).loss


def main():
    disable_existing_loggers()
    colossalai.launch_from_torch(seed=42, verbose=False)
    coordinator = DistCoordinator()
    logger = get_dist_logger()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32", max_norm=1.0))
    with coordinator.priority_execution():
        dataset = build_dataset()
    loader = booster.plugin.prepare_dataloader(dataset, batch_size=BATCH // coordinator.world_size)
    model = build_model()
    optimizer = HybridAdam(model.parameters(), lr=5e-3, eps=1e-4, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    model, optimizer, _, loader, scheduler = booster.boost(model, optimizer, None, loader, scheduler)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        booster.backward(loss, optimizer)
        optimizer.step()
        scheduler.step()
        dist.all_reduce(loss.data)
        losses.append(loss.item() / coordinator.world_size)
    logger.info(f"last loss {losses[-1]:.4f}", ranks=[0])
    return losses
