"""Other packages' names, resolved to ours: programs written for them run here with their import lines changed."""
