"""The ``python -m core WORD`` command. Each word runs a job of this package or of one of its companion packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# Word -> module with `main(arguments)`, imported when the word is typed; first arguments; description.
WORDS = {
    "train": ("core_train.main", (), "train a GPT (pretrain_gpt.py)"),
    "finetune": ("core_train.finetune.main", (), "fine-tune a checkpoint directory of Hugging Face"),
    "generate": ("core_train.commands.generate", (), "continue a text, or answer, with a trained model"),
    "convert": ("core_train.commands.convert", (), "turn a trained model into a directory of transformers, or back"),
    "compare": ("core.verify.record.compare", (), "name the first difference of recorded runs"),
    "plan": ("core_plan.command", (), "plan the memory and time of a run, and list the layouts that fit"),
    "verify": ("core.verify.program", (), "compare the gradients of a program with one process, or record it"),
    "inspect": ("core.checkpoint.__main__", ("inspect",), "show the steps, layout and tensors of a checkpoint"),
    "doctor": ("core_train.commands.doctor", (), "check this machine for training"),
    "compat-check": ("core_compat.check", (), "check a program for Megatron or ColossalAI, without running it"),
}
USAGE = "\n".join(
    [
        "usage: python -m core WORD ...        (or: gradient-core WORD ...)",
        "",
        "words, each with --help:",
        *(f"  {word:14}{text}" for word, (_, _, text) in WORDS.items()),
        "",
        "modules, each with --help:",
        "  python -m core.checkpoint         inspect checkpoints, check each byte",
        "  python -m core_compat.convert     turn checkpoints into other programs' files, and back",
        "  python -m core_compat.megatron    run a program that imports megatron.core",
        "  python -m core_compat.colossalai  run a program that imports colossalai",
    ]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command named by the first argument and return its exit status."""
    word, *others = (list(sys.argv[1:]) if arguments is None else list(arguments)) or ["--help"]
    if word in WORDS:
        module, first, _ = WORDS[word]
        return int(importlib.import_module(module).main([*first, *others]))
    if word in ("-h", "--help"):
        print(USAGE)
        return 0
    print(f"error: there is no command {word!r}\n{USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
