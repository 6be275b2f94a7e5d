"""Local store for processes of one machine."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore


def local_store() -> TCPStore:
    """Create a store that other machines cannot reach, listening on the loopback interface at a free port.

    TCPStore would bind to all interfaces, under any host name.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
