"""python -m core.compat.colossalai script.py: run a program that imports colossalai, which need not be installed."""

import sys

from core.compat.colossalai import SURFACE
from core.compat.install import run

run(SURFACE, sys.argv[1:])
