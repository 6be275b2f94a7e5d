"""What ranks compare, and what is refused: other models, other copies, NaN, and calls out of order."""
