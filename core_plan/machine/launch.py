"""This process's rank, from the variables of its launcher: torchrun's, or SLURM's."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core_plan.job.errors import ConfigError

PORTS = 1 << 16
TORCHRUNS_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun looks here for the error that ended a rank
OTHERS_WAIT_S = 20.0  # for the first rank, which may import more slowly


@dataclass(frozen=True)
class Launch:
    """Rank of this process, and the rendezvous of all ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str  # 'torchrun' (or another that sets the same variables), 'slurm'
    restarts: int = 0  # how often torchrun has started the job again

    def environment(self) -> dict[str, str]:
        """The variables that torch.distributed's env:// rendezvous reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def say_once(text: str, launch: Launch | None, environment: Mapping[str, str]) -> None:
    """Print the error that ends a job once, although all of its ranks have found it.

    torchrun prints the error file of the first failing rank last and ends the other ranks. So ranks other than 0 wait,
    and report an error only if they were not ended, because rank 0 may not have it.
    """
    file = environment.get(TORCHRUNS_FILE)
    if launch is None or launch.launcher != "torchrun" or file is None:
        if launch is None or launch.rank == 0:
            print(text, file=sys.stderr, flush=True)
        return
    if launch.rank > 0:
        time.sleep(OTHERS_WAIT_S)
    Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}))


def find_launch(environment: Mapping[str, str]) -> Launch | None:
    """Read this process's rank and rendezvous from the launcher's variables; None without a launcher.

    torchrun's variables win over SLURM's: torchrun is often started by srun, one a node.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun_launch(environment)
    tasks = read_number(environment, "SLURM_STEP_NUM_TASKS", at_least=1, default=1)
    if tasks > 1:  # a step of one task is a shell, or srun without -n
        return _slurm_launch(environment)
    return None


def _torchrun_launch(environment: Mapping[str, str]) -> Launch:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(
            f"RANK={environment['RANK']} and WORLD_SIZE={environment['WORLD_SIZE']} are set and {', '.join(missing)} "
            "not; start with torchrun, or unset RANK to let this program start its own ranks"
        )
    world_size = read_number(environment, "WORLD_SIZE", at_least=1)
    rank = read_number(environment, "RANK", below=world_size)
    here = read_number(environment, "LOCAL_WORLD_SIZE", at_least=1, below=world_size + 1, default=world_size)
    return Launch(
        rank=rank,
        world_size=world_size,
        local_rank=read_number(environment, "LOCAL_RANK", below=here, default=rank),
        local_world_size=here,
        master_addr=_address(environment["MASTER_ADDR"]),
        master_port=read_number(environment, "MASTER_PORT", at_least=1, below=PORTS),
        launcher="torchrun",
        restarts=read_number(environment, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def read_number(
    environment: Mapping[str, str],
    name: str,
    *,
    at_least: int = 0,
    below: int | None = None,
    default: int | None = None,
) -> int:
    """Read an environment variable as an integer. Raise ConfigError with its name if it is none or out of range."""
    text = environment.get(name)
    if text is None and default is not None:
        return default
    wanted = f"an integer of at least {at_least}" + ("" if below is None else f" and below {below}")
    if text is None:
        raise ConfigError(f"{name} is not set; a launcher sets it to {wanted}")
    if re.fullmatch(r"[0-9]{1,9}", text) is None or int(text) < at_least or (below is not None and int(text) >= below):
        raise ConfigError(f"{name} is {text!r}; expected {wanted}")
    return int(text)


def _address(text: str) -> str:
    if not re.fullmatch(r"[^\s/]{1,253}", text) or not text.isprintable():
        raise ConfigError(f"MASTER_ADDR is {text[:300]!r}; expected the name or the address of a host")
    return text


def _slurm_launch(environment: Mapping[str, str]) -> Launch:
    def read(*names: str) -> str:
        for name in names:
            if name in environment:
                return environment[name]
        raise ConfigError(f"this is a SLURM step of several tasks, and {' / '.join(names)} is not set; start with srun")

    world_size = read_number(environment, "SLURM_STEP_NUM_TASKS", at_least=1)
    counts = read("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    tasks_per_node = expand_counts(counts, at_most=world_size)
    if sum(tasks_per_node) != world_size:
        raise ConfigError(f"SLURM_STEP_NUM_TASKS is {world_size}, and the tasks a node, {counts!r}, are not as many")
    hosts = read("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job = read_number(environment, "SLURM_JOB_ID", default=0)
    node = read_number(environment, "SLURM_NODEID", below=len(tasks_per_node), default=0)
    return Launch(
        rank=read_number(environment, "SLURM_PROCID", below=world_size),
        world_size=world_size,
        local_rank=read_number(environment, "SLURM_LOCALID", below=tasks_per_node[node]),
        local_world_size=tasks_per_node[node],
        master_addr=_address(environment.get("MASTER_ADDR", first_host(hosts))),
        # all nodes compute the same port, and two jobs different ones
        master_port=read_number(environment, "MASTER_PORT", at_least=1, below=PORTS, default=20000 + job % 20000),
        launcher="slurm",
    )


def expand_counts(text: str, at_most: int = 1 << 20) -> list[int]:
    """Expand SLURM's tasks per node, '4(x2),3', to [4, 4, 3]. Raise ConfigError for other text or too many tasks."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None:
            raise ConfigError(f"cannot read the number of tasks a node from {text[:100]!r}; e.g. '4(x2),3'")
        tasks, nodes = int(match[1]), int(match[2] or 1)
        if tasks < 1 or nodes < 1 or tasks * nodes + sum(counts) > at_most:
            raise ConfigError(f"the tasks a node, {text[:100]!r}, are none, or more than {at_most} together")
        counts.extend([tasks] * nodes)
    return counts


def first_host(hosts: str) -> str:
    """The first host of a SLURM host list: 'gpu[003-006,9],login' is 'gpu003'."""
    match = re.match(r"([^,\[\]\s]+)(?:\[([\d,-]+)\]([^,\[\]\s]*))?(?=,|$)", hosts)
    if match is None:
        raise ConfigError(f"cannot read the first host from {hosts!r}; expected something like 'node[001-004]'")
    stem, ranges, tail = match[1], match[2], match[3]
    return stem if ranges is None else stem + re.split("[,-]", ranges)[0] + (tail or "")
