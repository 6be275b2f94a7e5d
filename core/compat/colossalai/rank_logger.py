"""get_dist_logger: Python's logging with a choice of ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

FORMAT = "[%(asctime)s] %(name)s - %(levelname)s: %(message)s (%(filename)s:%(lineno)d)"


class DistributedLogger:
    """The logger of a name, at first from level INFO on. `ranks` of a message: those that log it; None for all."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        if not self._logger.hasHandlers():
            self._logger.setLevel(logging.INFO)
            self._logger.addHandler(_formatted(logging.StreamHandler()))

    @staticmethod
    def get_instance(name: str) -> DistributedLogger:
        """The logger of a name; several objects of one name are one logger."""
        return DistributedLogger(name)

    @property
    def rank(self) -> int:
        """This process's rank, 0 before torch.distributed is started."""
        return dist.get_rank() if dist.is_initialized() else 0

    def set_level(self, level: str) -> None:
        """Log from this level on: 'DEBUG', 'INFO', 'WARNING' or 'ERROR'."""
        self._logger.setLevel(level)

    def log_to_file(self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Write messages also to rank_<rank>.log, or rank_<rank>_<suffix>.log, in the directory `path`."""
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        name = f"rank_{self.rank}.log" if suffix is None else f"rank_{self.rank}_{suffix}.log"
        handler = logging.FileHandler(directory / name, mode)
        handler.setLevel(level)
        self._logger.addHandler(_formatted(handler))

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log with level INFO."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log with level WARNING."""
        self._log(logging.WARNING, message, ranks)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log with level DEBUG."""
        self._log(logging.DEBUG, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log with level ERROR."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or self.rank in ranks:
            self._logger.log(level, "%s", message, stacklevel=3)


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """The logger of a name."""
    return DistributedLogger.get_instance(name)


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = ("colossalai",)) -> None:
    """Log only warnings and errors of those loggers that there are: the ones in `include`, or all but `exclude`."""
    names = list(logging.root.manager.loggerDict) if include is None else list(include)
    for name in names:
        if name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)


def _formatted(handler: logging.Handler) -> logging.Handler:
    handler.setFormatter(logging.Formatter(FORMAT))
    return handler
