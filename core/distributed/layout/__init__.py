"""Layout of parameters before any memory exists: buffers, buckets, shards, and the plan of a model."""
