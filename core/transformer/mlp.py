"""MLP of a transformer layer, with hidden channels split over tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from core.groups.process_groups import ProcessGroups
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from core.tensor_parallel.initialization import normal_init
from core.tensor_parallel.unsaved_output import computed_again, run_unsaved
from core.transformer.transformer_config import TransformerConfig


def swiglu(wide: Tensor) -> Tensor:
    """Compute silu(gate) * value, with gate and value concatenated in the last dimension."""
    gate, value = wide.chunk(2, dim=-1)
    return F.silu(gate) * value


def gelu(wide: Tensor) -> Tensor:
    """Compute GELU elementwise."""
    return F.gelu(wide)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "swiglu": swiglu}


class MLP(nn.Module):
    """MLP with an up projection, an activation and a down projection.

    With SwiGLU (arXiv 2002.05202) the up projection computes a gate and a value.

    Args:
        config (TransformerConfig): Model configuration.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
        name (str): Module path in the full model, which seeds its weights.
        recompute_activation (bool): Free the output of the activation after use, and recompute it in backward.
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
        self.gated = config.activation == "swiglu"
        parts = 2 if self.gated else 1
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            parts * config.ffn_size,
            config=config,
            init_method=normal_init(config.init_method_std),
            bias=config.add_bias_linear,
            stride=parts,  # gate and value are split separately, so a rank has matching halves
            pg_collection=pg_collection,
            name=None if name is None else f"{name}.linear_fc1",
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            config=config,
            init_method=normal_init(config.output_init_method_std),
            bias=config.add_bias_linear,
            pg_collection=pg_collection,
            name=None if name is None else f"{name}.linear_fc2",
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the MLP to [s, b, hidden], or to [s / tp, b, hidden] under sequence parallelism."""
        wide, _ = self.linear_fc1(hidden)
        again = self.recompute_activation and self.training
        wide = computed_again(self.activation, wide) if again else self.activation(wide)
        return run_unsaved(self._down, wide)

    def _down(self, wide: Tensor) -> Tensor:
        output, _ = self.linear_fc2(wide)
        return output
