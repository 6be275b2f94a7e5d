"""Inspection of checkpoints without a job: steps, layouts, tensors, files, and damage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core.checkpoint.bounded_read import read_bytes
from core.checkpoint.damage import Damage, open_manifest
from core.checkpoint.directory import check_directory
from core.checkpoint.errors import CheckpointNotFound, amount
from core.checkpoint.manifest import COMMIT_NAME, MANIFEST_NAME, Manifest, ManifestError
from core.checkpoint.root_directory import DELETING, SAVING, Committed, list_committed, read_latest

Print = Callable[[str], None]
LONGEST_VALUE = 100  # characters of one value of `meta`


def directories(place: str | os.PathLike[str], step: int | None) -> list[Path]:
    """Return the steps of a root, oldest commit first, or the given step's directory.

    Raises CheckpointNotFound if there are no such steps.
    """
    path = Path(os.path.realpath(place))
    if not path.is_dir():
        raise CheckpointNotFound(f"{path} is no directory.")
    committed = list_committed(path)
    is_step = Committed.from_path(path) is not None or (path / COMMIT_NAME).exists()
    if is_step and not committed:
        if step is not None:
            raise CheckpointNotFound(f"{path} is one step's directory; --step goes with the root above it.")
        return [path]
    found = [each.path for each in committed if step is None or each.step == step]
    if not found:
        steps = ", ".join(str(each.step) for each in committed) or "none"
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointNotFound(f"There is no {what} in {path}; steps there: {steps}.")
    return found


def inspect(place: str | os.PathLike[str], step: int | None, print_line: Print, *, with_files: bool = False) -> int:
    """Print an overview of a root, or one step's directory, and the content of one step, by default the newest.

    Return 0, or 1 if the step is unreadable. ``with_files`` also prints each file with its items.
    """
    found = directories(place, step)
    root = found[-1].parent
    latest = read_latest(root)
    unfinished = [each.name for each in sorted(root.iterdir()) if each.name.startswith((SAVING, DELETING))]
    if step is None and found[-1] != Path(os.path.realpath(place)):
        print_line(f"{root}")
        for directory in found:
            print_line(f"  {directory.name}{' (latest)' if directory.name == latest else ''}: {_summary(directory)}")
        for name in unfinished:
            print_line(f"  {name}: a save or deletion that has not ended, or never will; the next save cleans it")
        print_line("")
    return _inspect_step(found[-1], print_line, with_files)


def verify(place: str | os.PathLike[str], step: int | None, print_line: Print) -> int:
    """Read every byte of the selected steps and print each damaged file. Return 0 if all bytes are as saved, else 1."""
    found = directories(place, step)
    bad = 0
    for directory in found:
        start_s = time.monotonic()
        damages = check_directory(directory)
        for damage in damages:
            print_line(f"DAMAGED {directory}: {damage}")
        if damages:
            bad += 1
            continue
        opened = open_manifest(directory)
        assert not isinstance(opened, Damage), "just checked"
        _, manifest = opened
        seconds = time.monotonic() - start_s
        print_line(f"ok {directory}: {len(manifest.files)} files, {amount(manifest.total_bytes)}, {seconds:.1f} s")
    if bad:
        print_line(f"{bad} of {len(found)} checkpoints are damaged; loading takes the newest intact one")
    return 1 if bad else 0


def _summary(directory: Path) -> str:
    opened = open_manifest(directory)
    if isinstance(opened, Damage):
        return f"damaged: {opened}"
    commit, manifest = opened
    saved_by = f"{manifest.world_size} ranks{_flat(manifest.meta.get('layout', {}))}"
    return f"step {commit.step}, saved {commit.saved_at} by {saved_by}, {amount(manifest.total_bytes)}"


def _inspect_step(directory: Path, print_line: Print, with_files: bool) -> int:
    opened = open_manifest(directory)
    print_line(f"{directory}")
    if isinstance(opened, Damage):
        print_line(f"  DAMAGED: {opened}")
        manifest = _unvouched(directory)
        if manifest is None:
            return 1
        print_line("  what manifest.json says; no commit.json vouches for it:")
    else:
        commit, manifest = opened
        print_line(f"  step {commit.step}, commit {commit.sequence} of this root, saved {commit.saved_at}")
    print_line(f"  saved by {manifest.world_size} ranks{_flat(manifest.meta.get('layout', {}))}")
    for key, value in manifest.meta.items():
        if key != "layout":
            print_line(f"  {key}: {_shortened(value)}")
    _print_tensors(manifest, print_line)
    _print_files(directory, manifest, print_line, with_files)
    return 1 if isinstance(opened, Damage) else 0


def _print_tensors(manifest: Manifest, print_line: Print) -> None:
    width = max((len(name) for name in manifest.tensors), default=0)
    print_line(f"  {len(manifest.tensors)} tensors, {amount(sum(t.bytes for t in manifest.tensors.values()))}:")
    for name, tensor in sorted(manifest.tensors.items()):
        print_line(f"    {name:<{width}}  {tensor.dtype:<9} {list(tensor.shape)}  {tensor.bytes} bytes")
    objects: dict[str, int] = {}
    for file in manifest.files:
        for part in file.segments:
            if part.name not in manifest.tensors:
                objects[part.name] = objects.get(part.name, 0) + part.length
    if objects:
        print_line(f"  {len(objects)} other objects: {', '.join(f'{name} ({n} bytes)' for name, n in objects.items())}")


def _print_files(directory: Path, manifest: Manifest, print_line: Print, with_files: bool) -> None:
    print_line(
        f"  {len(manifest.files)} files, {amount(manifest.total_bytes)} (sizes only were looked at; see `verify`)"
    )
    for file in manifest.files:
        path = directory / file.name
        size = path.stat().st_size if path.is_file() else None
        if size != file.size:
            found = "is missing" if size is None else f"has {size} bytes"
            print_line(f"    DAMAGED: {file.name} {found}, {file.size} were saved")
        elif with_files:
            print_line(f"    {file.name}: rank {file.rank}, {file.size} bytes, crc32 {file.crc32:08x}")
            for part in file.segments:
                print_line(f"      {part.offset:>12} {part.length:>12}  {part.name}")


def _unvouched(directory: Path) -> Manifest | None:
    try:
        return Manifest.from_json(read_bytes(directory / MANIFEST_NAME))
    except (OSError, ManifestError):
        return None


def _flat(layout: Any) -> str:
    if not isinstance(layout, Mapping) or not layout:
        return ""
    # Without ep, and at tp's size, etp is the default, of a model without experts too.
    no_news = layout.get("ep") == 1 and layout.get("etp") == layout.get("tp")
    return f" ({', '.join(f'{key} {value}' for key, value in layout.items() if key != 'etp' or not no_news)})"


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"
