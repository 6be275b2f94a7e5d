"""Forwards of a cut model: seams, pipeline stages, attention over a split sequence, dropout, and the loss."""
