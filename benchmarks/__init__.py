"""Measurements that docs/source/performance_notebook.md quotes: `python -m benchmarks NAME`."""
