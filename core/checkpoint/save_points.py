"""Named points of a save, at which a test can have a hook called. Without a hook a point costs one comparison."""

from __future__ import annotations

from collections.abc import Callable

POINTS = {
    "before data": "the directory of the save exists, no rank has written into it",
    "half a file": "half of a rank's data file has reached the file system",
    "between files": "a rank has finished one data file and not begun the next",
    "before file fsync": "a data file is written and may lie in the page cache only",
    "before part": "a rank's data files are durable, its part of the manifest is not written",
    "half a part": "half of a rank's part of the manifest is written, under a temporary name",
    "before metadata": "all parts are there, the index of tensors is not",
    "before manifest": "the index of tensors is there, the manifest is not",
    "half a manifest": "half of the manifest is written, under a temporary name",
    "before commit record": "the manifest is durable, the record that vouches for it is not written",
    "before rename": "everything is durable, under the name of a save that has not ended",
    "after rename": "the directory has its name, the root's entry for it may not be durable",
    "before latest": "the checkpoint is committed and durable, `latest` names the one before",
    "half a latest": "half of the new `latest` is written, under a temporary name",
    "before deletion": "`latest` is moved, surplus checkpoints are not deleted",
    "between deletions": "a surplus checkpoint has lost its name, its files are all there",
    "during deletion": "some files of a surplus checkpoint are gone",
}
Hook = Callable[[str, int], None]
_hook: Hook | None = None


def reach(point: str, rank: int) -> None:
    """Call the hook, if a test has set one, when this rank's save reaches ``point``."""
    if _hook is not None:
        if point not in POINTS:
            raise ValueError(f"{point!r} is no point of a save; there are {', '.join(POINTS)}")
        _hook(point, rank)


def set_hook(hook: Hook | None) -> None:
    """Call ``hook(point, rank)`` at every point of every save of this process, on the thread that reaches it."""
    global _hook
    _hook = hook
