"""Prompt tuning, p-tuning and prefix tuning on a split model: each tensor-parallel rank holds all virtual tokens.

peft puts their embeddings, or their keys and values, before those of the text, outside of the model. So the split model
stays inside the PeftModel, and only the gradients of the virtual tokens need a contract. Prefixes have keys and values
of all heads, of which each rank's attention takes its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut.attach import attach_adapted
from core.hugging_face.cut.report import REPORT, SplitReport
from core.hugging_face.read.example import example_of
from core.hugging_face.read.plan import Plan, PlanError

PREFIX = "PREFIX_TUNING"
METHODS = {"PROMPT_TUNING", "P_TUNING", PREFIX}


def has_prompts(model: Any) -> bool:
    """Return True for a PeftModel that only puts virtual tokens before the text."""
    configs = getattr(model, "peft_config", {}).values()
    return len(configs) == 1 and {str(getattr(each.peft_type, "value", "")) for each in configs} <= METHODS


def keep_prompts(adapted: Any, part: Any, groups: ProcessGroups) -> Any:
    """Put a split model back into its PeftModel, and declare the gradients of the virtual tokens.

    Collective over the tensor-parallel group.
    """
    adapted.base_model = part
    report: SplitReport | None = getattr(part, REPORT, None)
    if report is None:  # one rank holds the full model
        return adapted
    splits = {f"base_model.{name}": split for name, split in report.plan.splits.items()}
    plan = Plan(f"prompts of {report.plan.family}", splits, {}, frozenset(), {})
    if groups.size("tp") == 1:
        setattr(adapted, REPORT, replace(report, plan=plan))
        return adapted
    (config,) = adapted.peft_config.values()
    if str(getattr(config.peft_type, "value", "")) == PREFIX:
        _take_own_heads(adapted, config.num_attention_heads, groups)
    attach_adapted(adapted, plan, groups, example_of(part, groups, None))
    return adapted


def _take_own_heads(adapted: Any, heads: int, groups: ProcessGroups) -> None:
    """Give each rank's attention the prefix keys and values of its own heads. Ranks share a head if there are fewer."""
    tp, rank, prefixes = groups.size("tp"), groups.rank("tp"), adapted.get_prompt
    if max(heads, tp) % min(heads, tp) or adapted.get_base_model().config.is_encoder_decoder:
        raise PlanError(
            f"prefix tuning is split for decoders whose heads are a multiple or a divisor of tp_size; this model has "
            f"{heads} key and value heads, and tp_size is {tp}; train LoRA"
        )
    first, count = rank * heads // tp, max(heads // tp, 1)

    def own(*args: Any, **options: Any) -> Any:
        cache = prefixes(*args, **options)
        for layer in cache.layers:
            layer.keys, layer.values = (each[:, first : first + count] for each in (layer.keys, layer.values))
        return cache

    adapted.get_prompt = own
