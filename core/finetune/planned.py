"""A fine-tuning job as a run to plan: what its plugin would do, asked of the plugin itself before any rank starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from core.booster.plugin import HybridParallelPlugin
from core.booster.plugin.dp_plugin_base import planned_world
from core.finetune.config import TINY, TuneConfig
from core.finetune.model import check_configuration, lora_config_of, model_class, plugin_of, torch_optimizer
from core.finetune.plan import BY_TORCH, SERVED, TunePlan, plan_tuning, sequence_mode, zero_stage
from core.finetune.trainer import loss_of_whole_logits
from core.number_ranges import divisors
from core.pipeline_parallel import PipelineLayout
from core.plan.hugging_face_source import HuggingFaceSource
from core.plan.model_run import ModelRun
from core.plan.planned_groups import planned_groups
from core.plan.run_memory import Run
from core.plan.suggestions import MOST_RANKS, larger_sizes
from core.training.config import ParallelOptions
from core.training.errors import ConfigError
from core.training.extras import require_installed
from core.training.hub import cached_model
from core.training.model_config import DTYPES
from core.training.sizes import check_ranks

WORDS = 8  # elements that a parameter, or a number between two operators, counts in the rule of thumb


@dataclass(frozen=True)
class PlannedTuning:
    """A fine-tuning job for `core.plan.plan_run`. Nothing is written, and a tiny model is not made.

    No weights are read, so that the model may be a config.json alone.
    """

    config: TuneConfig

    @cached_property
    def _model(self) -> ModelRun:
        return ModelRun(cached_model(self.config.model.path), sequence_length=self.config.model.sequence_length)

    @cached_property
    def configuration(self) -> Any:
        """The model's configuration. ConfigError for one that the job would refuse."""
        require_installed("transformers", "fine-tuning", "transformers")
        found = self._model.configuration
        if self.config.model.path.startswith(TINY):
            model_class(found, self.config.model.path)
        else:
            check_configuration(self.config, found)
        return found

    def run_on(self, ranks: int, *, on_cpu: bool, one_host: bool) -> Run:
        """Sizes of the job on some ranks. ConfigError, with the arithmetic, for what cannot be built.

        Wrapper, optimizer and stages are those that the plugin of the job would give its own rank 0.
        """
        config = self.config
        if config.data.task != "causal":
            raise ConfigError(f"--task {config.data.task} is not planned; leave --dry-run out")
        plan = plan_tuning(config, ranks)
        if config.lora.r is not None:
            require_installed("peft", "--lora.r", "peft")
        sizes = config.parallel
        grid = check_ranks(ParallelOptions(tp=sizes.tp, pp=sizes.pp, ep=sizes.ep, cp=sizes.sp), ranks, "sp")
        if sizes.plugin in BY_TORCH:
            raise ConfigError(
                f"--parallel.plugin {sizes.plugin}: what torch's own wrapper holds is not planned; plan "
                f"--parallel.plugin hybrid --parallel.zero {zero_stage(config)}, which shards the same, or leave "
                "--dry-run out"
            )
        with planned_world(0, ranks, torch.device("cpu" if on_cpu else "cuda")):
            plugin = plugin_of(config, plan.micro_batch_size)
        source = self._source(plan)
        try:
            if isinstance(plugin, HybridParallelPlugin):
                layout = plugin.cutting.layout_of(source.whole)
                source = source if layout is None else replace(source, layout=layout)
                source = replace(source, vocabulary_multiple=plugin.cutting.vocabulary_multiple)
                if plugin.cutting.splits_logits(source.whole):
                    source = replace(source, whole_loss=None, splits_sequence_of_logits=sizes.sp > 1)
            of_first = planned_groups(grid, 0, embedding_ranks=source.layout.embedding_ranks, over_gloo=on_cpu)
            part = source.stages(source.layout, of_first)[0]
            ddp, optimizer = plugin.engine_configs(part, self._optimizer([part]))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return Run(
            source,
            grid,
            source.layout,
            "1F1B",
            plan.num_microbatches,
            plan.tokens_per_step,
            ddp,
            optimizer,
            on_cpu,
            one_host,
            self._optimizer,
            self._model.notes,
        )

    def _source(self, plan: TunePlan) -> HuggingFaceSource:
        """The model whole, and the loss of whole logits."""
        config = self.config
        return HuggingFaceSource(
            self.configuration,
            DTYPES[config.model.dtype],
            plan.micro_batch_size,
            config.model.sequence_length,
            PipelineLayout((self.configuration.get_text_config().num_hidden_layers,), 1),
            config.parallel.tp,
            sequence_mode(config),
            config.model.gradient_checkpointing,
            config.data.packing,
            loss_of_whole_logits,
            adapters=None if config.lora.r is None else lora_config_of(config),
            logits_chunk=config.model.logits_chunk,
        )

    def _optimizer(self, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
        """The job's own, of one part: its schedule has one stage a rank."""
        (part,) = parts
        return torch_optimizer(self.config.optimizer, part)

    def smaller(self, ranks: int) -> Iterator[tuple[str, PlannedTuning, int]]:
        """(flags in words, the changed job, ranks) for each option that takes memory off a rank."""
        config = self.config
        parallel, model = config.parallel, config.model
        stages, axes = SERVED[parallel.plugin]
        zero: Any
        for zero in sorted(stage for stage in stages if stage > zero_stage(config)):
            yield f"--zero {zero}", self._with(parallel=replace(parallel, zero=zero)), ranks
        micro = plan_tuning(config, ranks).micro_batch_size
        for size in sorted(divisors(micro), reverse=True)[1:]:
            yield f"--run.micro-batch-size {size}", self._with(run=replace(config.run, micro_batch_size=size)), ranks
        if not model.gradient_checkpointing:
            again = replace(model, gradient_checkpointing=True)
            yield "--model.gradient-checkpointing", self._with(model=again), ranks
        for axis in (axis for axis in ("tp", "pp", "ep", "sp") if axis in axes):
            for size in larger_sizes(getattr(parallel, axis), ranks):
                larger: dict[str, Any] = {axis: size}
                yield f"--{axis} {size}", self._with(parallel=replace(parallel, **larger)), ranks
        more = 2 * ranks
        while more <= MOST_RANKS:
            yield f"--run.ranks {more}", self, more
            more *= 2

    def _with(self, **sections: Any) -> PlannedTuning:
        return PlannedTuning(replace(self.config, **sections))


def most_bytes(config: TuneConfig, ranks: int) -> int:
    """More than any rank holds, by a rule of thumb. A job far below its memory needs no plan, which takes seconds.

    Nothing is divided by parallel sizes, and nothing computed again. A parameter counts WORDS elements for gradient,
    master and moments. So does, for a token, each number that goes into a matrix or comes out, each logit, and each of
    a head's weights. 0 for a model that cannot be read, which others refuse.
    """
    try:
        job, plan = PlannedTuning(config), plan_tuning(config, ranks)
        shapes = [param.shape for param in job._source(plan).whole.parameters()]
        text = job.configuration.get_text_config()
    except (ValueError, RuntimeError):
        return 0
    widths = sum(2 * max(shape) + sum(shape) for shape in shapes)
    seen = text.num_hidden_layers * getattr(text, "num_attention_heads", 1) * config.model.sequence_length
    in_flight = plan.num_microbatches if config.parallel.pp > 1 else 1
    tokens = in_flight * plan.micro_batch_size * config.model.sequence_length
    numbers = sum(shape.numel() for shape in shapes) + tokens * (widths + seen + 2 * text.vocab_size)
    return WORDS * torch.float32.itemsize * numbers
