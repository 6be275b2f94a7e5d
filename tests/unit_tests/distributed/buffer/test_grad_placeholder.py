"""The placeholder in `.grad` has no memory, so no way to read it may reach some."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from core.distributed.buffer.grad_placeholder import GradPlaceholder
from core.groups.agree import SyncError

READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda grad: grad.sum(),
    "of .data": lambda grad: grad.data.sum(),
    "of a detached one": lambda grad: grad.detach().sum(),
    "view": lambda grad: grad.view(-1),
    "element": lambda grad: grad[0, 0].item(),
    "copy": copy.copy,
    "clone": lambda grad: grad.clone(),
    "numpy": lambda grad: grad.numpy(force=True),
    "array": np.asarray,
    "list": lambda grad: grad.tolist(),
    "numpy by DLPack": np.from_dlpack,
    "torch by DLPack": torch.from_dlpack,
    "file": lambda grad: torch.save(grad, io.BytesIO()),
    "norm of several": lambda grad: torch._foreach_norm([grad]),
}


@pytest.mark.parametrize("read", READS)
def test_no_read_reaches_memory_that_is_not_there(read: str) -> None:
    owner = nn.Identity()
    grad = GradPlaceholder.of(nn.Parameter(torch.ones(300, 300)), "w", torch.float32, owner)
    with pytest.raises((SyncError, RuntimeError), match="is not in `.grad` now|not supported for tensor subclasses"):
        READS[read](grad)
