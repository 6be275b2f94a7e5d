"""Devices: what a rank runs on, read from files that say where their figures come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.training.errors import ConfigError

FILES = Path(__file__).parent / "devices"
LONGEST_FILE = 1 << 20  # bytes


@dataclass(frozen=True)
class Link:
    """A way between ranks: seconds for no bytes, and bytes a second that one rank sends."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Device:
    """One rank's part of a machine.

    memory_bytes: of one rank's device; of the whole machine where is_host says that ranks are processes on CPUs.
    matmul_flops: operations a second of matrix products, by dtype, as achieved. peak_flops: what MFU is a fraction of.
    memory_bandwidth: bytes a second read and written. operator_overhead_s: the least that an operator takes. inside,
    between: links within a machine and between machines. ranks_per_machine: where one ends and the other begins.
    """

    name: str
    about: str
    memory_bytes: int
    is_host: bool
    matmul_flops: Mapping[str, float]
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    operator_overhead_s: float
    inside: Link
    between: Link
    ranks_per_machine: int
    source: str
    has_figures: bool = True  # False where only the memory is known

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Device:
        """From a file's content. KeyError, TypeError or ValueError where it is not one."""
        links = {where: Link(**link) for where, link in table["links"].items()}
        own = {key: value for key, value in table.items() if key != "links"}
        return cls(inside=links["inside"], between=links["between"], **own)


def known_devices() -> list[str]:
    """Names of the devices whose files come with the package."""
    return sorted(path.stem for path in FILES.glob("*.json"))


def read_device(name: str) -> Device:
    """A device by its name, or by the path of a file of that kind. ConfigError that lists the known ones."""
    path = Path(name) if name.endswith(".json") else FILES / f"{name.lower()}.json"
    if not path.is_file():
        raise ConfigError(
            f"--device {name} is not known; known are {', '.join(known_devices())}, or the path of a .json file "
            f"with the figures of {FILES / 'h100.json'}, measured on your machine"
        )
    try:
        if path.stat().st_size > LONGEST_FILE:
            raise ValueError(f"it has {path.stat().st_size} bytes, more than {LONGEST_FILE}")
        return Device.of(json.loads(path.read_text()))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--device {name}: the file is no device ({error!r}); begin with a copy of {FILES / 'h100.json'}"
        ) from error
