"""Our GPT as a model to plan: its stages on the meta device, and the figures of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.distributed import DistributedDataParallelConfig
from core.models.gpt import GPTModel
from core.pipeline_parallel import PipelineLayout, build_gpt_stages, gpt_activations
from core.transformer.rotary import RotaryEmbedding
from core.transformer.transformer_config import TransformerConfig
from core_plan.fake_collectives import fake_collectives
from core_plan.job.config import JobConfig
from core_plan.job.model_config import ddp_config, optimizer_config, transformer_config
from core_plan.job.plan import BYTES, plan_job
from core_plan.job.sizes import check_ranks, check_vocabulary
from core_plan.live_memory import AFTER, BEFORE
from core_plan.planned_groups import PlannedGroups
from core_plan.run_memory import Run
from core_plan.step_figures import PartFigures, layers_in_words, watch_step
from core_plan.without_values import WithoutValues


class LayerKind(NamedTuple):
    """Layers of equal cost."""

    number: int  # number of the first such layer
    recomputed: bool  # completely or in parts


# Names in recompute_modules that only one kind of layer has.
_OF_EXPERTS, _OF_DENSE = {"moe", "moe_act", "shared_experts"}, {"mlp", "mlp_act"}


class PassOn(nn.Module):
    """Identity module that replaces attention and MLP of a layer, so that only the surrounding code runs."""

    def forward(self, hidden: Tensor, *_: Any) -> Tensor:
        """Return the input."""
        return hidden


@dataclass(frozen=True)
class GptSource:
    """A GPT with configuration ``config`` and microbatches of [micro_batch_size, sequence_length] tokens."""

    config: TransformerConfig
    micro_batch_size: int
    sequence_length: int

    def stages(self, layout: PipelineLayout, groups: PlannedGroups) -> Sequence[nn.Module]:
        """Build the stages of the planned rank on the meta device, as a job builds them."""
        with torch.device("meta"):
            return build_gpt_stages(replace(self.config, perform_initialization=False), layout, groups)

    def sent_bytes(self) -> int:
        """Return the bytes that one stage sends to the next for a microbatch."""
        return sum(
            tensor.nbytes for tensor in gpt_activations(self.config, self.micro_batch_size, self.sequence_length)
        )

    def parts_of_stage(self, layout: PipelineLayout, stage: int) -> list[str | LayerKind]:
        """Return the parts of a stage in order: names of its ends and kinds of its layers."""
        spec = layout.stage(stage)
        count = self.config.recompute_num_layers
        recomputed = len(spec.layer_numbers) if count is None else count
        if self.config.recompute_granularity is None:
            recomputed = 0
        kinds = [self._kind(number, place < recomputed) for place, number in enumerate(spec.layer_numbers)]
        return [*[BEFORE] * spec.pre_process, *kinds, *[AFTER] * spec.post_process]

    def _kind(self, number: int, recomputed: bool) -> LayerKind:
        has_experts = self.config.is_moe_layer(number)
        first = next(n for n in range(number + 1) if self.config.is_moe_layer(n) == has_experts)
        return LayerKind(first, recomputed)

    def name_of_layers(self, kind: LayerKind) -> str:
        """Describe layers of a kind."""
        has_experts = None if self.config.num_moe_experts is None else self.config.is_moe_layer(kind.number)
        parts = sorted(self.config.recomputed_parts - (_OF_DENSE if has_experts else _OF_EXPERTS))
        again = f"{', '.join(parts)} computed again".removeprefix(" ")
        return layers_in_words(has_experts, again if kind.recomputed else "")

    def figures(
        self,
        parts: Sequence[str | LayerKind],
        groups: PlannedGroups,
        ddp: DistributedDataParallelConfig,
    ) -> dict[str | LayerKind, PartFigures]:
        """Return the figures of the ends, and of the layer kinds among ``parts``."""
        found: dict[str | LayerKind, PartFigures] = {}
        kinds = [part for part in dict.fromkeys(parts) if isinstance(part, LayerKind)]
        for recomputed in (False, True):
            some = [kind for kind in kinds if kind.recomputed == recomputed]
            if some or not (recomputed or kinds):
                found |= self._watch(some, groups, recomputed, ddp)
        return found

    def _watch(
        self, kinds: Sequence[LayerKind], groups: PlannedGroups, recomputed: bool, ddp: DistributedDataParallelConfig
    ) -> dict[str | LayerKind, PartFigures]:
        config = replace(
            self.config,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
            perform_initialization=False,
            recompute_granularity=self.config.recompute_granularity if recomputed else None,
            recompute_num_layers=None,
        )
        shape = self.micro_batch_size, self.sequence_length // self.config.context_parallel_size
        experts = config.num_moe_experts
        chosen = 1.0 if experts is None else config.moe_router_topk / experts
        with WithoutValues() as mode, fake_collectives(chosen, on_cpu=groups.ledger.over_gloo):
            numbers = [kind.number for kind in kinds]
            whole = config.recompute_granularity == "full"
            model = GPTModel(config, groups, layer_numbers=[*numbers, *numbers[-1:] * whole])
            if whole:  # the next layer stores the last one's output, and not the head, which stores it in fp32
                model.decoder.layers[-1].self_attention = model.decoder.layers[-1].mlp = PassOn()
            tokens, labels = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
            for rotary in (one for one in model.modules() if isinstance(one, RotaryEmbedding)):
                rotary(torch.empty(shape[1], 1, 1, rotary.head_size, dtype=config.params_dtype))  # fills its cache

            def run() -> Tensor:
                loss: Tensor = model(tokens, labels=labels).mean()
                return loss

            figures = watch_step(model, list(model.decoder.layers), run, groups.ledger, mode, ddp)
        return {
            BEFORE: figures[BEFORE],
            AFTER: figures[AFTER],
            **{kind: figures[str(place)] for place, kind in enumerate(kinds)},
        }


def run_of_job(config: JobConfig, world_size: int, *, on_cpu: bool = False, one_host: bool = True) -> Run:
    """Create the run of a configuration on ``world_size`` ranks.

    Raises:
        ConfigError: If it cannot be built. The text has the arithmetic.
    """
    plan = plan_job(config, world_size)
    tokens = {"bytes": BYTES, "bpe": config.data.bpe_vocab_size}.get(config.data.tokenizer, 1)
    vocabulary = check_vocabulary(tokens, config.model, config.parallel.tp)
    model = transformer_config(config, vocabulary)
    if plan.layout.chunks > 1:
        model = replace(model, virtual_pipeline_model_parallel_size=plan.layout.chunks)
    return Run(
        GptSource(model, plan.micro_batch_size, config.model.sequence_length),
        check_ranks(config.parallel, world_size),
        plan.layout,
        config.parallel.schedule_name,
        plan.num_microbatches,
        plan.tokens_per_step,
        ddp_config(config),
        optimizer_config(config.optimizer, config.model.dtype),
        on_cpu,
        one_host,
    )
