"""Chunked loss of causal transformers models, which never materializes the full logits."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import nn

from core.hugging_face.read.plan import PlanError, family_of, without_adapters
from core.hugging_face.run.loss.deferred_logits import DeferringHead, deferring_head, end_forward, expect_loss
from core.hugging_face.run.loss.label_counts import calls_loss_function
from core.hugging_face.run.loss.parallel_loss import ParallelCausalLoss, output_layer


def use_chunked_loss(model: Any, logits_chunk: int | None = None) -> Any:
    """Let a causal model compute its loss over chunks of tokens, in place, to save the memory of its logits.

    If a program reads the logits, all of them are computed then. Does not communicate.

        model = AutoModelForCausalLM.from_pretrained(directory)
        model = DistributedDataParallel(config, ddp_config, use_chunked_loss(model))
        model(input_ids=ids, labels=ids).loss.backward()

    Args:
        model: Transformers model, split or not, with or without adapters, or one stage of it. Call this before wrapping
            it.
        logits_chunk: Number of tokens per chunk. None uses chunks if a rank's logits have more than 2**28 elements; 0
            never does.

    Returns:
        The model.

    Raises:
        PlanError: If a number is given and the model computes its loss or logits in another way.
        ValueError: If ``logits_chunk`` is not a number of tokens, 0, or None.
    """
    if logits_chunk is not None and (isinstance(logits_chunk, bool) or not isinstance(logits_chunk, int)):
        raise ValueError(f"logits_chunk is {logits_chunk!r}; it is a number of tokens, 0 for never, or None")
    if logits_chunk is not None and logits_chunk < 0:
        raise ValueError(f"logits_chunk is {logits_chunk}; expected at least 0")
    base = without_adapters(model)
    installed = deferring_head(base)
    if installed is not None:
        installed.logits_chunk = logits_chunk
        return model
    if logits_chunk == 0 or _lies_elsewhere(base):
        return model
    why = why_not_in_chunks(base)
    if why is not None:
        if logits_chunk:
            raise PlanError(f"{family_of(base)}: logits_chunk={logits_chunk}, and {why}; leave logits_chunk out")
        return model
    _, head = output_layer(base)
    if not isinstance(base.loss_function, ParallelCausalLoss):
        base.loss_function = ParallelCausalLoss(None, head.weight.shape[0], own=base.loss_function)
    head.forward = DeferringHead(head, logits_chunk, family_of(base))
    names = tuple(inspect.signature(type(base).forward).parameters)[1:]
    for outer in {id(one): one for one in (model, base)}.values():  # peft calls the base model's forward directly
        outer.register_forward_pre_hook(partial(expect_loss, names=names), with_kwargs=True)
        outer.register_forward_hook(end_forward, always_call=True)
    return model


def why_not_in_chunks(model: Any) -> str | None:
    """Explain why a model's loss cannot be computed over chunks of tokens, or return ``None`` if it can."""
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "loss_function"):
        return "it is no model of transformers with an output layer"
    _, head = output_layer(model)
    if head is None:
        return "it has no output layer"
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return f"its output layer is a {type(head).__name__}, not nn.Linear"
    seam = getattr(vars(head).get("forward"), "seam", None)
    if "forward" in vars(head) and seam is None:
        return "its output layer has a forward that was replaced on the instance"
    if seam is not None and seam.after:
        return "each rank gathers the logits of the whole vocabulary (parallel_output=False)"
    own = model.loss_function
    name = getattr(own, "__name__", type(own).__name__)
    if not isinstance(own, ParallelCausalLoss) and name != "ForCausalLMLoss":
        return f"its loss is {name}, not ForCausalLMLoss"
    if not calls_loss_function(type(model).forward):
        return "its forward computes the loss elsewhere than in model.loss_function"
    return None


def _lies_elsewhere(model: Any) -> bool:
    """Return ``True`` for a pipeline stage whose output layer is on another stage."""
    stage = vars(model).get("forward")
    part = getattr(stage, "part", None)
    return part is not None and not part.post_process
