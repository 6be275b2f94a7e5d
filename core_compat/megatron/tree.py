"""Leaves of a tree for ``save_tree``: parts of tensors, objects and factories, with functions that change trees.

The names are those of Megatron's dist_checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core.checkpoint.pieces import Piece

__all__ = ["OptimizerState", "ShardedObject", "ShardedTensor", "ShardedTensorFactory"]

StateDict = dict[str, Any]
ReplicaId = Any  # a number or a tuple of numbers; the main replica has only zeros


@dataclass
class ShardedTensor:
    """Part of a tensor of the full model: ``data`` is at ``global_offset`` of [global_shape], under the name ``key``.

    Attributes:
        key: Name of the full tensor.
        data: This rank's part.
        dtype: Dtype of the tensor.
        local_shape: Shape of ``data``.
        global_shape: Shape of the full tensor.
        global_offset: First index of ``data`` in the full tensor, per dimension.
        axis_fragmentations: Number of parts per dimension, as Megatron records it. Not read here.
        replica_id: Zero (or all zeros) on the rank that writes it.
        prepend_axis_num: Number of leading axes of global_shape that ``data`` lacks.
        allow_shape_mismatch, flattened_range: Not supported; must keep the default.
    """

    key: str
    data: Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        if self.flattened_range is not None or self.allow_shape_mismatch:
            raise ValueError(
                f"ShardedTensor {self.key!r}: flattened_range and allow_shape_mismatch are not supported; describe "
                "each shard as a box of the full tensor, which loads at any layout"
            )

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Create one of several equal parts of a tensor.

            ShardedTensor.from_rank_offsets("weight", part, (0, tp_rank, tp_size))

        Args:
            key (str): Name of the global tensor.
            data (Tensor): The part.
            rank_offsets: (axis, index of this part, number of parts) for each split axis.
            replica_id (ReplicaId, optional): Zero (or all zeros) on the rank that writes it.
            prepend_axis_num (int, optional): Number of leading axes of the global shape that ``data`` lacks.
            init_kwargs: Further fields.
        """
        shape = [1] * prepend_axis_num + list(data.shape)
        offset, fragments = [0] * len(shape), [1] * len(shape)
        whole = list(shape)
        for axis, place, parts in rank_offsets:
            offset[axis], whole[axis], fragments[axis] = place * shape[axis], parts * shape[axis], parts
        more = {**init_kwargs, "replica_id": replica_id, "prepend_axis_num": prepend_axis_num}
        local = tuple(data.shape)
        return cls(key, data, data.dtype, local, tuple(whole), tuple(offset), tuple(fragments), **more)

    def piece(self, data: Tensor) -> Piece:
        """Return the box of the file that ``data`` is written to or read from."""
        shape = [1] * self.prepend_axis_num + list(data.shape)
        return Piece(self.key, tuple(self.global_shape), tuple(self.global_offset), data.view(shape))


@dataclass
class ShardedObject:
    """Value that is not a tensor, in an array of values that ranks save under one name.

    Attributes:
        key: Name of the array.
        data: The value. torch.load(weights_only=True) must be able to read it.
        global_shape: Shape of the array.
        global_offset: Index of the value in the array.
        replica_id: Zero (or all zeros) on the rank that writes it.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    @property
    def unique_key(self) -> str:
        """Name in the file."""
        place = ".".join(map(str, self.global_offset))
        return f"{self.key}/shard_{place}_{'.'.join(map(str, self.global_shape))}"


@dataclass
class ShardedTensorFactory:
    """Conversion of a value to sharded tensors when it is saved, and back when it is loaded.

    Attributes:
        key: Name of the value.
        data: The value.
        build_fn: Called with key, data, replica_id and flattened_range. Returns a tree of sharded tensors.
        merge_fn: Maps the loaded tree to the value.
        replica_id: Zero (or all zeros) on the rank that writes it.
        flattened_range: Passed to ``build_fn``.
    """

    key: str
    data: Tensor
    build_fn: Callable[..., Any]
    merge_fn: Callable[[Any], Any]
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """Build a tree of sharded tensors."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


class LocalNonpersistentObject:
    """Value that is neither saved nor loaded. A load returns it unchanged."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        return self.obj


@dataclass(eq=False)
class OptimizerState:
    """Placeholder for an optimizer's state in a tree, which is written next to the tree with the model's weights.

    Attributes:
        optimizer: The optimizer.
        loaded: True once a load has restored its state.
    """

    optimizer: Any
    loaded: bool = False

    def check_loaded(self, optimizer: Any) -> None:
        """Raise ValueError unless this is a loaded state of ``optimizer``."""
        if not self.loaded or self.optimizer is not optimizer:
            raise ValueError(
                "this optimizer state was not loaded; put optimizer.sharded_state_dict(...), or an OptimizerState of "
                "core_compat.megatron.tree, into the tree to load, and use the tree that load returns"
            )


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return ``True`` on the rank that writes."""
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


# -- trees -----------------------------------------------------------------------------------------------------------

SHARDED = (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistentObject, OptimizerState)


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every leaf of a tree of dictionaries and lists. Leaves that become DROPPED are removed."""
    if isinstance(tree, Mapping):
        made = {key: map_leaves(value, function) for key, value in tree.items()}
        return {key: value for key, value in made.items() if value is not DROPPED}
    if isinstance(tree, list):
        return [value for value in (map_leaves(value, function) for value in tree) if value is not DROPPED]
    return function(tree)


DROPPED = object()


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    found: list[Any] = []
    map_leaves(tree, found.append)
    return found


def apply_factories(sharded_state_dict: StateDict) -> None:
    """Replace factories by the leaves that they build, in place."""
    built = map_leaves(
        sharded_state_dict, lambda leaf: leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf
    )
    sharded_state_dict.clear()
    sharded_state_dict.update(built)


def apply_prefix_mapping(sharded_state_dict: StateDict, prefix_map: Mapping[str, str], strict: bool = False) -> None:
    """Replace the prefixes of the leaves' keys in place, by the first entry that matches.

    ``prefix_map`` maps old to new prefixes. With ``strict``, a key that no entry matches raises ValueError.
    """
    for leaf in leaves_of(sharded_state_dict):
        if isinstance(leaf, (ShardedTensor, ShardedObject, ShardedTensorFactory)):
            old = next((old for old in prefix_map if leaf.key.startswith(old)), None)
            if old is not None:
                leaf.key = prefix_map[old] + leaf.key[len(old) :]
            elif strict:
                raise ValueError(f"key {leaf.key!r} does not begin with {' or '.join(map(repr, prefix_map))}")


def replace_prefix_for_sharding(sharded_state_dict: StateDict, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of every leaf's key in place. Raises ValueError if a key does not begin with
    ``old_prefix``.
    """
    apply_prefix_mapping(sharded_state_dict, {old_prefix: new_prefix}, strict=True)


def add_prefix_for_sharding(sharded_state_dict: StateDict, prefix: str) -> None:
    """Add ``prefix`` to every leaf's key, in place."""
    replace_prefix_for_sharding(sharded_state_dict, "", prefix)


def with_saved(tree: Any, saved: Any) -> Any:
    """Replace a tree's plain values by the saved ones. Entries that only one of the two has are kept."""
    if isinstance(tree, Mapping) and isinstance(saved, Mapping):
        return {
            **saved,
            **{key: with_saved(value, saved[key]) if key in saved else value for key, value in tree.items()},
        }
    if not any(isinstance(leaf, SHARDED) for leaf in leaves_of(tree)):
        return saved
    if isinstance(tree, list) and isinstance(saved, list):
        rest = iter(saved)  # a list is saved without its sharded leaves
        return [each if isinstance(each, SHARDED) else with_saved(each, next(rest, each)) for each in tree]
    return tree


def merge(x1: Any, x2: Any) -> Any:
    """Merge two trees. If both have a leaf, the second one is used."""
    if isinstance(x1, dict) and isinstance(x2, dict):
        for key, value in x2.items():
            x1[key] = merge(x1[key], value) if key in x1 else value
        return x1
    return x2
