"""ModelWrapper: model returned by a plugin; ``unwrap()`` returns the plain module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from core.distributed.distributed_data_parallel import DistributedDataParallel

# Attributes of a transformers model that are correct for a part of it. A returned layer is this rank's part.
PASSED_ON = (
    *("config", "generation_config", "device", "dtype", "main_input_name", "base_model_prefix", "can_generate"),
    *("get_input_embeddings", "get_output_embeddings", "peft_config", "active_adapter", "active_adapters"),
)
SAVE = (
    "save_pretrained of a boosted model would write this rank's part of it; call "
    "booster.save_model(model, directory, shard=True) on all ranks"
)


class ModelWrapper(nn.Module):
    """Wrapper with the model as ``module``. Plugins subclass it to change the forward or ``unwrap``.

    It forwards those attributes of a transformers model that are also correct for a part of the model (``PASSED_ON``).
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self._modules:
                raise
            inner = self.unwrap()
            if name in PASSED_ON and hasattr(inner, name):
                return getattr(inner, name)
            if name == "save_pretrained":
                raise AttributeError(SAVE) from None
            if hasattr(inner, name):
                raise AttributeError(
                    f"a boosted model does not pass on {name!r} of {type(inner).__name__}, of which a rank may have a "
                    f"part; model.unwrap().{name} is this rank's"
                ) from None
            raise

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def unwrap(self) -> nn.Module:
        """Return the user's module under all wrappers. Checkpoints use its parameter names."""
        module = self.module
        while isinstance(module, (ModelWrapper, nn.parallel.DistributedDataParallel)):
            module = module.module
        return module

    @property
    def require_backward_grad_sync(self) -> bool:
        """False while backward accumulates without reducing, like torch DDP's attribute. The Booster's ``no_sync`` sets
        it.
        """
        return all(part.require_backward_grad_sync for part in self._reducing())

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, syncs: bool) -> None:
        for part in self._reducing():
            part.require_backward_grad_sync = syncs

    def _reducing(self) -> list[Any]:
        """Return the wrappers inside that reduce gradients."""
        kinds = (nn.parallel.DistributedDataParallel, DistributedDataParallel)
        return [part for part in self.modules() if isinstance(part, kinds)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward."""
        return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call a transformers model's ``generate``. Every rank must call it; data ranks may have different prompts."""
        model: Any = self.unwrap()
        return model.generate(*args, **kwargs)


@contextmanager
def all_of(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter all contexts, one after another."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class AMPModelMixin:
    """Mixin for a model whose optimizer keeps master weights."""

    def update_master_params(self) -> None:
        """Copy weights that were written into the model to the master weights. Called after a checkpoint is loaded."""
