"""Cast a model to 16 bits as transformers loads it: what it keeps in fp32 stays, such as rotary frequencies."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

ADAPTED = ".base_layer."  # in names of parameters that peft has added an adapter to
KEPT = "_get_dtype_plan"  # transformers' method: patterns of names -> the dtype that they keep in a precision


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast floating parameters and buffers to fp16 or bf16, in place. Returns the model. Local.

    Complex tensors and floats of 8 bits stay. Transformers models, also inside of others and without memory, get the
    dtypes that `from_pretrained(dtype=...)` gives: buffers that are made in fp32 (rotary frequencies) are not rounded,
    and the modules that a family keeps in fp32 are in fp32. A buffer in no file is unchanged if its family makes it in
    fp32. Other modules are cast whole.
    """
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    in_8_bits = {name: t.dtype for name, t in tensors.items() if t.is_floating_point() and t.dtype.itemsize == 1}
    kept = kept_dtypes(model, dtype) | in_8_bits
    before = {name: tensors[name].data for name in kept}
    model = model.half() if dtype is torch.float16 else model.bfloat16()  # complex buffers stay, unlike by `to`
    for name, wanted in kept.items():
        values = before[name].to(wanted)
        if isinstance(tensors[name], nn.Parameter):
            tensors[name].data = values
        else:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, values)
    return model


@contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Inside, outputs of layers with a matrix are off by their rounding in 16 bits, equally on all ranks.

    So far another order of sums may move a model's output; where routers choose, that is far.
    """
    generator = torch.Generator("cpu").manual_seed(3)

    def move(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.dtype not in (torch.float16, torch.bfloat16):
            return output
        noise = torch.randn(output.shape, generator=generator, device="cpu").to(output.device, output.dtype)
        return output * (1 + torch.finfo(output.dtype).eps * noise)

    with ExitStack() as stack:
        for module in model.modules():
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
                stack.callback(module.register_forward_hook(move).remove)
        yield


def kept_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Names of floating tensors that transformers has in another dtype when it loads a model in `dtype` -> that one."""
    kept = {}
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for place, inner in _outermost(model, ""):
        wanted = dtypes_of(inner, dtype)
        for name, tensor in tensors.items():
            known = wanted.get(name.removeprefix(place).replace(ADAPTED, "."), dtype)
            if name.startswith(place) and tensor.is_floating_point() and known is not dtype:
                kept[name] = known
    return kept


def _outermost(model: nn.Module, place: str) -> Iterator[tuple[str, Any]]:
    """(how its names begin, it) of each transformers model in a module that lies in no other one."""
    if hasattr(type(model), KEPT):  # peft's wrapper passes on the attributes of its model
        yield place, model
        return
    for name, child in model.named_children():
        yield from _outermost(child, f"{place}{name}.")


def dtypes_of(model: Any, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """The dtype of each floating tensor of a transformers model that is loaded in `dtype`, by its name.

    A model is made on the meta device to see what the family makes in fp32. Tensors of adapters are not among them.
    """
    config = copy.deepcopy(model.config)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype  # some families make models inside of them, or activations, in what it says
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            like = type(model)(config)
    finally:
        torch.set_default_dtype(before)
    tensors = [*like.named_parameters(remove_duplicate=False), *like.named_buffers(remove_duplicate=False)]
    found = {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}
    stored = like.state_dict().keys()
    for pattern, kept in getattr(like, KEPT)(dtype).items():
        kept_here = re.compile(pattern.replace("*", ".*"))
        found.update({name: kept for name in found.keys() & stored if kept_here.search(name)})
    return found
