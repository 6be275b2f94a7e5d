"""FileTier: memory of offloaded shards, in memory-mapped files.

Its tensors are used in place like any others. The kernel reads pages when they are used, and writes them back when it
needs their memory. The files have no name, so nothing is left when the process ends.

Disk space is reserved before a file is mapped. A full disk therefore raises OSError at once, instead of a signal later.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile

import torch

from core.distributed.buffer.memory_tier import MemoryTier
from core.watch.warn_user import warn_user

LEAST_BYTES = 2**20  # smallest size of a file
SPARE = 8  # a file is at least 1/SPARE of all earlier ones, so that there are few files


class FileTier(MemoryTier):
    """Files of one wrapped model on this rank, in an existing directory. Raises OSError if it cannot be written."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = os.path.abspath(directory)
        self.place = f"a file in {self.directory}"
        self.nbytes = 0  # size of all files
        self.block: mmap.mmap | None = None  # the file for the next tensors
        self.used = 0  # bytes of `block` in use
        self.refused: OSError | None = None  # reason why `new_shared` failed
        os.close(self._nameless())
        if _lies_in_ram(self.directory):
            warn_user(
                f"{self.directory} is a tmpfs, whose files are RAM, so offloading to it saves nothing; name a "
                "directory on a disk"
            )

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.zeros(numel, dtype=dtype, device="cpu")
        if self.block is None or self.used + nbytes > len(self.block):
            size = _pages(max(nbytes, LEAST_BYTES, self.nbytes // SPARE))
            descriptor = self._new(size, reserved=size)
            try:
                self.block, self.used = mmap.mmap(descriptor, size), 0
            finally:
                os.close(descriptor)
        tensor = torch.frombuffer(self.block, dtype=dtype, count=numel, offset=self.used)
        self.used = _pages(self.used + nbytes)
        return tensor

    def masters(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        try:
            return self.zeros(numel, dtype)
        except OSError as error:  # this step is still correct; the next one is rejected on all ranks
            self.failure = self.failure or str(error)
            return torch.zeros(numel, dtype=dtype, device="cpu")

    def new_shared(self, nbytes: int, *, is_first: bool) -> int:
        """Create a file for memory that ranks map from each other, and return its descriptor, which the caller closes.

        Only the first rank reserves the disk space. An OSError is also stored in ``refused``, because all ranks must
        learn it.
        """
        try:
            return self._new(nbytes, reserved=nbytes if is_first else 0)
        except OSError as error:
            self.refused = error
            raise

    def _new(self, nbytes: int, *, reserved: int) -> int:
        descriptor = self._nameless()
        try:
            os.ftruncate(descriptor, nbytes)
            if reserved > 0:  # posix_fallocate rejects 0
                os.posix_fallocate(descriptor, 0, reserved)
        except OSError as error:
            os.close(descriptor)
            free = os.statvfs(self.directory)
            raise OSError(
                error.errno,
                f"{reserved} bytes for offloaded shards could not be reserved in "
                f"{self.directory}, where {free.f_bavail * free.f_frsize} are free ({os.strerror(error.errno or 0)}). "
                "Free some, name another directory, or offload less",
            ) from None
        self.nbytes += nbytes
        return descriptor

    def _nameless(self) -> int:
        try:
            try:
                return os.open(self.directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                    raise
            descriptor, path = tempfile.mkstemp(prefix=".core-", dir=self.directory)
            os.unlink(path)
            return descriptor
        except OSError as error:
            raise OSError(
                error.errno,
                f"no file for offloaded shards can be made in {self.directory} "
                f"({os.strerror(error.errno or 0)}). Name a directory that exists and can be written on every rank",
            ) from None


def _lies_in_ram(directory: str) -> bool:
    """Return True for a directory of a tmpfs, if the kernel lists its mounts."""
    try:
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            kinds = {row.split(" ")[1]: row.split(" ")[2] for row in mounts}  # the last of stacked mounts
    except OSError:
        return False
    path = os.path.realpath(directory)
    while path not in kinds and path != "/":
        path = os.path.dirname(path)
    return kinds.get(path) in ("tmpfs", "ramfs")


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
