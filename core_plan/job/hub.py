"""Names on the Hugging Face Hub: found in the cache of huggingface_hub, or answered with the line that downloads them.

Nothing here uses the network.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Literal

Kind = Literal["model", "dataset"]
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FILES = (".json", ".jsonl", ".ndjson", ".parquet")  # how the name of a file of data ends
WEIGHTS = ("*.safetensors", "*.bin")


def is_hub_name(path: str) -> bool:
    """True for ``org/name`` that is neither a path of this machine nor inside an existing directory."""
    if HUB_NAME.fullmatch(path) is None or path.endswith(FILES):
        return False
    return not Path(path).exists() and not Path(path).parent.exists()


def cached_model(path: str) -> str:
    """The directory in the cache of huggingface_hub for a name of which it has the model; else ``path``."""
    snapshot = _snapshot(path, "model")
    has_weights = snapshot is not None and any(next(snapshot.glob(pattern), None) for pattern in WEIGHTS)
    return str(snapshot) if snapshot is not None and has_weights and (snapshot / "config.json").is_file() else path


def cached_data(path: str) -> str:
    """The directory in the cache of huggingface_hub for a name of which it has files of data; else ``path``."""
    snapshot = _snapshot(path, "dataset")
    return str(snapshot) if snapshot is not None and any(f.suffix in FILES for f in snapshot.rglob("*")) else path


def _snapshot(path: str, kind: Kind) -> Path | None:
    if not is_hub_name(path):
        return None
    try:
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:  # what needs it says so
        return None
    try:
        return Path(str(huggingface_hub.snapshot_download(path, repo_type=kind, local_files_only=True)))
    except (LocalEntryNotFoundError, ValueError):  # ValueError for what cannot be a name
        return None


def how_to_download(path: str, kind: Kind, file: str = "") -> str:
    """Return a sentence for an error: the command that downloads ``path``, or a file of it.

    Empty if it is not a name on the Hub.
    """
    if not is_hub_name(path):
        return ""
    what = ["--repo-type", "dataset"] if kind == "dataset" else []
    place = path.rpartition("/")[2]
    command = shlex.join(["hf", "download", path, *what, *([file] if file else []), "--local-dir", place])
    return f". Nothing is downloaded here; if this is a name on the Hub, run {command}, and give {place}"
