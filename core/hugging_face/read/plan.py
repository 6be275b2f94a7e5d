"""Plans that define which parameters are split over tensor parallelism, and the actions at the seams.

A style is Transformers' word for how one module is split. Here each style is a row of a table: how weight and bias are
cut, and how the module's input and output are changed. Everything else follows from that table and the parameters'
shapes, so a plan can be printed, and rejected, before anything runs. No process group is needed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from core.tensor_parallel.initialization import rows_on_rank

Before = Literal[
    "", "copy", "scatter", "vocabulary", "divide", "heads", "split sequence", "join sequence", "gather sequence"
]
After = Literal[
    "", "reduce", "reduce, copy", "gather", "copy tail", "select", "split sequence", "join sequence", "reduce sequence"
]
WORDS = {
    "": "unchanged",
    "copy": "whole; its gradient is summed over tp",
    "scatter": "whole; this rank's part of the last dimension is used",
    "vocabulary": "token ids; those of other ranks' rows give zero",
    "divide": "divided by tp",
    "heads": "what holds a value for each head is cut to this rank's heads",
    "reduce": "summed over tp",
    "reduce, copy": "summed over tp, and so is its gradient",
    "gather": "gathered along the last dimension",
    "copy tail": "the gradient of its last features is summed over tp",
    "select": "computed whole; this rank's heads are taken of it",
    "split sequence": "whole; this rank's part of the sequence is taken",
    "join sequence": "this rank's part of the sequence; all parts are joined",
    "gather sequence": "this rank's part of the sequence; all parts are joined, and its gradient is summed over tp",
    "reduce sequence": "summed over tp, and this rank's part of the sequence is taken",
}
AGAIN = "The model has been cut; make it again"


class PlanError(ValueError):
    """Error for a model that cannot be split as requested.

    The message names the family, the parameter or module, and the sizes or options that would work.
    """


def without_adapters(model: Any) -> Any:
    """Return the base model below peft's adapters, or the model itself if it has no adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def family_of(model: Any) -> str:
    """Return the name of a transformers model for error messages. Raises PlanError for any other object."""
    if not hasattr(model, "config") or not hasattr(model, "tp_plan"):
        raise PlanError(
            f"splitting takes a transformers model and was given a {type(model).__name__}; split before any wrapper"
        )
    return f"{model.config.model_type} ({type(model).__name__})"


@dataclass(frozen=True)
class Style:
    """Effect of a rule on a module and its parameters.

    Attributes:
        weight: Dimension along which the weight is cut, counted from the end; None if every rank keeps the full weight.
            A vector is cut along its only dimension.
        bias: As ``weight``, for the bias.
        blocks: Number of blocks in that dimension that are cut separately (2 for a fused gate and up).
        before: Action on the module's input.
        after: Action on the module's output.
        partial: True if unsplit parameters see this rank's part of an activation, so their gradients are summed over
            tp.
        shared: With ``after="select"``, number of heads at the end of the output that every rank takes.
    """

    weight: int | None = None
    bias: int | None = None
    blocks: int = 1
    before: Before = ""
    after: After = ""
    partial: bool = False
    shared: int = 0


COLUMN = Style(weight=-2, bias=-1, before="copy")
ROW = Style(weight=-1, after="reduce")
# Styles of Transformers 5.23 and 5.24. `moe_tp_experts` has no parameters here, since their rules are listed
# separately.
STYLES: dict[str, Style] = {
    "colwise": COLUMN,
    "colwise_gather_output": Style(weight=-2, bias=-1, before="copy", after="gather"),
    "colwise_rep": Style(weight=-2, bias=-1, before="copy", after="gather"),
    "packed_colwise": Style(weight=-2, bias=-1, blocks=2, before="copy"),
    "rowwise": ROW,
    "rowwise_split_input": Style(weight=-1, before="scatter", after="reduce"),
    "rowwise_rep": Style(weight=-1, before="scatter", after="reduce"),
    "packed_rowwise": Style(weight=-1, blocks=2, after="reduce"),
    "embedding_rowwise": Style(weight=-2, before="vocabulary", after="reduce"),
    "embedding_colwise": Style(weight=-1, after="gather"),
    "moe_tp_experts": Style(before="copy", after="reduce"),
    "moe_identity_expert": Style(before="divide"),
    "mla_kv_a_proj": Style(after="copy tail"),
    "replicated_with_grad_allreduce": Style(partial=True),
    "all_reduce": Style(before="copy", after="reduce"),  # every rank gets the full input; outputs are summed
    "local_params": Style(),
    "replicate": Style(),
    # Used by policies. Conv1D is a linear layer with a transposed weight: [inputs, outputs].
    "packed_3_colwise": Style(weight=-2, bias=-1, blocks=3, before="copy"),
    "conv1d_colwise": Style(weight=-1, bias=-1, before="copy"),
    "conv1d_packed_colwise": Style(weight=-1, bias=-1, blocks=2, before="copy"),
    "conv1d_packed_3_colwise": Style(weight=-1, bias=-1, blocks=3, before="copy"),
    "conv1d_rowwise": Style(weight=-2, after="reduce"),
    "rowwise_copied": Style(weight=-1, after="reduce, copy"),
    "heads_of_embedding": Style(weight=-1),  # one feature per head; each rank looks up its own heads
}
PADDED = {"embedding_rowwise"}  # a vocabulary is padded with zero rows; so is an output layer over it


@dataclass(frozen=True)
class Split:
    """Cut of one parameter along a dimension.

    Attributes:
        shape: Shape in the full model.
        dim: Dimension that is cut over tp.
        blocks: Number of blocks in that dimension that are cut separately.
        padded: True if a length that is not divisible is padded with zeros at its end (a vocabulary), so that each
            rank's part is a multiple of ``multiple``.
        heads: Number of units in the dimension that must not be cut through; 0 if unknown.
        groups: Attribute that counts how many query heads share one of these key or value heads. If it is known, heads
            that are not divisible are computed in full on every rank, which then selects the heads of its queries.
        queries: Number of query heads.
        axes: Groups that cut the parameter: "tp" along ``dim``, "ep" along dimension 0 (experts).
        multiple: See ``padded``.
    """

    parameter: str
    shape: tuple[int, ...]
    dim: int
    blocks: int = 1
    padded: bool = False
    heads: int = 0
    groups: str = ""
    queries: int = 0
    axes: tuple[str, ...] = ("tp",)
    multiple: int = 1

    @property
    def cuts(self) -> list[tuple[str, int, int, int]]:
        """(group, dimension, blocks, multiple) of each cut."""
        of_tp = (self.dim, self.blocks, self.multiple)
        return [(axis, 0, 1, 1) if axis == "ep" else (axis, *of_tp) for axis in self.axes]

    @property
    def length(self) -> int:
        return self.shape[self.dim]

    def local_shape(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """Return the parameter's shape on one rank. Only experts are cut over ``ep``."""
        local = list(self.shape)
        for axis, dim, _, multiple in self.cuts:
            local[dim] = rows_on_rank(local[dim], ep if axis == "ep" else tp, multiple)
        return tuple(local)

    def misfit(self, tp: int) -> str | None:
        """Explain why the parameter cannot be cut into ``tp`` equal parts, or return ``None`` if it can."""
        if self.is_shared(tp):
            return None
        if self.heads and self.heads % tp:
            return f"{self.parameter!r} {list(self.shape)} holds {self.heads} heads"
        if not self.padded and self.length % (self.blocks * tp):
            parts = f" in {self.blocks} parts" if self.blocks > 1 else ""
            return f"{self.parameter!r} {list(self.shape)} is cut along its dimension of {self.length}{parts}"
        return None

    def is_shared(self, tp: int) -> bool:
        """Return ``True`` if several of the ``tp`` ranks use the same head."""
        return bool(self.groups) and self.heads % tp > 0 and self.queries % tp == 0


@dataclass(frozen=True)
class Seam:
    """Actions on the input and output of one module.

    Attributes:
        style: Name of the style, for the printed plan.
        before: Action on the input.
        after: Action on the output.
        tail: Number of last features that ``copy tail`` acts on, or that every rank takes under ``select``.
        heads: Number of heads, without the tail, in the full model.
        copies: Under ``select``, the number of query heads in the full model if each query gets its own copy of a head;
            0 if all queries of a rank share the rank's heads.
        arguments: Names of the arguments that ``heads`` cuts.
    """

    module: str
    style: str
    before: Before = ""
    after: After = ""
    tail: int = 0
    heads: int = 0
    copies: int = 0
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Split of one model over tensor parallelism.

    Attributes:
        family: Name of the model in errors.
        splits: Cut parameters, by name.
        seams: Modules with changed inputs or outputs, by name.
        partial: Unsplit parameters whose gradients a rule declares to be partial sums over tp.
        whole: Shapes of all parameters that are not cut.
        numbers: Attributes of modules (by full name) that count heads or features in the full model. Each rank gets
            this number divided by tp.
        ep: Number of ranks over which experts are cut.
    """

    family: str
    splits: Mapping[str, Split]
    seams: Mapping[str, Seam]
    partial: frozenset[str] = frozenset()
    whole: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    ep: int = 1

    def with_vocabulary(self, multiple: int) -> Plan:
        """Return a plan in which each rank's part of a padded vocabulary is a multiple of ``multiple``."""
        splits = {n: replace(s, multiple=multiple) if s.padded else s for n, s in self.splits.items()}
        return replace(self, splits=splits)

    def at(self, tp: int) -> Plan:
        """Return the plan for ``tp`` ranks.

        Key and value heads that are not divisible stay unsplit, with partial gradients. Raises PlanError, listing the
        sizes that fit, if the model cannot be cut into ``tp`` equal parts.
        """
        self.check_size(tp)
        shared = {name: split for name, split in self.splits.items() if split.is_shared(tp)}
        seams, numbers = dict(self.seams), dict(self.numbers)
        for name, split in shared.items():
            module = name.rpartition(".")[0]
            copies = split.queries if tp % split.heads else 0
            seams[module] = replace(seams[module], after="select", heads=split.heads, copies=copies)
            numbers[split.groups] = tp if copies else split.queries  # queries per head: 1, or all queries of a rank
        return replace(
            self,
            splits={name: split for name, split in self.splits.items() if name not in shared},
            seams=seams,
            partial=self.partial | shared.keys(),
            whole={**self.whole, **{name: split.shape for name, split in shared.items()}},
            numbers=numbers,
        )

    def check_size(self, tp: int) -> None:
        """Raise PlanError, listing the sizes that fit, unless the model can be cut into ``tp`` equal parts."""
        misfits = self._misfits(tp)
        if misfits:
            more = f" (and {len(misfits) - 1} more)" if len(misfits) > 1 else ""
            raise PlanError(
                f"{self.family} over {tp} tensor-parallel ranks: {misfits[0]}{more}, which is not divisible by {tp}. "
                f"Sizes that fit this model: {', '.join(map(str, self.sizes()))}"
            )

    def _misfits(self, tp: int) -> list[str]:
        found = filter(None, (split.misfit(tp) for split in self.splits.values()))
        return [*found, *(f"{name!r} counts {number}" for name, number in self.numbers.items() if number % tp)]

    def sizes(self) -> list[int]:
        """Return every tensor-parallel size that fits all splits."""
        cut = [split for split in self.splits.values() if not split.groups]
        lengths = [split.length // split.blocks for split in cut if not split.padded]
        largest = math.gcd(*lengths, *(split.heads for split in cut if split.heads), *self.numbers.values()) or 1
        alike = {
            replace(split, parameter="", groups=split.groups and "groups"): name for name, split in self.splits.items()
        }
        splits = {name: self.splits[name] for name in alike.values()}
        few = replace(self, splits=splits, numbers={str(number): number for number in self.numbers.values()})
        return [size for size in range(1, largest + 1) if not few._misfits(size)]

    def table(self, tp: int) -> str:
        """Describe the plan for ``tp`` ranks: a line for each cut or partial parameter and for each seam.

        Layers with equal splits share one line. Raises PlanError if key or value heads are shared and the model cannot
        be cut into ``tp`` equal parts.
        """
        if any(split.is_shared(tp) for split in self.splits.values()):
            return self.at(tp).table(tp)
        splits = self.splits.values()
        rows = []
        for split in splits:
            dims = " and ".join(str(dim) for _, dim, *_ in split.cuts)
            blocks = f" in {split.blocks} blocks" if split.blocks > 1 else ""
            local = list(split.local_shape(tp, self.ep))
            rows.append(f"{split.parameter}: {list(split.shape)} cut along {dims}{blocks}, a rank holds {local}")
        rows += [f"{name}: whole; its gradient is summed over tp" for name in sorted(self.partial)]
        rows += [f"{name}: {number // tp} of {number}" for name, number in self.numbers.items()]
        seams = [
            f"{s.module} ({s.style}): input {WORDS[s.before]}; output {WORDS[s.after]}" for s in self.seams.values()
        ]
        lines = [f"{self.family} over tp {tp}" + (f", ep {self.ep}" if self.ep > 1 else "")]
        for heading, found in (("parameters:", rows), ("seams:", seams)):
            alike = Counter(re.sub(r"(?<=\.)\d+(?=[.: ])", "*", row) for row in found)
            lines += [heading, *(f"  {n:>3} x {row}" for row, n in alike.items())]
        cut = sum(math.prod(split.shape) for split in splits)
        rest = sum(math.prod(shape) for shape in self.whole.values())
        numel = rest + sum(math.prod(split.local_shape(tp, self.ep)) for split in splits)
        lines.append(f"{cut + rest:,} parameters in the model; a rank of {tp} holds {numel:,}, {rest:,} of them whole")
        return "\n".join(lines)


def style_of(family: str, name: str, style: str | Style) -> Style:
    """Look up a style by name; a Style is returned unchanged.

    ``name`` is the module or parameter that the rule names. Raises PlanError if the style is unknown.
    """
    if isinstance(style, Style):
        return style
    if style not in STYLES:
        raise PlanError(
            f"{family}: the rule for {name!r} has style {style!r}, which is unknown here (known: {', '.join(STYLES)}). "
            "Its effect on that module is not known, so nothing of the model is split"
        )
    return STYLES[style]


def cut_of(style: Style, parameter: str, shape: tuple[int, ...], *, named: bool) -> tuple[int, int] | None:
    """Return (dimension, blocks) along which a style cuts a parameter, or ``None`` if it stays unsplit.

    ``named`` is ``True`` if the rule names this parameter. Otherwise the rule names the module, and the module's bias
    is cut with the outputs, or is unsplit and added after the sum.
    """
    is_bias = len(shape) == 1 or (not named and parameter.rpartition(".")[2].endswith("bias"))
    dim = style.bias if is_bias else style.weight
    return None if style.weight is None or dim is None else (0 if len(shape) == 1 else len(shape) + dim, style.blocks)
