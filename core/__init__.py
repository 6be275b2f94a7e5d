"""A training core: one gradient contract a parameter, one contiguous buffer for every gradient."""

__version__ = "0.1.0"
