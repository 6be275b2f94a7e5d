"""Programs over Megatron Core: their schedules, the model that one process builds, and the groups of one process."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from core.groups import agree
from core.verify.gathered import kept
from core.verify.losses import Noted
from core.verify.megatron import imported
from core.verify.ran_jobs import Tape

if TYPE_CHECKING:
    from core.verify.program import ProgramWatch

SCHEDULES = ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving")
# Arguments of a model's constructor whose defaults are right on one process.
LAYOUT = ("self", "pre_process", "post_process", "vp_stage", "pg_collection", "parallel_output")
# Fields of a model's config, and their values on one process.
ONE_PROCESS = {
    **{f"{axis}_parallel_size": 1 for axis in ("tensor_model", "pipeline_model", "context", "expert_model")},
    "expert_tensor_parallel_size": 1,
    **dict.fromkeys(("sequence_parallel", "tp_comm_overlap", "gradient_accumulation_fusion", "cpu_offloading"), False),
    **dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), False),
    **dict.fromkeys(("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout")),
    **dict.fromkeys(("recompute_granularity", "recompute_method", "timers", "hierarchical_context_parallel_sizes")),
    **dict.fromkeys(("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")),
}
SCALERS = (
    ("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossAutoScaler"),
)
NOTHING_DRAWN = (
    "the forward step of Megatron Core's schedule draws nothing from data_iterator, so its data is not known; draw "
    "each microbatch from it, or call core.verify.note(mean_loss, inputs, labels) in the forward step"
)


class Schedules:
    """Megatron Core's schedules in a program that is watched: they show the model, its data, and its losses."""

    def __init__(self, watch: ProgramWatch) -> None:
        self.watch = watch

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the schedules inside the context."""
        module = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        with ExitStack() as stack:
            for name in (f"forward_backward_{kind}" for kind in SCHEDULES):
                stack.enter_context(mock.patch.object(module, name, self._watched(getattr(module, name))))
            yield

    def _watched(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        def begin_and_run(*, forward_step_func: Any, model: Any, forward_only: bool = False, **options: Any) -> Any:
            step = forward_step_func
            if not forward_only and self.watch.listens():
                self._begin(list(model) if isinstance(model, list) else [model])
                step = partial(self._run, forward_step_func)
            return schedule(forward_step_func=step, model=model, forward_only=forward_only, **options)

        return begin_and_run

    def _begin(self, chunks: list[nn.Module]) -> None:
        """Find the model. Collective: inside the schedule ranks wait for one another's activations."""
        watch = self.watch
        known = watch.checks.get(id(chunks[0]))
        if known is None:
            known = watch.checks[id(chunks[0])] = watch.check_of(chunks[0], {})
            watch.inside |= {id(part) for part in chunks[0].modules()}
        known.begin_step()

    def _run(self, step: Callable[..., Any], iterator: Any, chunk: Any, *given: Any) -> Any:
        """Run a forward step, and record the items that it draws, and its loss."""
        watch, job = self.watch, self.watch.checks[id(chunk)].job
        tape = Tape(iterator) if hasattr(iterator, "__next__") else None  # some ranks have no data
        noted = len(watch.noted)
        output, loss_fn = step(tape or iterator, chunk, *given)
        per_token = chunk.config.calculate_per_token_loss
        if len(watch.noted) == noted:  # the step does not call note itself
            items = tuple(tape.items) if tape else ()
            watch.noted.append(Noted(loss_of_step(step, per_token), kept((items, {})), per_token))

        def noting(output: Any, *args: Any, **kwargs: Any) -> Any:
            result = loss_fn(output, *args, **kwargs)
            loss, *tokens, _ = result
            job.losses = (*job.losses, (float(loss), float(tokens[0]) if tokens else 0.0))
            return result

        return output, noting


def loss_of_step(step: Callable[..., Any], per_token: bool) -> Callable[..., Any]:
    """Return a microbatch's loss, computed on any model by a forward step from the items that it has drawn."""

    def loss_of(model: nn.Module, *items: Any) -> Any:
        output, loss_fn = step(iter(items) if items else None, model)
        loss, *tokens, _ = loss_fn(output)
        if per_token:
            return loss, tokens[0]
        return loss / tokens[0].clamp(min=1) if tokens else loss

    return loss_of


def builder_of(module: nn.Module) -> tuple[Callable[[], nn.Module], str] | None:
    """Return a function that builds a model of Megatron Core without splitting it, and a description. Collective.

    The model's class is called with the arguments that the model has stored under their names. The result is None for
    any other model, or if an argument is not stored.
    """
    state, kinds = imported("megatron.core.parallel_state"), imported("megatron.core.transformer.transformer_config")
    config = getattr(module, "config", None)
    if state is None or kinds is None or not isinstance(config, kinds.TransformerConfig):
        return None
    arguments = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        if name in LAYOUT:
            continue
        if hasattr(module, name):
            arguments[name] = getattr(module, name)
        elif parameter.default is inspect.Parameter.empty:
            return None
    arguments["config"] = copy.copy(config)
    vars(arguments["config"]).update({name: value for name, value in ONE_PROCESS.items() if hasattr(config, name)})
    layers = _layer_specs(module)
    if layers:
        arguments["transformer_layer_spec"] = copy.copy(module.transformer_layer_spec)
        arguments["transformer_layer_spec"].layer_specs = layers

    def build() -> nn.Module:
        whole: nn.Module = type(module)(**arguments)
        rotary, own = (getattr(each, "rotary_pos_emb", None) for each in (module, whole))
        if rotary is not None:  # models do not store all its options
            vars(own).update({name: value for name, value in vars(rotary).items() if name != "cp_group"})
        return whole.train()

    return (
        build,
        f"reference of the same classes, so a layer that is wrong in both is not seen: {type(module).__name__}",
    )


def _layer_specs(module: Any) -> list[Any]:
    """Return the specs of all stages' layers, if the program has given each stage its own. Collective."""
    mine = {}
    if hasattr(getattr(module, "transformer_layer_spec", None), "layer_specs"):
        specs = module.transformer_layer_spec.layer_specs
        mine = {layer.layer_number: spec for layer, spec in zip(module.decoder.layers, specs, strict=False)}
    everyone = agree.gather(mine, None, "the layers' specs").values()
    found = {number: spec for of_rank in everyone for number, spec in of_rank.items()}
    return [found[number] for number in sorted(found)]


def state_of_one_process() -> dict[str, Any]:
    """Return the values of Megatron Core's parallel state on one process, by name; {} without initialized groups.

    Functions of Megatron Core such as its cross entropy take their group from this state.
    """
    state = imported("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    found: dict[str, Any] = {}
    for name, value in vars(state).items():
        if isinstance(value, dist.ProcessGroup):
            found[name] = alone
        elif name.startswith(("_MPU_", "_VIRTUAL_")):
            found[name] = None
        elif (
            name.startswith("_")
            and name.endswith(("_GLOBAL_RANKS", "_GLOBAL_RANKS_WITH_CP", "_PARALLEL_RANKS"))
            and value
        ):
            found[name] = [dist.get_rank()]
    return found


@contextmanager
def auxiliary_scale(weight: float) -> Iterator[None]:
    """Scale the gradients of Megatron Core's auxiliary losses, which its schedules scale, inside the context."""
    with ExitStack() as stack:
        for path, name in SCALERS:
            if (module := imported(path)) is not None:
                scale = mock.patch.object(getattr(module, name), "main_loss_backward_scale", torch.tensor(weight))
                stack.enter_context(scale)
        yield


@contextmanager
def with_state(values: dict[str, Any]) -> Iterator[None]:
    """Give Megatron Core's parallel state these values inside the context."""
    state = imported("megatron.core.parallel_state")
    if state is None:
        yield
        return
    with mock.patch.dict(vars(state), values):
        yield
