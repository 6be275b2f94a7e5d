"""Device functions with ColossalAI's names: get_current_device, get_accelerator, timers."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from core.booster.accelerator import default_device, device_of_group
from core_compat.arguments import arguments

# Functions that the CPU lacks: bytes of device memory are 0, there is no cache to empty, and the random
# numbers are torch's own.
_CPU: dict[str, Any] = {
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated"), None),
    "reset_max_memory_cached": None,
}
_RANDOM = ("manual_seed", "get_rng_state", "set_rng_state", "initial_seed", "seed")


def get_current_device() -> torch.device:
    """Return this rank's device: the default group's, or the accelerator before torch.distributed is initialized."""
    return device_of_group() if dist.is_initialized() else default_device()


class DeviceAccelerator:
    """torch's module of a device type (torch.cuda, torch.cpu, ...) with ColossalAI's additional names."""

    def __init__(self, kind: str) -> None:
        self.name = kind
        self.communication_backend = dist.get_default_backend_for_device(kind)
        self.is_synchronous = kind == "cpu"

    def get_current_device(self) -> torch.device:
        return torch.device("cpu") if self.name == "cpu" else default_device()

    def set_to_device(self, models: Any) -> Any:
        if isinstance(models, (list, tuple)):
            return [self.set_to_device(model) for model in models]
        return models.to(self.get_current_device())

    @arguments("self enabled=True dtype=None cache_enabled=True")
    def autocast(self, dtype: torch.dtype | None, **options: bool) -> torch.autocast:
        """Return torch's autocast on this device, with fp16 unless another dtype is given."""
        return torch.autocast(self.name, dtype=dtype or torch.float16, **options)

    def __getattr__(self, name: str) -> Any:
        module = torch.get_device_module(self.name)
        if hasattr(module, name):
            return getattr(module, name)
        if self.name == "cpu" and name in _CPU:
            return lambda *args, **kwargs: _CPU[name]
        if self.name == "cpu" and name in _RANDOM:
            return getattr(torch, name)
        raise AttributeError(
            f"torch.{self.name} has no {name!r}, so get_accelerator().{name} is unavailable on this device"
        )


def get_accelerator() -> DeviceAccelerator:
    """Return the device type that this rank trains on."""
    return DeviceAccelerator(get_current_device().type)


class Timer:
    """Timer of the seconds between ``start`` and ``stop``, with an optional history. Both wait for the device."""

    has_history = property(lambda self: bool(self._history), doc="True if a time was kept.")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._began = self._elapsed = 0.0
        self._history: list[float] = []

    @property
    def current_time(self) -> float:
        """Return the clock in seconds, after the device has finished its work."""
        get_accelerator().synchronize()
        return time.monotonic()

    def start(self) -> None:
        self._began = self.current_time

    def lap(self) -> float:
        return self.current_time - self._began

    def stop(self, keep_in_history: bool = False) -> float:
        self._elapsed = self.lap()
        self._history += [self._elapsed] if keep_in_history else []
        return self._elapsed

    def get_history_sum(self) -> float:
        return sum(self._history)

    def get_history_mean(self) -> float:
        return sum(self._history) / len(self._history)

    def get_elapsed_time(self) -> float:
        return self._elapsed


class MultiTimer:
    """Timers by name. With ``on=False`` they do nothing."""

    def __init__(self, on: bool = True) -> None:
        self._timers: dict[str, Timer] = {}
        self.get_timer = self._timers.__getitem__
        self.set_status(on)

    def set_status(self, mode: bool) -> None:
        self._on = mode

    def is_on(self) -> bool:
        return self._on

    def start(self, name: str) -> None:
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool) -> float | None:
        return self._timers[name].stop(keep_in_history) if self._on else None

    def reset(self, name: str | None = None) -> None:
        for timer in self._timers.values() if name is None else [self._timers[name]]:
            timer.reset()
