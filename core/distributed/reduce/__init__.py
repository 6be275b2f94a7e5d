"""From autograd's gradients to reduced buckets, and from updated shards to whole parameters."""
