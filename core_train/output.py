"""Output that may go away: a terminal that is closed, a pipe whose reader has ended (`| head`), a full disk."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})


class Output:
    """A text stream whose writes do not raise. `is_gone` is True once no process can read it any more."""

    def __init__(self, stream: TextIO | None) -> None:
        """Wrap a stream. Characters that the terminal's encoding lacks are written as escapes.

        Args:
            stream: The stream; None if the process was started with this descriptor closed.
        """
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        self.stream = stream
        self.is_gone = False
        self.has_warned = False

    def write(self, text: str) -> int:
        """Write the text; drop it if writing fails."""
        if self.stream is not None and not self.is_gone:
            try:
                self.stream.write(text)
            except OSError as error:
                self._failed(error)
        return len(text)

    def flush(self) -> None:
        """Flush; drop the buffered text if flushing fails."""
        if self.stream is not None and not self.is_gone:
            try:
                self.stream.flush()
            except OSError as error:
                self._failed(error)

    def isatty(self) -> bool:
        """True if a terminal shows it."""
        return self.stream is not None and self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def end(self) -> None:
        """Flush a last time. The interpreter would report remaining text as a separate error."""
        self.flush()
        with contextlib.suppress(OSError, ValueError):
            if self.stream is not None:
                self.stream.flush()
            return
        self._drop()

    def _failed(self, error: OSError) -> None:
        if error.errno not in FULL:
            self.is_gone = True
            self._drop()
        elif not self.has_warned:
            self.has_warned = True
            print(f"warning: the output cannot be written ({error}); training continues without it", file=sys.stderr)

    def _drop(self) -> None:
        """Let the descriptor lead nowhere, so that buffered text can be flushed."""
        assert self.stream is not None, "only a stream fails"
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def outputs_that_may_go() -> Iterator[None]:
    """Inside it, sys.stdout and sys.stderr do not raise."""
    before = sys.stdout, sys.stderr
    outputs = [Output(stream) for stream in before]
    sys.stdout, sys.stderr = (cast(TextIO, output) for output in outputs)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for output in outputs:
            output.end()


def output_is_gone() -> bool:
    """True if no process can read this process's standard output any more."""
    return isinstance(sys.stdout, Output) and sys.stdout.is_gone
