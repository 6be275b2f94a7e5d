"""Memory of the step: master weights, gradients and moments, in any storage format."""
