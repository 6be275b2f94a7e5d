"""Gradient checkpointing of some layers: their activations are recomputed in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.hugging_face.read.transformers_plans import checkpoint_each_layer


@dataclass(frozen=True)
class GradientCheckpointConfig:
    """Selects the layers that recompute their activations in backward.

    Args:
        gradient_checkpointing_ratio: Share of each stage's layers, from the first one, between 0 and 1.
    """

    gradient_checkpointing_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.gradient_checkpointing_ratio <= 1:
            raise ValueError(
                f"gradient_checkpointing_ratio is {self.gradient_checkpointing_ratio}; it is a part of the layers, "
                "between 0 and 1"
            )

    def layers_of(self, stage: int, count: int) -> int:
        """Return the number of a stage's layers that are checkpointed, counted from the first.

        Args:
            stage (int): Index of the stage.
            count (int): Number of its layers.
        """
        return int(self.gradient_checkpointing_ratio * count)


@dataclass(frozen=True)
class PipelineGradientCheckpointConfig(GradientCheckpointConfig):
    """Selects the layers that recompute their activations, for each pipeline stage.

    Args:
        num_ckpt_layers_per_stage: Number of checkpointed layers of each stage. Defaults to the ratio.
    """

    num_ckpt_layers_per_stage: Sequence[int] | None = None

    def layers_of(self, stage: int, count: int) -> int:
        """Return the number of a stage's layers that are checkpointed, counted from the first.

        Args:
            stage (int): Index of the stage.
            count (int): Number of its layers.

        Raises:
            ValueError: If the config does not name the stage, or names more layers than it has.
        """
        if self.num_ckpt_layers_per_stage is None:
            return super().layers_of(stage, count)
        counts = self.num_ckpt_layers_per_stage
        if stage >= len(counts) or not 0 <= counts[stage] <= count:
            raise ValueError(
                f"num_ckpt_layers_per_stage is {list(counts)}, and stage {stage} has {count} layers; name every stage, "
                "with at most its layers"
            )
        return int(counts[stage])


def checkpoint_layers(parts: Sequence[Any], config: GradientCheckpointConfig, lists: Sequence[str]) -> None:
    """Turn on transformers' own checkpointing in the first layers of each part of a model."""
    for part in parts:
        checkpoint_each_layer(part)
        blocks = [layer for name in lists for layer in part.get_submodule(name) if [*layer.parameters()]]
        stage = getattr(getattr(vars(part).get("forward"), "part", None), "index", 0)
        count = config.layers_of(stage, len(blocks))
        for number, layer in enumerate(blocks):
            layer.gradient_checkpointing = number < count
