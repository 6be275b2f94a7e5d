"""Families of models of transformers, split and compared with one process: `python -m tests.families`."""
