"""Comparison of a cut model's output with the output that the full model gave before."""
