"""Devices: the hardware of a rank, read from files that name the source of their figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from core.number_ranges import BELOW_ONE, Range, whole
from core_plan.job.errors import ConfigError

FILES = Path(__file__).parent / "devices"
LONGEST_FILE = 1 << 20  # bytes


@dataclass(frozen=True)
class Link:
    """A link between ranks.

    Attributes:
        latency_s: Seconds of a message without bytes.
        bytes_per_s: Bytes per second that one rank sends.
        hop_s: Seconds from one rank to the next in a ring or tree, added to latency_s for each hop of a collective; 0
            if latency_s was measured for the number of ranks.
    """

    latency_s: float
    bytes_per_s: float
    hop_s: float = 0.0

    def slower(self, turns: float) -> Link:
        """Return the link for ranks that take turns on their cores."""
        return Link(self.latency_s * turns, self.bytes_per_s / turns, self.hop_s * turns)


@dataclass(frozen=True)
class Device:
    """One rank's part of a machine. Read one with ``read_device``; measure one with ``python -m core plan calibrate``.

    From matmul_sizes on, only measured files have the attributes.

    Attributes:
        name: Name of the device, as in ``--device``.
        about: Description of the machine.
        source: Origin of the figures.
        has_figures: False if only the memory is known.
        memory_bytes: Memory of one rank's device, or of the complete machine if is_host is True.
        is_host: True if ranks are processes on CPUs.
        matmul_flops: Achieved operations per second of matrix products, by dtype.
        peak_flops: Operations per second that MFU is relative to, by dtype.
        attention_flops: Operations per second of the attention kernel, by dtype; a missing dtype uses matrix products.
        memory_bandwidth: Bytes per second, read and written.
        operator_overhead_s: Least duration of an operator. On a host it is added to each operator.
        inside: Link within a machine.
        between: Link of one rank to other machines.
        ranks_per_machine: Number of ranks on a machine.
        overlap_slowdown: Fraction by which arithmetic slows down while it hides a collective.
        headroom: Fraction of the memory kept free for the allocator's overhead.
        matmul_sizes: By dtype, (operations of a product, operations per second).
        memory_sizes: (bytes of an operator, bytes per second).
        operators: On a host, by name and dtype, (operations or bytes of an operator, seconds of a core).
        optimizer_bandwidth: Bytes per second of the update; 0 uses memory_bandwidth.
        optimizer_bucket_s: Seconds per bucket of an update.
        step_overhead_s: Seconds per step.
        gradients: Link of gradient reductions within a machine, with the latency of a bucket; None uses ``inside``.
        collectives: By name, (ranks, latency, bytes per second) within a machine.
        communicator_bytes: Bytes of a rank per communicator; None if not measured, and then not counted.
        ranks: Number of ranks measured at once.
        cores: Cores shared by the ranks of a host; 0 if each rank has its own device.
        turns: Number of ranks that take turns on a core.
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
    has_figures: bool = True
    matmul_sizes: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict, repr=False)
    memory_sizes: Sequence[Sequence[float]] = field(default=(), repr=False)
    optimizer_bandwidth: float = 0.0
    optimizer_bucket_s: float = 0.0
    step_overhead_s: float = 0.0
    gradients: Link | None = None
    operators: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict, repr=False)
    collectives: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict, repr=False)
    ranks: int = 0
    cores: int = 0
    turns: float = 1.0
    communicator_bytes: int | None = None
    attention_flops: Mapping[str, float] = field(default_factory=dict)
    overlap_slowdown: float = 0.0
    headroom: float = 0.0

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Device:
        """Create a device from a file's content. Raises ValueError if the content is not a device."""
        _check("", table, Table(CONTENT, list(NEEDED)))
        links = {where: Link(**link) for where, link in table["links"].items()}
        own = {key: value for key, value in table.items() if key != "links"}
        return cls(inside=links["inside"], between=links["between"], gradients=links.get("gradients"), **own)

    def matmul_rate(self, dtype: str, flops: float) -> float:
        """Return the operations per second of a product with ``flops`` operations. An unknown dtype uses fp32's
        rate.
        """
        name = dtype if dtype in self.matmul_flops else "float32"
        return rate_at(self.matmul_sizes.get(name, ()), flops) or self.matmul_flops[name]

    def attention_rate(self, dtype: str, flops: float) -> float:
        """Return the operations per second of an attention kernel with ``flops`` operations."""
        return self.attention_flops.get(dtype) or self.matmul_rate(dtype, flops)

    def memory_rate(self, nbytes: float) -> float:
        """Return the bytes per second of an operator that reads and writes ``nbytes``."""
        return rate_at(self.memory_sizes, nbytes) or self.memory_bandwidth

    def operator_s(self, name: str, size: float) -> float | None:
        """Return the seconds of a core for an operator of ``size`` operations or bytes; None if it was not measured."""
        points = self.operators.get(name)
        if not points:
            return None
        rates = [(point, point / max(seconds, 1e-9)) for point, seconds in points]
        return points[0][1] if size <= points[0][0] else size / rate_at(rates, size)

    def link(self, collective: str, ranks: int) -> Link:
        """Return the link of a collective over ``ranks`` of one machine."""
        points = self.collectives.get(collective)
        if not points:
            return self.inside
        _, latency_s, bytes_per_s = next((point for point in points if point[0] >= ranks), points[-1])
        return Link(latency_s, bytes_per_s).slower(self.link_turns)

    @property
    def link_turns(self) -> float:
        """Ratio of the waiting time for a core now to the waiting time when links were measured."""
        return self.turns / (max(1.0, self.ranks / self.cores) if self.cores else 1.0)

    def room(self, ranks: int) -> int:
        """Return the bytes available to the tensors of one of ``ranks``."""
        return self.memory_of(ranks) - self.kept_free(ranks)

    def memory_of(self, ranks: int) -> int:
        """Return the device memory of one of ``ranks``, or its share of a machine, in bytes."""
        return self.memory_bytes // (min(ranks, self.ranks_per_machine) if self.is_host else 1)

    def kept_free(self, ranks: int) -> int:
        """Return the bytes of this memory that are kept free."""
        return int(self.headroom * self.memory_of(ranks))

    def shared_by(self, ranks: int) -> Device:
        """Return the device as seen by one of ``ranks`` on a host: ranks in excess of cores take turns.

        Links were measured with ranks that took turns, if there were more ranks than cores.
        """
        turns = max(1.0, min(ranks, self.ranks_per_machine) / self.cores) if self.cores else 1.0
        shared = replace(self, turns=turns)
        slower = shared.link_turns
        return replace(
            shared,
            inside=self.inside.slower(slower),
            gradients=None if self.gradients is None else self.gradients.slower(slower),
        )


def rate_at(points: Sequence[Sequence[float]], size: float) -> float:
    """Interpolate the rate at a size between measured sizes, on a logarithmic scale; 0.0 without points."""
    if not points:
        return 0.0
    if size <= points[0][0]:
        return points[0][1]
    for (small, slow), (large, fast) in pairwise(points):
        if size <= large:
            share = math.log(size / small) / math.log(large / small)
            return slow * (fast / slow) ** share
    return points[-1][1]


def known_devices() -> list[str]:
    """Return the names of devices whose files are in the package."""
    return sorted(path.stem for path in FILES.glob("*.json"))


def read_device(name: str) -> Device:
    """Read a device by its name or the path of a device file.

    Raises:
        ConfigError: If there is no such device, or the file is invalid. The text lists the known devices.
    """
    path = Path(name) if name.endswith(".json") else FILES / f"{name.lower()}.json"
    if not path.is_file():
        raise ConfigError(
            f"--device {name} is unknown; expected {', '.join(known_devices())}, or the path of a .json file, which "
            "python -m core plan calibrate --out FILE writes for the machine it runs on"
        )
    try:
        if path.stat().st_size > LONGEST_FILE:
            raise ValueError(f"it has {path.stat().st_size} bytes, more than {LONGEST_FILE}")
        return Device.of(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--device {name}: the file is no device: {error}; python -m core plan calibrate writes one"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"--device {name}: the file is no device: its lists are in each other too deep") from error


class Table(NamedTuple):
    """Names and values that a table of a device file may contain."""

    names: Mapping[str, Any]  # allowed value by name
    needed: Sequence[str]
    others: Any = None  # allowed value of any other name; None allows no other names


# Upper limits, so that no product or quotient of a plan is infinite.
COUNT, COUNT_OR_ZERO, BYTES = whole(1, 10**7), whole(0, 10**7), whole(1, 10**18)
SECONDS, SIZE = Range(Real, 0, 1e6), Range(Real, 1, 1e30)
RATE, RATE_OR_ZERO = Range(Real, 1, 1e24), Range(Real, 0, 1e24)
LINK = Table({"latency_s": SECONDS, "bytes_per_s": RATE, "hop_s": SECONDS}, ["latency_s", "bytes_per_s"])
WORDS = {str: "a text", bool: "true or false"}
# Columns of lists of rows. The first number of a row increases.
POINTS, OPERATORS, COLLECTIVES = (SIZE, RATE), (SIZE, SECONDS), (COUNT, SECONDS, RATE)
NEEDED = {
    "name": str,
    "about": str,
    "source": str,
    "is_host": bool,
    "memory_bytes": BYTES,
    "memory_bandwidth": RATE,
    "operator_overhead_s": SECONDS,
    "ranks_per_machine": COUNT,
    "matmul_flops": Table({}, ["float32"], RATE),
    "peak_flops": Table({}, ["float32"], RATE),
    "links": Table({"inside": LINK, "between": LINK, "gradients": LINK}, ["inside", "between"]),
}
CONTENT = {
    **NEEDED,
    "has_figures": bool,
    "attention_flops": Table({}, [], RATE),
    "optimizer_bandwidth": RATE_OR_ZERO,
    "optimizer_bucket_s": SECONDS,
    "step_overhead_s": SECONDS,
    "overlap_slowdown": SECONDS,
    "headroom": BELOW_ONE,
    "ranks": COUNT_OR_ZERO,
    "cores": COUNT_OR_ZERO,
    "turns": Range(Real, 1, 1e6),
    "communicator_bytes": whole(0, 10**18),
    "matmul_sizes": Table({}, [], POINTS),
    "memory_sizes": POINTS,
    "operators": Table({}, [], OPERATORS),
    "collectives": Table({}, [], COLLECTIVES),
}


def _check(name: str, value: Any, allowed: Any) -> None:
    """Check a value of a device file against a Table, a Range, a type, or the columns of a list of rows.

    Raises:
        ValueError: For the first value that is invalid.
    """
    if isinstance(allowed, Table):
        if not isinstance(value, dict):
            raise _unexpected(name or "the content", "a table of names", value)
        before = f"{name}." if name else ""
        for missing in sorted({*allowed.needed} - value.keys()):
            raise ValueError(f"{before}{missing} is missing")
        for unknown in sorted(value.keys() - allowed.names.keys()) if allowed.others is None else ():
            raise ValueError(f"{before}{unknown} is no name there; known are {', '.join(sorted(allowed.names))}")
        for key, part in value.items():
            if part is not None or key != "communicator_bytes":
                _check(before + key, part, allowed.names.get(key, allowed.others))
    elif isinstance(allowed, tuple):
        if not isinstance(value, list):
            raise _unexpected(name, "a list of rows", value)
        for place, row in enumerate(value):
            if not isinstance(row, list) or len(row) != len(allowed):
                raise _unexpected(f"{name}[{place}]", f"a list of {len(allowed)} numbers", row)
            for column, (number, its_range) in enumerate(zip(row, allowed, strict=True)):
                _check(f"{name}[{place}][{column}]", number, its_range)
            if place and row[0] <= value[place - 1][0]:
                raise _unexpected(f"{name}[{place}][0]", f"more than {value[place - 1][0]} of the row before", row[0])
    elif not (value in allowed if isinstance(allowed, Range) else isinstance(value, allowed)):
        raise _unexpected(name, str(allowed) if isinstance(allowed, Range) else WORDS[allowed], value)


def _unexpected(name: str, expected: str, value: Any) -> ValueError:
    text = repr(value)
    return ValueError(f"{name} must be {expected}, got {text if len(text) <= 60 else text[:60] + '...'}")
