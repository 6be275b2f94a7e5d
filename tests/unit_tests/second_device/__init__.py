"""A second device for machines without a GPU: memory of the host that torch keeps apart from the CPU's.

An operator that is given a tensor of it and one of the CPU raises, as next to a GPU, and its collectives take no tensor
of the CPU. It computes by torch's kernels for CPUs, so training on it can be compared bit for bit.
"""
