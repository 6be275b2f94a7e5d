"""Parameters that must say what their gradient is, because they lie beside split layers and see what these split.

The norm of queries sees this rank's heads, so its gradient is partial over tensor parallelism; the norm before the
attention sees everything, so its gradient is whole. Their tags are alike, and names are the user's. Widths tell the two
apart: a layer beside split ones that is neither as wide as what goes into them nor as what comes out of them works on
what they split.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def params_beside_split_layers(modules: Iterable[nn.Module]) -> set[int]:
    """Ids of replicated vectors, in layers beside split ones, that are not as wide as these layers' whole sides."""
    found: set[int] = set()
    for parent in modules:
        layers = [list(layer.parameters(recurse=False)) for layer in parent.children()]
        split = [weight for params in layers for weight in params if _is_split_matrix(weight)]
        widths = {weight.shape[1 - weight.partition_dim] for weight in split}
        if not widths:
            continue
        for params in layers:
            if not any(getattr(param, "tensor_model_parallel", False) for param in params):
                found.update(id(param) for param in params if param.dim() == 1 and len(param) not in widths)
    return found


def _is_split_matrix(weight: nn.Parameter) -> bool:
    tagged = weight.dim() == 2 and getattr(weight, "tensor_model_parallel", False)
    return tagged and getattr(weight, "partition_dim", None) in (0, 1)
