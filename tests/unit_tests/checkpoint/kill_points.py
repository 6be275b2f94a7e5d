"""A hook that ends a rank at a point of a save, and the main job with that hook set in its ranks.

    python -m tests.unit_tests.checkpoint.kill_points "half a file:1:2" FLAGS OF pretrain_gpt.py

ends rank 1 when it comes to 'half a file' for the second time.
"""

from __future__ import annotations

import os
import signal
import sys

from core.checkpoint.save_points import POINTS, Hook, set_hook


def kill_at(point: str, rank: int, occurrence: int = 1) -> Hook:
    """End the process, as `kill -9` does, when `rank` comes to `point` for the n-th time."""
    assert point in POINTS, f"{point!r} is no point of a save; there are {', '.join(POINTS)}"
    seen = 0

    def hook(reached: str, by_rank: int) -> None:
        nonlocal seen
        if reached == point and by_rank == rank:
            seen += 1
            if seen == occurrence:
                os.kill(os.getpid(), signal.SIGKILL)

    return hook


if __name__ == "__main__":
    from core_train.main import main

    point, rank, occurrence = sys.argv[1].split(":")
    set_hook(kill_at(point, int(rank), int(occurrence)))
    sys.exit(main(sys.argv[2:]))  # the ranks it starts are started by the same command line
