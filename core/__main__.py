"""`python -m core`: the commands of this package, and where each is explained."""

from __future__ import annotations

import sys
from collections.abc import Sequence

COMMANDS = """usage: python -m core doctor
       python -m core finetune

other commands, each with --help:
  python -m core.training           train a GPT (the same as pretrain_gpt.py)
  python -m core.training.compare   how far the losses of several runs are from each other
  python -m core.generate           continue a text, or answer, with a trained model
  python -m core.convert            a trained model as a directory of transformers, and back
  python -m core.finetune           fine-tune a checkpoint directory of Hugging Face
  python -m core.plan               memory and time of a run before it starts, and which layouts fit
  python -m core.verify             compare gradients of your model or job with one process
  python -m core.checkpoint         look at checkpoints, check them, turn them into other files
  python -m core.compat             list what a program for Megatron or ColossalAI would meet, unrun
  python -m core.compat.megatron    run a program that imports megatron.core
  python -m core.compat.colossalai  run a program that imports colossalai"""


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; the exit status."""
    if list(arguments[:1]) == ["doctor"]:
        from core.jobs.doctor import main as doctor

        return doctor(arguments[1:])
    if list(arguments[:1]) == ["finetune"]:
        from core.finetune.main import main as finetune

        return finetune(arguments[1:])
    asked = list(arguments) in ([], ["-h"], ["--help"])
    if asked:
        print(COMMANDS)
        return 0
    print(f"error: there is no command {arguments[0]!r}\n{COMMANDS}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
