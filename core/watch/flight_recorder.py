"""The collectives of this process as torch's flight recorder has them, in words."""

from __future__ import annotations

import json

import torch

RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # of NCCL, where torch was built with it, and of gloo


def unfinished_collective() -> str:
    """The first collective of this process that has not ended; "" for none, or where none are recorded.

    A GPU's collective runs while the host is elsewhere, so the host's place does not show it. torch records
    those of NCCL always, and those of gloo where TORCH_FR_BUFFER_SIZE is set when the process starts.
    """
    for name in RECORDERS:
        dump = getattr(torch._C._distributed_c10d, name, None)
        entries = [] if dump is None else json.loads(dump()).get("entries", [])
        left = [entry for entry in entries if not entry["retired"]]
        if left:
            first = min(left, key=lambda entry: entry["record_id"])
            group = first["process_group"][1] or first["process_group"][0]
            kind = first["profiling_name"].partition(":")[2] or first["profiling_name"]
            number = first["p2p_seq_id"] if first["is_p2p"] else first["collective_seq_id"]
            return f"{kind} number {number} of group {group} ({first['input_sizes']} {first['input_dtypes']})"
    return ""
