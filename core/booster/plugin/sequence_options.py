"""What HybridParallelPlugin's options of sequence parallelism mean together; each is obeyed, or refused by name."""

from __future__ import annotations

from core.hugging_face.sequence import MODES, OVER_CONTEXT


def resolve_sequence(
    enabled: bool, mode: str | None, tp_size: int, sp_size: int | None, inner_ring_size: int | None
) -> tuple[str | None, int]:
    """The mode, None without sequence parallelism; and how many ranks of their own it takes. Raises ValueError."""
    if mode is not None and mode not in MODES:
        raise ValueError(f"sequence_parallelism_mode {mode!r} is none of {', '.join(MODES)}")
    if sp_size is not None and (isinstance(sp_size, bool) or not isinstance(sp_size, int) or sp_size < 1):
        raise ValueError(f"HybridParallelPlugin: sp_size is {sp_size!r}; it is a number of ranks, at least 1")
    if not enabled:
        given = {"sequence_parallelism_mode": mode, "sp_size": None if sp_size == 1 else sp_size}
        for name, value in {**given, "inner_ring_size": inner_ring_size}.items():
            if value is not None:
                raise ValueError(f"{name}={value!r} needs enable_sequence_parallelism=True, which is False")
        return None, 1
    mode = mode or "split_gather"
    if inner_ring_size not in (None, sp_size if mode == "ring_attn" else None):
        raise ValueError(
            f"inner_ring_size={inner_ring_size} asks for rings inside the ring of 'ring_attn', and keys and values "
            f"travel in one ring of sp_size={sp_size} ranks here; leave it out"
        )
    if mode in OVER_CONTEXT:
        if sp_size is None or sp_size < 2:
            raise ValueError(f"sequence_parallelism_mode={mode!r} takes ranks of its own; sp_size is {sp_size}, give "
                             "at least 2")  # fmt: skip
        return mode, sp_size
    if tp_size < 2:
        raise ValueError(f"sequence_parallelism_mode={mode!r} is over the tensor-parallel ranks, and tp_size is 1")
    if sp_size not in (None, 1, tp_size):
        raise ValueError(f"sp_size is {sp_size}, and {mode!r} takes the {tp_size} tensor-parallel ranks; leave it out")
    return mode, 1
