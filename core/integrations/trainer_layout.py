"""Transformers' Trainer over a model that HybridParallelPlugin splits: tensor parallelism, pipeline stages, replicas.

The training loop is Transformers'. Calls on the model and optimizer go to the Booster: ranks of one replica get the
same rows, a training step runs one batch through the pipeline, and files hold the unsplit model.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin
from core.booster.plugin.hybrid_parallel_model import HybridParallelModel
from core.booster.plugin.label_mean import NUM_ITEMS
from core.booster.plugin.zero_plugin_base import DTYPES
from core.hugging_face.cut_model import cut_model
from core.integrations import for_accelerate, token_scores

if TYPE_CHECKING:
    from transformers import Trainer as Base

    from core.integrations.for_accelerate import AcceleratorParts
else:
    Base = AcceleratorParts = object

LOSS = "a pipeline computes the model's own loss, on its last stage. Split by tp_size, or leave it out"
NOT_IN_STAGES = {
    "compute_loss_func": LOSS,
    "compute_metrics": "the logits are on the last stage, and an evaluation gives the loss. Split by tp_size",
}
# What a pipeline replaces. The losses of these classes are the model's own.
REPLACED = ("compute_loss", "training_step", "prediction_step")
OWN_LOSS = {("transformers.trainer", "Trainer"), ("trl.trainer.sft_trainer", "SFTTrainer")}


class LayoutAcceleratorParts(AcceleratorParts):
    """Differences from our Accelerator for a model that a plugin splits."""

    def lay_out(self, plugin: HybridParallelPlugin) -> None:
        """Make the plugin's groups, and deal rows to replicas from now on. Collective over the world."""
        plugin.groups()
        places = super().gather(torch.tensor([plugin.data_rank()], device=self.device)).tolist()
        self.replica_ranks = [places.index(replica) for replica in range(plugin.data_size())]
        self.plugin, self.booster = plugin, Booster(plugin=plugin)
        self.boosted: HybridParallelModel | None = None
        self.boosted_optimizer: Any = None

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader as accelerate does. The ranks of a replica get the same batches."""
        with _dealt_to(self.plugin.data_rank(), self.plugin.data_size()):
            return super().prepare_data_loader(*args, **kwargs)

    def boost(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[HybridParallelModel, Any]:
        """Split a model, and return it with its optimizer as accelerate's loops take them. Collective."""
        scores = token_scores.take_off(model)
        boosted, wrapped, *_ = self.booster.boost(model, optimizer)
        boosted.losses_are_local = True
        boosted.zero_grad = wrapped.zero_grad  # the loop drops gradients by the model
        if scores is not None and self.plugin.pp_size == 1:
            token_scores.score_tokens(boosted.unwrap(), scores)
        self.boosted, self.boosted_optimizer = boosted, wrapped
        prepared = for_accelerate.prepared_optimizer(wrapped)
        self._optimizers.append(prepared)
        return boosted, prepared

    def cut_reference(self, model: Any) -> None:
        """Split a frozen model in place as the trained one is split, such as the reference of DPO. Collective."""
        scores = token_scores.take_off(model)
        model.requires_grad_(False).to(DTYPES[self.plugin.precision] or model.dtype)
        cutting = replace(self.plugin.cutting, checkpointing=None)
        (part,) = cut_model(model, cutting, self.plugin.groups(), self.device).parts
        assert part is model, "a model without stages is cut in place"
        if scores is not None:
            token_scores.score_tokens(model, scores)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward. A pipeline has already computed gradients with the loss. Collective after a step's last one."""
        if self.boosted is None:
            super().backward(loss, **kwargs)
        elif self.plugin.pp_size == 1:
            self.booster.backward(loss, self.boosted_optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the gradients of all parameters of the split model. Collective. Returns the norm before clipping."""
        if self.boosted is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        given = {id(param) for param in parameters if param.requires_grad}
        own = {id(param) for param in self.boosted.parameters() if param.requires_grad}
        if given != own:
            raise ValueError(
                f"clip_grad_norm_ was given {len(given)} parameters, and the split model trains {len(own)}: their norm "
                "is computed over all ranks. Pass model.parameters()"
            )
        self.boosted_optimizer.sync_grad()
        if math.isinf(max_norm):
            return self.boosted_optimizer.get_grad_norm()
        return self.boosted_optimizer.clip_grad_by_norm(max_norm, norm_type)

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The module inside the wrapper; of a pipeline, this rank's first stage."""
        inner = model.unwrap() if isinstance(model, HybridParallelModel) else model
        return super().unwrap_model(inner, *args, **kwargs)


class LayoutParts(Base):
    """Differences from Transformers' class if a ``plugin`` is given; without one there are none.

    Tensor, sequence, expert and data parallelism run ``compute_loss``, also the one of a subclass. A pipeline computes
    the loss inside the model's last stage, and subclasses that compute another one are rejected.

    plugin: a HybridParallelPlugin. It decides the precision; ``bf16`` and ``fp16`` of the arguments are rejected. With
    stages, a batch of a replica is cut into its microbatches, so give ``dataloader_drop_last=True`` if the last batch
    may be smaller. A model is trained once.
    """

    data_collator: Any

    def __init__(self, *args: Any, plugin: HybridParallelPlugin | None = None, **kwargs: Any) -> None:
        self.plugin = plugin
        if plugin is not None:
            _check_given(plugin, kwargs)
            _check_overridden(plugin, type(self))
        super().__init__(*args, **kwargs)
        if plugin is not None:
            _check_arguments(plugin, self.args)
            _check_loss(plugin, self)
            if getattr(self, "ref_model", None) is not None and plugin.pp_size == 1:
                self.accelerator.cut_reference(self.ref_model)
            if plugin.pp_size > 1 and getattr(self.data_collator, "padding_free", False):
                self.data_collator = _in_rows(self.data_collator)

    @property
    def boosted(self) -> HybridParallelModel | None:
        """The split model; None before training, and without a plugin."""
        return getattr(self.accelerator, "boosted", None)

    @property
    def booster(self) -> Booster | None:
        """The Booster of the plugin."""
        return getattr(self.accelerator, "booster", None)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def accelerator_class(self) -> Any:
        """Return the class of Accelerator that trains."""
        return super().accelerator_class() if self.plugin is None else _accelerator_class()

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator as Transformers does, and the plugin's groups."""
        super().create_accelerator_and_postprocess()
        if self.plugin is not None:
            self.accelerator.lay_out(self.plugin)

    def get_tp_size(self) -> int:
        """Return the number of ranks with the same rows: the ranks of a replica."""
        if self.plugin is None:
            return int(super().get_tp_size())
        return dist.get_world_size() // self.plugin.data_size()

    def _wrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._wrap_model(model, *args, **kwargs) if self.boosted is None else self.boosted

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if self.plugin is None:
            return super()._prepare_for_training(max_steps, train_dataloader, *args, **kwargs)
        if self.boosted is not None:
            raise RuntimeError(
                "train() was called again, and the model is split by now; make a new Trainer of the model"
            )
        _check_loader(train_dataloader, self.plugin.data_size())
        with mock.patch.object(self.accelerator, "prepare", self._boost):
            return super()._prepare_for_training(max_steps, train_dataloader, *args, **kwargs)

    def _boost(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[HybridParallelModel, Any]:
        """Split the model. Replaces ``accelerator.prepare``. Collective over the world."""
        boosted, prepared = self.accelerator.boost(model, optimizer)
        boosted.gathers_logits = _computes_of_logits(self)
        self.model = boosted.unwrap()
        return boosted, prepared

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss as Transformers does; with stages, run the batch through the pipeline. Collective then."""
        if self.plugin is None or self.plugin.pp_size == 1 or self.boosted is None:
            averages = self.args.average_tokens_across_devices and not _loss_ignores_items(self)
            with mock.patch.object(self.args, "average_tokens_across_devices", averages):
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        assert self.booster is not None, "made with the plugin"
        parts = 1
        if not torch.is_grad_enabled():
            outcome = self.booster.execute_pipeline(iter([inputs]), self.boosted, _share)
        else:
            if num_items_in_batch is None:
                parts = self.current_gradient_accumulation_steps  # Transformers divides the loss by it
            else:
                inputs = {**inputs, NUM_ITEMS: num_items_in_batch}
            criterion = functools.partial(_share, parts=parts)
            optimizer = self.optimizer.optimizer
            outcome = self.booster.execute_pipeline(iter([inputs]), self.boosted, criterion, optimizer)
        loss = outcome["loss"].detach().to(self.args.device) * parts
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        """Evaluate a batch as Transformers does. With stages only the loss is returned."""
        if self.plugin is None or self.plugin.pp_size == 1 or self.boosted is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        from accelerate.utils import send_to_device

        with torch.no_grad():
            return self.compute_loss(model, send_to_device(inputs, self.args.device)), None, None

    # -- files -------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as Transformers does. Collective: every rank must call it; the first one writes the unsplit model."""
        if self.boosted is None or self.booster is None:
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        if self.args.should_save:  # first, so that the directory is complete on every rank after the collective
            Path(folder).mkdir(parents=True, exist_ok=True)
            named = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if named is not None:
                named.save_pretrained(folder)
            torch.save(self.args, Path(folder) / "training_args.bin")
        self.booster.save_model(self.boosted, folder, shard=True, use_safetensors=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.plugin is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = self.optimizer.optimizer.state_dict()  # collective, and only the first rank asks for it below
        with mock.patch.object(self.optimizer.optimizer, "state_dict", lambda: state):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_best_model(self) -> None:
        if self.boosted is None or self.booster is None:
            super()._load_best_model()
            return
        self.booster.load_model(self.boosted, self.state.best_model_checkpoint)


@functools.cache
def _accelerator_class() -> Any:
    return type("Accelerator", (LayoutAcceleratorParts, for_accelerate.derived()), {})


def _in_rows(collate: Any) -> Any:
    """Return TRL's collator of packed records with a row for each, so that a pipeline can cut a batch."""
    collate.padding_free, collate.return_position_ids = False, True

    def stacked(rows: Any) -> Any:
        batch = collate(rows)
        del batch["attention_mask"]  # documents are kept apart by their positions
        batch["labels"][batch["position_ids"] == 0] = -100
        return batch

    return stacked


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


def check_layout(plugin: HybridParallelPlugin, trainer_class: type, arguments: Any) -> None:
    """Raise ValueError for a class from ``over``, or training arguments, that a split model cannot serve. Local."""
    _check_overridden(plugin, trainer_class)
    _check_arguments(plugin, arguments)


def _check_given(plugin: HybridParallelPlugin, given: dict[str, Any]) -> None:
    """Raise ValueError for arguments of Trainer that a split model cannot serve."""
    if given.get("ddp_config") is not None:
        raise ValueError(
            "Trainer got both ddp_config and plugin; drop ddp_config, and set the sharding with the plugin's zero_stage"
        )
    if given.get("model_init") is not None:
        raise ValueError("Trainer with a plugin: model_init would make a second model; make the model before")
    for name, why in NOT_IN_STAGES.items() if plugin.pp_size > 1 else ():
        if given.get(name) is not None:
            raise ValueError(f"Trainer with {name} and pp_size={plugin.pp_size}: {why}")


def _check_overridden(plugin: HybridParallelPlugin, kind: type) -> None:
    """Raise ValueError if a subclass overrides a computation that the pipeline performs."""
    for name in REPLACED if plugin.pp_size > 1 else ():
        for owner in kind.__mro__:
            if name in vars(owner) and owner is not LayoutParts and not _has_own_loss(owner):
                raise ValueError(f"{owner.__name__}.{name} with pp_size={plugin.pp_size}: {LOSS}")


def _has_own_loss(owner: type) -> bool:
    return (owner.__module__, owner.__name__) in OWN_LOSS or owner.__module__ == "transformers.trainer"


def _check_arguments(plugin: HybridParallelPlugin, arguments: Any) -> None:
    """Raise ValueError for training arguments that a split model cannot serve."""
    refused = {
        "bf16": "give the plugin precision='bf16'",
        "fp16": "give the plugin precision='fp16'",
        "auto_find_batch_size": "the model is split once",
    }
    if plugin.pp_size > 1:
        refused |= {"label_smoothing_factor": LOSS, "activation_offloading": "stages keep their own activations"}
    for name, instead in refused.items():
        if getattr(arguments, name, False):
            raise ValueError(f"TrainingArguments({name}={getattr(arguments, name)}) with a plugin: {instead}")
    if not arguments.average_tokens_across_devices:
        raise ValueError(
            "TrainingArguments(average_tokens_across_devices=False) with a plugin: the loss is the mean over the "
            "tokens of all replicas; leave it out"
        )


def _check_loss(plugin: HybridParallelPlugin, trainer: Any) -> None:
    """Raise ValueError for a loss of TRL's SFTTrainer that a pipeline does not compute."""
    if plugin.pp_size > 1 and getattr(trainer.args, "loss_type", "nll") != "nll":
        raise ValueError(f"SFTConfig(loss_type={trainer.args.loss_type!r}) with pp_size={plugin.pp_size}: {LOSS}")
    if plugin.pp_size > 1 and getattr(trainer, "aux_loss_enabled", False):
        raise ValueError(f"router_aux_loss_coef={trainer.router_aux_loss_coef} with pp_size={plugin.pp_size}: {LOSS}")


def _check_loader(loader: Any, replicas: int) -> None:
    """Raise ValueError for a loader that gives the ranks of one replica different rows."""
    sampler: Any = getattr(loader, "sampler", None)
    if getattr(sampler, "num_replicas", replicas) != replicas:
        raise ValueError(
            f"the training loader deals rows to {sampler.num_replicas} ranks, and the model has {replicas} replicas, "
            "whose ranks need the same rows; return self.accelerator.prepare(DataLoader(...)) without that sampler"
        )


def _loss_ignores_items(trainer: Any) -> bool:
    """Return True if the loss is a mean over the rows of this rank, as in classification and question answering.

    Transformers passes ``num_items_in_batch`` to every model that takes keywords, and multiplies the loss by the number
    of processes because it expects a division by that number. If the loss ignores it, the loss and each gradient would
    be multiplied alone.
    """
    if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
        return False
    model = trainer.accelerator.unwrap_model(trainer.model)
    loss_function = getattr(model, "loss_function", None)
    return callable(loss_function) and "num_items_in_batch" not in inspect.signature(loss_function).parameters


def _computes_of_logits(trainer: Any) -> bool:
    """True if a loss or a metric is computed of logits, outside of the model."""
    if trainer.compute_loss_func is not None or trainer.compute_metrics is not None or trainer.label_smoother:
        return True
    owner = next(kind for kind in type(trainer).__mro__ if "compute_loss" in vars(kind) and kind is not LayoutParts)
    return not _has_own_loss(owner)
