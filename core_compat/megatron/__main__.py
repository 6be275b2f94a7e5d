"""python -m core_compat.megatron script.py: run a program that imports megatron.core, which need not be installed."""

import sys

from core_compat.install import run
from core_compat.megatron import SURFACE

run(SURFACE, sys.argv[1:])
