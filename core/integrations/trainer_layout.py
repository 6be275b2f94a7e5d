"""Transformers' Trainer over a model that HybridParallelPlugin splits: tensor parallelism, pipeline stages, replicas.

Trainer's loop is Transformers' own. What a process asks of its model and optimizer there goes to the Booster: ranks of
one replica get the same rows, a training step is a batch through the pipeline, and files hold the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin
from core.booster.plugin.hybrid_parallel_loss import NUM_ITEMS, add_over_replicas
from core.booster.plugin.hybrid_parallel_model import HybridParallelModel
from core.integrations import for_accelerate, token_scores

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

NOT_TAKEN = {
    "compute_loss_func": "computes a loss of logits that a rank has in part; leave it out: the model's own is used",
    "compute_metrics": "takes the logits of all rows, and an evaluation of a split model gives its loss; leave it out",
    "model_init": "would make a second model after the first is split; make the model before",
}


class LayoutParts(Base):
    """Differences from Transformers' class where a `plugin` is given; without one there are none.

    plugin: a HybridParallelPlugin. It decides the precision; `bf16` and `fp16` of the arguments are refused. With
    stages, a batch of a replica is cut into its microbatches, so give `dataloader_drop_last=True` where the last batch
    may be smaller. A model is trained once.
    """

    def __init__(self, *args: Any, plugin: HybridParallelPlugin | None = None, **kwargs: Any) -> None:
        self.plugin = plugin
        self.booster: Any = None if plugin is None else Booster(plugin=plugin)
        self.boosted: HybridParallelModel | None = None
        if plugin is not None:
            _check_given(plugin, kwargs)
        super().__init__(*args, **kwargs)
        if plugin is not None:
            _check_arguments(self.args)

    # -- what the loop is made of ------------------------------------------------------------------------------------

    def get_tp_size(self) -> int:
        """Number of ranks that have the same rows: those of a replica."""
        if self.plugin is None:
            return int(super().get_tp_size())
        return dist.get_world_size() // self.plugin.data_size()

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        if self.plugin is None:
            return super()._get_dataloader(*args, **kwargs)
        self.plugin.groups()
        with _dealt_to(self.plugin.data_rank(), self.plugin.data_size()):
            return super()._get_dataloader(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.plugin is None:
            return super()._prepare_for_training(*args, **kwargs)
        if self.boosted is not None:
            raise RuntimeError(
                "train() was called again, and the model is split by now; make a new Trainer of the model"
            )
        with mock.patch.object(self.accelerator, "prepare", self._boost):
            return super()._prepare_for_training(*args, **kwargs)

    def _boost(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[HybridParallelModel, Any]:
        """In the place of `accelerator.prepare`. Collective over the world."""
        scores = token_scores.take_off(model)
        boosted, wrapped, *_ = self.booster.boost(model, optimizer)
        if scores and self.plugin is not None and self.plugin.pp_size == 1:
            token_scores.score_tokens(boosted.unwrap())
        self.boosted = boosted
        boosted.zero_grad = wrapped.zero_grad  # the loop drops gradients by the model
        prepared = for_accelerate.prepared_optimizer(wrapped)
        self.accelerator._optimizers.append(prepared)
        return boosted, prepared

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of a replica's batch; its share of the step's loss, equal on all ranks. Collective."""
        if self.plugin is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        inputs = _on_device(inputs, self.args.device)
        by_items = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        parts = 1 if by_items else self.current_gradient_accumulation_steps
        if by_items:
            inputs = {**inputs, NUM_ITEMS: num_items_in_batch}
        optimizer = self.optimizer.optimizer
        if self.plugin.pp_size > 1:
            criterion = functools.partial(_share, parts=parts)
            outcome = self.booster.execute_pipeline(iter([inputs]), model, criterion, optimizer)
            return outcome["loss"].detach().to(self.args.device)
        loss = _share(model(**inputs), inputs, parts)
        self.booster.backward(loss, optimizer)
        return loss.detach()

    def _clip_grad_norm(self, model: Any) -> Any:
        if self.plugin is None:
            return super()._clip_grad_norm(model)
        return self.optimizer.optimizer.clip_grad_by_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self.plugin is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        self.optimizer.optimizer.sync_grad()
        return self.optimizer.optimizer.get_grad_norm() if grad_norm is None else grad_norm

    # -- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """The mean over rows of the batches' losses, of all replicas. Collective. Without predictions."""
        if self.plugin is None:
            return super().evaluation_loop(dataloader, description, prediction_loss_only, *args, **kwargs)
        from transformers.trainer_utils import EvalLoopOutput

        if self.boosted is None:
            raise RuntimeError("evaluate() came before train(), which splits the model; evaluate the model before it")
        self.boosted.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for inputs in dataloader:
            batch = _on_device(inputs, self.args.device)
            rows = len(next(value for value in batch.values() if isinstance(value, torch.Tensor)))
            if self.plugin.pp_size > 1:
                loss = self.booster.execute_pipeline(iter([batch]), self.boosted, _share)["loss"]
            else:
                loss = self.boosted(**batch).loss
            sums += torch.stack([loss.double() * rows, loss.new_tensor(rows).double()])
        add_over_replicas(sums, self.boosted.cut.groups)
        prefix = kwargs.get("metric_key_prefix", "eval")
        metrics = {f"{prefix}_loss": float(sums[0] / sums[1])}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=int(sums[1]))

    # -- files -------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Transformers' does. Collective: every rank calls it, and the first one writes the whole model."""
        if self.boosted is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        self.booster.save_model(self.boosted, folder, shard=True, use_safetensors=True)
        if self.args.should_save:
            named = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if named is not None:
                named.save_pretrained(folder)
            torch.save(self.args, Path(folder) / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.plugin is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = self.optimizer.optimizer.state_dict()  # collective, and only the first rank asks for it below
        with mock.patch.object(self.optimizer.optimizer, "state_dict", lambda: state):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_best_model(self) -> None:
        if self.boosted is None:
            super()._load_best_model()
            return
        self.booster.load_model(self.boosted, self.state.best_model_checkpoint)


def _on_device(inputs: dict[str, Any], device: torch.device) -> Any:
    from accelerate.utils import send_to_device

    return send_to_device(inputs, device)


def _share(outputs: Any, batch: Any, parts: int = 1) -> torch.Tensor:
    """A batch's loss, of a step of so many batches."""
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss if parts == 1 else loss / parts


@contextmanager
def _dealt_to(rank: int, replicas: int) -> Iterator[None]:
    """Inside, accelerate deals the batches of a loader out to replicas: their ranks get the same ones."""
    import accelerate.accelerator

    deal = accelerate.accelerator.prepare_data_loader

    def prepare(*args: Any, **options: Any) -> Any:
        return deal(*args, **{**options, "num_processes": replicas, "process_index": rank, "dispatch_batches": False})

    with mock.patch.object(accelerate.accelerator, "prepare_data_loader", prepare):
        yield


def _check_given(plugin: HybridParallelPlugin, given: dict[str, Any]) -> None:
    """ValueError for arguments of Trainer that a split model cannot serve."""
    if given.get("ddp_config") is not None:
        raise ValueError("Trainer was given ddp_config and plugin; the plugin's zero_stage says what is sharded")
    for name, why in NOT_TAKEN.items():
        if given.get(name) is not None:
            raise ValueError(f"Trainer over {type(plugin).__name__}: {name} {why}")


def _check_arguments(arguments: Any) -> None:
    """ValueError for training arguments that a split model cannot serve."""
    refused = {
        "bf16": "give the plugin precision='bf16'",
        "fp16": "give the plugin precision='fp16'",
        "label_smoothing_factor": "it computes a loss of logits that a rank has in part",
        "auto_find_batch_size": "the model is split once",
    }
    for name, instead in refused.items():
        if getattr(arguments, name, False):
            raise ValueError(f"TrainingArguments({name}={getattr(arguments, name)}) with a plugin: {instead}")
    if not arguments.average_tokens_across_devices:
        raise ValueError(
            "TrainingArguments(average_tokens_across_devices=False) with a plugin: the loss is the mean over the "
            "tokens of all replicas; leave it out"
        )
