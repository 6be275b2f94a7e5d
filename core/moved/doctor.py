"""`python -m core.doctor`: what this machine has for training."""

import sys

from core.jobs.doctor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
