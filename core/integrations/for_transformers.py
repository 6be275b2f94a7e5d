"""Transformers' Trainer over this package's wrapper, through the Accelerator of for_accelerate."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from unittest import mock

from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.integrations import for_accelerate
from core.integrations.loop_optimizer import LoopOptimizer
from core.integrations.trainer_layout import LayoutParts
from core.training.extras import require

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class TrainerParts(Base):
    """The differences from Transformers' class; `from core.integrations import Trainer` is both.

        config = DistributedDataParallelConfig(...)
        trainer = Trainer(model, arguments, train_dataset=data, ddp_config=config)
        trainer.train()

    ddp_config: how gradients are kept and reduced, and what is sharded; None replicates everything, as torch's DDP.
    plugin: a HybridParallelPlugin, in its place, for a model that is split over tensor-parallel ranks and pipeline
    stages (`LayoutParts`). The other arguments are Transformers'. `save_model`, checkpoints and resuming work as there:
    files hold whole tensors.
    """

    def __init__(self, *args: Any, ddp_config: DistributedDataParallelConfig | None = None, **kwargs: Any) -> None:
        self.ddp_config = ddp_config
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """As Transformers' does, with our Accelerator in the place of accelerate's."""
        import transformers.trainer

        def ours(*, kwargs_handlers: list[Any], **options: Any) -> Any:
            for handler in kwargs_handlers:
                if self.args.ddp_find_unused_parameters is None and hasattr(handler, "find_unused_parameters"):
                    handler.find_unused_parameters = False  # Transformers' own choice, which would be warned of
            return for_accelerate.derived()(kwargs_handlers=kwargs_handlers, ddp_config=self.ddp_config, **options)

        with mock.patch.object(transformers.trainer, "Accelerator", ours):
            super().create_accelerator_and_postprocess()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Transformers' does. Collective: every rank calls it, and the first one writes."""
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
def derived() -> Any:
    """The class to use: Transformers', with these parts. MissingExtra where a package is not installed."""
    for_accelerate.derived()
    theirs = require("transformers", "core.integrations.Trainer", "integrations")
    return type("Trainer", (LayoutParts, TrainerParts, theirs.Trainer), {"__doc__": TrainerParts.__doc__})
