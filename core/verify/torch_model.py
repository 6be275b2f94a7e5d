"""Models outside our wrapper as jobs of verify: torch's DDP, fully_shard, DTensor, or user code.

A DTensor's placements define its part of the full parameter. A plain tensor is the full parameter, unless it has
Megatron's attributes (``tensor_model_parallel``, ``partition_dim``): see ``declare_splits``. Megatron Core's models are
recognized by their modules' names; Megatron Core is never imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.optimizer import register_optimizer_step_pre_hook

import core.interface.optimizer
from core import parallel_state
from core.checkpoint.boxes import Box
from core.checkpoint.global_slices import GlobalSlice, global_slices
from core.distributed import DistributedDataParallel
from core.distributed.contract.gradient_contract import GradientContract
from core.distributed.guard.replicas import checksum
from core.groups import agree
from core.groups.param_attributes import data_group_of
from core.groups.process_groups import ProcessGroups
from core.interface import ModelWrapper
from core.verify import deepspeed, megatron
from core.verify.gathered import Held, WrappedModel
from core.verify.job import Job, split_loss
from core.verify.microbatches import Microbatch
from core.verify.ran_jobs import LoopJob
from core.verify.recording import Recorder
from core.verify.step_ends import StepEnds

WRAPPERS = (DistributedDataParallel, TorchDDP, ModelWrapper)
# Names of mesh dimensions along which data differs; all other dimensions split the model.
DATA_DIMENSIONS = ("dp", "dp_replicate", "dp_shard", "ddp", "fsdp", "hsdp", "data", "replicate", "shard")
# Functions that change reduced gradients before an optimizer steps. Boosted optimizers call the last one.
CLIPS = (
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.nn.utils, "clip_grad_value_"),
    (core.interface.optimizer, "clip_loose_gradients"),
)


class MeshPlaces(ProcessGroups):
    """This rank's index among the data ranks and among the ranks that split a replica. It has no process groups."""

    def __init__(self, data: Sequence[int], model: Sequence[int]) -> None:
        super().__init__()
        rank = dist.get_rank()
        self.__dict__["_places"] = {
            "dp_cp": (data.index(rank), len(data)),
            "tp": (model.index(rank), len(model)),
        }


@dataclass(frozen=True)
class TorchChunk:
    """Module of a model outside our wrapper, without a config."""

    module: nn.Module
    config: None = None


class TorchModel(WrappedModel):
    """This rank's part of a model outside our wrapper. Collective over the world.

    Args:
        outer: Model as the loop calls it.
        mesh: Device mesh, if it cannot be read from the model.
        before: The module before torch's DDP converted its DTensors to plain tensors.
    """

    def __init__(self, outer: nn.Module, mesh: DeviceMesh | None = None, before: nn.Module | None = None) -> None:
        self.outer = outer
        self.module = unwrapped(outer)
        sharded = [part for part in self.module.modules() if isinstance(part, FSDPModule)]
        for part in sharded:  # after a forward without backward, the outermost module stays unsharded
            part.reshard()
        self.chunks: list[Any] = [TorchChunk(self.module)]
        self.params = dict(self.module.named_parameters())
        placed = _dtensors(self.module) or ({} if before is None else _dtensors(before))
        self.groups = _places(outer, placed, mesh)
        self.device = next((_local(param).device for param in self.params.values()), torch.device("cpu"))
        self.reduces_in_backward = bool(sharded)
        self.own: dict[int, Tensor] = {}  # gradients that the diagnosis computed outside DeepSpeed's engine
        megatron.declare_names(self.module, self.groups)
        with megatron.marked_sinks(self.module):
            places = _slices(self.module, placed, self.groups)
        self.held = [
            Held(places[name], 0, _readable(param), self._contract(name, param) if param.requires_grad else None)
            for name, param in self.params.items()
        ]
        self.biases = []

    def _contract(self, name: str, param: nn.Parameter) -> GradientContract:
        group = data_group_of(param)
        return GradientContract(name, group == "expt_dp", group, self.groups.size("dp_cp"))

    @property
    def is_whole(self) -> bool:
        """True if this rank holds the full model in plain tensors."""
        return not self.is_split and not any(isinstance(param, DTensor) for param in self.params.values())

    def record_dtype(self, module: nn.Module) -> None:
        """See WrappedModel; fully_shard gathers weights in the dtype of its MixedPrecisionPolicy."""
        if self.reduces_in_backward and self.computes_in is None:
            own = [param.dtype for param in module.parameters(recurse=False) if not isinstance(param, DTensor)]
            held = {held.tensor.dtype for held in self.held}
            self.computes_in = next((dtype for dtype in own if dtype.is_floating_point and dtype not in held), None)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See WrappedModel; only parameters of ZeRO-3 are gathered, because each rank sends its part of others."""
        with deepspeed.gathered([*self.params.values()]):
            yield

    def gradients(self) -> dict[tuple[int, str], Tensor]:
        """Return this rank's parts of the gradients. Collective.

        DTensor gradients are reduced as an optimizer sees them.
        """
        found = {}
        gathered = megatron.gathered_gradients(self.outer)
        gathered |= deepspeed.gradients(self.outer, [self.params[held.place.local_name] for held in self.trained])
        for held in self.trained:
            param = self.params[held.place.local_name]
            grad = gathered.get(id(param), gradient_of(param))
            found[held.key] = torch.zeros_like(held.tensor) if grad is None else _local(grad, param).clone()
        return found

    def own_gradient(self, held: Held) -> Tensor:
        """See WrappedModel; fully_shard reduces in backward."""
        param = self.params[held.place.local_name]
        if deepspeed.is_engine(self.outer):
            return self.own.get(id(param), torch.zeros(held.place.local_shape))
        grad = gradient_of(param)
        if grad is None or (self.reduces_in_backward and self.groups.size("dp_cp") > 1):
            return torch.zeros(held.place.local_shape)
        return _local(grad, param)

    def valid_mask(self, held: Held) -> Tensor:
        """See WrappedModel."""
        return torch.ones(held.tensor.numel(), dtype=torch.bool)


class TorchLoopJob(LoopJob):
    """First step of a loop whose gradients are complete when a torch optimizer begins to step or gradients are clipped.

    Collective over the world.

    Args:
        outer: Model as the loop calls it.
        loss_fn: Loss of a model and a microbatch.
        mesh: Device mesh, if it cannot be read from the model.
        before: The module before torch's DDP converted its DTensors to plain tensors.

    Attributes:
        at_norm: Called on all ranks with the gradient norm of Megatron Core's optimizer or DeepSpeed's engine.

    Raises:
        ValueError: On all ranks, if the model's positions in the mesh are unknown.
    """

    at_norm: Callable[[float | None], None]

    def __init__(
        self,
        outer: nn.Module,
        loss_fn: Callable[[nn.Module, Microbatch], Any],
        mesh: DeviceMesh | None = None,
        before: nn.Module | None = None,
    ) -> None:
        model = TorchModel(outer, mesh, before)
        Job.__init__(self, model, 1, None)
        self.torch_model = model
        self.loss_fn = loss_fn
        self.before = {}
        self.at_norm = lambda norm: None
        if dist.get_world_size() > 1 and dist.get_backend() != "fake":
            self.ends = StepEnds()
        self.kept: dict[str, Tensor | None] | None = None  # the loop's gradients, while the diagnosis computes others

    @contextmanager
    def watched(self, finish: Callable[..., None]) -> Iterator[None]:
        """Call ``finish`` before an optimizer of one of the model's parameters steps, or gradients are clipped."""
        mine = {id(param) for param in self.torch_model.params.values()}

        def compare(params: Any, *, after_clip: bool = False) -> bool:
            given = [params] if isinstance(params, Tensor) else list(params)
            is_mine = any(id(param) in mine and gradient_of(param) is not None for param in given)
            if is_mine:
                with torch.enable_grad():
                    finish(after_clip)
            return is_mine

        clipped = False  # in this step

        def before_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
            nonlocal clipped
            if in_megatron:  # the gradients were compared when Megatron Core's optimizer, around this one, began
                return
            compare([param for group in optimizer.param_groups for param in group["params"]], after_clip=clipped)
            clipped = False

        def before_clip(clip: Callable[..., Any]) -> Callable[..., Any]:
            def compare_and_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal clipped
                parameters = parameters if isinstance(parameters, Tensor) else list(parameters)
                clipped = compare(parameters) or clipped
                return clip(parameters, *args, **kwargs)

            return compare_and_clip

        in_megatron = False

        def before_megatron(optimizer: Any) -> None:  # on all ranks, though a rank may step no parameter
            nonlocal in_megatron
            in_megatron = True
            with torch.enable_grad():
                finish()

        def after_megatron(optimizer: Any, result: Any) -> None:
            nonlocal in_megatron
            in_megatron = False
            self.at_norm(result[1])

        with ExitStack() as stack:
            if megatron.is_wrapper(self.torch_model.outer):
                stack.enter_context(megatron.around_steps("step", before_megatron, after_megatron))
            if deepspeed.is_engine(self.torch_model.outer):
                around = deepspeed.around_updates(self.torch_model.outer, finish, lambda norm: self.at_norm(norm))
                stack.enter_context(around)
            stack.callback(register_optimizer_step_pre_hook(before_step).remove)
            for owner, name in CLIPS:
                stack.enter_context(mock.patch.object(owner, name, before_clip(getattr(owner, name))))
            yield

    def weight_checksums(self) -> dict[tuple[Any, ...], list[int]]:
        """See RanJob."""
        return {(each.name, *each.place.boxes): checksum(each.tensor).tolist() for each in self.model.held}

    def clear(self) -> None:
        """Restore the loop's gradients."""
        if self.kept is not None:
            for name, param in self.torch_model.params.items():
                if hasattr(param, "main_grad"):
                    param.main_grad.copy_(self.kept[name])
                else:
                    param.grad = self.kept[name]
            self.kept = None

    def backward(self, batch: Any, recorder: Recorder | None = None) -> None:
        """See Job. fully_shard reduces anyway."""
        model = self.torch_model
        if self.kept is None:
            grads = {name: gradient_of(param) for name, param in model.params.items()}
            self.kept = {name: None if grad is None else grad.clone() for name, grad in grads.items()}
        model.own = {}
        called = model.module if deepspeed.is_engine(model.outer) else model.outer  # an engine would reduce
        for param in model.params.values():
            param.grad = None
            if hasattr(param, "main_grad"):  # Megatron Core's wrapper accumulates in it
                param.main_grad.zero_()
        ddp = wrapper_of(model.outer)
        with nullcontext() if ddp is None else ddp.no_sync():
            for part, forward in zip(self.parts(batch), self.forwards, strict=True):
                given = self._received()
                loss = output = None
                if self.groups.rank("pp") == self.groups.size("pp") - 1:
                    loss, _ = split_loss(self.loss_fn(called, part), self.per_token)
                    loss = loss * (1.0 if self.per_token else 1.0 / self.microbatches)
                else:
                    output = model.outer(*forward[0], **forward[1])
                    _send(output.detach(), self.groups.ranks("pp")[self.groups.rank("pp") + 1])
                with nullcontext() if recorder is None else recorder.backward():
                    if loss is not None:
                        self._run_backward(loss)
                    else:
                        assert output is not None
                        output.backward(_receive(self.groups.ranks("pp")[self.groups.rank("pp") + 1]))
                if given is not None:
                    _send(given.grad, self.groups.ranks("pp")[self.groups.rank("pp") - 1])

    def _run_backward(self, loss: Tensor) -> None:
        """Compute this rank's gradients, for DeepSpeed without its hooks on parameters, which reduce."""
        if not deepspeed.is_engine(self.torch_model.outer):
            loss.backward()
            return
        own, params = self.torch_model.own, [param for param in self.torch_model.params.values() if param.requires_grad]
        for param, grad in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
            if grad is not None:
                own[id(param)] = grad + own.get(id(param), 0)

    def _received(self) -> Tensor | None:
        """Pass the activation of the stage before to this stage, and return it; None on the first stage."""
        if self.groups.rank("pp") == 0:
            return None
        given = _receive(self.groups.ranks("pp")[self.groups.rank("pp") - 1]).requires_grad_()
        self.torch_model.module.set_input_tensor(given)
        return given

    def drift(self) -> str:
        """See Job; replicas were already compared."""
        return ""


def unwrapped(outer: nn.Module) -> Any:
    """Return the user's module inside wrappers: ours, a plugin's, torch's DDP, Megatron Core's, DeepSpeed's engine."""
    part: Any = outer
    while (is_wrapper := _is_wrapper(part)) or hasattr(part, "_orig_mod"):
        part = part.module if is_wrapper else part._orig_mod
    return part


def _is_wrapper(part: nn.Module) -> bool:
    return isinstance(part, WRAPPERS) or megatron.is_wrapper(part) or deepspeed.is_engine(part)


def wrapper_of(outer: nn.Module) -> Any:
    """Return torch's DDP or Megatron Core's, around or inside a model; None if there is no such wrapper."""
    parts = (part for part in outer.modules() if hasattr(part, "no_sync"))
    return next((part for part in parts if isinstance(part, TorchDDP) or megatron.is_wrapper(part)), None)


def gradient_of(param: Any) -> Any:
    """Return a parameter's gradient, or None. Megatron Core's wrapper stores it in ``main_grad``, not in ``grad``."""
    return getattr(param, "main_grad", None) if param.grad is None else param.grad


def _send(tensor: Tensor, rank: int) -> None:
    dist.send_object_list([tensor.cpu()], dst=rank)


def _receive(rank: int) -> Tensor:
    received: list[Any] = [None]
    dist.recv_object_list(received, src=rank)
    tensor: Tensor = received[0]
    return tensor


def _dtensors(module: nn.Module) -> dict[str, DTensor]:
    return {name: param for name, param in module.named_parameters() if isinstance(param, DTensor)}


def _readable(param: Any) -> Tensor:
    """Return the local part of a parameter; the parameter itself if ZeRO-3 replaces its data by gathered data."""
    return param if hasattr(param, "ds_id") else _local(param.detach())


def _local(tensor: Tensor, param: Any = None) -> Tensor:
    """Return the local part of a tensor, placed as its parameter if one is given."""
    if isinstance(tensor, DTensor) and isinstance(param, DTensor) and tensor.placements != param.placements:
        tensor = tensor.redistribute(placements=param.placements)
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _places(outer: nn.Module, placed: Mapping[str, DTensor], mesh: DeviceMesh | None) -> ProcessGroups:
    """Find the ranks with different data, and the ranks that split one replica. Collective over the world.

    They are read from the mesh (the given one, or the DTensors'), from parallel_state, from Megatron Core's, or from
    the process group of torch's DDP. Otherwise all ranks have different data.
    """
    meshes = [param.device_mesh for param in placed.values()]
    mesh = mesh or max(meshes, key=lambda each: each.ndim, default=None)
    world, rank = list(range(dist.get_world_size())), dist.get_rank()
    data, model = world, [rank]
    if mesh is not None:
        shards = any(isinstance(part, FSDPModule) for part in outer.modules())
        with agree.together(None, "the mesh of the model", ValueError):
            model = _model_ranks(mesh, all_data=shards)
        place = model.index(rank)
        answers = agree.gather(place, None, "the places in the mesh")
        data = [other for other in world if answers[other] == place]
    elif parallel_state.model_parallel_is_initialized():
        return parallel_state.get_process_groups()
    elif (found := megatron.groups_of(outer)) is not None:
        return found
    elif (ddp := wrapper_of(outer)) is not None:
        data = dist.get_process_group_ranks(ddp.process_group)
        if getattr(ddp, "device_mesh", None) is not None and len(data) < len(world):
            raise ValueError(
                "torch's DDP has replaced the model's DTensors by plain tensors, so the parts that ranks hold are "
                "unknown; run the program with python -m core verify --whole, which reads the model before the wrap"
            )
        place = data.index(rank)
        answers = agree.gather(place, None, "the places in the data groups")
        model = [other for other in world if answers[other] == place]
    return MeshPlaces(data, model)


def _model_ranks(mesh: DeviceMesh, *, all_data: bool) -> list[int]:
    """Return the ranks of this rank's replica. If ``all_data``, data differs along unnamed dimensions."""
    names = mesh.mesh_dim_names
    if names is None and mesh.ndim > 1:
        raise ValueError(
            f"the mesh {mesh} has {mesh.ndim} dimensions and no names, so it is not known which ranks have other data; "
            f"make it with mesh_dim_names=('dp', 'tp'). Data dimensions are {', '.join(DATA_DIMENSIONS)}"
        )
    if names is None:
        names = ("dp" if all_data else "tp",)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh"
    chosen = tuple(
        place if name in DATA_DIMENSIONS else slice(None) for place, name in zip(coordinate, names, strict=True)
    )
    ranks: list[int] = mesh.mesh[chosen].flatten().tolist()
    return ranks


def _slices(module: nn.Module, placed: Mapping[str, DTensor], groups: ProcessGroups) -> dict[str, GlobalSlice]:
    """Find this rank's part of every parameter; the first rank with the same boxes is replica 0. Collective."""
    found = global_slices(module, groups)
    for name, param in module.named_parameters():
        if hasattr(param, "ds_shape"):
            shape = deepspeed.full_shape(param)
            box = Box((0,) * len(shape), (0,) * len(shape), shape)
            found[name] = replace(found[name], shape=shape, local_shape=shape, boxes=(box,))
    for name, param in placed.items():
        found[name] = replace(found[name], shape=tuple(param.shape), **_boxes(name, param))
    mine = {name: (place.name, place.boxes) for name, place in found.items()}
    everyone = agree.gather(mine, None, "the parts of the parameters")
    names = [{name for name, _ in parts.values()} for parts in everyone.values()]
    if isinstance(groups, MeshPlaces) and not set.intersection(*names):
        raise ValueError(
            "the ranks have no parameter in common, as stages of torch.distributed.pipelining. Stages are compared "
            "under PipelineRunner and Megatron Core's schedules only; check the program with one stage"
        )
    before = {part for rank in range(dist.get_rank()) for part in everyone[rank].values()}
    return {name: replace(place, replica=int(mine[name] in before)) for name, place in found.items()}


def _boxes(name: str, param: DTensor) -> dict[str, Any]:
    local = tuple(param.to_local().shape)
    chunks = [chunk for chunk in param.__create_chunk_list__() if chunk.sizes.numel()]
    if len(chunks) > 1 or (chunks and tuple(chunks[0].sizes) != local):
        raise ValueError(f"rank {dist.get_rank()}: parameter {name!r}, placed {param.placements}, is in several pieces")
    start = tuple(0 for _ in local)
    boxes = tuple(Box(tuple(chunk.offsets), start, tuple(chunk.sizes)) for chunk in chunks)
    return {"local_shape": local, "boxes": boxes}


@contextmanager
def some_world() -> Iterator[None]:
    """Provide a process group of one rank inside the context, if the program has not initialized torch.distributed."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
