"""launch and its kin: start torch.distributed as ColossalAI's functions of these names do, on the device there is."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from core.booster.accelerator import devices_here
from core.compat.colossalai.rank_logger import get_dist_logger

Config = Mapping[str, Any]
TORCHRUN = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE"}
SLURM = {"rank": "SLURM_PROCID", "local_rank": "SLURM_LOCALID", "world_size": "SLURM_NPROCS"}
OPENMPI = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
}


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    config: Config | None = None,
) -> None:
    """Start the default group, choose this rank's device, and seed Python, NumPy and torch alike on every rank.

    backend: None for the device's own, which is 'nccl' on GPUs and 'gloo' on CPUs. A group that is started already is
    kept. config: of old versions; only an empty one. Collective. Raises ValueError for a config with settings.
    """
    _refuse_config(config)
    logger = get_dist_logger()
    if dist.is_initialized():
        place = (dist.get_rank(), dist.get_world_size())
        if place != (rank, world_size):
            raise RuntimeError(
                f"torch.distributed is started already, with this process as rank {place[0]} of {place[1]}, and launch "
                f"says rank {rank} of {world_size}; leave out one of the two starts"
            )
        how = f"was started before, with {dist.get_backend()}"
    else:
        devices = torch.accelerator.device_count()
        # All ranks of a machine decide alike: an accelerator for each of them, or none.
        enough = 0 < int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= devices
        kind = devices_here()[-1] if enough and backend != "gloo" else "cpu"
        own = dist.get_default_backend_for_device(kind)
        if backend not in (None, own) and verbose:
            logger.warning(f"backend {backend!r} is not for {kind!r}, where this rank trains; {own!r} is taken")
        if kind != "cpu":
            torch.accelerator.set_device_index(rank % devices if local_rank is None else local_rank)
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        dist.init_process_group(own, init_method=address, rank=rank, world_size=world_size)
        how = f"is started with {own} on {kind}"
    set_seed(seed)
    if verbose:
        logger.info(f"torch.distributed {how}; world size {world_size}, seed {seed}", ranks=[0])


def launch_from_torch(
    backend: str | Config | None = None, seed: int = 1024, verbose: bool = True, *, config: Config | None = None
) -> None:
    """`launch` with the place that torchrun gave this process. Collective."""
    if isinstance(backend, Mapping):  # old versions have the config first
        backend, config = None, backend
    if dist.is_initialized() and "RANK" not in os.environ:
        place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        launch(**place, host="", port=0, seed=seed, verbose=verbose, config=config)
        return
    place = _place(TORCHRUN, "torchrun")
    host, port = _variable("MASTER_ADDR", "torchrun"), _variable("MASTER_PORT", "torchrun")
    launch(**place, host=host, port=int(port), backend=backend, seed=seed, verbose=verbose, config=config)


def launch_from_slurm(
    host: str,
    port: int,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    config: Config | None = None,
) -> None:
    """`launch` with the place that SLURM's srun gave this process. Collective."""
    place = _place(SLURM, "srun")
    launch(**place, host=host, port=port, backend=backend, seed=seed, verbose=verbose, config=config)


def launch_from_openmpi(
    host: str,
    port: int,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    config: Config | None = None,
) -> None:
    """`launch` with the place that Open MPI's mpirun gave this process. Collective."""
    place = _place(OPENMPI, "mpirun")
    launch(**place, host=host, port=port, backend=backend, seed=seed, verbose=verbose, config=config)


def set_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's random numbers."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _place(names: Mapping[str, str], launcher: str) -> dict[str, int]:
    return {argument: int(_variable(name, launcher)) for argument, name in names.items()}


def _variable(name: str, launcher: str) -> str:
    if name not in os.environ:
        raise RuntimeError(f"{name} is not set; start the program with {launcher}, which sets it for each process")
    return os.environ[name]


def _refuse_config(config: Config | None) -> None:
    if config:
        raise ValueError(
            f"launch got a config with {', '.join(map(str, config))}, which nothing here would read; pass these "
            "settings to a plugin of the Booster, to core.gradient_handler.build_gradient_handler, or to "
            "core.gradient_accumulation.accumulate_gradient, and leave the config out"
        )
