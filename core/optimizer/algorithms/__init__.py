"""The algorithms by name, and whose kernels run them."""
