"""Plans of runs: memory, time and layouts of any number of ranks, from the code that trains, before anything runs."""

from core.plan.advise import Advice, advise
from core.plan.device import Device, Link, known_devices, read_device
from core.plan.model_run import ModelRun
from core.plan.plan_run import RunPlan, plan_run
from core.plan.run_memory import RankMemory, Run

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
