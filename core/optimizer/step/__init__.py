"""One step of the inner optimizer, on the device or on the CPU, and the log of skipped steps."""
