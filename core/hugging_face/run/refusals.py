"""Rejection of outputs and methods for which a rank only has a part. A request raises before any layer runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from core.hugging_face.read.plan import PlanError

REFUSALS = "refusals_of_arguments"  # attribute of a model: functions that reject arguments of its forward
HEADS = "they would be of this rank's heads; leave it out, or ask a model that is not split"
LAYERS = "a stage has its own layers only; leave it out"
# Arguments of a forward -> reason for rejecting them, for each kind of split. The config can set them too.
SPLIT_HEADS: Mapping[str, str] = {"output_attentions": HEADS}
IN_STAGES: Mapping[str, str] = {
    "output_attentions": LAYERS,
    "output_hidden_states": LAYERS,
    "use_cache": "a stage would cache its own layers; set use_cache=False, or generate with the model saved",
    "return_dict": "a stage finds hidden activations and the loss by their names; leave return_dict=False out",
}
CUT_SEQUENCE: Mapping[str, str] = {
    "use_cache": "a cache of keys and values would hold a part of the sequence; set use_cache=False, or generate with "
    "the model saved",
    "output_hidden_states": "they would be of a part of the sequence; leave it out",
    "output_attentions": "they would be of a part of the sequence; leave it out",
}
CUT_LAYERS: Mapping[str, str] = {
    **CUT_SEQUENCE,
    "output_router_logits": "the routers see a part of the sequence, and their loss is of all of it; set it to False, "
    "or use 'split_gather'",
}


def refuse_partial_outputs(model: nn.Module, family: str, where: str, refused: Mapping[str, str]) -> None:
    """Make a model raise ValueError if one of the ``refused`` arguments (name -> reason) is requested.

    ``where`` describes the split, for the message.
    """
    refuse = partial(_refuse, family, where, refused)
    model.register_forward_pre_hook(refuse, with_kwargs=True)
    vars(model).setdefault(REFUSALS, []).append(refuse)


def refuse_arguments(model: Any, arguments: Mapping[str, Any]) -> None:
    """Reject arguments of a forward before it runs, so that every pipeline stage rejects and no stage waits.

    Raises ValueError if the model rejects one of them.
    """
    for refuse in vars(model).get(REFUSALS, ()):
        refuse(model, (), dict(arguments))


def _refuse(
    family: str, where: str, refused: Mapping[str, str], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    for name, why in refused.items():
        is_requested = kwargs.get(name)
        if name == "return_dict":
            is_requested = (model.config.return_dict if is_requested is None else is_requested) is False
        elif is_requested is None and name != "use_cache":  # models read use_cache from the config only to generate
            configs = (model.config, model.config.get_text_config())
            is_requested = any(getattr(config, name, None) for config in configs)
        if is_requested:
            raise ValueError(f"{family}, {name} {where}: {why}")


def refuse_methods(model: Any, family: str, **more: str) -> None:
    """Replace methods that would save or resize a rank's part as if it were the full model.

    ``more`` has further method names with the reason for the error text.
    """
    refused = {
        "save_pretrained": "would save this rank's part as if it were the model; call save_split on all ranks",
        "resize_token_embeddings": "would resize this rank's part; resize the whole model before it is split",
        **more,
    }
    for name, why in refused.items():
        if not isinstance(getattr(model, name, None), (partial, type(None))):
            setattr(model, name, partial(_refuse_method, getattr(model, name), f"{family} is split: {name} {why}"))


def _refuse_method(method: Callable[..., Any], sentence: str, *args: Any, **kwargs: Any) -> Any:
    """Raise PlanError in place of a method, unless the call passes the full state in ``state_dict``
    (``save_split``).
    """
    if kwargs.get("state_dict") is None:
        raise PlanError(sentence)
    return method(*args, **kwargs)
