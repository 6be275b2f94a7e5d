"""Optimizer algorithms by name, and the kernels that run them."""
