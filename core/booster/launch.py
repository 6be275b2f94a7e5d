"""launch and its variants: initialize torch.distributed under torchrun, SLURM's srun or Open MPI."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.distributed as dist

from core.booster.accelerator import devices_here
from core.booster.rank_logger import DistributedLogger
from core.watch.rank_watch import announce_process
from core.watch.waiting import PeerLost, in_short, starting

# Launcher -> environment variables of each process: rank, local rank, number of ranks, host, port.
PLACES = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "srun": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NPROCS"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
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
) -> None:
    """Initialize the default process group, select this rank's device, and seed all random number generators.

    Every rank of the job must call it. A group that is already initialized is kept.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        host: Host of rank 0.
        port: A free port of that host.
        backend: 'gloo' to train on the CPU. Otherwise the device's own backend is used ('nccl' on GPUs, 'gloo' on
            CPUs), with a warning if another one is named.
        local_rank: Index of this rank's device on this machine. Defaults to ``rank`` modulo the number of devices.
        seed: Seed of Python, NumPy and torch, the same on every rank.
        verbose: Log how the group was initialized.

    Raises:
        RuntimeError: If a group already exists with another size, or with this process at another rank.
        PeerLost: If ranks cannot be reached.
    """
    logger = DistributedLogger()
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
        # All ranks of a machine make the same choice: an accelerator for each of them, or for none.
        enough = 0 < int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= devices
        kind = devices_here()[-1] if enough and backend != "gloo" else "cpu"
        own = dist.get_default_backend_for_device(kind)
        if backend not in (None, own) and verbose:
            logger.warning(f"backend {backend!r} is not for {kind!r}, where this rank trains; {own!r} is taken")
        if kind != "cpu":
            torch.accelerator.set_device_index(rank % devices if local_rank is None else local_rank)
        with starting(_store(host, port, rank, world_size), rank, world_size) as store:
            dist.init_process_group(own, store=store, rank=rank, world_size=world_size)
        announce_process()
        how = f"is started with {own} on {kind}"
    set_seed(seed)
    if verbose:
        logger.info(f"torch.distributed {how}; world size {world_size}, seed {seed}", ranks=[0])


def _store(host: str, port: int, rank: int, world_size: int) -> dist.Store:
    """Return torchrun's store, or create one on rank 0 without waiting for ranks, so that ``starting`` can name
    them.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: dist.Store = next(dist.rendezvous(f"tcp://{address}", rank, world_size))[0]
        return store
    try:
        return dist.TCPStore(host, port, world_size, rank == 0, wait_for_workers=False, multi_tenant=True)
    except dist.DistError as error:
        what = "cannot hold the job's store at" if rank == 0 else "cannot reach rank 0, which holds the job's store, at"
        raise PeerLost(f"rank {rank} {what} {address}: {in_short(error)}. Give a free port of rank 0's host") from error


def launch_from_torch(backend: str | None = None, seed: int = 1024, verbose: bool = True) -> None:
    """Call ``launch`` with the rank, size and address that torchrun set for this process. Collective.

    Args:
        backend (str, optional): As in ``launch``.
        seed (int, optional): Seed of Python, NumPy and torch.
        verbose (bool, optional): Log how the group was initialized.

    Raises:
        RuntimeError: If torchrun's variables are not set.
    """
    if dist.is_initialized() and "RANK" not in os.environ:
        launch(dist.get_rank(), dist.get_world_size(), "", 0, backend, None, seed, verbose)
        return
    place = _place("torchrun")
    host, port = (_variable(name, "torchrun") for name in PLACES["torchrun"][3:])
    launch(**place, host=host, port=int(port), backend=backend, seed=seed, verbose=verbose)


def launch_from_slurm(host: str, port: int, backend: str | None = None, seed: int = 1024, verbose: bool = True) -> None:
    """Call ``launch`` with the rank and size that SLURM's srun set for this process. Collective.

    Args:
        host (str): Host of rank 0.
        port (int): A free port of that host.
        backend (str, optional): As in ``launch``.
        seed (int, optional): Seed of Python, NumPy and torch.
        verbose (bool, optional): Log how the group was initialized.

    Raises:
        RuntimeError: If srun's variables are not set.
    """
    launch(**_place("srun"), host=host, port=port, backend=backend, seed=seed, verbose=verbose)


def launch_from_openmpi(
    host: str, port: int, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """Call ``launch`` with the rank and size that Open MPI's mpirun set for this process. Collective.

    Args:
        host (str): Host of rank 0.
        port (int): A free port of that host.
        backend (str, optional): As in ``launch``.
        seed (int, optional): Seed of Python, NumPy and torch.
        verbose (bool, optional): Log how the group was initialized.

    Raises:
        RuntimeError: If mpirun's variables are not set.
    """
    launch(**_place("mpirun"), host=host, port=port, backend=backend, seed=seed, verbose=verbose)


def set_seed(seed: int) -> None:
    """Seed the random number generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _place(launcher: str) -> dict[str, int]:
    words = zip(("rank", "local_rank", "world_size"), PLACES[launcher], strict=False)
    return {argument: int(_variable(name, launcher)) for argument, name in words}


def _variable(name: str, launcher: str) -> str:
    if name not in os.environ:
        raise RuntimeError(f"{name} is not set; start the program with {launcher}, which sets it for each process")
    return os.environ[name]
