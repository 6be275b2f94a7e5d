"""ProducerStreams: the device streams on which one model's gradients arrive."""

from __future__ import annotations

import torch


class ProducerStreams:
    """Streams that have worked on a model's gradients and that the current stream has not waited for yet.

    A model may run its layers on several streams, and autograd chooses the stream on which it accumulates a gradient.
    A reduction waits for the stream that launches it only. So every stream on which a gradient arrives is recorded, and
    ``join`` makes the current stream wait for all of them before a bucket, borrowed memory or a shard is touched.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seen: set[torch.Stream] = set()

    def record(self) -> torch.Stream:
        """Record the current stream, on which a gradient has arrived, and return it."""
        stream = torch.accelerator.current_stream(self.device)
        self._seen.add(stream)
        return stream

    def join(self) -> None:
        """Make the current stream wait for the work that is queued on all other recorded streams.

        Costs nothing if all gradients arrived on one stream. The host does not wait.
        """
        current = self.record()
        if len(self._seen) > 1:
            for stream in self._seen - {current}:
                current.wait_stream(stream)
            self._seen = {current}
