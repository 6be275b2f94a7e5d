"""Import paths of version 0.1.0 whose files lie in a room now: `core.timers` is found here (core/__init__.py).

New code imports from the room, which type checkers find too.
"""
