"""LazyInitContext: builds models immediately in host memory, with the same values as without it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn


class LazyInitContext:
    """Context for building a model: ``with LazyInitContext(): model = Model()``. Plugins move the model to the device.

    Nothing is delayed: each rank needs host memory for the complete model. Both arguments are ignored.
    """

    def __init__(self, tensor_cls: Any = None, default_device: Any = None) -> None:
        self._on_host = torch.device("cpu")

    def __enter__(self) -> LazyInitContext:
        logging.getLogger(__name__).info("LazyInitContext builds the model at once, in host memory")
        self._on_host.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._on_host.__exit__(*error)

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Return the module unchanged. Raises RuntimeError if a parameter is on the meta device and so has no
        values.
        """
        name = next((name for name, param in module.named_parameters() if param.is_meta), None)
        if name is not None:
            words = "is on the meta device and has no values; build the model without torch.device('meta')"
            raise RuntimeError(f"parameter {name!r} {words}")
        return module
