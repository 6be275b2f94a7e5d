"""`python -m tests.layouts`: our GPT's gradients in many layouts against one process. Exit status 0: all are right."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.layouts.gpt import DTYPES
from tests.layouts.table import Groups, Verdict, Work, run_on_own_ranks, run_table
from tests.layouts.tables import tables
from tests.layouts.training import OPTIMIZERS

TRAINING_STEPS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the table; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.layouts", description=__doc__)
    parser.add_argument("--table", choices=sorted(tables()), default="quick", help="which layouts (default: quick)")
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["fp64", "fp32"])
    parser.add_argument("--only", default="", metavar="TEXT", help="only layouts whose line contains all these words")
    parser.add_argument("--max-ranks", type=int, default=8, help="leave out layouts of more ranks")
    parser.add_argument(
        "--steps", type=int, help=f"train so many steps in fp64 instead (--table training: {TRAINING_STEPS})"
    )
    parser.add_argument("--optimizers", nargs="+", choices=sorted(OPTIMIZERS), default=["sgd", "adam"])
    parser.add_argument("--limit-s", type=float, default=120.0, help="the time one layout may take")
    parser.add_argument("--list", action="store_true", help="print the layouts and stop")
    options = parser.parse_args(arguments)

    groups: Groups = {
        heading: [
            layout
            for layout in layouts
            if layout.world <= options.max_ranks and all(word in str(layout).split() for word in options.only.split())
        ]
        for heading, layouts in tables()[options.table]().items()
    }
    groups = {heading: layouts for heading, layouts in groups.items() if layouts}
    if options.list:
        print(*(layout for layouts in groups.values() for layout in layouts), sep="\n")
        return 0
    if not groups:
        print(
            f"FAILED: no layout of table {options.table!r} has {options.only!r} and at most {options.max_ranks} ranks"
        )
        return 1
    steps = options.steps or (TRAINING_STEPS if options.table == "training" else 0)
    work = Work(options.optimizers if steps else options.dtypes, steps)
    if "WORLD_SIZE" in os.environ:
        verdict = _run_as_a_rank(groups, work, options.limit_s)
    else:
        verdict = run_on_own_ranks(groups, work, _print, limit_s=options.limit_s)
    return 0 if verdict.ok else 1


def _run_as_a_rank(groups: Groups, work: Work, limit_s: float) -> Verdict:
    """Under torchrun: the layouts that have just as many ranks as were started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    try:
        world = dist.get_world_size()
        fitting = {heading: [layout for layout in rows if layout.world == world] for heading, rows in groups.items()}
        fitting = {heading: rows for heading, rows in fitting.items() if rows}
        return run_table(fitting, work.kinds, work.run, _print if dist.get_rank() == 0 else lambda line: None)
    finally:
        dist.destroy_process_group()


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
