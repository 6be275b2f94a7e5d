"""python -m core_compat.colossalai script.py: run a program that imports colossalai, which need not be installed."""

import sys

from core_compat.colossalai import SURFACE
from core_compat.install import run

run(SURFACE, sys.argv[1:])
