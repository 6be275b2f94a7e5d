"""The store of a job on one machine: reached from this machine only, and not hurt by what is no client."""

import os
import random
import socket
import time
from pathlib import Path

from torch.distributed import TCPStore

from core.groups.local_store import local_store


def listening_at(port: int) -> set[str]:
    """The addresses, as the kernel writes them, at which somebody listens on a port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {
        line[1].rpartition(":")[0] for line in lines if line[3] == "0A" and int(line[1].rpartition(":")[2], 16) == port
    }


def test_it_listens_on_the_loopback_interface_alone() -> None:
    store = local_store()
    assert listening_at(store.port) == {"0100007F"}, "127.0.0.1, in the kernel's order of bytes"
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_garbage_leaves_no_descriptor_behind_and_the_store_goes_on() -> None:
    store = local_store()
    client = TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("key", "value")
    before = len(os.listdir("/proc/self/fd"))
    choose = random.Random(1)
    for garbage in [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"",
        b"\0" * 5000,
        *(choose.randbytes(999) for _ in range(20)),
    ]:
        with socket.create_connection(("127.0.0.1", store.port)) as connection:
            connection.sendall(garbage)
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < until:
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert client.get("key") == b"value"
