"""One step of the inner optimizer, on the device or on the CPU, and what the log says of skipped ones."""
