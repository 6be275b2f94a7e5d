"""ConfigError: a job's configuration is invalid. In its own file, so that launch needs no torch."""

from __future__ import annotations


class ConfigError(ValueError):
    """Error of a job's configuration that cannot be used."""
