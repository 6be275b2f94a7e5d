"""Comparisons between ranks, and refusals: other models, other copies, NaN, and calls out of order."""
