"""One test file a subject; `ranks.py` gives a test its ranks."""
