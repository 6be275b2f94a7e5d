"""Sequence parallelism of transformers models: between the first and the last layer, a rank holds a part of the tokens.

The model's own forward receives the complete sequence on every rank, and computes embeddings, masks, positions, and
rotary tables from it.

'split_gather' and 'ring' cut over the tensor-parallel ranks and are seams of the plan (``cut/sequence.py``): norms and
residual sums compute on a rank's part, and a module that contains anything else gets the complete sequence.
'all_to_all' and 'ring_attn' cut over the context-parallel ranks: each layer gets the inputs for this rank's tokens, and
only attention sees other tokens. Gradients: Note [Gradients of a part of the sequence] in
core/context_parallel/cut_sequence.py.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from core.context_parallel.cut_sequence import CutSequence
from core.groups.process_groups import ProcessGroups
from core.hugging_face.read.plan import PlanError
from core.hugging_face.run.dropout import SplitRegions, has_dropout
from core.hugging_face.run.refusals import CUT_LAYERS, CUT_SEQUENCE, refuse_partial_outputs
from core.hugging_face.run.seams import on_first, on_output
from core.hugging_face.run.sequence_attention import register_attention
from core.tensor_parallel.mappings import group_rank

OVER_TENSOR = ("split_gather", "ring")  # equal here: there is no ring of partial matrix products
OVER_CONTEXT = ("all_to_all", "ring_attn")
MODES = (*OVER_TENSOR, *OVER_CONTEXT)
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


class SequenceParallel(CutSequence):
    """Cut of one model's sequence, with hooks on the model and its layers.

    ``mode`` is one of ``MODES``. With ``local_logits`` the sequence stays cut after the last layer, up to the loss.
    Only modes over the context-parallel group support it; the others ignore it. Raises PlanError if the mode is
    unknown, or its group has only one rank.
    """

    def __init__(self, mode: str, groups: ProcessGroups, family: str, *, local_logits: bool = False) -> None:
        if mode not in MODES:
            raise PlanError(f"sequence_parallel is {mode!r}, expected one of {', '.join(MODES)}")
        axis, option = ("tp", "tensor_model_parallel_size") if mode in OVER_TENSOR else ("cp", "context_parallel_size")
        if groups.size(axis) == 1:
            raise PlanError(
                f"sequence_parallel={mode!r} needs several ranks in group {axis!r}, and there is one; give "
                f"initialize_model_parallel {option}"
            )
        super().__init__(groups.require(axis), in_halves=mode == "ring_attn")
        self.mode, self.family, self.local_logits = mode, family, local_logits and mode in OVER_CONTEXT
        self.multiple = 2 * self.size if self.in_halves else self.size
        self.takes_cache = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self  # shared with the copy; process groups cannot be copied

    def attach(self, model: Any, layers: str) -> None:
        """Register the hooks on a model or stage, whose list of layers is named ``layers``."""
        self.takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
        refused = CUT_LAYERS if self.mode in OVER_CONTEXT else CUT_SEQUENCE
        refuse_partial_outputs(model, self.family, f"under {self.mode!r}", refused)
        model.register_forward_pre_hook(self.enter_model, with_kwargs=True)
        if self.mode in OVER_TENSOR:
            return
        # A model with custom attention only logs a warning here; the comparison of outputs then rejects it.
        model.set_attn_implementation(register_attention(self.mode, self.group))
        present = [model.get_submodule(place) for place in present_layers(model, layers)]
        for layer in present:
            layer.register_forward_pre_hook(partial(self.enter_layer, layer is present[0]), with_kwargs=True)
        present[-1].register_forward_hook(self.leave_layers)
        if has_dropout(model):
            SplitRegions("cp", group_rank(self.group)).attach(present)

    def enter_model(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reject a length that cannot be cut, and convert ``cu_seq_lens_q`` to position ids. A forward pre-hook."""
        given = [kwargs.get(name) for name in ("input_ids", "inputs_embeds")] + [*args[:1]]
        ids = next((value for value in given if isinstance(value, Tensor) and value.dim() >= 2), None)
        kwargs = dict(kwargs)
        if ids is not None:
            self.check_length(ids.shape[1])
            self._name_positions(ids, kwargs)
        if self.takes_cache:
            kwargs.setdefault("use_cache", False)
        return args, kwargs

    def check_length(self, length: int) -> None:
        """Raise ValueError, listing lengths that fit, if a sequence of this length cannot be cut."""
        if length % self.multiple:
            below = length // self.multiple * self.multiple
            raise ValueError(
                f"a sequence of {length} tokens is not divisible by {self.multiple}, which {self.mode!r} over "
                f"{self.size} ranks needs; pad it to {below + self.multiple}"
                + (f", or cut it to {below}" if below else "")
            )

    def _name_positions(self, ids: Tensor, kwargs: dict[str, Any]) -> None:
        """Set position ids of packed documents, which restart in each document."""
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
        """Cut every per-token input of a layer to this rank's part. Masks stay complete. A forward pre-hook."""
        lengths: list[int] = []

        def hidden(value: Tensor) -> Tensor:
            lengths.append(value.shape[-2] * (1 if is_first else self.size))
            if not is_first:
                return value
            self.check_length(value.shape[-2])
            return self.cut(value)

        args, kwargs = on_first(hidden, type(layer).__name__, args, kwargs)
        part = partial(self._part_of, length=lengths[0])
        rest = {name: value if "mask" in name else tree.tree_map(part, value) for name, value in kwargs.items()}
        return tree.tree_map(part, args), rest

    def _part_of(self, value: Any, length: int) -> Any:
        """Return this rank's part of tables [..., s, d] and of integers [..., s]."""
        if not isinstance(value, Tensor) or value.dim() == 4:  # a mask may be a positional argument
            return value
        dim = -2 if value.is_floating_point() or value.is_complex() else -1
        return self.part(value, dim) if value.dim() >= -dim and value.shape[dim] == length else value

    def leave_layers(self, layer: nn.Module, args: Any, output: Any) -> Any:
        """Gather the sequence after the last layer, unless the loss is computed from the parts. A forward hook."""
        return output if self.local_logits else on_output(self.whole, "layers", output)


def present_layers(model: nn.Module, layers: str) -> list[str]:
    """Return the names of a list's layers that are on this stage."""
    found = model.get_submodule(layers).named_children()
    return [f"{layers}.{name}" for name, layer in found if any(True for _ in layer.parameters())]
