"""This machine: its memory, its processor cores, its launcher, and the start of ranks on it."""
