"""A training job before it runs: its configuration, its sizes, and how its work is divided among ranks."""
