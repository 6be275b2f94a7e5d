"""`python -m core.plan`: plan a run before renting it."""

from __future__ import annotations

import sys

from core.plan.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
