"""Plan: which parameters of a model are split over tensor parallelism, and what happens at its seams. No processes.

A style is a word of Transformers for what becomes of one module. Here it is a row of a table: how the weight and the
bias are cut, what is done to the module's input, and what to its output. All else follows from that table and from the
shapes of the parameters, so a plan can be printed, and refused, before anything runs.
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


class PlanError(ValueError):
    """A model cannot be split as asked. The message names family and parameter or module, and says what would fit."""


def without_adapters(model: Any) -> Any:
    """The model that peft has put adapters into; the model itself where there are none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def family_of(model: Any) -> str:
    """Name of a transformers model in errors. PlanError for any other."""
    if not hasattr(model, "config") or not hasattr(model, "tp_plan"):
        raise PlanError(
            f"splitting takes a transformers model and was given a {type(model).__name__}; split before any wrapper"
        )
    return f"{model.config.model_type} ({type(model).__name__})"


@dataclass(frozen=True)
class Style:
    """Effect of a rule on a module and its parameters.

    weight, bias: the dimension that is cut, from the end; None where every rank keeps the whole. A vector under
    `weight` is cut along its only dimension. blocks: parts of that dimension which are cut each for itself (gate, up).
    partial: True if whole parameters see this rank's part of an activation, so that their gradients are summed over tp.
    shared: how many heads at the end of an output every rank takes, where `after` is "select".
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
# The styles of Transformers 5.23 and 5.24; `moe_tp_experts` is a row without parameters: those have rules of their own.
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
    "all_reduce": Style(before="copy", after="reduce"),  # a sum of what each rank makes of a whole input
    "local_params": Style(),
    "replicate": Style(),
    # Of policies. Conv1D is a linear layer whose weight is transposed: [inputs, outputs].
    "packed_3_colwise": Style(weight=-2, bias=-1, blocks=3, before="copy"),
    "conv1d_colwise": Style(weight=-1, bias=-1, before="copy"),
    "conv1d_packed_colwise": Style(weight=-1, bias=-1, blocks=2, before="copy"),
    "conv1d_packed_3_colwise": Style(weight=-1, bias=-1, blocks=3, before="copy"),
    "conv1d_rowwise": Style(weight=-2, after="reduce"),
    "rowwise_copied": Style(weight=-1, after="reduce, copy"),
    "heads_of_embedding": Style(weight=-1),  # one feature a head: each rank looks up its own
}
PADDED = {"embedding_rowwise"}  # a vocabulary is padded with zero rows; so is an output layer over it


@dataclass(frozen=True)
class Split:
    """One parameter that is cut: along `dim`, of `length` in the whole model, in `blocks` parts each cut for itself.

    padded: True if a length that does not divide is padded with zeros at its end (a vocabulary), so that each rank's
    part is a multiple of `multiple`.
    heads: how many whole units the dimension has that no cut may go through; 0 if none is known.
    groups, queries: the attribute that says how many heads of queries share one of these heads of keys or values, and
    how many queries there are. Where they are known, heads that do not divide are computed whole on every rank, which
    then takes those of its queries. axes: the groups that it is cut over: "tp" along `dim`, "ep" along dimension 0, of
    experts.
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
        """Of the dimension, in the whole model."""
        return self.shape[self.dim]

    def local_shape(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """Shape that a rank of `tp` holds; of experts, a rank of `tp` and `ep`."""
        local = list(self.shape)
        for axis, dim, _, multiple in self.cuts:
            local[dim] = rows_on_rank(local[dim], ep if axis == "ep" else tp, multiple)
        return tuple(local)

    def misfit(self, tp: int) -> str | None:
        """Return why it cannot be cut into `tp` equal parts, in words."""
        if self.is_shared(tp):
            return None
        if self.heads and self.heads % tp:
            return f"{self.parameter!r} {list(self.shape)} holds {self.heads} heads"
        if not self.padded and self.length % (self.blocks * tp):
            parts = f" in {self.blocks} parts" if self.blocks > 1 else ""
            return f"{self.parameter!r} {list(self.shape)} is cut along its dimension of {self.length}{parts}"
        return None

    def is_shared(self, tp: int) -> bool:
        """True if some of its heads are used by several ranks of `tp`."""
        return bool(self.groups) and self.heads % tp > 0 and self.queries % tp == 0


@dataclass(frozen=True)
class Seam:
    """Actions on the input and the output of one module.

    tail: the number of last features of `copy tail`, or of those that every rank takes under `select`. heads: how many
    heads the rest is in the whole model. copies: of how many queries in the whole model each gets a head of its own
    under `select`; 0 if all queries of a rank share its heads. arguments: the names of what `heads` cuts.
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
    """Split of a family's model over tensor parallelism.

    splits and seams are keyed by the name of the parameter or module. partial: whole parameters whose gradients are
    parts of a sum over tp, by rule. whole: the shapes of all parameters that are not cut. numbers: attributes of
    modules (by their full names) that count heads or features, and how many a rank's are of: it has that over tp.
    ep: the ranks over which experts are cut.
    """

    family: str
    splits: Mapping[str, Split]
    seams: Mapping[str, Seam]
    partial: frozenset[str] = frozenset()
    whole: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    ep: int = 1

    def with_vocabulary(self, multiple: int) -> Plan:
        """The plan with a rank's part of a padded vocabulary a multiple of `multiple`."""
        splits = {n: replace(s, multiple=multiple) if s.padded else s for n, s in self.splits.items()}
        return replace(self, splits=splits)

    def at(self, tp: int) -> Plan:
        """The plan for `tp` ranks: heads of keys and values that do not divide stay whole, with partial gradients.

        PlanError, with the sizes that fit, if the model cannot be cut into so many equal parts.
        """
        self.check_size(tp)
        shared = {name: split for name, split in self.splits.items() if split.is_shared(tp)}
        seams, numbers = dict(self.seams), dict(self.numbers)
        for name, split in shared.items():
            module = name.rpartition(".")[0]
            copies = split.queries if tp % split.heads else 0
            seams[module] = replace(seams[module], after="select", heads=split.heads, copies=copies)
            numbers[split.groups] = tp if copies else split.queries  # queries that share a head: 1, or all of a rank
        return replace(
            self,
            splits={name: split for name, split in self.splits.items() if name not in shared},
            seams=seams,
            partial=self.partial | shared.keys(),
            whole={**self.whole, **{name: split.shape for name, split in shared.items()}},
            numbers=numbers,
        )

    def check_size(self, tp: int) -> None:
        """Raise PlanError, with the sizes that fit, if the model cannot be cut into `tp` equal parts."""
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
        """Every tensor-parallel size that all splits can be cut into."""
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
        """The plan in words: one line a parameter that is cut or partial, one a seam. Layers alike are one line."""
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
        held = rest + sum(math.prod(split.local_shape(tp, self.ep)) for split in splits)
        lines.append(f"{cut + rest:,} parameters in the model; a rank of {tp} holds {held:,}, {rest:,} of them whole")
        return "\n".join(lines)


def style_of(family: str, name: str, style: str | Style) -> Style:
    """The table's row, or the style itself. PlanError for a style that the table does not have."""
    if isinstance(style, Style):
        return style
    if style not in STYLES:
        raise PlanError(
            f"{family}: the rule for {name!r} has style {style!r}, which is unknown here (known: {', '.join(STYLES)}). "
            "Its effect on that module is not known, so nothing of the model is split"
        )
    return STYLES[style]


def cut_of(style: Style, parameter: str, shape: tuple[int, ...], *, named: bool) -> tuple[int, int] | None:
    """(dimension, blocks) along which a style cuts a parameter; None where it stays whole.

    named: True if the rule names this parameter; else it names the module, whose bias has a cut of its own: it follows
    the outputs, or is whole and added after the sum.
    """
    is_bias = len(shape) == 1 or (not named and parameter.rpartition(".")[2].endswith("bias"))
    dim = style.bias if is_bias else style.weight
    return None if style.weight is None or dim is None else (0 if len(shape) == 1 else len(shape) + dim, style.blocks)
