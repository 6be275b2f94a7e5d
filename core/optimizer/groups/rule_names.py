"""The names that rules see: those of the whole model, in every stage of a pipeline, as in a checkpoint.

A stage counts its own layers from 0. What they are called in the whole model its modules say (`global_names`, see
core.distributed.contract.global_names); where they do not, two stages have one name for different parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from core.distributed.contract.global_names import namer
from core.distributed.distributed_data_parallel import DistributedDataParallel
from core.distributed.finalize_model_grads import models_of
from core.groups import agree
from core.optimizer.groups.model_check import params_of


def trainable_params(chunks: Sequence[DistributedDataParallel]) -> list[tuple[str, nn.Parameter, bool]]:
    """(name in the whole model, parameter, True for an expert's) of everything that this rank trains."""
    namers = [namer(chunk.module) for chunk in chunks]
    return [(namers[number](contract.name), param, contract.is_expert) for number, param, contract in params_of(chunks)]


def frozen_params(chunks: Sequence[DistributedDataParallel]) -> list[tuple[str, nn.Parameter]]:
    """(name in the whole model, parameter) of those that do not train."""
    namers = [namer(chunk.module) for chunk in chunks]
    return [
        (global_name(name), param)
        for global_name, chunk in zip(namers, chunks, strict=True)
        for name, param in chunk.module.named_parameters()
        if not param.requires_grad
    ]


def repeated_name(chunks: Sequence[DistributedDataParallel]) -> str | None:
    """In words a name that two stages have for different parameters; None if there is none. Collective over 'pp'."""
    groups = chunks[0].groups
    if groups.size("pp") == 1:
        return None
    namers, models = [namer(chunk.module) for chunk in chunks], models_of(chunks)
    mine = {
        id(param): (models[number], namers[number](contract.name))
        for number, param, contract in params_of(chunks)
        if not contract.crosses_stages  # a copy of one weight, such as a tied embedding
    }
    holder: dict[tuple[int, str], int] = {}
    for rank, held in agree.gather(list(mine.values()), groups.require("pp"), "the names of stages").items():
        for key in held:
            if key in holder:
                return f"{key[1]!r} is the name of two parameters, of pipeline stages on ranks {holder[key]} and {rank}"
            holder[key] = rank
    return None
