"""`python -m core.convert`: turn a model into another directory."""

import sys

from core.jobs.convert import main

if __name__ == "__main__":
    sys.exit(main())
