"""Places where a transformers model can be cut into pipeline stages, found without tracing.

A stage runs the model's own forward and keeps its layers at their original index. The first layer of a later stage ends
the forward, and this stage's first layer takes the received tensors. Every stage computes masks, positions, and rotary
tables by the model's own code. Absent modules return NaN. A model that passes anything besides its ``Streams`` from
layer to layer is thus detected and rejected.

An encoder-decoder is cut as one list: the encoder's layers, then the decoder's. All embeddings are on the first stage,
whose forward also runs the decoder's embeddings; encoder stages pass that result on with their own hidden states.
Decoder stages receive the encoder's output (``encoder_outputs``) and pass it on.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from core.hugging_face.read.plan import PlanError, family_of
from core.hugging_face.run.loss.deferred_logits import head_of
from core.hugging_face.run.stage_forward import GIVEN, PIXELS, ModelCut, refuse_router_loss

Side = Literal["entry", "between", "exit"]
SIDES: tuple[Side, ...] = ("entry", "between", "exit")


def find_cut(model: Any, sides: Mapping[str, Side] | None = None) -> ModelCut:
    """Find the places where a transformers model, possibly on the meta device, can be cut. Does not communicate.

    ``sides`` are the sides on which a forward used the modules outside the layers (``watch_order``). Without it, the
    order of registration decides. Raises PlanError if the model does not have exactly one list of layers (or one for
    its encoder and one for its decoder), or if a parameter belongs to several stages.
    """
    family = family_of(model)
    lists = _lists_of(model, family)
    refuse_router_loss(family, model)
    for name in ("layerdrop", "decoder_layerdrop", "encoder_layerdrop"):
        if getattr(model.config, name, 0.0):
            raise PlanError(
                f"{family}: {name}={getattr(model.config, name)} leaves layers out at random, and a stage begins at a "
                f"certain layer; set {name}=0.0 in the config"
            )
    places: dict[str, str] = {}  # parameter -> a side, 'around', or the name of its layer
    side: Side = "entry"
    for owner, module in model.named_modules():  # order of registration
        if any(name.startswith(owner + ".") for name in lists):
            side = "entry" if owner else side
        elif owner in lists:
            side = "between" if owner != lists[-1] else "exit"
        elif side == "between" and not owner.startswith(lists[0].rpartition(".")[0]):
            side = "entry"
        place: str = (sides or {}).get(owner, side)
        if not owner or any(name.startswith(owner + ".") for name in lists):
            place = "around"
        elif _layer_of(owner, lists):
            place = _layer_of(owner, lists)
        places.update({f"{owner}.{leaf}".strip("."): place for leaf, _ in module.named_parameters(recurse=False)})
    entry, between, exit = (
        frozenset(name.rpartition(".")[0] for name in places if places[name] == end) for end in SIDES
    )
    around = frozenset(name for name in places if places[name] == "around")
    tied = frozenset(_tied(family, model, places, lists))
    counts = tuple(len(model.get_submodule(name)) for name in lists)
    return ModelCut(family, lists, counts, entry, between, exit, around, tied)


def _lists_of(model: Any, family: str) -> tuple[str, ...]:
    """Return the lists of layers that stages divide. Raises PlanError if the model has others."""
    found = lists_of_layers(model)
    if len(found) > 1 and _takes_images(model):
        text = next(name for name, module in model.named_modules() if module is model.get_decoder())
        of_text = [name for name in found if name.startswith(text + ".")]
        if len(of_text) == 1:
            return (of_text[0],)
    if not model.config.is_encoder_decoder or len(found) != 2:
        return (list_of_layers(model, f"{family}: a pipeline cuts a model at its"),)
    if GIVEN not in inspect.signature(type(model).forward).parameters:
        raise PlanError(f"{family}: a pipeline gives its decoder {GIVEN}, which its forward does not take")
    return tuple(found)


def _takes_images(model: Any) -> bool:
    """Return ``True`` for a causal text model that also takes images or videos, with a vision tower before its
    layers.
    """
    takes = inspect.signature(type(model).forward).parameters
    is_causal = model.main_input_name == "input_ids" and not model.config.is_encoder_decoder
    return is_causal and PIXELS in takes and head_of(model) is not None


def list_of_layers(model: nn.Module, needs: str) -> str:
    """Return the name of the model's single list of layers.

    Raises PlanError if there is none or several. The message starts with ``needs``, the feature that needs the list.
    """
    outer = lists_of_layers(model)
    if len(outer) != 1:
        found = f"{len(outer)} of them ({', '.join(outer)})" if outer else "none"
        raise PlanError(f"{needs} one list of layers (nn.ModuleList); it has {found}")
    return outer[0]


def lists_of_layers(model: nn.Module) -> list[str]:
    """Return the names of all outermost nn.ModuleLists with parameters."""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    ]
    return [name for name in lists if not any(name.startswith(other + ".") for other in lists)]


def _tied(family: str, model: nn.Module, places: Mapping[str, str], lists: Sequence[str]) -> Iterator[str]:
    """Yield the names of parameters that are shared before and after the layers. Raises PlanError for any other tie."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    # During loading, tied parameters are still separate tensors.
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    for names in [*by_id.values(), *map(list, pairs)]:
        owners = {places.get(name) or _layer_of(name, lists) or "exit" for name in names}
        if owners == {"entry", "exit"}:
            yield from names
        elif len(owners) > 1:
            raise PlanError(
                f"{family}: {names[0]!r} and {names[1]!r} are one parameter in several layers; a pipeline can have "
                "a copy of a tied parameter before the layers and after them only"
            )


def _layer_of(name: str, lists: Sequence[str]) -> str:
    """Return the name of the layer that contains a module or parameter, or '' outside the lists of layers."""
    list_name = next((list_name for list_name in lists if name.startswith(list_name + ".")), None)
    return "" if list_name is None else f"{list_name}.{name.removeprefix(list_name + '.').partition('.')[0]}"
