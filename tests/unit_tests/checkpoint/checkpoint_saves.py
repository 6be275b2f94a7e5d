"""Small checkpoints for tests of their storage: tensors that tell their step and rank, saved and loaded through dcp."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.storage import StorageWriter

from core.checkpoint.directory import CheckpointDirectory
from core.checkpoint.root_directory import list_committed
from core.checkpoint.saver import CheckpointSaver, SaveReport

State = dict[str, torch.Tensor]


def state_of(step: int, rank: int) -> State:
    """Four tensors that only this rank has, and one that all ranks have; every element depends on the step."""
    values = torch.Generator().manual_seed(1000 * step + rank)
    shared = torch.Generator().manual_seed(7 * step + 1)
    return {
        f"rank{rank}.weight": torch.randn(31, 17, generator=values),
        f"rank{rank}.half": torch.randn(64, generator=values).bfloat16(),
        f"rank{rank}.count": torch.tensor(step * 10 + rank),
        f"rank{rank}.empty": torch.empty(0, 3),
        "shared.bias": torch.randn(40, 10, generator=shared)[:, ::2],  # not contiguous
    }


def fill_with(state: State, group: dist.ProcessGroup | None = None) -> Callable[[StorageWriter], None]:
    """What a saver calls to have `state` written."""

    def fill(writer: StorageWriter) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(state, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())

    return fill


def save_step(saver: CheckpointSaver, step: int) -> SaveReport:
    """Save `state_of(step)` of this rank."""
    return saver.save(step, fill_with(state_of(step, saver.ranks.rank)), meta={"layout": {"dp": saver.ranks.world}})


def save_alone(root: Path, *steps: int, world: int = 1) -> None:
    """Checkpoints of one process without torch.distributed; the state is that of `world` ranks together."""
    with CheckpointSaver(root, file_bytes=1500) as saver:
        for step in steps:
            state = {name: tensor for rank in range(world) for name, tensor in state_of(step, rank).items()}
            saver.save(step, fill_with(state), meta={"layout": {"dp": world}})


def loaded(directory: CheckpointDirectory, rank: int) -> State:
    """What a rank of the same job reads from a checkpoint."""
    reader = directory.reader()
    state = {name: torch.full_like(tensor, 7) for name, tensor in state_of(0, rank).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    return state


def assert_is_step(state: State, step: int, rank: int) -> None:
    """`state` is bit for bit what `state_of` gives; another step's would differ in every tensor that has elements."""
    expected, other = state_of(step, rank), state_of(step + 1, rank)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), f"{name} is not what step {step} saved"
        assert tensor.numel() == 0 or not torch.equal(other[name], tensor), "the steps do not differ: a weak test"


def only_directory(root: Path) -> Path:
    """The one committed directory of a root."""
    (committed,) = list_committed(root)
    return committed.path


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What torch.save writes for a tensor."""
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()
