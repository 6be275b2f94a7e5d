"""`core.hyper_comm_grid`: grids of ranks whose groups have names."""

from core.compat.megatron.faces.hyper_comm_grid import HyperCommGrid, RankGenerator

__all__ = ["HyperCommGrid", "RankGenerator"]
