"""`python -m core.verify`: our GPT's gradients in many layouts against one process. Exit status 0: all are right."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from core.verify.gpt import DTYPES, check_gpt
from core.verify.layouts import TABLES, Layout
from core.verify.table import Verdict, run_on_own_ranks, run_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the table; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m core.verify", description=__doc__)
    parser.add_argument("--table", choices=sorted(TABLES), default="quick", help="which layouts (default: quick)")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["fp64", "fp32"])
    parser.add_argument("--only", default="", metavar="TEXT", help="only layouts whose line contains all these words")
    parser.add_argument("--max-ranks", type=int, default=8, help="leave out layouts of more ranks")
    parser.add_argument("--limit-s", type=float, default=120.0, help="the time one layout may take")
    parser.add_argument("--list", action="store_true", help="print the layouts and stop")
    options = parser.parse_args(arguments)

    layouts = [
        layout
        for layout in TABLES[options.table]
        if layout.world <= options.max_ranks and all(word in str(layout).split() for word in options.only.split())
    ]
    if options.list:
        print(*layouts, sep="\n")
        return 0
    if not layouts:
        print(
            f"FAILED: no layout of table {options.table!r} has {options.only!r} and at most {options.max_ranks} ranks"
        )
        return 1
    if "WORLD_SIZE" in os.environ:
        verdict = _run_as_a_rank(layouts, options.dtypes, options.limit_s)
    else:
        verdict = run_on_own_ranks(layouts, options.dtypes, _print, limit_s=options.limit_s)
    return 0 if verdict.ok else 1


def _run_as_a_rank(layouts: Sequence[Layout], dtypes: Sequence[str], limit_s: float) -> Verdict:
    """Under torchrun: the layouts that have just as many ranks as were started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    try:
        fitting = [layout for layout in layouts if layout.world == dist.get_world_size()]
        return run_table(fitting, dtypes, check_gpt, _print if dist.get_rank() == 0 else lambda line: None)
    finally:
        dist.destroy_process_group()


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
