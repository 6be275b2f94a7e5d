"""Pipeline stages of transformers models, without tracing: each runs the model's own forward, with modules left out.

A stage holds its layers at their true index. A layer that lies on another stage has no parameters here: the first one
after this stage's layers ends the forward, and the first layer of this stage takes what was received. Masks, positions
and rotary tables are computed on every stage, by the model's own code. What absent modules give instead of a value is
NaN, so that a model in which anything but hidden states goes from layer to layer is found and refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from core.hugging_face.plan import PlanError
from core.model_parallel_config import ModelParallelConfig
from core.pipeline_parallel.layout import PipelineLayout, StageSpec
from core.pipeline_parallel.runner import MicrobatchLoss

NOT_RECEIVED = "a stage takes what the stage before it sent as received="


@dataclass(frozen=True)
class ModelCut:
    """Where a model can be cut into stages.

    layers: the name of its list of layers; count: how many there are. entry, exit: modules with parameters that are
    used before the first layer, and after the last one. around: parameters of modules that hold the list itself; every
    stage has a copy. tied: the names of parameters that are one and lie on the first stage and on the last.
    """

    family: str
    layers: str
    count: int
    entry: frozenset[str]
    exit: frozenset[str]
    around: frozenset[str]
    tied: frozenset[str]

    def stage_of(self, parameter: str, layout: PipelineLayout) -> int | None:
        """The stage that holds a parameter; None for one that every stage has a copy of."""
        if parameter in self.around:
            return None
        layer = self.layer_of(parameter)
        if layer is not None:
            return next(s for s in range(layout.num_stages) if layer in layout.stage(s).layer_numbers)
        return 0 if parameter.rpartition(".")[0] in self.entry else layout.num_stages - 1

    def layer_of(self, name: str) -> int | None:
        """The number of the layer that a parameter or module lies in; None outside the list."""
        if not name.startswith(self.layers + "."):
            return None
        return int(name[len(self.layers) + 1 :].partition(".")[0])


def find_cut(model: Any, used_before: Mapping[str, bool] | None = None) -> ModelCut:
    """Where a transformers model can be cut. Local; the model may be on the meta device.

    used_before: of modules with parameters outside the layers, whether a forward used them before the first layer
    (`watch_order`). Without it the pipeline plan of the family says so, else the order of registration.
    Raises PlanError for a model without one list of layers, and for parameters that lie on several stages.
    """
    family = f"{model.config.model_type} ({type(model).__name__})"
    layers = list_of_layers(model, f"{family}: a pipeline cuts a model at its")
    _refuse_router_loss(family, model)
    for name in ("layerdrop", "decoder_layerdrop", "encoder_layerdrop"):
        if getattr(model.config, name, 0.0):
            raise PlanError(
                f"{family}: {name}={getattr(model.config, name)} leaves layers out at random, and a stage begins at a "
                f"certain layer; set {name}=0.0 in the config"
            )
    names = list(dict(model.named_modules()))
    base = next(name for name, module in model.named_modules() if module is model.base_model)
    plan = getattr(model.config, "base_model_pp_plan", None) or {}
    planned = [f"{base}.{name}" if base else name for name in plan]
    entry: set[str] = set()
    exit: set[str] = set()
    around: set[str] = set()
    for owner, module in model.named_modules():
        own = [f"{owner}.{leaf}" if owner else leaf for leaf, _ in module.named_parameters(recurse=False)]
        if not own or owner.startswith(layers + "."):
            continue
        if not owner or layers.startswith(owner + "."):
            around.update(own)
        elif used_before is not None and owner in used_before:
            (entry if used_before[owner] else exit).add(owner)
        elif owner in planned and layers in planned:
            (entry if planned.index(owner) < planned.index(layers) else exit).add(owner)
        else:
            (entry if names.index(owner) < names.index(layers) else exit).add(owner)
    cut = ModelCut(
        family,
        layers,
        len(model.get_submodule(layers)),
        frozenset(entry),
        frozenset(exit),
        frozenset(around),
        frozenset(),
    )
    return ModelCut(**{**vars(cut), "tied": frozenset(_tied(model, cut))})


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


def _tied(model: nn.Module, cut: ModelCut) -> Iterator[str]:
    """Names of parameters that are used before the layers and after them. PlanError for ties of any other kind."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    # While a checkpoint is loaded, tied parameters are not one tensor yet.
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    for names in [*by_id.values(), *map(list, pairs)]:
        owners = {_side(name, cut) for name in names}
        if owners == {"entry", "exit"}:
            yield from names
        elif len(owners) > 1:
            raise PlanError(
                f"{cut.family}: {names[0]!r} and {names[1]!r} are one parameter in several layers; a pipeline can have "
                "a copy of a tied parameter before the layers and after them only"
            )


def _side(name: str, cut: ModelCut) -> str:
    """Where a parameter lies: before or after the layers, around them, or in which one."""
    if name in cut.around:
        return "around"
    layer = cut.layer_of(name)
    if layer is not None:
        return f"layer {layer}"
    return "entry" if name.rpartition(".")[0] in cut.entry else "exit"


def watch_order(model: Any, example: Mapping[str, Any]) -> tuple[dict[str, bool], Any]:
    """One forward of the whole model, without gradients: which modules came before the first layer, and the output."""
    cut = find_cut(model)
    first_layer = model.get_submodule(f"{cut.layers}.0")
    came: dict[str, bool] = {}
    entered: list[bool] = []
    handles = [first_layer.register_forward_pre_hook(lambda *_: entered.append(True))]
    for name in sorted(cut.entry | cut.exit):
        handles.append(model.get_submodule(name).register_forward_pre_hook(partial(_note, came, name, entered)))
    try:
        return came, run_quietly(model, example)
    finally:
        for handle in handles:
            handle.remove()


def _note(came: dict[str, bool], name: str, entered: list[bool], *_: Any) -> None:
    came.setdefault(name, not entered)


def run_quietly(model: Any, example: Mapping[str, Any]) -> Any:
    """A forward's output in evaluation mode, without gradients; random streams and the mode stay as they were."""
    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng():
            return model.eval()(**example)
    finally:
        model.train(training)


# -- a stage's forward ----------------------------------------------------------------------------------------------


class _Leave(Exception):
    """A layer that lies on a later stage was called: the forward of this stage has come to its end."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the forward of a pipeline stage ends here")
        self.hidden = hidden


class StageForward:
    """A model's own forward on one stage: takes `received=`, and gives hidden states, or on the last stage the output.

    It stands in the model's attribute `forward`. part: which layers lie here. All other arguments are the model's, the
    same on every stage: token ids give the shape, and masks and positions are made of them.
    """

    def __init__(self, model: nn.Module, cut: ModelCut, part: StageSpec) -> None:
        self.model, self.cut, self.part = model, cut, part
        self.takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
        self.received: Tensor | None = None
        self.entered = False  # True from this stage's first layer on

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
            return leave.hidden
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
        if args:
            return (self.received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.received}

    def stand_in(self, width: int | None) -> Tensor:
        """What an absent module gives, as wide as it: nothing that a layer of this stage may use."""
        if self.received is None or self.entered:
            raise PlanError(
                f"{self.cut.family}: stage {self.part.index} uses a module of the first stage beside its layers, so "
                "this model cannot be cut into stages"
            )
        batch, sequence, hidden = self.received.shape
        return self.received.new_full((batch, sequence, width or hidden), torch.nan)

    def __deepcopy__(self, memo: dict[int, Any]) -> StageForward:
        copied = object.__new__(StageForward)
        vars(copied).update(vars(self))
        memo[id(self)] = copied
        copied.model = memo.get(id(self.model), self.model)
        return copied


class AbsentLayer:
    """The forward of a layer that lies on another stage."""

    def __init__(self, stage: StageForward) -> None:
        self.stage = stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not self.stage.entered:
            # A tuple, because some models take the first of what a layer gives; nobody looks at it.
            return (None if hidden is None else hidden,)
        if not isinstance(hidden, Tensor):
            raise PlanError(
                f"{self.stage.cut.family}: its layers are called without hidden_states, so what a stage would send is "
                "unknown"
            )
        raise _Leave(hidden)


class AbsentEntry:
    """The forward of a module of the first stage, on another one. width: of its output; None: that of hidden states."""

    def __init__(self, stage: StageForward, width: int | None) -> None:
        self.stage, self.width = stage, width

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.stage.stand_in(self.width)


class AbsentExit:
    """The forward of a module of the last stage, on another one: nothing should call it."""

    def __init__(self, stage: StageForward, name: str) -> None:
        self.stage, self.name = stage, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(
            f"{self.stage.cut.family}: {self.name!r} is used before the last layer, and was taken to belong to the "
            "last stage; load the whole model by from_pretrained, whose forward shows where it belongs"
        )


def keep_stage(model: Any, cut: ModelCut, layout: PipelineLayout, index: int) -> Any:
    """Leave one stage's modules in a model, in place; parameters and children of all others go. Returns the model."""
    part = layout.stage(index)
    if not part.layer_numbers:
        raise PlanError(f"{cut.family}: stage {index} of {list(layout.layers_per_stage)} has no layer; give each one")
    if "forward" in vars(model):
        raise PlanError(f"{cut.family}: the model has a forward of its own on the instance; cut it into stages before")
    stage = StageForward(model, cut, part)
    modules = dict(model.named_modules())  # all of them, before children are taken out
    for number in range(cut.count):
        layer = modules[f"{cut.layers}.{number}"]
        if number not in part.layer_numbers:
            _empty(layer, AbsentLayer(stage))
        elif number == part.layer_numbers[0]:
            layer.register_forward_pre_hook(stage.enter, with_kwargs=True)
    for name in cut.entry if not part.pre_process else ():
        module = modules[name]
        width = getattr(module, "embedding_dim", getattr(module, "out_features", None))
        _empty(module, AbsentEntry(stage, width))
    for name in cut.exit if not part.post_process else ():
        _empty(modules[name], AbsentExit(stage, name))
    model.forward = stage
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    model.all_tied_weights_keys = {target: source for target, source in ties.items() if {target, source} <= names}
    return model


def _empty(module: nn.Module, forward: Any) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, None)
    for name, _ in [*module.named_buffers(recurse=False), *module.named_children()]:
        delattr(module, name)
    module.forward = forward


def absent_modules(model: nn.Module) -> list[str]:
    """The names of modules of a stage that lie on another one."""
    kinds = AbsentLayer, AbsentEntry, AbsentExit
    return [name for name, module in model.named_modules() if isinstance(vars(module).get("forward"), kinds)]


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
    """What one stage sends the next, on the meta device: hidden states [microbatch, sequence, hidden]."""
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
