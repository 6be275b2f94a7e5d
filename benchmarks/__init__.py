"""Measurements that benchmarks/notebook.md quotes: `python -m benchmarks NAME`."""
