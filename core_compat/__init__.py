"""Names of other packages, resolved to ours: programs written for them run here after a change of import lines."""
