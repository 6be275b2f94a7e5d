"""Meaning of a first and of a second Ctrl-C."""

import signal

SAME_PRESS_S = 0.5  # a launcher and the terminal may both deliver the same Ctrl-C
INTERRUPTED = 128 + signal.SIGINT  # the exit status of a process that a Ctrl-C has ended, as shells count
