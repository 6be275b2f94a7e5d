"""Plans of runs: memory, time and layouts of any number of ranks, from the code that trains, before anything runs.

Names are imported when they are first used. A job imports its configuration from ``core_plan.job``, and each of its
processes would otherwise load the planner, and with it every model, before it starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core_plan.advice import Advice, advise
    from core_plan.device import Device, Link, known_devices, read_device
    from core_plan.model_run import ModelRun
    from core_plan.run_memory import RankMemory, Run
    from core_plan.run_plan import RunPlan, plan_run

_MODULES = {
    "advice": ("Advice", "advise"),
    "device": ("Device", "Link", "known_devices", "read_device"),
    "model_run": ("ModelRun",),
    "run_memory": ("RankMemory", "Run"),
    "run_plan": ("RunPlan", "plan_run"),
}
__all__ = [
    "Advice",
    "Device",
    "Link",
    "ModelRun",
    "RankMemory",
    "Run",
    "RunPlan",
    "advise",
    "known_devices",
    "plan_run",
    "read_device",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"core_plan.{module}"), name)
    raise AttributeError(f"module 'core_plan' has no attribute {name!r}")
