"""Memory that nobody has written yet is NaN, so that a read of it shows: `pytest --poison`.

torch does this for its own memory in deterministic mode. Pools and huge pages of the package are filled here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

VARIABLE = "TESTS_POISON"  # ranks inherit it


def is_on() -> bool:
    return VARIABLE in os.environ


def start() -> None:
    """Fill fresh memory of this process from now on. Idempotent; tests may have switched torch's mode off."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if not _started:
        _started.append(pools())
        _started[0].__enter__()


_started: list[AbstractContextManager[None]] = []


@contextmanager
def pools() -> Iterator[None]:
    """Fill the memory that pools lend with NaN."""
    from core.distributed.buffer.bucket_pool import BucketPool
    from core.distributed.wire.huge_pages import Blocks

    right = [(owner, name, getattr(owner, name)) for owner, name in ((BucketPool, "acquire"), (Blocks, "borrow"))]
    for owner, name, method in right:
        setattr(owner, name, _filled(method))
    try:
        yield
    finally:
        for owner, name, method in right:
            setattr(owner, name, method)


def _filled(right: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    import torch

    def fill(*arguments: Any, **options: Any) -> torch.Tensor:
        memory = right(*arguments, **options)
        return memory.fill_(float("nan") if memory.is_floating_point() else torch.iinfo(memory.dtype).max)

    return fill
