"""`python -m core.generate`: continue a text."""

import sys

from core.jobs.generate import main

if __name__ == "__main__":
    sys.exit(main())
