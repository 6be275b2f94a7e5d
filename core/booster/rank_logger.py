"""DistributedLogger: Python's logging on selected ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

FORMAT = "[%(asctime)s] %(name)s - %(levelname)s: %(message)s (%(filename)s:%(lineno)d)"
OWN = ("core", "colossalai")


class DistributedLogger:
    """Logger whose ``info``, ``warning``, ``debug`` and ``error`` take (message, ranks=None) to log on some ranks only.

    Args:
        name (str, optional): Name of the Python logger. Its level is INFO if it has no handlers yet.
    """

    def __init__(self, name: str = "core") -> None:
        self._logger = logging.getLogger(name)
        if not self._logger.hasHandlers():
            self._logger.setLevel(logging.INFO)
            self._add(logging.StreamHandler())

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(logging.Formatter(FORMAT))
        self._logger.addHandler(handler)

    @classmethod
    def get_instance(cls, name: str) -> DistributedLogger:
        """Return the logger with this name. All objects of one name share one Python logger."""
        return cls(name)

    @property
    def rank(self) -> int:
        """Rank of this process, or 0 before torch.distributed is initialized."""
        return dist.get_rank() if dist.is_initialized() else 0

    def set_level(self, level: str) -> None:
        """Set the lowest level that is logged: 'DEBUG', 'INFO', 'WARNING' or 'ERROR'."""
        self._logger.setLevel(level)

    def log_to_file(self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Also write messages to rank_<rank>.log, or rank_<rank>_<suffix>.log.

        Args:
            path (str | Path): Directory of the file, created if needed.
            mode (str, optional): Mode of ``open``.
            level (str, optional): Lowest level that is written.
            suffix (str, optional): Text at the end of the file name.
        """
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        name = f"rank_{self.rank}.log" if suffix is None else f"rank_{self.rank}_{suffix}.log"
        handler = logging.FileHandler(directory / name, mode)
        handler.setLevel(level)
        self._add(handler)

    @staticmethod
    def _at(level: int) -> Any:
        def log(self: DistributedLogger, message: str, ranks: Sequence[int] | None = None) -> None:
            if ranks is None or self.rank in ranks:
                self._logger.log(level, "%s", message, stacklevel=2)

        return log

    info, warning, debug, error = map(_at, (logging.INFO, logging.WARNING, logging.DEBUG, logging.ERROR))


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = OWN) -> None:
    """Limit existing loggers to warnings and errors.

    Args:
        include (Sequence[str], optional): Names of the loggers. Defaults to all.
        exclude (Sequence[str], optional): Names of loggers to leave unchanged.
    """
    for name in list(logging.root.manager.loggerDict) if include is None else include:
        if name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)
