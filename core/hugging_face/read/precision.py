"""Cast a model to 16 bits as transformers loads it: tensors that it keeps in fp32, such as rotary frequencies, stay."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

ADAPTED = ".base_layer."  # occurs in names of parameters with a peft adapter
KEPT = "_get_dtype_plan"  # method of transformers models: name patterns -> dtype that they keep


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast floating-point parameters and buffers of any module to fp16 or bf16, in place, and return it.

    Complex tensors and 8-bit floats stay. Transformers models, also nested ones and ones on the meta device, get the
    dtypes of ``from_pretrained(dtype=...)``: buffers that are computed in fp32 (rotary frequencies) are not rounded,
    and modules that a family keeps in fp32 are in fp32. A buffer that no file stores stays unchanged if its family
    computes it in fp32. All other modules are cast completely.
    """
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    in_8_bits = {name: t.dtype for name, t in tensors.items() if t.is_floating_point() and t.dtype.itemsize == 1}
    kept = kept_dtypes(model, dtype) | in_8_bits
    before = {name: tensors[name].data for name in kept}
    model = model.half() if dtype is torch.float16 else model.bfloat16()  # unlike `to`, this keeps complex buffers
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
    """Perturb the outputs of matrix layers by their 16-bit rounding inside the context, equally on all ranks.

    This estimates how far a different order of summation may move the model's output; with routers, that can be far.
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
    """Return the dtypes of tensors that transformers keeps in another dtype when it loads a model in ``dtype``.

    Transformers models inside any module are considered.
    """
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
    """Yield (prefix of its names, model) of each outermost transformers model in a module."""
    if hasattr(type(model), KEPT):  # peft's wrapper forwards attributes to its model
        yield place, model
        return
    for name, child in model.named_children():
        yield from _outermost(child, f"{place}{name}.")


def dtypes_of(model: Any, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """Return the dtype of each floating-point tensor of a transformers model loaded in ``dtype``, by name.

    A copy is built on the meta device to find the tensors that the family creates in fp32. Tensors of adapters are not
    included.
    """
    config = copy.deepcopy(model.config)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype  # some families create nested models or activations in this dtype
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
