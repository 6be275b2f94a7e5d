"""Small transformers models for these tests, the same in every process."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from core import parallel_state
from core.tensor_parallel.initialization import tensor_parallel_join

VOCABULARY = 97  # does not divide: the last rank holds padding


def small(family: str, dtype: torch.dtype = torch.float64, **values: Any) -> Any:
    """A causal model with two layers, in which nothing is zero or at its initial value."""
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **{**sizes, **heads, **values})
    config.update({"_experts_implementation": "eager"})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + 0.1 * torch.randn(parameter.shape))
    return model.to(dtype)


def tokens(batch: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    """Token ids; with a seed of its own for each data rank."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def whole(model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A slice of a split model, or of a gradient, in the shape of the whole model. Collective."""
    split = model.split_report.plan.splits.get(name)
    group = parallel_state.get_process_groups().tp
    if split is None or group is None or group.size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return tensor_parallel_join(parts, split.dim, split.blocks).narrow(split.dim, 0, split.length)


def whole_copy(model: Any) -> Any:
    """A copy to compute the expected values with."""
    return copy.deepcopy(model)


def grad_times(factor: float, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same output, and a gradient times a factor."""

    def mutated(*args: Any) -> Any:
        output = function(*args)
        return output * factor + (output * (1.0 - factor)).detach() if output.requires_grad else output

    return mutated
