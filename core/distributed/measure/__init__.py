"""What a step's communication took, and the tables that describe a wrapped model."""
