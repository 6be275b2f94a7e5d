"""Weights in files that other programs read too: one file, or shards with an index; whole, or in slices.

The Booster, models of Hugging Face, the converter and fine-tuning read and write such files here alone.
"""
