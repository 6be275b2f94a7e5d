"""Time of a step's communication, and the tables that describe a wrapped model."""
