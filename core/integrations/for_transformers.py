"""Transformers' Trainer over this package's wrapper, through the Accelerator of for_accelerate."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.extras import require
from core.integrations import for_accelerate
from core.integrations.evaluation import EvaluationLoader
from core.integrations.loop_optimizer import LoopOptimizer
from core.integrations.trainer_layout import LayoutParts

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class TrainerParts(Base):
    """Mixin that adds sharding and splitting to Transformers' Trainer.

    ``from core.integrations import Trainer`` combines both. ``save_model``, checkpoints and resuming work as in
    Transformers: files hold full tensors.

        config = DistributedDataParallelConfig(...)
        trainer = Trainer(model, arguments, train_dataset=data, ddp_config=config)
        trainer.train()

    Args:
        ddp_config: Reduction and sharding of gradients. None replicates everything, as torch's DDP does.
        plugin: HybridParallelPlugin for a model split over tensor-parallel ranks and stages; replaces ddp_config.
        args: Arguments of Transformers' Trainer.
        kwargs: Arguments of Transformers' Trainer.
    """

    def __init__(self, *args: Any, ddp_config: DistributedDataParallelConfig | None = None, **kwargs: Any) -> None:
        self.ddp_config = ddp_config
        super().__init__(*args, **kwargs)

    def accelerator_class(self) -> Any:
        """Return the class of Accelerator that trains."""
        return for_accelerate.derived()

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator as Transformers does, from ``accelerator_class``."""
        import transformers.trainer

        def ours(*, kwargs_handlers: list[Any], **options: Any) -> Any:
            for handler in kwargs_handlers:
                if self.args.ddp_find_unused_parameters is None and hasattr(handler, "find_unused_parameters"):
                    handler.find_unused_parameters = False  # Transformers' own choice, which would be warned of
            kind = self.accelerator_class()
            return kind(kwargs_handlers=kwargs_handlers, ddp_config=self.ddp_config, **options)

        with mock.patch.object(transformers.trainer, "Accelerator", ours):
            super().create_accelerator_and_postprocess()

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with the same result on any number of ranks. Collective.

        A batch's loss is the mean over its own rows, and each row counts once.
        """
        loader = EvaluationLoader.of(dataloader) if self.args.world_size > 1 else dataloader
        self.accelerator.evaluated = loader if isinstance(loader, EvaluationLoader) else None
        try:
            return super().evaluation_loop(loader, *args, **kwargs)
        finally:
            self.accelerator.evaluated = None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        gather, world = self.accelerator.gather, self.args.world_size

        def of_each_rank(count: torch.Tensor) -> torch.Tensor:
            if self.accelerator.evaluated is not None:  # the loss of the batch alone
                return count.expand(world)
            counts: torch.Tensor = gather(count)  # one number per replica
            return counts.repeat_interleave(world // len(counts))

        with mock.patch.object(self.accelerator, "gather", of_each_rank):
            return super()._get_num_items_in_batch(batch_samples, device)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as Transformers does. Collective: every rank must call it; the first one writes."""
        wrapped = self.model_wrapped
        if not isinstance(wrapped, DistributedDataParallel):
            super().save_model(output_dir, _internal_call)
            return
        with wrapped.gathered():
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = getattr(self.optimizer, "optimizer", None)
        if not isinstance(optimizer, LoopOptimizer):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        with optimizer.collected():  # only the first rank asks for the state
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_best_model(self) -> None:
        wrapped = self.model_wrapped
        if not isinstance(wrapped, DistributedDataParallel):
            super()._load_best_model()
            return
        with wrapped.gathered():
            super()._load_best_model()


@functools.cache
def over(trainer_class: type[Any]) -> Any:
    """Derive the class that trains in any layout from a Trainer class.

        from trl import KTOTrainer

        trainer = over(KTOTrainer)(model, args=arguments, train_dataset=data, plugin=HybridParallelPlugin(...))

    Args:
        trainer_class: transformers.Trainer or a subclass, of TRL or your own.

    Returns:
        A class with the name of ``trainer_class`` that takes ``ddp_config`` or ``plugin`` too. One that has these parts
        already comes back unchanged.

    Raises:
        TypeError: If ``trainer_class`` does not derive from transformers.Trainer.
        MissingExtra: If accelerate or transformers is not installed.
    """
    for_accelerate.derived()
    theirs = require("transformers", "core.integrations.over", "integrations")
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, theirs.Trainer)):
        raise TypeError(f"over takes a class derived from transformers.Trainer, and was given {trainer_class!r}")
    if issubclass(trainer_class, TrainerParts):
        return trainer_class
    own = {"__doc__": TrainerParts.__doc__, "__module__": __name__}
    return type(trainer_class.__name__, (LayoutParts, TrainerParts, trainer_class), own)


def derived() -> Any:
    """Return Transformers' Trainer with these parts. MissingExtra if a package is not installed."""
    for_accelerate.derived()
    return over(require("transformers", "core.integrations.Trainer", "integrations").Trainer)
