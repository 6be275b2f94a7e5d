"""ModelWrapper: a model as a plugin returns it, with the plain module one `unwrap()` away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn


class ModelWrapper(nn.Module):
    """Holds a model as `module`. A plugin derives from it to change the forward or what `unwrap` finds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def unwrap(self) -> nn.Module:
        """The user's own module, under all wrappers: these are the names that checkpoints use."""
        module = self.module
        while isinstance(module, (ModelWrapper, nn.parallel.DistributedDataParallel)):
            module = module.module
        return module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call a transformers model's own `generate`. Every rank calls it; data ranks may have other prompts."""
        model: Any = self.unwrap()
        return model.generate(*args, **kwargs)


@contextmanager
def all_of(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside all of these contexts, which are entered one after another."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class AMPModelMixin:
    """A model whose optimizer keeps master weights of its own."""

    def update_master_params(self) -> None:
        """Take over weights that were written into the model from outside. Called after a checkpoint is loaded."""
