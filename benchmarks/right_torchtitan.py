"""A short trainer over torchtitan's parallelize functions on the CPU, checked as by `python -m core verify`."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from benchmarks.right_program import last_report
from core.verify import GradientReport, note

VOCABULARY, LENGTH, STEPS = 32, 16, 3


@dataclass(frozen=True)
class Titan:
    """A loop over torchtitan's Llama 3.

    Attributes:
        fsdp: Ranks that shard the parameters and have other data.
        tp: Ranks that split the layers.
        replicas: Copies of the sharded model.
        parts: Microbatches a step.
        recompute: True to checkpoint activations.
        fault: Name of a planted mistake; '' for none.
    """

    fsdp: int = 1
    tp: int = 1
    replicas: int = 1
    parts: int = 1
    recompute: bool = False
    fault: str = ""

    def __str__(self) -> str:
        sizes = {"replicas": self.replicas, "fsdp": self.fsdp, "tp": self.tp, "microbatches": self.parts}
        words = *(f"{name} {size}" for name, size in sizes.items() if size > 1), "recomputed" * self.recompute
        return ", ".join(filter(None, (*words, self.fault)))


RIGHT = [
    Titan(fsdp=2), Titan(fsdp=2, parts=2), Titan(fsdp=2, recompute=True), Titan(tp=2), Titan(tp=2, parts=2),
    Titan(tp=2, recompute=True), Titan(tp=2, fault="right gradient of an input"),
]  # fmt: skip
LAYOUTS = [*RIGHT, Titan(replicas=2)]
RIGHT_OF_4 = [Titan(fsdp=2, tp=2), Titan(replicas=2, fsdp=2)]
# A loop with a planted mistake, and text that its report contains.
WRONG = {
    Titan(fsdp=2, fault="averaged"): "1/n twice",
    Titan(fsdp=2, parts=2, fault="own tokens"): "2 times too large",
    Titan(fsdp=2, parts=2, fault="not zeroed"): "zero_grad is not called",
    Titan(fsdp=2, parts=2, fault="skipped"): "on data rank 1 alone",
    Titan(tp=2, fault="norm"): "layers.1.attention_norm.weight",
    Titan(tp=2, fault="gradient of an input"): "wrong at that of `layers.1.ffn_norm`",
    Titan(tp=2, parts=2, fault="own tokens"): "2 times too large",
    Titan(replicas=2): "1/n twice",  # torchtitan's own: replicas are averaged, and the loss is divided by all tokens
}


def report_of(program: Titan) -> GradientReport:
    """Run a loop, compare its gradients and weights, and return the last report. Collective over the world."""
    _import_torchtitan()
    return last_report(partial(_train, program))


def _import_torchtitan() -> None:
    """Import the model without its experts' kernels, which need triton and are not called."""
    sys.modules.setdefault("torchtitan.models.moe.kernels", mock.MagicMock())
    importlib.import_module("torchtitan.models.llama3.infra.parallelize")
    vars(sys.modules["torchtitan.distributed.parallel_dims"])["device_type"] = "cpu"  # it takes CUDA where no GPU is
    logging.getLogger().setLevel(logging.ERROR)


def _train(program: Titan) -> None:
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama

    dims = ParallelDims(
        dp_replicate=program.replicas, dp_shard=program.fsdp, cp=1, tp=program.tp, pp=1, ep=1, etp=1,
        world_size=dist.get_world_size(),
    )  # fmt: skip
    dims.build_mesh()
    config = JobConfig()
    config.training.seq_len = LENGTH
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint.mode = "full" if program.recompute else "none"
    config.parallelism.disable_loss_parallel = True
    torch.manual_seed(0)
    model: Any = Transformer(
        TransformerModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, max_seq_len=LENGTH)
    )
    with torch.no_grad():
        model.init_weights()
    parallelize_llama(model, dims, config)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    _plant(program.fault, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    place = dist.get_rank() // program.tp
    data_ranks = dist.get_world_size() // program.tp
    tokens = 2 * LENGTH * data_ranks * (1 if program.fault == "own tokens" else program.parts)
    for step in range(STEPS):
        if program.fault != "not zeroed":
            optimizer.zero_grad()
        for part in range(program.parts):
            seed = place + data_ranks * (part + program.parts * step)
            rows = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
            inputs, labels = rows[:, :-1], rows[:, 1:]
            note(_mean_loss, inputs, labels)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
            is_skipped = (program.fault, part, place) == ("skipped", 0, 1)
            (loss * (not is_skipped) / tokens).backward()
        optimizer.step()


def _plant(fault: str, model: Any) -> None:
    layer = model.layers["1"]
    if fault == "averaged":  # FSDP divides too
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(dist.get_world_size())
    if fault == "norm":
        layer.attention_norm.weight.register_hook(lambda grad: 2 * grad)
    if "gradient of an input" in fault:
        layer.feed_forward.forward = partial(_on_local_tensors, layer.feed_forward, reduces="right" in fault)


def _on_local_tensors(part: Any, inputs: Any, *, reduces: bool) -> Tensor:
    """Multiply local tensors, whose gradient is a part of a sum; `to_local` expects the sum by default."""
    if not isinstance(inputs, DTensor):  # in the unsplit model
        result: Tensor = type(part).forward(part, inputs)
        return result
    local = inputs.to_local(grad_placements=[Partial()] if reduces else None)
    gate, up = (F.linear(local, layer.weight.to_local()) for layer in (part.w1, part.w3))
    product: Tensor = part.w2(F.silu(gate) * up)
    return product


def _mean_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
