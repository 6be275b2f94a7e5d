"""Attention over a sequence that is split over ranks, added to transformers' registries of attentions and masks.

'all_to_all' exchanges positions for heads, so that torch's attention sees the complete sequence with the model's own
mask. 'ring_attn' passes keys and values between ranks and supports one kind of mask: causal inside each document, with
or without a window. To recognize it, the model's mask function is evaluated at the first and last token of each
document, and at tokens where a window starts to move. Attention rejects any other mask; a mask that no layer uses is
not rejected.

Both support soft caps of scores and one sink per head. Torch's attention has neither, so such scores are computed in
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from core.context_parallel.all_to_all import exchange
from core.context_parallel.blocks import Block, Sight, block_attention
from core.context_parallel.ring import Scores, ring_attention
from core.tensor_parallel.mappings import group_rank, group_size

UNKNOWN = ("position_bias",)  # arguments that change the scores and are unsupported here
_NAMES: dict[tuple[str, int], tuple[str, Any]] = {}  # (mode, id of group) -> name, and the group to keep its id alive


def register_attention(mode: str, group: dist.ProcessGroup) -> str:
    """Register a mode's attention over a group with transformers, and return its name there."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name, _ = _NAMES.setdefault((mode, id(group)), (f"core_{mode}_{len(_NAMES)}", group))
    is_ring = mode == "ring_attn"
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_ring_of_documents if is_ring else _all_to_all_attention, group))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, _documents_of if is_ring else ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name


def _all_to_all_attention(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over a split sequence by exchanging positions for heads. Collective, in forward and backward.

    Key and value heads are repeated if their number is not divisible. Query, key and value are [b, heads or groups, s /
    sp, d], the mask is of the complete sequence [b, 1 or heads, s, s], and sinks (``s_aux``) are [heads]. Return the
    output [b, s / sp, heads, d], and ``None`` for the attention weights.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    size, heads, groups = group_size(group), query.shape[1], key.shape[1]
    _refuse_unknown("all_to_all", options)
    if heads % size:
        raise ValueError(
            f"'all_to_all' distributes heads over {size} ranks, but a rank's {heads} heads are not divisible by "
            f"{size}; use fewer ranks, or 'ring_attn'"
        )
    repeats = math.lcm(groups, size) // groups
    key, value = (part.repeat_interleave(repeats, dim=1) if repeats > 1 else part for part in (key, value))
    # [b, n, s / sp, d] -> [b, n / sp, s, d]
    by_rank = (rearrange(part, "b (sp n) s d -> sp b n s d", sp=size) for part in (query, key, value))
    query, key, value = (rearrange(exchange(part, group), "sp b n s d -> b n (sp s) d") for part in by_rank)
    mine = group_rank(group) * heads // size, heads // size  # (first, number) of this rank's heads
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] == heads > 1:
        attention_mask = attention_mask.narrow(1, *mine)
    # Attributes that torch's attention reads from the module; a rank has fewer heads than the module.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    shape = SimpleNamespace(is_causal=causal, num_key_value_groups=query.shape[1] // key.shape[1])
    if softcap is None and s_aux is None:
        output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](shape, query, key, value, attention_mask, **options)
    else:
        sinks = None if s_aux is None else s_aux.narrow(0, *mine)
        output = _in_blocks(query, key, value, attention_mask, causal, Sight(cap=softcap), sinks, **options)
    parts = exchange(rearrange(output, "b (sp s) n d -> sp b s n d", sp=size), group)
    return rearrange(parts, "sp b s n d -> b s (sp n) d"), None


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    causal: bool,
    sight: Sight,
    sinks: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **unused: Any,
) -> Tensor:
    """Attend with capped scores or sinks: [b, heads or groups, s, d] -> [b, s, heads, d]."""
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(
            f"attention with a cap or sinks over a split sequence reads masks of bools, and this one has "
            f"{attention_mask.dtype}; give a mask [b, s], or use 'split_gather'"
        )
    _refuse_dropout("attention with a cap or sinks over a split sequence", dropout)
    everything = slice(0, query.shape[2])
    block = Block(everything, everything, causal=causal and attention_mask is None)
    width = value.shape[-1]
    query, key, value = _of_one_width(query, key, value, scaling)
    output = block_attention(query, key, value, [block], replace(sight, pairs=attention_mask), sinks)
    return output[..., :width].transpose(1, 2)


def _of_one_width(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Pad queries, keys, and values [..., d] to the widest of them.

    Queries are scaled to compensate, because attention divides scores by the square root of the padded width.
    """
    wide = max(query.shape[-1], value.shape[-1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (F.pad(p, (0, wide - p.shape[-1])) for p in (query * (scale * wide**0.5), key, value))
    return query, key, value


def _refuse_dropout(what: str, dropout: float) -> None:
    if dropout:
        raise ValueError(f"{what} does not support attention dropout, got {dropout}; set it to 0.0 in the config")


def _ring_of_documents(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend over a split sequence by passing keys and values around a ring. Collective, in forward and backward.

    Attention is causal inside each document, as ``_documents_of`` describes them in ``attention_mask``. Shapes are as
    in ``_all_to_all_attention``.
    """
    _refuse_unknown("ring_attn", options)
    _refuse_dropout("attention under 'ring_attn'", dropout)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"'ring_attn' is causal, and {type(module).__name__} is not; use 'all_to_all'")
    if attention_mask is not None and not attention_mask.numel():
        raise ValueError(
            "'ring_attn' is causal inside each document, with a window or without, and the model asks for another mask "
            "(such as tokens that see later ones) at this length; use 'all_to_all' or 'split_gather'"
        )
    is_view = attention_mask is None or attention_mask.shape[-2] == 1 or attention_mask.stride(-2) == 0
    if attention_mask is not None and (attention_mask.dtype != torch.long or not is_view):
        raise ValueError(
            f"'ring_attn' does not read a mask of shape {list(attention_mask.shape)}; documents are marked by position "
            "ids that begin again, and padding by a mask [b, s]"
        )
    width = value.shape[-1]
    query, key, value = _of_one_width(query, key, value, scaling)
    query, key, value = (rearrange(part, "b n s d -> s b n d") for part in (query, key, value))
    documents = None if attention_mask is None else attention_mask[:, 0, 0]
    window = None if attention_mask is None or attention_mask.shape[2] == 1 else attention_mask.shape[2] - 1
    output = ring_attention(query, key, value, group, documents, Scores(window, softcap), s_aux)
    return rearrange(output[..., :width], "s b n d -> b s n d").contiguous(), None


def _documents_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    **unused: Any,
) -> Tensor | None:
    """Describe a model's mask by documents, for ``_ring_of_documents``. Arguments are the ones of transformers' masks.

    ``mask_function`` returns True if a query sees a key, by the indices of batch, head, query, and key. ``local_size``
    is the size of a window, or of chunks, which are treated as documents.

    Return the number of each token's document [b, 1, 1 + window, s], -1 for padding. The third dimension is a view, so
    that no layer needs to read a number from device memory; its size minus 1 is the number of keys that a query sees,
    including itself; size 1 means no window. Return ``None`` if nothing is masked, and empty [b, 1, 1, 0] if the mask
    is not causal inside each document. This is not an error yet, because some models create masks that no layer uses.
    """
    if q_length != kv_length:
        raise ValueError(f"'ring_attn' needs as many keys as queries, and got {q_length} queries and {kv_length} keys")
    places = torch.arange(q_length, device=device)
    rows = torch.arange(batch_size, device=device)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        """Evaluate the mask function, [b, queries, keys]."""
        shape = batch_size, query.shape[0], key.shape[1]
        seen = mask_function(rows.view(-1, 1, 1), torch.zeros_like(rows).view(-1, 1, 1), query, key)
        return seen.expand(shape)

    before = mask_function(rows.view(-1, 1), torch.zeros_like(rows).view(-1, 1), places[1:], places[:-1])
    begins = F.pad(~before.expand(batch_size, q_length - 1), (1, 0))
    documents = begins.cumsum(-1)
    real = torch.ones_like(begins) if attention_mask is None else attention_mask.to(begins.device, torch.bool)
    documents = documents.masked_fill(~real, -1)
    changes = (begins | (real != real.roll(1, -1))).any(0)
    probes = changes | changes.roll(-1) | (places == 0) | (places == q_length - 1)
    if local_size is not None and local_size < q_length:
        moved = probes.roll(local_size)
        probes = probes | moved | moved.roll(-1) | moved.roll(1)
    probes = probes.nonzero()  # [n, 1]
    seen = sees(probes, places.unsqueeze(0)) & real[:, None]
    for window in (None, local_size):
        expected = (documents[:, probes[:, 0], None] == documents[:, None]) & (places <= probes)
        if window is not None:
            expected &= places > probes - window
        if not bool(((seen != expected) & real[:, probes[:, 0], None]).any()):
            if window is None and not bool((documents != 0).any()):
                return None
            return documents[:, None, None].expand(-1, 1, 1 + (window or 0), -1)
    return documents.new_empty(batch_size, 1, 1, 0)


def _refuse_unknown(mode: str, options: dict[str, Any]) -> None:
    name = next((name for name in UNKNOWN if options.get(name) is not None), None)
    if name is not None:
        raise ValueError(f"{mode!r} does not know {name!r} of this model's attention; use 'split_gather'")
