"""Hyperparameters of each parameter."""
