"""Train a small ResNet with BatchNorm on images made here, by torch's DDP or by core's wrapper: `--wrapper torch`.

    torchrun --standalone --nproc-per-node 2 examples/train_vision.py
    torchrun --standalone --nproc-per-node 2 examples/train_vision.py --wrapper torch

Both print the same losses and accuracies. On a CPU the buffers of BatchNorm are broadcast, as torch's DDP does by
default; on GPUs the layers become SyncBatchNorm, which the tests cannot run: they have no GPU. Evaluation on all ranks,
an average of the weights (EMA), early stop, and TensorBoard with `--tensorboard DIRECTORY`. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core_plan.job.errors import ConfigError
from core_plan.job.run_directory import check_writable

CLASSES = 4


def images(count: int, seed: int) -> TensorDataset:
    """Noise, and in it a bright quarter, whose place is the class. [3, 16, 16] each."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    pixels = torch.randn(count, 3, 16, 16, generator=generator)
    for number, label in enumerate(labels.tolist()):
        row, column = 8 * (label // 2), 8 * (label % 2)
        pixels[number, :, row : row + 8, column : column + 8] += 0.3
    return TensorDataset(pixels, labels)


class Block(nn.Module):
    """Two convolutions, each with a BatchNorm, and what comes in added to them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class SmallResNet(nn.Module):
    """Two blocks, a pooling between them, and a linear layer over the mean of each quarter."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.first, self.second = Block(width), Block(width)
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(F.relu(self.bn(self.stem(x)))), 2)
        return self.head(F.adaptive_avg_pool2d(self.second(x), 2).flatten(1))


def wrapped(model: nn.Module, options: argparse.Namespace) -> Any:
    """The model for training over all ranks: the lines that differ between the two wrappers."""
    if options.wrapper == "torch":
        return nn.parallel.DistributedDataParallel(
            model,
            bucket_cap_mb=25,  # the default, as is the broadcast of buffers
            gradient_as_bucket_view=True,
        )
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,  # as torch's DDP does
        broadcast_buffers=True,  # here it has to be said; a wrap of a model with BatchNorm without it warns
        bucket_size=25 * 2**20 // 4,  # elements
    )
    return DistributedDataParallel(None, config, model)


def evaluate(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The share of right answers, over the images of all ranks. Each rank looks at its part, once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for buffer in model.buffers():  # BatchNorm's, which each rank has moved in the last forward
        dist.broadcast(buffer, 0)
    counts = torch.zeros(2, device=device)
    model.eval()
    with torch.no_grad():
        for pixels, labels in DataLoader(Subset(data, range(rank, len(data), world)), batch_size=64):
            right = model(pixels.to(device)).argmax(1) == labels.to(device)
            counts += torch.tensor([right.sum(), len(right)], device=device)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def train(options: argparse.Namespace) -> Iterator[tuple[int, float, float]]:
    """(epoch, mean loss, accuracy of the averaged model) of each epoch, the same on all ranks."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)  # the same weights on all ranks
    model: nn.Module = SmallResNet().to(device)
    if on_gpu:  # it has no kernel for CPUs
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = wrapped(model, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    data, held_out = images(256, seed=1), images(130, seed=2)  # 130 do not divide by the ranks, and need not
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(loader))
    best, since_best = 0.0, 0
    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros((), device=device)
        for pixels, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(pixels.to(device)), labels.to(device))
            loss.backward()
            if options.wrapper == "core":
                finalize_model_grads([model])  # the one line more: every gradient is whole now
            optimizer.step()
            schedule.step()
            average.update_parameters(model.module)
            total += loss.detach() / len(loader)
        dist.all_reduce(total)
        accuracy = evaluate(average.module, held_out, device)
        yield epoch, float(total / dist.get_world_size()), accuracy
        best, since_best = (accuracy, 0) if accuracy > best else (best, since_best + 1)
        if since_best == options.patience:  # all ranks have the same numbers, so all stop
            return


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print a line an epoch on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wrapper", choices=("core", "torch"), default="core")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--patience", type=int, default=2, help="epochs without a better accuracy before it stops")
    parser.add_argument("--tensorboard", help="a directory for what TensorBoard shows; needs the package tensorboard")
    options = parser.parse_args(arguments)
    if options.tensorboard:
        try:
            check_writable(Path(options.tensorboard), "--tensorboard")
        except ConfigError as error:
            parser.error(str(error))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if options.wrapper == "core":
        parallel_state.initialize_model_parallel()
    writer = None
    if options.tensorboard and dist.get_rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(options.tensorboard)
    for epoch, loss, accuracy in train(options):
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy of the average {accuracy:.3f}", flush=True)
        if writer is not None:
            writer.add_scalar("loss", loss, epoch)
            writer.add_scalar("accuracy", accuracy, epoch)
    if writer is not None:
        writer.close()
    if options.wrapper == "core":
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
