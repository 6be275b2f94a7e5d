"""The place of each rank and what it waits for, so that an error names the rank that is lost or hangs."""
