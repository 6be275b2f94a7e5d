"""TransformersGPT: the model of Hugging Face's transformers as a reference for our GPT, with which it shares no layer.

A reference of the same classes cannot see a layer that is wrong in both, such as an attention that is not causal.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.models.transformers_layouts import config_for_transformers, from_transformers, paths_of, to_transformers
from core.transformer.transformer_config import TransformerConfig
from core.verify.in_double import InDouble


class TransformersGPT(nn.Module):
    """A model that core.convert has written, made by `AutoModelForCausalLM`, with our names of parameters.

    check_gradients and the command take it for our GPT of themselves.

    config: of our GPT; how it is split does not matter. ValueError if it has no counterpart there, as with experts.
    Its modules are called like ours where both compute the same, so that a wrong one can be named.

        check_gradients(build_gpt, loss_fn, batch, reference_fn=lambda: TransformersGPT(config))
    """

    pre_process = post_process = True  # as a pipeline of one stage

    def __init__(self, config: TransformerConfig) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        self.config = config
        theirs = AutoConfig.for_model(**config_for_transformers(config))
        with InDouble():  # tables of rotary positions
            model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
        self.theirs = [model]  # a list, so that its parameters are none of this module's
        for name, value in from_transformers(config, model.state_dict()).items():
            *path, last = name.split(".")
            self._part(path).register_parameter(last, nn.Parameter(value.clone()))
        for param in model.parameters():
            param.data = param.data.new_empty(0)  # each forward brings its own
        modules = dict(model.named_modules())
        for ours, name in paths_of(config).items():
            part = self._part(ours.split("."))
            modules[name].register_forward_hook(lambda _, __, output, part=part: part(output))

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Loss of each token [b, s] given labels, else logits [s, b, vocabulary]. Arguments are those of our GPT."""
        weights = to_transformers(self.config, dict(self.named_parameters()))
        dtype = next(iter(weights.values())).dtype
        given: dict[str, Any] = {"use_cache": False, "position_ids": position_ids}
        if document_ids is not None:
            hidden = ~(document_ids[:, :, None] == document_ids[:, None, :]).tril()[:, None]  # [b, 1, s, s]
            given["attention_mask"] = torch.zeros_like(hidden, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
        with InDouble() if dtype == torch.float64 else nullcontext():
            output: Any = torch.func.functional_call(self.theirs[0], weights, (input_ids,), given)
        logits: Tensor = output.logits
        if labels is None:
            return logits.transpose(0, 1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)

    def set_input_tensor(self, hidden: Tensor | None) -> None:
        """See GPTModel; there is no stage before."""

    def _part(self, path: list[str]) -> nn.Module:
        """The module at a path, made where there is none."""
        part: nn.Module = self
        for name in path:
            if name not in part._modules:
                part.add_module(name, _Named())
            part = part.get_submodule(name)
        return part


class _Named(nn.Module):
    """Gives what it is given, so that hooks on it see the output of a module of theirs."""

    def forward(self, output: Any) -> Any:
        """See above."""
        return output
