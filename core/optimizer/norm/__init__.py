"""Global gradient norm, clipping, and the check that all ranks step with equal settings."""
