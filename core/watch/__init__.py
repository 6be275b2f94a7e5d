"""Location and waits of every rank, so that an error names the rank that is lost or hangs."""
