"""Plans of runs: memory, time and layouts of any number of ranks, from the code that trains, before anything runs."""

from core.plan.device import Device, Link, known_devices, read_device
from core.plan.plan_run import RunPlan, plan_run
from core.plan.run_memory import RankMemory, Run

__all__ = ["Device", "Link", "RankMemory", "Run", "RunPlan", "known_devices", "plan_run", "read_device"]
