"""Sharded parameters: a rank keeps its shard of each bucket, which is gathered around its use and given up again."""
