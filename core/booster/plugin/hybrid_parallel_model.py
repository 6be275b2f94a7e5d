"""HybridParallelModel: this rank's part of a model, as HybridParallelPlugin returns it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as tree

from core.booster.plugin.low_level_zero_model import LowLevelZeroModel
from core.hugging_face.read.plan import without_adapters
from core.hugging_face.run.loss.parallel_loss import refuse_use_of_split_logits, with_whole_logits
from core.parallel_state import get_rank_watch
from core.watch.waiting import is_peers


class HybridParallelModel(LowLevelZeroModel):
    """Part of a transformers model on this rank. Without pipeline stages it is called like the model.

    With stages, ``booster.execute_pipeline`` runs it.
    """

    gathers_logits = False  # True: a causal model's outputs have the logits of the full vocabulary
    runner: Any = None  # the pipeline's runner, created at its first batch
    bytes_read = 0  # bytes of files that this rank read in its last load of weights

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on this rank's slices.

        Raises RuntimeError if the model has pipeline stages, or was created on the meta device and not loaded since.
        """
        if self.cut.layout is not None:
            raise RuntimeError(
                f"the model is cut into {self.cut.layout.num_stages} pipeline stages, and this rank has a part of "
                "them; call booster.execute_pipeline(data_iter, model, criterion, optimizer)"
            )
        self.expect_values()
        trains = self.engine is not None and torch.is_grad_enabled()
        if trains and self._takes_cache and "use_cache" not in self._positional[: len(args)]:
            kwargs.setdefault("use_cache", False)  # caches are for generation, and not all layers can fill one
        with self.failures_reported():
            output = super().forward(*args, **kwargs)
        return (with_whole_logits if self.gathers_logits else refuse_use_of_split_logits)(self.unwrap(), output)

    @cached_property
    def _takes_cache(self) -> bool:
        """Return ``True`` if the model's forward accepts a KV cache."""
        return "use_cache" in inspect.signature(type(without_adapters(self.unwrap())).forward).parameters

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own ``generate`` on this rank's slices. Tensor-parallel ranks draw the same tokens.

        With expert parallelism ranks compute together, so data ranks with finished texts continue until all have
        finished (synced_gpus). Raises RuntimeError if the model has pipeline stages.
        """
        if self.cut.layout is not None:
            raise RuntimeError(
                f"the model is cut into {self.cut.layout.num_stages} pipeline stages, and each makes a part of a "
                "token; generate with the model saved: booster.save_model, then transformers or python -m core generate"
            )
        self.expect_values()
        if self.cut.groups.size("ep") > 1:
            kwargs.setdefault("synced_gpus", True)
        with self.failures_reported():
            return super().generate(*args, **kwargs)

    @contextmanager
    def failures_reported(self) -> Iterator[None]:
        """Report a forward that fails only on this rank to all others, which wait in its collectives.

        A ValueError is not reported, because it rejects inputs that are the same on all ranks of a replica.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            watch = get_rank_watch()
            if watch is not None and not is_peers(error):
                watch.report_failure(error)
            raise

    def expect_values(self) -> None:
        """Raise RuntimeError on all ranks if a model boosted on the meta device has not been loaded."""
        if self.cut.unread:
            raise RuntimeError(
                f"the model was boosted on the meta device, and {len(self.cut.unread)} of its tensors, the first "
                f"{min(self.cut.unread)!r}, have no values yet; call booster.load_model(model, directory) before"
            )

    def cast(self, inputs: Any) -> Any:
        return inputs if self.cast_to is None else tree.tree_map_only(torch.Tensor, self._cast, inputs)
