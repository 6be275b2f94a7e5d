"""The main job's configuration as a run to plan."""

from __future__ import annotations

from dataclasses import replace

from core_plan.gpt_source import GptSource
from core_plan.job.config import JobConfig
from core_plan.job.model_config import ddp_config, optimizer_config, transformer_config
from core_plan.job.plan import BYTES, plan_job
from core_plan.job.sizes import check_ranks, check_vocabulary
from core_plan.run_memory import Run


def run_of_job(config: JobConfig, world_size: int, *, on_cpu: bool = False, one_host: bool = True) -> Run:
    """Create the run of a configuration on `world_size` ranks.

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
