"""Gradient contracts: one frozen contract for each parameter, read from the parameter's tags."""
