"""The messages that a logger is given, also on the ranks of a test, where pytest's caplog is not."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """The messages of the logger of that name, and of those below it, as they come."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(name)
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)
