"""The MLP of a transformer layer, its hidden channels split over tensor parallelism."""

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
    """silu(gate) * value of [..., gate and value side by side]."""
    gate, value = wide.chunk(2, dim=-1)
    return F.silu(gate) * value


def gelu(wide: Tensor) -> Tensor:
    """GELU of any shape, elementwise."""
    return F.gelu(wide)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": gelu, "swiglu": swiglu}


class MLP(nn.Module):
    """Up, activation, down; with SwiGLU (arXiv 2002.05202) up is a gate and a value side by side.

    recompute_activation: True if backward computes the output of the activation again, which is freed in between.
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
            stride=parts,  # gate and value are split each for itself, so a rank's halves belong together
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
        """[s, b, hidden] to the same, or [s / tp, b, hidden] under sequence parallelism."""
        wide, _ = self.linear_fc1(hidden)
        again = self.recompute_activation and self.training
        wide = computed_again(self.activation, wide) if again else self.activation(wide)
        return run_unsaved(self._down, wide)

    def _down(self, wide: Tensor) -> Tensor:
        output, _ = self.linear_fc2(wide)
        return output
