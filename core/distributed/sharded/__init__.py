"""Sharded parameters, gathered around their use."""
