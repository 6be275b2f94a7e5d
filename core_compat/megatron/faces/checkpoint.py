"""dist_checkpointing with Megatron's arguments, over core.checkpoint's trees."""

from __future__ import annotations

import enum
import logging
from typing import Any

from core_compat.megatron import tree_files as ours
from core_compat.megatron.faces.refusals import arguments

logger = logging.getLogger(__name__)
_WAYS = "-sharded_strategy=None -common_strategy=None"
sharded_state_dict = arguments("self>chunk prefix='' !sharded_offsets=() -metadata=None")(ours.module_tree)
# Strategies are ignored; integrity is always checked.
save = arguments(
    f"sharded_state_dict>tree checkpoint_dir>directory {_WAYS} -validate_access_integrity=True "
    "!async_sharded_save=False -preprocess_common_before_consistancy_check=None content_metadata=None "
    "-async_strategy=None -verify_integrity=False * process_group>group=None"
)(ours.save_tree)
load_tensors_metadata = arguments(f"checkpoint_dir>directory {_WAYS}")(ours.tree_tensors)


class Strategy:
    """Placeholder for Megatron's strategies of writing or reading.

    Arguments are ignored, because there is one format here.
    """

    def __init__(self, *unused: Any, **also_unused: Any) -> None: ...


class StrictHandling(enum.Enum):
    """Behavior if a checkpoint lacks requested keys ('unexpected') or has additional ones ('missing')."""

    ASSUME_OK_UNEXPECTED, IGNORE_ALL = "assume_ok_unexpected", "ignore_all"
    LOG_UNEXPECTED, LOG_ALL = "log_unexpected", "log_all"
    RAISE_UNEXPECTED, RAISE_ALL = "raise_unexpected", "raise_all"
    RETURN_UNEXPECTED, RETURN_ALL = "return_unexpected", "return_all"


@arguments(
    f"sharded_state_dict checkpoint_dir {_WAYS} -validate_access_integrity=True strict='assume_ok_unexpected' "
    "-verify_integrity=False process_group=None"
)
def load(sharded_state_dict: Any, checkpoint_dir: Any, strict: Any, process_group: Any) -> Any:
    """Load the tree of tree_files.load_tree. Collective.

    If ``strict`` returns mismatches, return (tree, keys of the file not requested, requested keys not in the file).
    """
    how = StrictHandling(strict).value
    found = ours.load_tree(
        sharded_state_dict,
        checkpoint_dir,
        refuse_lacking=how.startswith(("assume", "raise")),
        refuse_unasked=how == "raise_all",
        group=process_group,
    )
    if how.startswith("log") and (found.lacking or found.unasked):
        logger.warning("loading %s: not in it: %s; not asked for: %s", checkpoint_dir, found.lacking, found.unasked)
    return (found.tree, set(found.unasked), set(found.lacking)) if how.startswith("return") else found.tree


def load_common_state_dict(checkpoint_dir: Any) -> Any:
    """Return the plain values of a checkpoint. Collective over the default group."""
    return ours.load_tree({}, checkpoint_dir).tree


def load_plain_tensors(checkpoint_dir: Any) -> Any:
    """Return every full tensor of a checkpoint on every rank. Collective over the default group."""
    tensors = ours.tree_tensors(checkpoint_dir)
    found = ours.load_tree(tensors, checkpoint_dir).tree
    return {key: found[key] for key in tensors}


@arguments("checkpoint_dir=None * preloaded_state_dict=None")
def load_content_metadata(checkpoint_dir: Any, preloaded_state_dict: Any) -> Any:
    """Return the content_metadata passed to ``save``."""
    if preloaded_state_dict is not None:
        return preloaded_state_dict.get("content_metadata")
    if checkpoint_dir is None:
        raise ValueError("content_metadata is in the checkpoint; pass checkpoint_dir")
    return ours.tree_metadata(checkpoint_dir)
