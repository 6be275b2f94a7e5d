"""The path from autograd's gradients to reduced buckets."""
