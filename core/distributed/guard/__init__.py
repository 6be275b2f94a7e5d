"""Guards: agreement between ranks, and checks of gradients and weights."""
