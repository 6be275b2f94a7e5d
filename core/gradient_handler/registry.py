"""Registry of gradient handlers by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from core.gradient_handler.base import BaseGradientHandler

Handler = TypeVar("Handler", bound=type[BaseGradientHandler])


class Registry:
    """Registry of classes by name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._modules: dict[str, type[BaseGradientHandler]] = {}

    def register_module(self, module: Handler) -> Handler:
        """Register a subclass of BaseGradientHandler under its class name. Use it as a decorator.

        Raises:
            TypeError: If it is not a subclass of BaseGradientHandler.
            ValueError: If the name is taken.
        """
        if not (isinstance(module, type) and issubclass(module, BaseGradientHandler)):
            raise TypeError(f"registry {self.name!r} takes subclasses of BaseGradientHandler, got {module!r}")
        if module.__name__ in self._modules:
            raise ValueError(
                f"registry {self.name!r} already has a {module.__name__!r} "
                f"(from {self._modules[module.__name__].__module__}); give the new class another name"
            )
        self._modules[module.__name__] = module
        return module

    def get_module(self, name: str) -> type[BaseGradientHandler]:
        """Return the class with this name.

        Raises:
            ValueError: If there is no such class. The message lists the known names.
        """
        if name not in self._modules:
            known = ", ".join(sorted(self._modules))
            raise ValueError(f"{name!r} is not in registry {self.name!r}; known are {known}")
        return self._modules[name]

    def has(self, name: str) -> bool:
        """Return ``True`` if a class with this name is registered."""
        return name in self._modules


GRADIENT_HANDLER = Registry("gradient_handler")


def build_gradient_handler(
    config: str | Mapping[str, Any], model: nn.Module, optimizer: Any, **options: Any
) -> BaseGradientHandler:
    """Create the handler named by a configuration.

        config = {"type": "DataParallelGradientHandler", "bucket_cap_mb": 25}
        build_gradient_handler(config, model, optimizer)

    Args:
        config (str | Mapping[str, Any]): A registered name, or a dict with the name under "type" and further arguments
            of the class. Not modified.
        model (Module): Model with the gradients.
        optimizer (Optimizer): Optimizer of the parameters.
        options: Further arguments, which override the config's.

    Raises:
        ValueError: If the name is unknown or missing.
    """
    arguments = {"type": config} if isinstance(config, str) else dict(config)
    name = arguments.pop("type", None)
    if not isinstance(name, str):
        raise ValueError(f"a gradient handler's config names its class under 'type'; got {config!r}")
    return GRADIENT_HANDLER.get_module(name)(model, optimizer, **{**arguments, **options})
