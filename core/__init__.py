"""Building blocks for training with data, tensor, sequence, context, pipeline and expert parallelism.

Gradients live in contiguous buffers, and a contract per parameter states which groups reduce its gradient.
"""

__version__ = "0.1.0"
