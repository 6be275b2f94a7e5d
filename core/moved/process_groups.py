"""`core.process_groups`: this rank's process groups."""

from core.groups.process_groups import ProcessGroups, world_chain, world_groups
from core.parallel_state import ProcessGroupCollection

__all__ = ["ProcessGroupCollection", "ProcessGroups", "world_chain", "world_groups"]
