"""Do two versions of this code train to the same bits? Record one, and compare the other with the file.

    python -m benchmarks same_bits record bits.json     # in a checkout of the one commit
    python -m benchmarks same_bits compare bits.json    # in a checkout of the other, on the same machine

Each layout of the oracle trains a few steps in deterministic mode, with clipping below the norm. What is recorded of
every rank is a digest of the loss, the norm, each gradient before the step and each weight after it. The bits depend
on the processor and on torch, so the file is of use on one machine only, and says which torch has made it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.verify.rank_pool import RankFailure, RankPool
from tests.layouts import gpt
from tests.layouts.layouts import Layout
from tests.layouts.tables import tables

STEPS = 3
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
BOTH_KINDS = ("quick", "training")  # tables whose layouts are run in bf16 too


def main(arguments: list[str]) -> int:
    """Parse the command line; the exit status is 0 where all bits are equal, or were recorded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks same_bits", description=__doc__)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--every", type=int, default=1, help="only every so many-th layout (default: all)")
    parser.add_argument("--max-ranks", type=int, default=8)
    options = parser.parse_args(arguments)
    if options.what == "record":
        before = {"torch": torch.__version__, "cases": list(cases(options.max_ranks))[:: options.every]}
    else:
        before = json.loads(options.file.read_text())
        before["cases"] = before["cases"][:: options.every]
    if before["torch"] != torch.__version__:
        print(f"{options.file} was made with torch {before['torch']}, and this is {torch.__version__}")
        return 1
    differing = failed = 0
    with RankPool(options.max_ranks) as pool:
        for case in before["cases"]:
            layout = Layout(**case["layout"])
            try:
                digest = pool.run(train, layout.world, (layout, case["kind"]))
            except RankFailure as failure:
                digest = f"failed: {str(failure).strip().splitlines()[-1]}"
                failed += 1
            if case.setdefault("digest", digest) != digest:
                differing += 1
                print(f"DIFFERS  {case['kind']} {layout}\n  before {case['digest']}\n  now    {digest}", flush=True)
    if options.what == "record":
        options.file.write_text(json.dumps(before, indent=1))
    print(f"{len(before['cases'])} cases, {differing} differ, {failed} failed")
    return 1 if differing else 0


def cases(max_ranks: int) -> Iterator[dict[str, Any]]:
    """Dtype and layout of each distinct layout in deterministic mode."""
    seen = set()
    for table, make in tables().items():
        for layouts in make().values():
            for layout in layouts:
                layout = replace(layout, deterministic=True)
                for kind in KINDS if table in BOTH_KINDS else ("fp32",):
                    legal = layout.problem is None and layout.world <= max_ranks
                    if legal and (kind, layout) not in seen:
                        seen.add((kind, layout))
                        yield {"kind": kind, "layout": asdict(layout)}


def train(layout: Layout, kind: str) -> str:
    """The digest of a few steps on every rank. Collective over a started group of `layout.world` ranks."""
    gpt.DTYPES.update(KINDS)
    digest = hashlib.sha256()
    with gpt.groups_of(layout) as groups:
        job = gpt.job_of(layout, kind, groups, gpt.wrapper_config(layout))
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.01,
            clip_grad=0.5,
            bf16=kind == "bf16",
            params_dtype=KINDS[kind],
        )
        optimizer = get_megatron_optimizer(config, job.model.chunks)
        for step in range(STEPS):
            loss = job.step(gpt.global_batch(layout, step))
            gradients = job.model.gradients()
            _, norm, _ = optimizer.step()
            digest.update(repr((loss, norm)).encode())
            with job.model.gathered():
                for tensor in (*gradients.values(), *(held.tensor for held in job.model.trained)):
                    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest.hexdigest())
    return hashlib.sha256(repr(everyone).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
