"""What our GPT does not need of the sync rules, added to it: a parameter for each, so that the oracle sees them all.

A conditioner on every stage (pipeline-replicated sum, 'pp'); position embeddings on the last stage too (position
embedding sum, 'pos_embd'); and norms and expert biases of which each rank has n times its part (the means over 'tp' and
'expt_tp').
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from core.context_parallel import positions_on_rank
from core.distributed.contract.gradient_contract import DECLARATION
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.moe import Experts
from core.tensor_parallel import draw_master
from core.tensor_parallel.initialization import normal_init

CONDITIONER = "conditioner"


class Tail(nn.Module):
    """Positions once more, before the last norm: a copy of the embedding's where that lies on another stage.

    Its attribute has the name that tells position embeddings from others.
    """

    def __init__(self, embeddings: nn.Embedding) -> None:
        super().__init__()
        self.position_embeddings = embeddings


def add_tagged(model: GPTModel, groups: ProcessGroups) -> None:
    """Add the parameters above to a stage, or to the whole model, and put them into its forward."""
    _add_conditioner(model)
    if model.post_process:
        _add_tail(model, groups)
    for name, param in model.named_parameters():
        if name.endswith("input_layernorm.weight") and model.config.sequence_parallel:
            param.sequence_parallel = False
            _average(param, groups.size("tp"))
    for module in model.modules():
        if isinstance(module, Experts) and module.bias2 is not None and groups.size("expt_tp") > 1:
            delattr(module.bias2, DECLARATION)
            _average(module.bias2, groups.size("expt_tp"))


def _average(param: nn.Parameter, ranks: int) -> None:
    """Each rank's part of the gradient times the number of ranks: the mean is then what the sum was."""
    param.average_gradients_across_tp_domain = True
    param.register_hook(lambda grad: grad * ranks)


def _add_conditioner(model: GPTModel) -> None:
    config = model.config
    weight = nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
    weight.pipeline_parallel = True
    weight.sequence_parallel = config.sequence_parallel
    model.register_parameter(CONDITIONER, weight)

    def condition(_layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] * weight, *inputs[1:])

    for layer in model.decoder.layers:  # each one, so that it does not matter where stages begin
        layer.register_forward_pre_hook(condition)


def _add_tail(model: GPTModel, groups: ProcessGroups) -> None:
    config = model.config
    shape = (config.max_sequence_length, config.hidden_size)
    if model.pre_process:
        embeddings = model.embedding.position_embeddings
        assert embeddings is not None, "a tagged model has learned positions"
    else:
        name = "embedding.position_embeddings.weight"  # drawn as the first stage's is
        weight = draw_master(shape, normal_init(config.init_method_std), name, config.init_seed)
        embeddings = nn.Embedding.from_pretrained(weight.to(config.params_dtype), freeze=False)
        embeddings.weight.sequence_parallel = config.sequence_parallel
        embeddings.weight.shared = True  # norms count the first stage's
        model.tail = Tail(embeddings)
        names = getattr(model, "global_names", {})
        model.global_names = {**names, "tail.position_embeddings": "embedding.position_embeddings"}

    def add_positions(_norm: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        tp = groups.size("tp") if config.sequence_parallel else 1
        length = inputs[0].shape[0] * tp
        positions = positions_on_rank(length, groups.size("cp"), groups.rank("cp"), inputs[0].device)
        mine = positions.chunk(tp)[groups.rank("tp") if tp > 1 else 0]
        return (inputs[0] + embeddings(mine).unsqueeze(1),)

    final = model.decoder.final_layernorm
    assert final is not None, "the last stage ends with a norm"
    final.register_forward_pre_hook(add_positions)
