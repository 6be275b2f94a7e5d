"""Run one benchmark by name: `python -m benchmarks NAME [options]`; without a name, list them."""

from __future__ import annotations

import importlib
import sys

# Name -> (module with a main(arguments), one line about it). What main returns, if anything, is the exit status.
BENCHMARKS = {
    "collectives": ("benchmarks.collectives", "ways to reduce and gather on CPU, and which one is taken"),
    "communication": ("benchmarks.communication", "bytes sent and collectives a step, counted, against theory"),
    "families": (
        "benchmarks.families",
        "every family of Transformers with a plan, through HybridParallelPlugin at its defaults: equal or refused",
    ),
    "first_steps": ("benchmarks.first_steps", "what the watch of the first two steps costs in them, and later"),
    "gpu": (
        "benchmarks.gpu",
        "on a GPU: overhead, weight gradients in place, the optimizer's pass, MFU; results checked",
    ),
    "groups": ("benchmarks.groups", "creating the process groups of a rank in worlds of 1 024 and 16 384"),
    "hugging_face": (
        "benchmarks.hugging_face",
        "split Hugging Face models compared with Transformers' own tensor parallelism and FSDP2; wrapping, loading",
    ),
    "loss": ("benchmarks.loss", "the last layer's loss with whole logits and in chunks: memory and time"),
    "memory": ("benchmarks.memory", "bytes a parameter for each strategy and precision, formula and measured"),
    "optimizer": ("benchmarks.optimizer_step", "the optimizer's step and torch's, as a share of copy bandwidth"),
    "overlap": ("benchmarks.overlap", "step time over bucket size on a simulated wire, hidden share, the advised size"),
    "peers_right": (
        "benchmarks.peers_right",
        "gradients of other frameworks' own loops in each layout, compared with one process",
    ),
    "plan": (
        "benchmarks.plan",
        "planned memory and time of a step compared with measured ones, on 1 to 8 ranks; with devices measured",
    ),
    "published": ("benchmarks.published_runs", "plans compared with figures that others have published"),
    "same_bits": (
        "benchmarks.same_bits",
        "do two versions of this code train to the same bits? record one, compare the other",
    ),
    "startup": ("benchmarks.startup", "wrapping up to 100 000 parameters, optimizer and first step; groups at 16 384"),
    "steps": ("benchmarks.steps", "step time, processor time and memory; torch's wrappers and other frameworks too"),
    "tiers": ("benchmarks.tiers", "what files instead of RAM cost: a step with moments, parameters, gradients in them"),
}


def main(arguments: list[str]) -> int:
    """Run the benchmark that `arguments` names, with the rest of them; return the exit status."""
    asked = arguments[:1] in (["-h"], ["--help"])
    if not arguments or arguments[0] not in BENCHMARKS:
        known = "\n".join(f"  {name:<14} {line}" for name, (_, line) in BENCHMARKS.items())
        print(
            f"usage: python -m benchmarks NAME [--json FILE] [options]\n{known}",
            file=sys.stdout if asked else sys.stderr,
        )
        return 0 if asked else 2
    module, _ = BENCHMARKS[arguments[0]]
    return importlib.import_module(module).main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
