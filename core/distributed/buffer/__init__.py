"""The memory of gradients: buffers, the buckets they are cut into, and what stands in `.grad`."""
