"""Descriptions of this process's collectives, from torch's flight recorder."""

from __future__ import annotations

import json

import torch

RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL's, if torch was built with it, and gloo's


def unfinished_collective() -> str:
    """Describe the first unfinished collective of this process, or return "" without such a record.

    A GPU collective runs asynchronously, so the host's location does not show it. torch always records NCCL's
    collectives, and gloo's if TORCH_FR_BUFFER_SIZE is set when the process starts.
    """
    for name in RECORDERS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        entries = [] if dump is None else json.loads(dump()).get("entries", [])
        unfinished = [entry for entry in entries if not entry["retired"]]
        if unfinished:
            first = min(unfinished, key=lambda entry: entry["record_id"])
            group = first["process_group"][1] or first["process_group"][0]
            kind = first["profiling_name"].partition(":")[2] or first["profiling_name"]
            number = first["p2p_seq_id"] if first["is_p2p"] else first["collective_seq_id"]
            return f"{kind} number {number} of group {group} ({first['input_sizes']} {first['input_dtypes']})"
    return ""
