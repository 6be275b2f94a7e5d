"""Gradient contracts: tags on parameters in, one frozen contract out."""
