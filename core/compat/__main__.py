"""`python -m core.compat check train.py`: check a program for Megatron Core or ColossalAI against this package."""

import sys

USAGE = """usage: python -m core.compat check FILE.py [DIRECTORY ...]

Lists every name, call and argument of megatron.core and colossalai that is served, obeyed otherwise, warned of,
absent, or Megatron's own, with its line and what to write instead. Nothing of the program is run. The status is 1
if something is absent, and 2 if a file cannot be read.
To run a program: python -m core.compat.megatron train.py, or python -m core.compat.colossalai train.py."""


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    if arguments[:1] != ["check"] or len(arguments) < 2 or arguments[1] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments and arguments[-1] in ("-h", "--help") else 2
    from core.compat.check import main as check

    return check(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
