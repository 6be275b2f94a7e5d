"""`core.device_mesh`: groups as torch's DeviceMesh."""

from core.parallel_state import get_device_mesh, initialize_from_device_mesh

__all__ = ["get_device_mesh", "initialize_from_device_mesh"]
