"""One step of the inner optimizer, and what ranks compare before it."""
