"""Train a GPT on text.

    torchrun --standalone --nproc-per-node 4 pretrain_gpt.py      # the command of `make train`
    python pretrain_gpt.py                                        # starts --run.ranks (4) ranks on its own
    srun -n 16 python pretrain_gpt.py --config configs/mine.toml --parallel.tp 4

`python pretrain_gpt.py --help` lists every option; docs/source/training.md describes a run's output and files.
"""

import sys

from core_train.main import main

if __name__ == "__main__":
    sys.exit(main())
