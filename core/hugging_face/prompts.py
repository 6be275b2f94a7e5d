"""Prompt tuning and p-tuning on a split model: each tensor-parallel rank holds all virtual tokens.

peft puts their embeddings before those of the text, outside of the model. So the split model stays inside the
PeftModel, and only the gradients of the virtual tokens need a contract.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.groups.process_groups import ProcessGroups
from core.hugging_face.cut.attach import attach_adapted
from core.hugging_face.cut.report import REPORT, SplitReport
from core.hugging_face.read.example import example_of
from core.hugging_face.read.plan import Plan

METHODS = {"PROMPT_TUNING", "P_TUNING"}  # prefixes have keys and values for all heads


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
    attach_adapted(adapted, plan, groups, example_of(part, groups, None))
    return adapted
