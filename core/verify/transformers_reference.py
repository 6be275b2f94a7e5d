"""Hugging Face's transformers as an independent reference for our GPT.

A reference built from the same classes cannot detect a layer that is wrong in both, such as attention without a causal
mask.
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
    """Transformers model with our GPT's parameter names, in the form that python -m core convert would write.

    check_gradients and ``python -m core verify`` use it for our GPT by default. Its modules have our names if both
    compute the same, so that a report can name a wrong module.

        check_gradients(build_gpt, loss_fn, batch, reference_fn=lambda: TransformersGPT(config))

    Args:
        config: Config of our GPT; its parallel sizes do not matter.

    Raises:
        ValueError: If transformers has no equivalent model, as with experts.
    """

    pre_process = post_process = True  # like a pipeline with a single stage

    def __init__(self, config: TransformerConfig) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        self.config = config
        theirs = AutoConfig.for_model(**config_for_transformers(config))
        with InDouble():  # rotary position tables
            model = AutoModelForCausalLM.from_config(theirs, attn_implementation="eager")
        self.theirs = [model]  # a list, so that its parameters are not registered here
        for name, value in from_transformers(config, model.state_dict()).items():
            *path, last = name.split(".")
            self._part(path).register_parameter(last, nn.Parameter(value.clone()))
        for param in model.parameters():
            param.data = param.data.new_empty(0)  # each forward supplies the weights
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
        """Compute the loss of each token, or logits.

        Args:
            input_ids: [b, s].
            labels: [b, s], or None for logits.
            position_ids: As in our GPT.
            document_ids: As in our GPT.

        Returns:
            Losses [b, s] with labels, else logits [s, b, vocabulary].
        """
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
        """See GPTModel; there is no previous stage."""

    def _part(self, path: list[str]) -> nn.Module:
        """Return the module at a path; create missing ones."""
        part: nn.Module = self
        for name in path:
            if name not in part._modules:
                part.add_module(name, _Named())
            part = part.get_submodule(name)
        return part


class _Named(nn.Module):
    """Module that returns its input, so that hooks on it see the output of a transformers module."""

    def forward(self, output: Any) -> Any:
        """Return the input."""
        return output
