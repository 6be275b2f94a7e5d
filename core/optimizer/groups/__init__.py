"""Which hyperparameters each parameter gets."""
