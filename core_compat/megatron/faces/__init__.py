"""Thin wrappers for functions whose arguments differ in Megatron: they translate arguments and call the engine."""
