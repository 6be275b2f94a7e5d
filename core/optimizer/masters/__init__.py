"""The memory that is stepped: master weights, gradients and moments, in any storage format."""
