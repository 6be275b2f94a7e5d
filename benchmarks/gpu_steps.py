"""Whole training steps for `python -m benchmarks gpu`: plain PyTorch, ours in every strategy, and our own GPT.

At world size 1 there is nothing to reduce, so what a step of ours takes more than plain PyTorch's is the wrapper:
hooks, the norm that it measures, the one wait for the device in a step. Model, optimizer and batches are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.arms import BETAS, EPS, WEIGHT_DECAY
from benchmarks.step_figures import deviation
from benchmarks.workloads import SEED, WORKLOADS, Workload

LR = 1e-3
CHECKED_LR = 0.03  # so large that the losses show the scale of the gradients, which AdamW cancels but for eps
STRATEGIES = ("no_shard", "optim", "optim_grads")
PLAIN = "plain PyTorch"
CONTROL = "control: half the gradient"

MODELS: dict[str, Workload] = {
    "gpt355m": Workload("gpt355m", 24, 1, width=1024, heads=16, vocabulary=50304, tokens=1024, samples=8),
    "gpt10m": WORKLOADS["gpt10m"],
    "test": WORKLOADS["test"],
}

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]  # one optimizer step; the loss before it, on the device


@dataclass(frozen=True)
class Setting:
    """Device and precision of the arms. autocast: products in bf16, parameters in fp32."""

    workload: Workload
    device: torch.device
    autocast: bool
    lr: float = LR

    def model(self) -> nn.Module:
        """The workload's model, with the same weights on every device."""
        return _Cast(self.workload.model().to(self.device), self.device.type, self.autocast)

    def batches(self, count: int) -> list[Batch]:
        """Of the first steps."""
        found = [self.workload.microbatches(step, 0, 1)[0] for step in range(count)]
        return [(inputs.to(self.device), targets.to(self.device)) for inputs, targets in found]

    def on(self, device: str) -> Setting:
        """The same elsewhere."""
        return replace(self, device=torch.device(device))


class _Cast(nn.Module):
    def __init__(self, module: nn.Module, device_type: str, autocast: bool) -> None:
        super().__init__()
        self.module, self.device_type, self.autocast = module, device_type, autocast

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.autocast):
            return self.module(inputs, targets)


def plain(setting: Setting, *, gradient_factor: float = 1.0) -> Step:
    """A loop in plain PyTorch, with the fused AdamW. gradient_factor: other than 1 in a control that must be caught."""
    model = setting.model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setting.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(*batch)
        (loss if gradient_factor == 1.0 else gradient_factor * loss).backward()
        optimizer.step()
        return loss.detach()

    return step


def wrapped(setting: Setting, strategy: str, *, overlap: bool) -> Step:
    """Ours, as a user would write it."""
    options: dict[str, Any] = {"data_parallel_sharding_strategy": strategy, "overlap_grad_reduce": overlap}
    if overlap and strategy != "no_shard":
        options["overlap_param_gather"] = True
    adam = {"optimizer_backend": "fused", "lr": setting.lr}
    return _train(setting.model(), None, options, adam, lambda model, batch: model(*batch))


def own_gpt(setting: Setting) -> tuple[Step, nn.Module]:
    """core's GPT in bf16 with fp32 masters and gradients, its weight gradients written in place."""
    from core.models.gpt import GPTModel
    from core.transformer.transformer_config import TransformerConfig

    work = setting.workload
    config = TransformerConfig(
        num_layers=work.units * work.layers,
        hidden_size=work.width,
        num_attention_heads=work.heads,
        vocab_size=work.vocabulary,
        max_sequence_length=work.tokens,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=True,
        init_seed=SEED,
    )
    model = GPTModel(config).to(setting.device)
    options = {"data_parallel_sharding_strategy": "optim", "grad_reduce_in_fp32": True}
    adam = {"optimizer_backend": "fused", "lr": setting.lr, "bf16": True}
    return _train(model, config, options, adam, lambda wrapper, batch: wrapper(batch[0], labels=batch[1]).mean()), model


def _train(
    model: nn.Module,
    config: Any,
    options: dict[str, Any],
    adam: dict[str, Any],
    loss_of: Callable[[nn.Module, Batch], torch.Tensor],
) -> Step:
    from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    wrapper = DistributedDataParallel(config, DistributedDataParallelConfig(**options), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            weight_decay=WEIGHT_DECAY,
            clip_grad=0.0,
            **adam,
        ),
        [wrapper],
        no_weight_decay_cond=lambda name, param: False,  # all parameters decay, as in torch.optim.AdamW
    )

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(wrapper, batch)
        loss.backward()
        finalize_model_grads([wrapper])
        updated, _, _ = optimizer.step()
        if not updated:
            raise RuntimeError("the optimizer skipped a step")
        return loss.detach()

    return step


def arms_of(setting: Setting) -> dict[str, Callable[[], Step]]:
    """Plain PyTorch first, then every strategy with and without overlap."""
    arms: dict[str, Callable[[], Step]] = {PLAIN: lambda: plain(setting)}
    for strategy in STRATEGIES:
        for overlap in (False, True):
            name = f"core {strategy}" + (" overlapped" if overlap else "")
            arms[name] = partial(wrapped, setting, strategy, overlap=overlap)
    return arms


# -- the gate ---------------------------------------------------------------------------------------------------------


class WrongLosses(RuntimeError):
    """An arm does not train as plain PyTorch on the CPU does, or a control that is wrong was not caught."""


def losses(step: Step, batches: Sequence[Batch]) -> list[float]:
    """Of consecutive steps, read from the device after the last."""
    found = [step(batch) for batch in batches]
    return torch.stack(found).float().tolist()


def check(name: str, got: Sequence[float], want: Sequence[float], tolerance: float) -> float:
    """The largest relative difference of an arm's losses; WrongLosses beyond the tolerance."""
    off = deviation(got, want)
    if not off <= tolerance:
        raise WrongLosses(
            f"{name}: losses {_short(got)} are {off:.1e} from {_short(want)}, {tolerance:.0e} allowed; its time would "
            "mean nothing"
        )
    return off


def _short(values: Sequence[float]) -> list[float]:
    return [round(value, 6) for value in values]


def check_control(got: Sequence[float], want: Sequence[float], tolerance: float) -> float:
    """WrongLosses unless a wrong arm would have been refused."""
    off = deviation(got, want)
    if math.isfinite(off) and off <= tolerance:
        raise WrongLosses(f"{CONTROL}: losses are within {off:.1e}; the gate at {tolerance:.0e} catches nothing")
    return off


# -- floating point operations ----------------------------------------------------------------------------------------


def matrix_numel(model: nn.Module) -> int:
    """Elements of all weights that tokens are multiplied by: linear layers and the output, no embedding and no bias."""
    from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    kinds = (nn.Linear, ColumnParallelLinear, RowParallelLinear)
    return sum(_matrix(module) for module in model.modules() if isinstance(module, kinds))


def _matrix(module: Any) -> int:
    if module.weight is not None:
        return int(module.weight.numel())
    return int(module.output_size_per_partition * module.input_size)  # a tied output: the embedding's weight is used


def step_flops(matrix_elements: int, workload: Workload) -> int:
    """Of forward and backward over one batch, 6 N + 12 L H Q T a token: Chowdhery et al. 2022 (PaLM), appendix B.

    N: elements of the matrices; L H Q: layers times width; T: tokens of a sequence. Attention counts as if it were not
    causal and nothing as if it were computed twice, as there.
    """
    layers = workload.units * workload.layers
    tokens = workload.samples * workload.tokens
    return tokens * (6 * matrix_elements + 12 * layers * workload.width * workload.tokens)
