"""Two hosts on one machine: namespaces of network, processes, shared memory and names, joined by a cable.

What a process of one host opens (ports, /dev/shm, processes by number) the other host does not see. They share a disk,
as the hosts of a job do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("host-a", "host-b")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
# In the namespaces of a host: what tells hosts apart, then the command.
ENTER = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount --bind "$1" /proc/sys/kernel/random/boot_id
hostname "$2"
shift 2
exec "$@"
"""


def why_not() -> str | None:
    """Why this machine cannot make hosts; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces of network need root on Linux"
    missing = [tool for tool in ("ip", "unshare", "mount", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"there is no command {', '.join(missing)}"
    try:
        with TwoHosts(Path("/tmp")) as hosts:
            tried = hosts.start(0, ["true"], stderr=subprocess.PIPE)
            _, said = tried.communicate(timeout=20)
            return None if tried.returncode == 0 else f"this machine makes no namespaces: {said.strip()}"
    except (subprocess.SubprocessError, OSError) as error:
        return f"this machine makes no namespaces: {error}"


class TwoHosts:
    """A context manager: when it ends, the hosts and all that runs on them are gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        word = uuid.uuid4().hex[:6]
        self.spaces = [f"core-{word}-{name}" for name in NAMES]
        self.cables = [f"core{word}{end}" for end in "ab"]
        self.boots = [folder / f"boot-{word}-{name}" for name in NAMES]
        self.running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> TwoHosts:
        try:
            for space, boot in zip(self.spaces, self.boots, strict=True):
                _ip("netns", "add", space)
                boot.write_text(f"{uuid.uuid4()}\n")
            near, far = self.cables
            _ip("link", "add", near, "netns", self.spaces[0], "type", "veth", "peer", far, "netns", self.spaces[1])
            for space, cable, address in zip(self.spaces, self.cables, ADDRESSES, strict=True):
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", cable)
                _ip("-n", space, "link", "set", cable, "up")
                _ip("-n", space, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def start(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Run a command on a host, as the first of its processes: when it is killed, they all are."""
        enter = ["ip", "netns", "exec", self.spaces[host]]
        enter += ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--uts", "--ipc", "--kill-child"]
        enter += ["sh", "-c", ENTER, "sh", str(self.boots[host]), NAMES[host], *command]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.cables[host]}
        process = subprocess.Popen(enter, env=environment, text=True, **options)
        self.running.append(process)
        return process

    def pull_the_cable(self) -> None:
        """From now on no packet arrives."""
        _ip("-n", self.spaces[1], "link", "set", self.cables[1], "down")

    def _remove(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        for space, boot in zip(self.spaces, self.boots, strict=True):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
            boot.unlink(missing_ok=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
