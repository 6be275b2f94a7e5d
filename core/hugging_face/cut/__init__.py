"""Cut a model into the slices and stages of one rank, and declare the gradients of the parameters left unsplit."""
