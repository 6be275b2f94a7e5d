"""A job as a run to plan: what its plugin would do, asked of the plugin itself before any rank starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from core.booster.plugin.dp_plugin_base import planned_world
from core.finetune.arguments import Arguments, changed
from core.finetune.config import TINY, TuneConfig
from core.finetune.model import check_sizes, directory_of, plugin_of
from core.pipeline_parallel import PipelineLayout
from core.plan.hugging_face_source import HuggingFaceSource
from core.plan.model_run import ModelRun
from core.plan.planned_groups import planned_groups
from core.plan.run_memory import Run
from core.plan.suggestions import MOST_RANKS, larger_sizes
from core.training.config import ParallelOptions
from core.training.errors import ConfigError
from core.training.sizes import check_ranks

WORDS = 8  # elements that a parameter, or a number between two operators, counts in the rule of thumb
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision -> dtype of the parameters."""


def loss_of_logits(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: float) -> torch.Tensor:
    """Return the sum of the losses of the labels / num_items_in_batch. logits: [..., tokens, vocabulary]."""
    target = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    total = nn.functional.cross_entropy(logits.flatten(0, -2), target, ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


@dataclass(frozen=True)
class PlannedTuning:
    """A fine-tuning job for `core.plan.plan_run`. Nothing is written and no weights are read."""

    config: TuneConfig
    given: Arguments

    @cached_property
    def _model(self) -> ModelRun:
        name = self.given.model.model_name_or_path
        place = name if name.startswith(TINY) else str(directory_of(self.given))
        return ModelRun(place, sequence_length=self.length)

    @property
    def length(self) -> int:
        """Tokens of the longest record."""
        return int(self.given.theirs.max_length or 1024)

    def run_on(self, ranks: int, *, on_cpu: bool, one_host: bool) -> Run:
        """Return the job on some ranks. ConfigError, with the arithmetic, for one that cannot be built.

        Wrapper, optimizer and stages are those that the plugin of the job would give its own rank 0.
        """
        options, theirs = self.config.options, self.given.theirs
        if options.task != "sft":
            raise ConfigError(f"--task {options.task} is not planned; --dry-run has made all other checks")
        dp = check_sizes(self.config, ranks)
        grid = check_ranks(ParallelOptions(tp=options.tp, pp=options.pp, ep=options.ep, cp=options.sp), ranks, "sp")
        try:
            with planned_world(0, ranks, torch.device("cpu" if on_cpu else "cuda")):
                plugin = plugin_of(self.config, self.given)
            source = self._source()
            layout = plugin.cutting.layout_of(source.whole)
            source = source if layout is None else replace(source, layout=layout)
            source = replace(source, vocabulary_multiple=plugin.cutting.vocabulary_multiple)
            if plugin.cutting.splits_logits(source.whole):
                source = replace(source, whole_loss=None, splits_sequence_of_logits=options.sp > 1)
            of_first = planned_groups(grid, 0, embedding_ranks=source.layout.embedding_ranks, over_gloo=on_cpu)
            part = source.stages(source.layout, of_first)[0]
            ddp, optimizer = plugin.engine_configs(part, _optimizer([part]))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        rows = theirs.per_device_train_batch_size
        microbatches = theirs.gradient_accumulation_steps * (rows if options.pp > 1 and not theirs.packing else 1)
        tokens = rows * theirs.gradient_accumulation_steps * dp * self.length
        return Run(
            *(source, grid, source.layout, "1F1B", microbatches, tokens, ddp, optimizer, on_cpu, one_host),
            _optimizer,
            self._model.notes,
        )

    def _source(self) -> HuggingFaceSource:
        """The model unsplit, and the loss of full logits."""
        from trl import get_peft_config

        options, theirs = self.config.options, self.given.theirs
        adapters = get_peft_config(self.given.model)
        if adapters is not None:
            adapters.target_modules = adapters.target_modules or "all-linear"
        configuration = self._model.configuration
        return HuggingFaceSource(
            *(configuration, DTYPES[options.precision]),
            1 if options.pp > 1 and not theirs.packing else theirs.per_device_train_batch_size,
            self.length,
            PipelineLayout((configuration.get_text_config().num_hidden_layers,), 1),
            options.tp,
            options.sequence_mode,
            theirs.activation_checkpointing,
            theirs.packing,
            loss_of_logits,
            adapters=adapters,
            logits_chunk=options.logits_chunk,
        )

    def smaller(self, ranks: int) -> Iterator[tuple[str, PlannedTuning, int]]:
        """Yield (flags in words, the changed job, ranks) for each option that takes memory off a rank."""
        options, theirs = self.config.options, self.given.theirs
        for zero in range(options.zero + 1, 4):
            yield f"--zero {zero}", self._with(zero=zero), ranks
        rows = theirs.per_device_train_batch_size
        if rows > 1:
            fewer = replace(self, given=self.given._replace(theirs=replace(theirs, per_device_train_batch_size=1)))
            yield "--per_device_train_batch_size 1", fewer, ranks
        if not theirs.activation_checkpointing:
            again = replace(self, given=self.given._replace(theirs=replace(theirs, activation_checkpointing=True)))
            yield "--activation_checkpointing", again, ranks
        for axis in ("tp", "pp", "ep", "sp"):
            for size in larger_sizes(getattr(options, axis), ranks):
                yield f"--{axis} {size}", self._with(**{axis: size}), ranks
        more = 2 * ranks
        while more <= MOST_RANKS:
            yield f"--ranks {more}", self, more
            more *= 2

    def _with(self, **options: Any) -> PlannedTuning:
        return replace(self, config=changed(self.config, **options))


def _optimizer(parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """Return the kind that most jobs have: two moments an element."""
    learning = [param for part in parts for param in part.parameters() if param.requires_grad]
    return torch.optim.AdamW(learning, lr=1e-4)


def most_bytes(job: PlannedTuning) -> int:
    """Return more than any rank holds, by a rule of thumb: a job far below its memory needs no plan.

    A parameter counts WORDS elements, and so does, for a token, each number that goes into a matrix or comes out.
    0 for a model that cannot be read, which others refuse.
    """
    try:
        shapes = [param.shape for param in job._source().whole.parameters()]
        text = job._model.configuration.get_text_config()
    except (ValueError, RuntimeError):
        return 0
    widths = sum(2 * max(shape) + sum(shape) for shape in shapes)
    seen = text.num_hidden_layers * getattr(text, "num_attention_heads", 1) * job.length
    tokens = job.given.theirs.per_device_train_batch_size * job.length
    numbers = sum(shape.numel() for shape in shapes) + tokens * (widths + seen + 2 * text.vocab_size)
    return WORDS * torch.float32.itemsize * numbers
