"""Communicator options of a group: stream priority and NCCL settings, by Megatron's group names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from core.groups.rank_grid import KINDS

# A few kinds of groups have other names in Megatron. GROUP_NAMES: the name in users' lists and files -> our field.
MEGATRON_NAMES = {
    "expt_tp": "ep_tp",
    "tp_ep": "tp_ep_mp",
    **{kind: kind.replace("expt_dp", "ep_dp") for kind in KINDS if "expt_dp" in kind},
    **{kind: f"{kind}_instance" for kind in KINDS if "dist_opt" in kind},
}
GROUP_NAMES = {MEGATRON_NAMES.get(kind, kind): kind for kind in KINDS}
COMMUNICATOR_SETTINGS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")
NET_NAMES = {"ib": "IB", "socket": "Socket"}


@dataclass(frozen=True)
class GroupOptions:
    """Options of one group's communicator.

    Attributes:
        high_priority: Run collectives on a high-priority stream.
        settings: (name, value) pairs of the NCCL communicator's configuration.
    """

    high_priority: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    def nccl(self) -> Any | None:
        """Return the options as torch's ProcessGroupNCCL.Options, or ``None`` if all are defaults."""
        if self == NO_OPTIONS:
            return None
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=self.high_priority)
        for name, value in self.settings:
            setattr(options.config, name, value)
        return options


NO_OPTIONS = GroupOptions()


def group_options(high_priority: Sequence[str] = (), config_path: str | None = None) -> dict[str, GroupOptions]:
    """Return the options of each group that has any, by field of ProcessGroups.

    The YAML file maps a group name to cga_cluster_size, min_ctas, max_ctas, net_name and is_high_priority_stream.
    Raises ValueError if a name, setting or value is unknown, and RuntimeError if PyYAML is not installed.
    """
    by_group = {} if config_path is None else _read(config_path)
    for name in high_priority:
        _check_group(name, "high_priority_stream_groups")
    options = {}
    for name, group in GROUP_NAMES.items():
        settings = by_group.get(name, {})
        priority = name in high_priority or bool(settings.get("is_high_priority_stream", False))
        option = GroupOptions(priority, tuple((key, settings[key]) for key in COMMUNICATOR_SETTINGS if key in settings))
        if option != NO_OPTIONS:
            options[group] = option
    return options


def _check_group(name: str, source: str) -> None:
    if name not in GROUP_NAMES:
        raise ValueError(f"{source} names the group {name!r}; known are {', '.join(GROUP_NAMES)}.")


def _read(path: str) -> dict[str, dict[str, Any]]:
    try:
        import yaml
    except ImportError as missing:
        raise RuntimeError(
            f"nccl_communicator_config_path={path!r} needs PyYAML, which is not installed; run 'pip install pyyaml'."
        ) from missing
    content = yaml.safe_load(Path(path).read_text()) or {}
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} must map group names to settings, got {content!r}.")
    return {name: _check_settings(path, name, settings) for name, settings in content.items()}


def _check_settings(path: str, group: str, settings: Any) -> dict[str, Any]:
    _check_group(group, path)
    if not isinstance(settings, Mapping):
        raise ValueError(f"{path}: '{group}' must map settings to values, got {settings!r}.")
    checked = {}
    for key, value in settings.items():
        if key == "is_high_priority_stream":
            fits = isinstance(value, bool)
        elif key == "net_name":
            fits = str(value).lower() in NET_NAMES
            value = NET_NAMES.get(str(value).lower(), value)
        elif key in COMMUNICATOR_SETTINGS:
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        else:
            known = ", ".join((*COMMUNICATOR_SETTINGS, "is_high_priority_stream"))
            raise ValueError(f"{path}: '{group}' has the unknown setting {key!r}; known are {known}.")
        if not fits:
            raise ValueError(f"{path}: '{group}' has {key}={value!r}, which that setting cannot be.")
        checked[key] = value
    return checked


def get_nccl_options(group: str, settings: Mapping[str, Mapping[str, Any]]) -> Any | None:
    """Return one group's options as torch's ProcessGroupNCCL.Options, or ``None`` if it has no settings."""
    if group not in settings:
        return None
    checked = _check_settings("nccl_comm_cfgs", group, settings[group])
    pairs = tuple((key, checked[key]) for key in COMMUNICATOR_SETTINGS if key in checked)
    return GroupOptions(checked.get("is_high_priority_stream", False), pairs).nccl()
