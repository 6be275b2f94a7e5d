"""From shards to whole parameters: after an optimizer's step, or where parameters are sharded around their use."""
