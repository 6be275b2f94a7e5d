"""python -m core.compat.megatron script.py: run a program that imports megatron.core, which need not be installed."""

import sys

from core.compat.install import run
from core.compat.megatron import SURFACE

run(SURFACE, sys.argv[1:])
