"""Process groups: grids of ranks, the groups cut from them, agreement within a group. Nothing of gradients."""
