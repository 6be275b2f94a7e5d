"""Start the ranks of a job that has no launcher on this machine, and wait for them.

torch's elastic launcher would kill ranks that write a checkpoint for longer than 30 s after Ctrl-C. When a rank fails,
it ends the others at once, before they report which one they miss.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

from core.watch.interrupts import INTERRUPTED, SAME_PRESS_S
from core_plan.machine.launch import Launch

STARTED_BY_US = "GRADIENT_CORE_PARENT"  # process id of the process that started this rank
LAST_S = 4.0  # time from a second Ctrl-C until ranks are killed; stopped processes receive no other signal
GRACE_S = 10.0  # time for the other ranks to end after one has failed


def start_ranks(ranks: int) -> int:
    """Run this process's command once per rank and wait. Return the first failing rank's exit status, or 0.

    Signals are passed on. The ranks meet at a store in this process, whose port the system has chosen.
    """
    from core.groups.local_store import local_store
    from core.interface.whole import about_to_start_ranks

    about_to_start_ranks()
    store = local_store()
    processes: list[subprocess.Popen[bytes]] = []
    interrupts: list[float] = []  # when, in seconds

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupts.append(time.monotonic())
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    heard = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        heard.append(signal.SIGHUP)
    previous = {number: signal.signal(number, pass_on) for number in heard}
    try:
        for rank in range(ranks):
            launch = Launch(rank, ranks, rank, ranks, "127.0.0.1", store.port, "own")
            environment = {**os.environ, **launch.environment(), STARTED_BY_US: str(os.getpid())}
            environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 connects to this store and creates none
            # In a new session a terminal's Ctrl-C reaches a rank once, from this process.
            command = [sys.executable, *sys.orig_argv[1:]]
            processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return _wait_for_all(processes, interrupts)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait_for_all(processes: list[subprocess.Popen[bytes]], interrupts: list[float]) -> int:
    """Wait for all processes, at most GRACE_S after the first failure and LAST_S after a second Ctrl-C."""
    status = 0
    deadline: float | None = None
    while any(process.poll() is None for process in processes):
        failed = [process.returncode for process in processes if process.returncode]
        if failed and deadline is None:
            status, deadline = failed[0], time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            return status
        again = next((at for at in interrupts if at > interrupts[0] + SAME_PRESS_S), None)
        if again is not None and time.monotonic() > again + LAST_S:
            return INTERRUPTED
        time.sleep(0.05)
    return status or next((process.returncode for process in processes if process.returncode), 0)


def become_rank(launch: Launch) -> None:
    """Set the variables that torch reads in this process. If ``start_ranks`` started it, end it with that process."""
    os.environ.update(launch.environment())
    if launch.world_size == launch.local_world_size and sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # no other machine can reach the ports of a job of one
    if STARTED_BY_US not in os.environ:
        return
    parent = int(os.environ[STARTED_BY_US])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="watch parent", daemon=True).start()
