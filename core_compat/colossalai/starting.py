"""launch functions with ColossalAI's arguments, and its logger's name, over core.booster."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from core.booster import launch as ours
from core.booster.rank_logger import DistributedLogger as OurLogger
from core_compat.arguments import arguments

# Old versions have a config: only an empty one is accepted.
_HOW = "backend=None seed=1024 verbose=True * !config=None|{}"
_taking = functools.partial(
    arguments,
    advice={
        "config": "nothing here would read it; pass the settings to a plugin of the Booster, to "
        "core.gradient_handler.build_gradient_handler, or to core.gradient_accumulation.accumulate_gradient"
    },
)
launch = _taking(f"rank world_size host port backend=None local_rank=None {_HOW[13:]}")(ours.launch)
launch_from_slurm = _taking(f"host port {_HOW}")(ours.launch_from_slurm)
launch_from_openmpi = _taking(f"host port {_HOW}")(ours.launch_from_openmpi)
_launch_from_torch = _taking(_HOW)(ours.launch_from_torch)


@arguments(_HOW.replace("!", ""))
def launch_from_torch(backend: Any, config: Any, **how: Any) -> None:
    """Call core.booster.launch.launch_from_torch. Old versions pass the config first."""
    first = isinstance(backend, Mapping)
    _launch_from_torch(None if first else backend, config=backend if first else config, **how)


class DistributedLogger(OurLogger):
    """core.booster.rank_logger.DistributedLogger."""

    def __init__(self, name: str = "colossalai") -> None:
        super().__init__(name)
