"""Thin faces where Megatron's arguments are not ours: they translate, and the engine acts."""
