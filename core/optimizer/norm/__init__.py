"""The norm of all gradients of the model, clipping by it, and whether all ranks are about to step alike."""
