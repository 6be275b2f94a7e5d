"""--profile: torch's profile of a few steps, with the names of their parts and collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FILE = "profile.json"
SKIPPED, WARM_UP, ACTIVE = 1, 1, 3  # steps: the first allocates


def profiler_of(directory: Path) -> Any:
    """Return a torch profiler that writes `directory`/profile.json when its steps are over. Call `step` after each
    step.

    A context manager. A run that ends earlier writes the recorded steps, if any.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(skip_first=SKIPPED, wait=0, warmup=WARM_UP, active=ACTIVE, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(directory / FILE)),
    )
