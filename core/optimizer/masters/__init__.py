"""The memory that is stepped: master weights, gradients and moments, whatever they are kept in."""
