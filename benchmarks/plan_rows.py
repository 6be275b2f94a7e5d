"""The runs whose plans are held against measurements: layouts of our GPT, and models of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core_plan.gpt_source import run_of_job
from core_plan.hugging_face_source import run_of_model
from core_plan.job.config import JobConfig
from core_plan.job.config_file import load_config
from core_plan.model_run import ModelRun
from core_plan.run_memory import Run


@dataclass(frozen=True)
class PlanRow:
    """One run. flags: of the main job, or none; family, layout: of a Hugging Face model, as ModelRun takes them.

    held_out: True for a model that was not run while the plan was made to fit.
    """

    name: str
    ranks: int
    flags: str = ""
    family: str = ""
    layout: Mapping[str, Any] = field(default_factory=dict)
    held_out: bool = False

    def config(self, size: Size, folder: Path) -> JobConfig | ModelRun:
        """Configuration of the run. folder: of the models' configurations."""
        if not self.family:
            return load_config([*size.flags.split(), *self.flags.split()])
        path = folder / f"{self.family}.json"
        batch = {"sequence_length": size.tokens, "global_batch_size": size.batch}
        return ModelRun(str(path), **{**batch, **self.layout})

    def run(self, config: JobConfig | ModelRun) -> Run:
        """The run of a configuration."""
        if isinstance(config, ModelRun):
            return run_of_model(config, self.ranks, on_cpu=True)
        return run_of_job(config, self.ranks, on_cpu=True)


@dataclass(frozen=True)
class Size:
    """Sizes of the models."""

    layers: int
    hidden: int
    tokens: int
    batch: int
    vocabulary: int

    @property
    def flags(self) -> str:
        """As the main job takes them; its tokens are bytes."""
        return (
            f"--model.num-layers {self.layers} --model.hidden-size {self.hidden} --model.num-attention-heads 8 "
            f"--model.vocab-size 256 --model.sequence-length {self.tokens} --run.global-batch-size {self.batch} "
            "--ddp.bucket-size 1000000"
        )

    def write_models(self, folder: Path) -> None:
        """A config.json a family, named after it."""
        import transformers

        sizes = {"num_hidden_layers": self.layers, "hidden_size": self.hidden, "num_attention_heads": 8}
        sizes |= {"vocab_size": self.vocabulary, "max_position_embeddings": self.tokens}
        llama = {**sizes, "intermediate_size": 3 * self.hidden, "num_key_value_heads": 4, "head_dim": self.hidden // 8}
        other = {
            "gpt2": {
                **{"n_layer": self.layers, "n_embd": self.hidden, "n_head": 8, "n_positions": self.tokens},
                "vocab_size": self.vocabulary,
            },
            "opt": {**sizes, "ffn_dim": 4 * self.hidden, "word_embed_proj_dim": self.hidden},
        }
        marks = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        for family in {row.family for row in ROWS if row.family}:
            config = transformers.AutoConfig.for_model(family, **{**other.get(family, llama), **marks})
            (folder / f"{family}.json").write_text(json.dumps(config.to_dict()))


FULL = Size(layers=4, hidden=256, tokens=128, batch=16, vocabulary=2048)
TINY = Size(layers=4, hidden=64, tokens=64, batch=16, vocabulary=512)
REPLICATED = "--ddp.no-use-distributed-optimizer"
GRADIENTS_CUT = "--ddp.data-parallel-sharding-strategy optim_grads"
ALL_CUT = "--ddp.data-parallel-sharding-strategy optim_grads_params --ddp.no-overlap-param-gather"
EXPERTS = "--model.num-experts 4 --model.moe-layer-freq 2 --model.moe-ffn-hidden-size 512"
ROWS = (
    PlanRow("4 microbatches", 1, "--tp 1 --run.micro-batch-size 4"),
    PlanRow("recomputed", 1, "--tp 1 --model.recompute-granularity full"),
    PlanRow("gpt2", 1, family="gpt2", layout={"zero": 0}),
    PlanRow("dp 2", 2, f"--tp 1 {REPLICATED}"),
    PlanRow("tp 2, sequence parallel", 2, "--tp 2"),
    PlanRow("pp 2", 2, "--tp 1 --pp 2"),
    PlanRow("llama, tp 2", 2, family="llama", layout={"tp": 2}),
    PlanRow("mistral, dp 2, ZeRO 2", 2, family="mistral", layout={"zero": 2}, held_out=True),
    PlanRow("dp 4, optim_grads, 2 microbatches", 4, f"--tp 1 {GRADIENTS_CUT} --run.micro-batch-size 2"),
    PlanRow("tp 2 x dp 2, optim", 4, "--tp 2 --parallel.sequence-parallel False"),
    PlanRow("cp 2 x dp 2", 4, "--tp 1 --cp 2"),
    PlanRow("ep 4", 4, f"--tp 1 --parallel.ep 4 {EXPERTS}"),
    PlanRow("qwen3, tp 2 x dp 2, recomputed", 4, family="qwen3", layout={"tp": 2, "recompute": True}),
    PlanRow("opt, tp 2 x dp 2", 4, family="opt", layout={"tp": 2}, held_out=True),
    PlanRow("tp 2 x pp 2 x dp 2", 8, "--tp 2 --pp 2"),
    PlanRow("dp 8, optim_grads_params", 8, f"--tp 1 {ALL_CUT}"),
    PlanRow("mistral, pp 2 x dp 4", 8, family="mistral", layout={"pp": 2}, held_out=True),
)
