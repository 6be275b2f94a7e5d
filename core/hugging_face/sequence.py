"""Sequence parallelism of transformers models: between the first and the last layer a rank holds a part of the tokens.

A model's own forward is given the whole sequence on every rank, and makes embeddings, masks, positions and rotary
tables of it. 'split_gather' and 'ring' cut over the tensor-parallel ranks, and are seams of the plan
(core/hugging_face/sequence_seams.py). 'all_to_all' and 'ring_attn' cut over the context-parallel ranks. There each
layer gets what goes with this rank's tokens, and only attention sees the tokens of other ranks.

Note [Gradients of a part of the sequence]: context-parallel ranks are data ranks to the engine, which takes the mean of
their gradients. A parameter of a layer has seen a part of the tokens, so its gradient should be summed. Hence the
gradient that enters the layers from behind is multiplied by the number of ranks, and divided by it where it leaves them
in front: what lies outside computes the whole sequence, on every rank alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.context_parallel.sequence_split import rank_order
from core.hugging_face.plan import Plan, PlanError
from core.hugging_face.sequence_attention import register_attention
from core.hugging_face.sequence_seams import on_first_tensor, on_output, over_sequence, present_layers
from core.process_groups import ProcessGroups
from core.tensor_parallel.mappings import all_reduce, gather_first, group_rank, group_size

OVER_TENSOR = ("split_gather", "ring")  # the same here: the ring of products in place of the gather is not
OVER_CONTEXT = ("all_to_all", "ring_attn")
MODES = (*OVER_TENSOR, *OVER_CONTEXT)
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class SequenceParallel:
    """How one model's sequence is cut: what stands in the hooks of the model and of its layers.

    mode: one of MODES. local_logits: True if the sequence stays cut behind the last layer, up to the loss.
    Raises PlanError for a mode that is unknown, and for one whose group has one rank.
    """

    def __init__(self, mode: str, groups: ProcessGroups, family: str, *, local_logits: bool = False) -> None:
        if mode not in MODES:
            raise PlanError(f"sequence_parallel is {mode!r}, expected one of {', '.join(MODES)}")
        axis = "tp" if mode in OVER_TENSOR else "cp"
        if groups.size(axis) == 1:
            option = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size"}[axis]
            raise PlanError(f"sequence_parallel={mode!r} needs several ranks in group {axis!r}, and there is one; give "
                            f"initialize_model_parallel {option}")  # fmt: skip
        if groups.size("ep") > 1:
            raise PlanError(f"{family}: sequence_parallel={mode!r} with experts over several ranks is not here")
        self.mode, self.family, self.local_logits = mode, family, local_logits
        self.group = groups.require(axis)
        self.size, self.rank = group_size(self.group), group_rank(self.group)
        self.multiple = 2 * self.size if mode == "ring_attn" else self.size  # a head and a tail chunk a rank
        self.takes_cache = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self  # it never changes, and its group cannot be copied

    # -- set up ----------------------------------------------------------------------------------------------------

    def cut_plan(self, model: nn.Module, plan: Plan, layers: str) -> Plan:
        """The plan with the seams of 'split_gather'; as it is for a mode over context-parallel ranks."""
        return over_sequence(model, plan, layers) if self.mode in OVER_TENSOR else plan

    def attach(self, model: Any, layers: str) -> None:
        """Put the hooks into a model, or a stage."""
        self.takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
        model.register_forward_pre_hook(self.enter_model, with_kwargs=True)
        if self.mode in OVER_TENSOR:
            return
        # A model that has attention of its own only logs a warning here; its output is other than before then.
        model.set_attn_implementation(register_attention(self.mode, self.group))
        present = [model.get_submodule(place) for place in present_layers(model, layers)]
        for layer in present:
            layer.register_forward_pre_hook(partial(self.enter_layer, layer is present[0]), with_kwargs=True)
        present[-1].register_forward_hook(self.leave_layers)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def enter_model(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuse what cannot be cut before any rank communicates; documents of `cu_seq_lens_q` become position ids."""
        given = [kwargs.get(name) for name in ("input_ids", "inputs_embeds")] + [*args[:1]]
        ids = next((value for value in given if isinstance(value, Tensor) and value.dim() >= 2), None)
        kwargs = dict(kwargs)
        if ids is not None:
            self.check_length(ids.shape[1])
            self._name_positions(ids, kwargs)
        if self.takes_cache and kwargs.setdefault("use_cache", False):
            raise ValueError(f"{self.family}: a cache of keys and values would hold a part of the sequence; it is for "
                             "generation, so set use_cache=False, or generate with the model saved")  # fmt: skip
        default = getattr(model.config.get_text_config(), "output_router_logits", False)
        if self.mode in OVER_CONTEXT and kwargs.get("output_router_logits", default):
            raise ValueError(
                f"{self.family}: output_router_logits adds a loss of the routers, which see a part of the sequence "
                f"under {self.mode!r}; set output_router_logits=False, or use 'split_gather'"
            )
        if kwargs.get("output_hidden_states") or kwargs.get("output_attentions"):
            raise ValueError(f"{self.family}: hidden states and attentions of layers are of a part of the sequence; "
                             "leave output_hidden_states and output_attentions out")  # fmt: skip
        return args, kwargs

    def check_length(self, length: int) -> None:
        """ValueError, with the lengths that fit, for a sequence that cannot be cut."""
        if length % self.multiple:
            below = length // self.multiple * self.multiple
            raise ValueError(
                f"a sequence of {length} tokens is not divisible by {self.multiple}, which {self.mode!r} over "
                f"{self.size} ranks needs; pad it to {below + self.multiple}"
                + (f", or cut it to {below}" if below else "")
            )

    def _name_positions(self, ids: Tensor, kwargs: dict[str, Any]) -> None:
        """Documents that are packed into one row are told by positions that begin anew."""
        ends = kwargs.get(PACKED[0])
        for name in PACKED:
            kwargs.pop(name, None)
        if ends is None:
            return
        places = torch.arange(ids.shape[1], device=ids.device)
        if ids.shape[0] != 1 or int(ends[0]) != 0 or int(ends[-1]) != len(places):
            raise ValueError(
                f"{self.family}: cu_seq_lens_q runs from {int(ends[0])} to {int(ends[-1])} and the batch is "
                f"{list(ids.shape[:2])}; packed documents are one row, from 0 to its length"
            )
        positions = (places - ends[torch.searchsorted(ends.contiguous(), places, right=True) - 1]).unsqueeze(0)
        if kwargs.setdefault("position_ids", positions).ne(positions).any():
            raise ValueError(f"{self.family}: position_ids and cu_seq_lens_q name other documents; give one of the two")

    def enter_layer(self, is_first: bool, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """This rank's part of everything that has a value for each token; masks stay whole."""
        lengths: list[int] = []

        def hidden(value: Tensor) -> Tensor:
            lengths.append(value.shape[-2] * (1 if is_first else self.size))
            if not is_first:
                return value
            self.check_length(value.shape[-2])
            cut: Tensor = _Cut.apply(value, self)
            return cut

        args, kwargs = on_first_tensor(hidden, type(layer).__name__, args, kwargs)
        rest = {name: value if "mask" in name else self._parts(value, lengths[0]) for name, value in kwargs.items()}
        return tuple(self._parts(value, lengths[0]) for value in args), rest

    def _parts(self, value: Any, length: int) -> Any:
        """Tables [..., s, d] and numbers of tokens [..., s], cut; also inside tuples and mappings."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._parts(each, length) for each in value)
        if isinstance(value, Mapping):
            return {name: self._parts(each, length) for name, each in value.items()}
        if not isinstance(value, Tensor) or value.dim() == 4:  # a mask may be given by place
            return value
        dim = -2 if value.is_floating_point() or value.is_complex() else -1
        return self.part(value, dim) if value.dim() >= -dim and value.shape[dim] == length else value

    def leave_layers(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """The whole sequence again, unless the loss is computed from the parts."""
        return output if self.local_logits else on_output(lambda part: _Join.apply(part, self), "layers", output)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _order(self, length: int, device: torch.device) -> Tensor:
        """Positions of the whole sequence, those of each rank one after the other."""
        positions = torch.arange(length, device=device)
        return rank_order(positions, 0, self.size) if self.mode == "ring_attn" else positions

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a dimension that is as long as the sequence."""
        return whole.index_select(dim, self._order(whole.shape[dim], whole.device).chunk(self.size)[self.rank])

    def join(self, part: Tensor, dim: int) -> Tensor:
        """The whole sequence of all ranks' parts, without gradients. Collective over the group."""
        joined = gather_first(part.transpose(0, dim).contiguous(), self.group)
        return joined.index_select(0, self._order(len(joined), part.device).argsort()).transpose(0, dim).contiguous()

    def total(self, value: Tensor) -> Tensor:
        """The sum over the ranks. Its gradient is multiplied by their number: Note [Gradients of a part]."""
        summed: Tensor = _Total.apply(value, self)
        return summed


class _Cut(torch.autograd.Function):
    """Hidden states [..., s, h], whole -> this rank's part."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, sequence: SequenceParallel) -> Tensor:
        ctx.sequence = sequence
        return sequence.part(whole, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.sequence.join(grad, -2) / ctx.sequence.size, None


class _Join(torch.autograd.Function):
    """Hidden states [..., s, h], this rank's part -> whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, sequence: SequenceParallel) -> Tensor:
        ctx.sequence = sequence
        return sequence.join(part, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.sequence.part(grad, -2) * ctx.sequence.size, None


class _Total(torch.autograd.Function):
    """A sum of this rank's tokens -> of all tokens."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, sequence: SequenceParallel) -> Tensor:
        ctx.size = sequence.size
        return all_reduce(value, sequence.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None
