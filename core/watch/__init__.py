"""Where each rank is and what it waits for, so that an error names the rank that is lost or hangs."""
