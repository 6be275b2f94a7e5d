"""`python -m core.finetune --model DIR --data FILE.jsonl --tp 2`: fine-tune a checkpoint directory."""

import sys

from core.finetune.main import main

if __name__ == "__main__":
    sys.exit(main())
