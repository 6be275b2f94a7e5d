"""Measurements that docs/source/performance.md quotes: `python -m benchmarks NAME`."""
