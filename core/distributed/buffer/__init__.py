"""Gradient memory: buffers, the buckets they are split into, and the contents of ``.grad``."""
