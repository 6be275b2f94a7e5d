"""From autograd's gradients to reduced buckets."""
