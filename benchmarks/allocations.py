"""The memory that a call allocates for its time, as torch's own profiler counts it on the CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

MEMORY = "[memory]"


def peak_of(changes: Iterable[int]) -> int:
    """The most that is held at once, over what was at the beginning: allocated bytes are above 0, freed ones below."""
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


def temporary_bytes(call: Callable[[], Any]) -> int:
    """The largest amount of tensor memory on the CPU that `call` held at once and that was not there before it.

    Counted from each allocation and release, so nothing is missed between two samples; what other libraries take
    (a backend's send buffers) is not in it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == MEMORY and event["args"]["Device Type"] == 0]
    return peak_of(event["args"]["Bytes"] for event in sorted(memory, key=lambda event: float(event["ts"])))
