"""Plans of runs: memory, time and layouts of any number of ranks, from the code that trains, before anything runs."""

from core_plan.advise import Advice, advise
from core_plan.device import Device, Link, known_devices, read_device
from core_plan.model_run import ModelRun
from core_plan.plan_run import RunPlan, plan_run
from core_plan.run_memory import RankMemory, Run

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
