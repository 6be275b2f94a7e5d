"""`core.process_groups`: this rank's process groups."""

from core.groups.process_groups import ProcessGroupCollection, ProcessGroups, world_chain, world_groups

__all__ = ["ProcessGroupCollection", "ProcessGroups", "world_chain", "world_groups"]
