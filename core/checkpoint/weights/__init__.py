"""Weights in files that other programs also read: one file, or shards with an index, with full tensors or slices.

The Booster, Hugging Face models, the converter and fine-tuning use only this package to read and write such files.
"""
