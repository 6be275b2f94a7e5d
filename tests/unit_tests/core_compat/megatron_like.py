"""A model with Megatron's arguments, call and tags, for tests where Megatron Core itself is not installed.

Like Megatron's own it counts a stage's layers from 0 and says their numbers in the whole model by `layer_number`.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core import parallel_state
from core.models.gpt import GPTModel as OurGPTModel
from core.pipeline_parallel import PipelineLayout
from core.transformer import TransformerConfig as OurConfig


@dataclass
class TransformerConfig(OurConfig):
    """Our fields, and further ones of Megatron's that the programs of the tests set."""

    pipeline_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.use_cpu_initialization = False  # weights are drawn whole, on the CPU, in any case
        super().__post_init__()


class GPTModel(OurGPTModel):
    """Called as Megatron's: (tokens, positions, mask, labels)."""

    def __init__(
        self, config: TransformerConfig, transformer_layer_spec: Any, vocab_size: int, max_sequence_length: int,
        pre_process: bool = True, post_process: bool = True, share_embeddings_and_output_weights: bool = False,
    ) -> None:  # fmt: skip
        own: dict[str, Any] = {"vocab_size": vocab_size, "max_sequence_length": max_sequence_length}
        own["share_embeddings_and_output_weights"] = share_embeddings_and_output_weights
        groups = parallel_state.get_process_groups()
        layout = PipelineLayout.even(config.num_layers, config.pipeline_model_parallel_size)
        numbers = layout.stage(groups.rank("pp")).layer_numbers
        place: dict[str, Any] = {"pre_process": pre_process, "post_process": post_process, "layer_numbers": numbers}
        super().__init__(dataclasses.replace(config, **own), groups, **place)
        for part in self.modules():
            vars(part).pop("global_names", None)
        for number, layer in zip(numbers, self.decoder.layers, strict=True):
            layer.layer_number = number + 1

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None = None
    ) -> Tensor:
        return super().forward(input_ids, labels, position_ids=position_ids if self.pre_process else None)


@contextmanager
def installed() -> Iterator[None]:
    """`megatron.core` is this model, and a parallel_state whose groups nothing here needs."""
    state = {"initialize_model_parallel": lambda *sizes, **more: None, "destroy_model_parallel": lambda: None}
    contents: dict[str, dict[str, Any]] = {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.parallel_state": state,
        "megatron.core.tensor_parallel": {},
        "megatron.core.tensor_parallel.random": {"initialize_rng_tracker": lambda **options: None},
        "megatron.core.models": {},
        "megatron.core.models.gpt": {"GPTModel": GPTModel},
        "megatron.core.models.gpt.gpt_layer_specs": {"get_gpt_layer_local_spec": lambda: None},
        "megatron.core.transformer": {"TransformerConfig": TransformerConfig},
    }
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "megatron"}
    for name, members in contents.items():
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(members, __path__=[])
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    try:
        yield
    finally:
        for name in contents:
            del sys.modules[name]
        sys.modules.update(before)


def built(
    tensor_parallel: int = 1, pipeline_parallel: int = 1, sequence_parallel: bool = False, *, vocabulary: int = 32,
    length: int = 16, **fields: Any,
) -> GPTModel:  # fmt: skip
    """This rank's part of a GPT of two layers, tied, without dropout."""
    sizes = {"tensor_model_parallel_size": tensor_parallel, "pipeline_model_parallel_size": pipeline_parallel}
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, **sizes, sequence_parallel=sequence_parallel,
        pipeline_dtype=torch.float32, **fields,
    )  # fmt: skip
    place = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    return GPTModel(config, None, vocabulary, length, *place, share_embeddings_and_output_weights=True)
