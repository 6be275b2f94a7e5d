"""What is wrong with what a job was told. Apart, so that a launcher's variables are read without importing torch."""

from __future__ import annotations


class ConfigError(ValueError):
    """A job's configuration cannot be used as it stands."""
