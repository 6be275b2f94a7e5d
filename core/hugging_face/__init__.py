"""Tensor parallelism for Hugging Face models: read, print, check, and apply the models' own plans, on plain tensors."""

from core.hugging_face.checkpoint import load_split, save_split
from core.hugging_face.cut.report import SplitReport
from core.hugging_face.cut.split import split_model, split_stages
from core.hugging_face.lora import add_lora
from core.hugging_face.read.plan import Plan, PlanError, Seam, Split
from core.hugging_face.read.policies import POLICIES, Policy
from core.hugging_face.read.transformers_plans import read_plan
from core.hugging_face.run.loss.chunked_loss import use_chunked_loss
from core.hugging_face.run.loss.parallel_loss import gather_logits
from core.hugging_face.run.stages import stage_activations, stage_forward_step, stages_config

__all__ = [
    "POLICIES",
    "Plan",
    "PlanError",
    "Policy",
    "Seam",
    "Split",
    "SplitReport",
    "add_lora",
    "gather_logits",
    "load_split",
    "read_plan",
    "save_split",
    "split_model",
    "split_stages",
    "stage_activations",
    "stage_forward_step",
    "stages_config",
    "use_chunked_loss",
]
