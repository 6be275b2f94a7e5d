"""Process groups: rank grids, the groups derived from them, and agreement within a group. Independent of gradients."""
