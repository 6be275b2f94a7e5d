"""A training core: one gradient contract a parameter, one contiguous buffer for every gradient."""

__version__ = "0.1.0"
__path__ = [*__path__, f"{__path__[0]}/moved"]  # core/moved/timers.py is `core.timers` too
