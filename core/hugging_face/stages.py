"""Pipeline stages of transformers models, without tracing: each runs the model's own forward, with modules left out.

A stage holds its layers at their true index. The first layer that lies on a later stage ends the forward, and the first
layer of this stage takes what was received. Every stage computes masks, positions and rotary tables, by the model's own
code. What absent modules give is NaN, so that a model in which anything but hidden states goes from layer to layer is
found and refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.hugging_face.dropout import as_in_training
from core.hugging_face.plan import PlanError, family_of
from core.model_parallel_config import ModelParallelConfig
from core.pipeline_parallel.layout import PipelineLayout, StageSpec
from core.pipeline_parallel.runner import MicrobatchLoss

INITIALIZED = "_is_hf_initialized"  # True on a module whose parameters loading must not draw
NOT_RECEIVED = "a stage takes what the stage before it sent as received="


@dataclass(frozen=True)
class ModelCut:
    """Places at which a model can be cut into stages.

    layers: the name of its list of layers. entry, exit: modules with parameters that are used before the first layer,
    and after the last one. around: parameters of modules that hold the list itself; every stage has a copy. tied: the
    names of parameters that are one and lie on the first stage and on the last.
    """

    family: str
    layers: str
    count: int
    entry: frozenset[str]
    exit: frozenset[str]
    around: frozenset[str]
    tied: frozenset[str]


def find_cut(model: Any, used_before: Mapping[str, bool] | None = None) -> ModelCut:
    """Find where a transformers model can be cut. Local; the model may be on the meta device.

    used_before: of modules with parameters outside the layers, whether a forward used them before the first layer
    (`watch_order`). Without it the order of registration says so.
    Raises PlanError for a model without one list of layers, and for parameters that lie on several stages.
    """
    family = family_of(model)
    layers = list_of_layers(model, f"{family}: a pipeline cuts a model at its")
    _refuse_router_loss(family, model)
    for name in ("layerdrop", "decoder_layerdrop", "encoder_layerdrop"):
        if getattr(model.config, name, 0.0):
            raise PlanError(
                f"{family}: {name}={getattr(model.config, name)} leaves layers out at random, and a stage begins at a "
                f"certain layer; set {name}=0.0 in the config"
            )
    sides: dict[str, str] = {}  # parameter -> where it lies: entry, exit, around, or the number of a layer
    is_behind = False
    for owner, module in model.named_modules():  # in the order of registration
        is_behind |= owner == layers
        side = "entry" if (used_before or {}).get(owner, not is_behind) else "exit"
        if not owner or layers.startswith(owner + "."):
            side = "around"
        elif owner.startswith(layers + "."):
            side = _layer_of(owner, layers)
        sides.update({f"{owner}.{leaf}".strip("."): side for leaf, _ in module.named_parameters(recurse=False)})
    entry, exit = (frozenset(n.rpartition(".")[0] for n in sides if sides[n] == end) for end in ("entry", "exit"))
    around = frozenset(name for name in sides if sides[name] == "around")
    tied = frozenset(_tied(family, model, sides, layers))
    return ModelCut(family, layers, len(model.get_submodule(layers)), entry, exit, around, tied)


def list_of_layers(model: nn.Module, needs: str) -> str:
    """The name of the one list of layers. PlanError, after what needs it, for a model that has none or several."""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    ]
    outer = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    if len(outer) != 1:
        found = f"{len(outer)} of them ({', '.join(outer)})" if outer else "none"
        raise PlanError(f"{needs} one list of layers (nn.ModuleList); it has {found}")
    return outer[0]


def _refuse_router_loss(family: str, model: Any, asked: bool | None = None) -> None:
    """PlanError where the routers' loss is asked for: by an argument of a forward, or else by the config."""
    if getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked:
        raise PlanError(
            f"{family}: output_router_logits adds a loss of all layers' routers, and a stage has its own layers only; "
            "set output_router_logits=False in the config"
        )


def _tied(family: str, model: nn.Module, sides: Mapping[str, str], layers: str) -> Iterator[str]:
    """Names of parameters that are used before the layers and after them. PlanError for ties of any other kind."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    # While a checkpoint is loaded, tied parameters are not one tensor yet.
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    for names in [*by_id.values(), *map(list, pairs)]:
        owners = {sides.get(name) or _layer_of(name, layers) or "exit" for name in names}
        if owners == {"entry", "exit"}:
            yield from names
        elif len(owners) > 1:
            raise PlanError(
                f"{family}: {names[0]!r} and {names[1]!r} are one parameter in several layers; a pipeline can have "
                "a copy of a tied parameter before the layers and after them only"
            )


def _layer_of(name: str, layers: str) -> str:
    """The number of the layer that a module or parameter lies in; nothing for one outside the list of layers."""
    return name.removeprefix(f"{layers}.").partition(".")[0] if name.startswith(f"{layers}.") else ""


def watch_order(model: Any, example: Mapping[str, Any]) -> tuple[dict[str, bool], Any]:
    """One forward of the whole model, without gradients: which modules came before the first layer, and the output."""
    cut = find_cut(model)
    first, order = f"{cut.layers}.0", list[str]()
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: order.append(name))
        for name in (first, *sorted(cut.entry | cut.exit))
    ]
    try:
        output = run_quietly(model, example, training="labels" in example)
    finally:
        for handle in handles:
            handle.remove()
    before = order[: order.index(first)] if first in order else order
    return {name: name in before for name in order}, output


def run_quietly(model: Any, example: Mapping[str, Any], *, training: bool = False) -> Any:
    """A forward's output, without gradients; random streams and modes stay as they were.

    training: True for what training computes (`as_in_training`), False for evaluation mode.
    """
    mode = as_in_training(model) if training else in_evaluation(model)
    with torch.no_grad(), torch.random.fork_rng(), mode:
        return model(**example)


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in evaluation mode. Each module has its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class _Leave(Exception):
    """A layer that lies on a later stage was called: the forward of this stage ends, with these hidden states."""


class StageForward:
    """A model's own forward on one stage: takes `received=`, and gives hidden states, or on the last stage the output.

    It stands in the model's attribute `forward`. part: which layers lie here; absent: modules that lie on other stages.
    All other arguments are the model's, the same on every stage: token ids give the shape, masks and positions.
    """

    def __init__(self, model: nn.Module, cut: ModelCut, part: StageSpec) -> None:
        self.model, self.cut, self.part = model, cut, part
        self.takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
        self.received: Tensor | None = None
        self.entered = False  # True from this stage's first layer on
        self.absent: list[str] = []

    def __call__(self, *args: Any, received: Tensor | None = None, **kwargs: Any) -> Any:
        """Hidden states [batch, sequence, hidden]; on the last stage what the model gives."""
        if (received is None) != self.part.pre_process:
            what = "and got none" if received is None else "and this is the first stage, which has none before it"
            raise ValueError(f"{self.cut.family}, stage {self.part.index}: {NOT_RECEIVED}, {what}")
        _refuse_router_loss(self.cut.family, self.model, kwargs.get("output_router_logits"))
        if self.takes_cache:
            kwargs.setdefault("use_cache", False)  # caches of keys and values are for generation
        self.received, self.entered = received, False
        try:
            output = type(self.model).forward(self.model, *args, **kwargs)
        except _Leave as leave:
            return leave.args[0]
        finally:
            self.received = None
        if not self.part.post_process:
            raise PlanError(f"{self.cut.family}: stage {self.part.index} came to the end without its next layer")
        return output

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before this stage's first layer: what was received takes the place of the hidden states."""
        self.entered = True
        if self.received is None:
            return None
        return ((self.received, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": self.received})

    def absent_layer(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of a layer that lies on another stage."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not self.entered:
            return (hidden,)  # some models take the first of what a layer gives; it is not read
        if not isinstance(hidden, Tensor):
            raise PlanError(
                f"{self.cut.family}: its layers are called without hidden_states, so what a stage would send is unknown"
            )
        raise _Leave(hidden)

    def absent_entry(self, width: int | None, *args: Any, **kwargs: Any) -> Tensor:
        """The forward of a module of the first stage, on another one: nothing that a layer of this stage may use.

        width: of its output; None: that of hidden states.
        """
        if self.received is None or self.entered:
            raise PlanError(
                f"{self.cut.family}: stage {self.part.index} uses a module of the first stage outside its layers, so "
                "this model cannot be cut into stages"
            )
        batch, sequence, hidden = self.received.shape
        return self.received.new_full((batch, sequence, width or hidden), torch.nan)

    def absent_exit(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The forward of a module of the last stage, on another one: nothing should call it."""
        raise PlanError(
            f"{self.cut.family}: {name!r} is used before the last layer, and was taken to belong to the last stage; "
            "load the whole model by from_pretrained, whose forward shows where it belongs"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> StageForward:
        copied = memo[id(self)] = copy.copy(self)
        copied.model = memo.get(id(self.model), self.model)
        return copied


def keep_stage(model: Any, cut: ModelCut, layout: PipelineLayout, index: int) -> Any:
    """Leave one stage's modules in a model, in place; parameters and children of all others go. Returns the model."""
    part = layout.stage(index)
    if not part.layer_numbers:
        raise PlanError(f"{cut.family}: stage {index} of {list(layout.layers_per_stage)} has no layer; give each one")
    if "forward" in vars(model):
        raise PlanError(f"{cut.family}: the model has a forward of its own on the instance; cut it into stages before")
    stage = StageForward(model, cut, part)
    modules = dict(model.named_modules())  # all of them, before children are taken out
    absent: dict[str, Any] = {}
    for number in range(cut.count):
        name = f"{cut.layers}.{number}"
        if number not in part.layer_numbers:
            absent[name] = stage.absent_layer
        elif number == part.layer_numbers[0]:
            modules[name].register_forward_pre_hook(stage.enter, with_kwargs=True)
    for name in cut.entry if not part.pre_process else ():
        width = getattr(modules[name], "embedding_dim", getattr(modules[name], "out_features", None))
        absent[name] = partial(stage.absent_entry, width)
    for name in cut.exit if not part.post_process else ():
        absent[name] = partial(stage.absent_exit, name)
    for name, forward in absent.items():
        empty_module(modules[name], forward)
    stage.absent = list(absent)
    model.forward = stage
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {target: source for target, source in ties.items() if {target, source} <= names}
    return model


def empty_module(module: nn.Module, forward: Any) -> None:
    """Take parameters, buffers and children out of a module, and give it another forward."""
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, None)
    for name, _ in [*module.named_buffers(recurse=False), *module.named_children()]:
        delattr(module, name)
    module.forward = forward


def mark_absent(model: Any) -> None:
    """Have transformers draw nothing for layers of other stages. Rotary tables are buffers, and are made."""
    for module in model.modules():
        setattr(module, INITIALIZED, not [*module.parameters(), *module.buffers()])


def stage_of(chunk: nn.Module) -> StageForward:
    """The stage's forward of a model, in wrappers or not. PlanError where there is none."""
    for module in chunk.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, StageForward):
            return forward
    raise PlanError(f"a {type(chunk).__name__} is no stage of a transformers model; make it by split_stages")


def stage_forward_step(chunk: nn.Module, microbatch: Mapping[str, Any], hidden: Tensor | None) -> Any:
    """One microbatch through one stage; on the last stage the model's own loss. For a PipelineRunner.

    microbatch: the model's arguments with its labels, on every stage. The step's loss is the mean over microbatches.
    """
    stage = stage_of(chunk)
    output = chunk(received=hidden, **microbatch)
    if not stage.part.post_process:
        return output
    if getattr(output, "loss", None) is None:
        raise ValueError(f"{stage.cut.family} gave no loss; the microbatch needs labels")
    return MicrobatchLoss(output.loss)


def stage_activations(chunk: nn.Module, microbatch_size: int, sequence_length: int) -> list[Tensor]:
    """Activations that a stage sends, on the meta device: hidden states [microbatch, sequence, hidden]."""
    model: Any = stage_of(chunk).model
    width = model.config.get_text_config().hidden_size
    return [torch.empty(microbatch_size, sequence_length, width, dtype=model.dtype, device="meta")]


def stages_config(layout: PipelineLayout, tp: int = 1) -> ModelParallelConfig:
    """The config for `wrap_stages`: it says which chunks of a rank are one model."""
    virtual = layout.chunks if layout.chunks > 1 else None
    return ModelParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=virtual,
    )
