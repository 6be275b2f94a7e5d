"""`python -m core.training`: the same as pretrain_gpt.py."""

import sys

from core.training.main import main

sys.exit(main())
