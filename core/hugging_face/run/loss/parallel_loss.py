"""Causal loss of split logits: a ``model.loss_function`` that computes from each rank's part of the vocabulary."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup as Group

from core.groups.process_groups import ProcessGroups
from core.hugging_face.read.plan import Plan, PlanError
from core.hugging_face.read.quiet import run_quietly
from core.hugging_face.run.loss.deferred_logits import DeferredLogits, head_of
from core.hugging_face.run.sequence import SequenceParallel
from core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region, group_size


class ParallelCausalLoss:
    """Transformers' ForCausalLMLoss for split logits.

    As there, each token predicts its successor, labels of -100 are ignored, and ``num_items_in_batch`` is supported.
    Deferred logits are computed in chunks of tokens.

    Args:
        vocab_size: Number of rows of the unsplit output layer.
        sequence: Sequence parallelism of the model, if any. Labels cover the complete sequence in any case.
        own: The model's own loss, for logits that are not deferred.
        multiple: Each rank's columns are padded to a multiple of this.
    """

    def __init__(
        self,
        group: Group | None,
        vocab_size: int,
        sequence: SequenceParallel | None = None,
        own: Callable[..., Tensor] | None = None,
        multiple: int = 1,
    ) -> None:
        self.multiple = multiple
        self.group, self.vocab_size, self.sequence, self.own = group, vocab_size, sequence, own

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """Compute the mean over counted tokens, or their sum divided by ``num_items_in_batch``.

        Collective over the groups that split the logits.

        Args:
            logits: This rank's logits [..., ceil(vocabulary / tp)].
            labels: Token ids [..., tokens] of the complete sequence.
            vocab_size: Must be the output layer's number of rows, or None.
            shift_labels: Labels already shifted by one, in place of ``labels``.

        Raises:
            ValueError: If there are no labels, or ``vocab_size`` differs from the output layer's.
        """
        deferred = logits if isinstance(logits, DeferredLogits) and logits.value is None else None
        if self.own is not None and deferred is None:
            given = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **unused}
            return self.own(logits, labels, vocab_size or self.vocab_size, shift_labels=shift_labels, **given)
        if vocab_size not in (None, self.vocab_size):
            raise ValueError(f"vocab_size is {vocab_size}, and the output layer has {self.vocab_size} rows")
        if shift_labels is None and labels is None:
            raise ValueError("the loss needs labels")
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        count = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        sequence = self.cut_sequence
        total = self.token_losses(logits, shift_labels, ignore_index).sum()
        total = total if sequence is None else sequence.total(total)
        return total / torch.as_tensor(count).to(total)

    def token_losses(self, logits: Tensor, shift_labels: Tensor, ignore_index: int = -100) -> Tensor:
        """Compute the loss of each token of this rank's part of the sequence. Ignored tokens give 0.

        ``shift_labels`` has the next token of each position of the complete sequence, [..., tokens].
        """
        if self.cut_sequence is not None:
            shift_labels = self.cut_sequence.part(shift_labels, -1)
        counted = shift_labels != ignore_index
        target = shift_labels.masked_fill(~counted, 0)
        groups = ProcessGroups(tp=self.group)
        if isinstance(logits, DeferredLogits) and logits.value is None:
            losses = logits.losses(target, self.vocab_size, self.multiple, groups)
        else:
            sizes = {"vocab_size": self.vocab_size, "multiple": self.multiple}
            losses = vocab_parallel_cross_entropy(logits, target, pg_collection=groups, **sizes)
        return losses.masked_fill(~counted, 0.0)

    @property
    def cut_sequence(self) -> SequenceParallel | None:
        """Cut of the logits' sequence, or ``None`` if every rank has the complete sequence."""
        return self.sequence if self.sequence is not None and self.sequence.local_logits else None

    @property
    def is_split(self) -> bool:
        """Return ``True`` if a rank's logits are a part of the vocabulary or of the sequence."""
        return group_size(self.group) > 1 or self.cut_sequence is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelCausalLoss:
        return self  # immutable, and process groups cannot be copied


def why_logits_stay_whole(
    model: Any, plan: Plan, arguments: Mapping[str, Any], tp: int, *, cuts_sequence: bool
) -> str | None:
    """Explain why the loss cannot be computed from split logits, or return ``None`` if it can.

    A forward with labels shows it: the logits must go to ``model.loss_function``, and the loss must come from there.
    ``cuts_sequence`` is ``True`` if another group than tp cuts the sequence. Collective over the groups that cut the
    model.
    """
    name, head = output_layer(model)
    seam = plan.seams.get(name)
    split = seam is not None and seam.after == "gather"
    if not split and (not cuts_sequence or head is None or tp > 1):
        return "parallel_output needs an output layer that the plan splits, and there is none"
    loss = getattr(model.loss_function, "__name__", str(model.loss_function))
    if loss != "ForCausalLMLoss":
        return f"parallel_output knows the loss ForCausalLMLoss, and the model has {loss}"
    if "input_ids" not in arguments or "labels" not in inspect.signature(type(model).forward).parameters:
        return "parallel_output is for models whose forward computes a loss of token ids"
    given: list[tuple[int, ...]] = []

    def record(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given.append(tuple(logits.shape))
        return logits.new_ones(())

    own = model.loss_function
    model.loss_function = record
    # NaN logits turn everything else that is computed from them into NaN.
    poison = head.register_forward_hook(lambda module, args, output: output * math.nan)
    try:
        labels = arguments.get("decoder_input_ids", arguments["input_ids"])
        output = run_quietly(model, {**arguments, "labels": labels}, training=False)
    finally:
        model.loss_function = own
        poison.remove()
    rows = plan.splits[f"{name}.weight"].length if split else head.weight.shape[0]
    if [shape[-1] for shape in given] != [rows]:
        return "a forward with labels computes its loss elsewhere than in model.loss_function, of logits that are whole"
    loss_of_labels = output.get("loss")
    if loss_of_labels is not None and bool(loss_of_labels.isnan()):  # False for tensors on the meta device
        return "a forward with labels adds something to its loss that it computes of the logits, which are to be whole"
    return None


def use_parallel_loss(model: Any, plan: Plan, group: Group | None, sequence: SequenceParallel | None) -> Plan:
    """Keep the logits split, and install the parallel loss as ``model.loss_function``.

    Return the plan without the gather of the logits.
    """
    name, head = output_layer(model)
    seam = plan.seams.get(name)
    split = seam is not None and seam.after == "gather"
    cut = plan.splits[f"{name}.weight"] if split else None
    rows, multiple = (head.weight.shape[0], 1) if cut is None else (cut.length, cut.multiple)
    model.loss_function = ParallelCausalLoss(group, rows, sequence, multiple=multiple)
    if seam is None:
        return plan
    seam = replace(seam, after="")
    placed = vars(head).get("forward")
    if placed is not None:
        placed.seam = seam
    return replace(plan, seams={**plan.seams, seam.module: seam})


def output_layer(model: Any) -> tuple[str, Any]:
    """Return the output layer's name and the layer, or '' and ``None`` if the model has none."""
    head = head_of(model)
    return next((name for name, module in model.named_modules() if module is head), ""), head


class _SplitLogits(Tensor):
    """Logits of this rank's part of the vocabulary, as returned to the user. Computing with them raises PlanError.

    A user's criterion would otherwise treat them as the full logits and silently compute a wrong loss.
    """

    source: ParallelCausalLoss

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in ("__get__", "size", "dim", "detach", "__repr__", "is_floating_point", "as_subclass"):
            raise _use_of_a_part(name)
        output = super().__torch_function__(func, types, args, kwargs or {})
        if name == "detach":
            output.source = args[0].source
        return output


def _use_of_a_part(name: str) -> PlanError:
    return PlanError(
        f"{name} of logits that hold this tensor-parallel rank's part of the vocabulary: use the model's own loss "
        "(labels=), or core.hugging_face.gather_logits(logits), or split the model with parallel_output=False"
    )


def refuse_use_of_split_logits(model: Any, output: Any) -> Any:
    """Return a model's output with split logits replaced by a tensor that refuses use."""
    source = getattr(model, "loss_function", None)
    if not isinstance(source, ParallelCausalLoss) or not source.is_split:
        return output
    if not hasattr(output, "keys"):
        raise PlanError("return_dict=False hides which output the logits are, and they are split; leave it out")
    logits = output.get("logits")
    if isinstance(logits, DeferredLogits):
        logits.refusal, logits.source = _use_of_a_part, source
    elif isinstance(logits, Tensor):
        output["logits"] = marked = logits.as_subclass(_SplitLogits)
        marked.source = source
    return output


def gather_logits(logits: Tensor) -> Tensor:
    """Gather split logits on every rank that shares them, to [..., vocabulary]. Full logits are returned unchanged.

    Logits of a part of the sequence are gathered over the sequence too. In backward each rank takes its part of the
    gradient, so compute the loss in the same way on all of these ranks. Collective over the tensor-parallel group, and
    over the context-parallel group if it cuts the sequence.
    """
    if isinstance(logits, DeferredLogits):
        whole = logits.computed()
        if logits.refusal is None:
            return whole
    elif not isinstance(logits, _SplitLogits):
        return logits
    else:
        whole = logits.as_subclass(Tensor)
    source: ParallelCausalLoss = logits.source
    if group_size(source.group) > 1:
        whole = gather_from_tensor_model_parallel_region(whole, source.group)
    whole = whole[..., : source.vocab_size]
    return whole if source.cut_sequence is None else source.cut_sequence.whole(whole)


def with_whole_logits(model: Any, output: Any) -> Any:
    """Return a model's output with split logits gathered. Collective if they are split, like ``gather_logits``."""
    marked = refuse_use_of_split_logits(model, output)
    if hasattr(marked, "keys") and isinstance(marked.get("logits"), (_SplitLogits, DeferredLogits)):
        marked["logits"] = gather_logits(marked["logits"])
    return marked
