"""Compare the output of a cut model with the output that the full model gave before."""
