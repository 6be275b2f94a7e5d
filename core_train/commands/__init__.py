"""Commands of one process: doctor, generate, convert."""
