"""Experts of one rank: MLPs of equal shape with stacked weights, applied to tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.distributed.contract.gradient_contract import declare_gradient
from core.groups.process_groups import ProcessGroups
from core.tensor_parallel import draw_master, tensor_parallel_slice
from core.tensor_parallel.initialization import InitMethod, normal_init, set_tensor_model_parallel_attributes
from core.tensor_parallel.mappings import resolve_groups
from core.tensor_parallel.unsaved_output import computed_again, run_unsaved
from core.transformer.mlp import ACTIVATIONS
from core.transformer.transformer_config import TransformerConfig


class Experts(nn.Module):
    """Experts of one rank, as MLPs with stacked weights.

    Rank r of 'ep' has experts r * n to (r + 1) * n - 1, each split over 'expt_tp'. Shapes: weight1 [n, parts * ffn /
    expt_tp, hidden], weight2 [n, hidden, ffn / expt_tp], with parts = 2 for SwiGLU. All parameters have
    ``allreduce=False``, because their gradient already covers the tokens of all 'ep' ranks and is only reduced over
    'expt_dp'.

    Args:
        config: Configuration with ``num_moe_experts``.
        pg_collection: Process groups. Defaults to those of ``parallel_state``, if initialized.
        name: Module path in the full model. With the expert's number it seeds the weights, equally in every layout.
        recompute_activation: See ``core.transformer.MLP``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroups | None = None,
        name: str | None = None,
        recompute_activation: bool = False,
    ) -> None:
        super().__init__()
        self.recompute_activation = recompute_activation
        self.activation = ACTIVATIONS[config.activation]
        groups = resolve_groups(pg_collection)
        if config.num_moe_experts is None:
            raise ValueError("Experts needs config.num_moe_experts")
        self.config = config
        self.gated = config.activation == "swiglu"
        self.num_experts: int = config.num_moe_experts
        self.num_local_experts = self.num_experts // groups.size("ep")
        self.first_expert = groups.rank("ep") * self.num_local_experts
        self.tp_size, self.tp_rank = groups.size("expt_tp"), groups.rank("expt_tp")
        parts, ffn, hidden = (2 if self.gated else 1), config.expert_ffn_size, config.hidden_size
        self.weight1 = self._weights(
            (parts * ffn, hidden), 0, parts, normal_init(config.init_method_std), name and f"{name}.{{}}.weight1"
        )
        self.weight2 = self._weights(
            (hidden, ffn), 1, 1, normal_init(config.output_init_method_std), name and f"{name}.{{}}.weight2"
        )
        self.bias1: nn.Parameter | None = None
        self.bias2: nn.Parameter | None = None
        if config.add_bias_linear:
            rows = parts * ffn // self.tp_size
            self.bias1 = nn.Parameter(torch.zeros(self.num_local_experts, rows, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.bias1, True, 1, parts)
            self.bias2 = nn.Parameter(torch.zeros(self.num_local_experts, hidden, dtype=config.params_dtype))
            if self.tp_size > 1:  # only the first of the ranks that share an expert adds it
                declare_gradient(self.bias2, partial_over=("expt_tp",))
        for param in self.parameters():
            param.allreduce = False
            param.expert_dim = 0

    def _weights(
        self, shape: tuple[int, int], dim: int, stride: int, init_method: InitMethod, name: str | None
    ) -> nn.Parameter:
        local = list(shape)
        local[dim] //= self.tp_size
        weight = nn.Parameter(torch.empty(self.num_local_experts, *local, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(weight, True, dim + 1, stride)
        if self.config.perform_initialization:
            mine = range(self.first_expert, self.first_expert + self.num_local_experts)
            # Without a name, numbers come from torch's stream, which must advance equally on ranks with other experts.
            for expert in range(self.num_experts) if name is None else mine:
                full_name = None if name is None else name.format(expert)
                master = draw_master(shape, init_method, full_name, self.config.init_seed)
                if expert in mine:
                    piece = tensor_parallel_slice(master, dim, self.tp_size, self.tp_rank, stride)
                    weight.data[expert - self.first_expert].copy_(piece)
        return weight

    def forward(self, tokens: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        """Run every expert on its tokens, without communication.

        An expert without tokens also runs, so its gradient is zero instead of missing.

        Args:
            tokens (Tensor): [tokens, hidden], sorted by expert.
            tokens_per_expert (Sequence[int]): Number of tokens of each local expert.

        Returns:
            Tensor of shape [tokens, hidden], this rank's part of a sum over 'expt_tp'.
        """
        if self._can_group(tokens):
            return self._run_grouped(tokens, tokens_per_expert)
        bias1 = [None] * self.num_local_experts if self.bias1 is None else self.bias1.unbind(0)
        # One unbind has one backward; indexing would make a gradient of all experts for each of them.
        outputs = [
            self._down(F.linear(part, up, bias), partial(F.linear, weight=down))
            for part, up, bias, down in zip(
                tokens.split(list(tokens_per_expert)),
                self.weight1.unbind(0),
                bias1,
                self.weight2.unbind(0),
                strict=True,
            )
        ]
        return self._add_bias2(torch.cat(outputs), self._repeats(tokens, tokens_per_expert))

    def _run_grouped(self, tokens: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        repeats = self._repeats(tokens, tokens_per_expert)
        ends = repeats.cumsum(0).to(torch.int32)
        wide = F.grouped_mm(tokens, self.weight1.transpose(1, 2), offs=ends)
        if self.bias1 is not None:
            wide = wide + self.bias1.repeat_interleave(repeats, dim=0, output_size=tokens.shape[0])
        output = self._down(wide, lambda active: F.grouped_mm(active, self.weight2.transpose(1, 2), offs=ends))
        return self._add_bias2(output, repeats)

    def _down(self, wide: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        again = self.recompute_activation and self.training
        active = computed_again(self.activation, wide) if again else self.activation(wide)
        return run_unsaved(product, active)

    def _add_bias2(self, output: Tensor, repeats: Tensor) -> Tensor:
        if self.bias2 is None:
            return output
        bias = self.bias2.repeat_interleave(repeats, dim=0, output_size=output.shape[0])
        return output + (bias if self.tp_rank == 0 else bias * 0.0)

    @staticmethod
    def _repeats(tokens: Tensor, tokens_per_expert: Sequence[int]) -> Tensor:
        return torch.tensor(tokens_per_expert, device=tokens.device)

    def _can_group(self, tokens: Tensor) -> bool:
        """Return ``True`` if torch has a grouped kernel for these tokens.

        It needs rows of a multiple of 16 bytes, at least one token, and on a GPU bf16 since Ampere.
        """
        dtype = tokens.dtype
        if not (self.config.moe_grouped_gemm and hasattr(F, "grouped_mm") and tokens.shape[0]):
            return False
        if dtype != self.weight1.dtype or dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return False
        if tokens.is_cuda and (dtype != torch.bfloat16 or torch.cuda.get_device_capability(tokens.device) < (8, 0)):
            return False
        return all(size * dtype.itemsize % 16 == 0 for size in (*self.weight1.shape[1:], *self.weight2.shape[1:]))
