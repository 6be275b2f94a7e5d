"""The norm of all gradients of the model, and clipping by it."""
