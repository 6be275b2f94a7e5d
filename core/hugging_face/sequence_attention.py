"""Attention of a sequence that is split over ranks, by transformers' registries of attentions and of masks.

'all_to_all' exchanges positions for heads, and lets torch's attention see the whole sequence with the model's own mask.
'ring_attn' passes keys and values around, and knows one kind of mask: causal inside each document. The function that
makes the model's mask is asked at the first and the last token of each document. Attention refuses another mask; one
that no layer uses is not refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from core.context_parallel.all_to_all import exchange
from core.context_parallel.ring import ring_attention
from core.tensor_parallel.mappings import group_rank, group_size

UNKNOWN = ("softcap", "s_aux", "position_bias")  # arguments that change the scores, and that no exchange here knows
_NAMES: dict[tuple[str, int], tuple[str, Any]] = {}  # (mode, id of a group) -> its name, and the group, to keep the id


def register_attention(mode: str, group: dist.ProcessGroup) -> str:
    """The name under which transformers finds a mode's attention over a group."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name, _ = _NAMES.setdefault((mode, id(group)), (f"core_{mode}_{len(_NAMES)}", group))
    is_ring = mode == "ring_attn"
    ALL_ATTENTION_FUNCTIONS.register(name, partial(ring_of_documents if is_ring else all_to_all_attention, group))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, documents_of if is_ring else ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name


def all_to_all_attention(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[b, heads or groups, s / sp, d] -> [b, s / sp, heads, d]. Collective over the group, forward and backward.

    attention_mask: of the whole sequence [b, 1 or heads, s, s]. Key and value heads that do not divide are repeated.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    size, heads, groups = group_size(group), query.shape[1], key.shape[1]
    _refuse_unknown("all_to_all", options)
    if heads % size:
        raise ValueError(
            f"'all_to_all' gives each of {size} ranks whole heads, and a rank has {heads} of them, which does not "
            "divide; use fewer ranks, or 'ring_attn'"
        )
    repeats = math.lcm(groups, size) // groups
    key, value = (part.repeat_interleave(repeats, dim=1) if repeats > 1 else part for part in (key, value))
    # [b, n, s / sp, d] -> [b, n / sp, s, d]
    by_rank = (rearrange(part, "b (sp n) s d -> sp b n s d", sp=size) for part in (query, key, value))
    query, key, value = (rearrange(exchange(part, group), "sp b n s d -> b n (sp s) d") for part in by_rank)
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] == heads > 1:
        attention_mask = attention_mask.narrow(1, group_rank(group) * heads // size, heads // size)
    # What torch's attention asks of the module; a rank's heads are fewer than the module has.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    shape = SimpleNamespace(is_causal=causal, num_key_value_groups=query.shape[1] // key.shape[1])
    output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](shape, query, key, value, attention_mask, **options)
    parts = exchange(rearrange(output, "b (sp s) n d -> sp b s n d", sp=size), group)
    return rearrange(parts, "sp b s n d -> b s (sp n) d"), None


def ring_of_documents(
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[b, heads or groups, s / sp, d] -> [b, s / sp, heads, d]. Collective over the group, forward and backward.

    attention_mask: what `documents_of` has made.
    """
    _refuse_unknown("ring_attn", options)
    if dropout:
        raise ValueError(f"'ring_attn' has no dropout in attention, and it is {dropout}; set it to 0.0 in the config")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"'ring_attn' is causal, and {type(module).__name__} is not; use 'all_to_all'")
    if attention_mask is not None and not attention_mask.numel():
        raise ValueError(
            "'ring_attn' is causal inside each document, and the model asks for another mask (a window, chunks, or "
            "tokens that see later ones) at this length; use 'all_to_all' or 'split_gather'"
        )
    if attention_mask is not None and (attention_mask.dtype != torch.long or attention_mask.shape[-2] != 1):
        raise ValueError(
            f"'ring_attn' does not read a mask of shape {list(attention_mask.shape)}; documents are marked by position "
            "ids that begin again, and padding by a mask [b, s]"
        )
    width, wide = value.shape[-1], max(query.shape[-1], value.shape[-1])
    # The ring divides scores by the square root of the width that it sees.
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (F.pad(p, (0, wide - p.shape[-1])) for p in (query * (scale * wide**0.5), key, value))
    query, key, value = (rearrange(part, "b n s d -> s b n d") for part in (query, key, value))
    documents = None if attention_mask is None else attention_mask[:, 0, 0]
    output = ring_attention(query, key, value, group, documents)
    return rearrange(output[..., :width], "s b n d -> b s n d").contiguous(), None


def documents_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> Tensor | None:
    """The number of each token's document [b, 1, 1, s], -1 for padding; None where all tokens are of one.

    mask_function: whether a query sees a key, by numbers of batch, head, query and key. Where what it says is not
    causal attention inside each document, the result is empty [b, 1, 1, 0]: some models make masks that no layer uses.
    """
    if q_length != kv_length:
        raise ValueError(f"'ring_attn' needs as many keys as queries, and got {q_length} queries and {kv_length} keys")
    places = torch.arange(q_length, device=device)
    rows = torch.arange(batch_size, device=device)

    def sees(query: Tensor, key: Tensor) -> Tensor:
        """[b, queries, keys]"""
        shape = batch_size, query.shape[0], key.shape[1]
        seen = mask_function(rows.view(-1, 1, 1), torch.zeros_like(rows).view(-1, 1, 1), query, key)
        return seen.expand(shape)

    before = mask_function(rows.view(-1, 1), torch.zeros_like(rows).view(-1, 1), places[1:], places[:-1])
    begins = F.pad(~before.expand(batch_size, q_length - 1), (1, 0))
    documents = begins.cumsum(-1)
    real = torch.ones_like(begins) if attention_mask is None else attention_mask.to(begins.device, torch.bool)
    documents = documents.masked_fill(~real, -1)
    changes = (begins | (real != real.roll(1, -1))).any(0)
    asked = (changes | changes.roll(-1) | (places == 0) | (places == q_length - 1)).nonzero()  # [n, 1]
    expected = (documents[:, asked[:, 0], None] == documents[:, None]) & (places <= asked)
    wrong = (sees(asked, places.unsqueeze(0)) & real[:, None]) != expected
    if bool((wrong & real[:, asked[:, 0], None]).any()):
        return documents.new_empty(batch_size, 1, 1, 0)
    return documents[:, None, None] if bool((documents != 0).any()) else None


def _refuse_unknown(mode: str, options: dict[str, Any]) -> None:
    name = next((name for name in UNKNOWN if options.get(name) is not None), None)
    if name is not None:
        raise ValueError(f"{mode!r} does not know {name!r} of this model's attention; use 'split_gather'")
