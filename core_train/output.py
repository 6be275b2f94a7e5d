"""Output that may go away: a terminal that is closed, a pipe whose reader has ended (``| head``), a full disk."""

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
    """A text stream whose writes do not raise. ``is_gone`` is True once no process can read it any more.

    Characters that the terminal's encoding lacks are written as escapes. The stream is None if the process was started
    with this descriptor closed.
    """

    def __init__(self, stream: TextIO | None) -> None:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        self.stream = stream
        self.is_gone = False
        self.has_warned = False

    def write(self, text: str) -> int:
        """Write the text; drop it if writing fails."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush; drop the buffered text if flushing fails."""
        self._try("flush")

    def isatty(self) -> bool:
        """True if a terminal shows it."""
        return self.stream is not None and self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def end(self) -> None:
        """Flush a last time. The interpreter would report remaining text as a separate error."""
        self.flush()
        try:
            if self.stream is not None:
                self.stream.flush()
        except (OSError, ValueError):
            self._drop()

    def _try(self, name: str, *arguments: str) -> None:
        if self.stream is None or self.is_gone:
            return
        try:
            getattr(self.stream, name)(*arguments)
        except OSError as error:
            if error.errno not in FULL:
                self.is_gone = True
                self._drop()
            elif not self.has_warned:
                self.has_warned = True
                print(f"warning: the output cannot be written ({error}); training continues", file=sys.stderr)

    def _drop(self) -> None:
        """Redirect the descriptor to the null device, so that buffered text can be flushed."""
        assert self.stream is not None, "only a stream fails"
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())


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
