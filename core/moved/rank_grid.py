"""`core.rank_grid`: from sizes to groups of ranks."""

from core.groups.rank_grid import (
    AXES,
    Axis,
    RankGrid,
    axes_of,
    default_embedding_ranks,
    default_position_embedding_ranks,
    group_ranks,
)

__all__ = [
    "AXES",
    "Axis",
    "RankGrid",
    "axes_of",
    "default_embedding_ranks",
    "default_position_embedding_ranks",
    "group_ranks",
]
