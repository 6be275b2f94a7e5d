"""Tables of layouts of our own models, each compared with one process: `python -m tests.layouts`."""
