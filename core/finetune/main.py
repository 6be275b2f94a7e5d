"""The command: read the configuration, check it before ranks start, run the job."""

from __future__ import annotations

import os
from collections.abc import Sequence

from core.finetune.config import SCORED, TuneConfig, load_config
from core.finetune.plan import TunePlan, plan_tuning
from core.training.checkpoint_options import check_saved_model
from core.training.errors import ConfigError
from core.training.extras import require_installed
from core.training.launch import Launch
from core.training.main import Command, check_logging, check_run_places, run_command
from core.training.own_ranks import STARTED_BY_US


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank, or start all of them; the exit status."""
    return run_command(FINETUNE, argv)


def check_extras(config: TuneConfig, ranks_here: int) -> None:
    """Find out now whether what was asked for is installed."""
    check_logging(config)
    require_installed("transformers", "fine-tuning", "transformers")
    if config.lora.r is not None:
        require_installed("peft", "--lora.r", "peft")


def check_places(config: TuneConfig) -> None:
    """Find out before ranks start whether model and data are there, fit the ranks, and can be read."""
    if STARTED_BY_US in os.environ:  # who started this rank has checked
        return
    check_run_places(config, config.data.cache)
    check_saved_model(config, but=("path",) if config.data.task in SCORED else ())  # which begins from `start_of`'s

    from core.finetune.model import check_model, known_classes, load_tokenizer, rows_of, stop_marks
    from core.finetune.records import check_record, check_tokenizer
    from core.finetune.task_records import check_padding, checked_task, completions
    from core.finetune.windows import check_rows, classes_of, open_windows, prepare_windows, read_documents
    from core.hugging_face.transformers_plans import transformers_package

    transformers_package().utils.logging.disable_progress_bar()
    check_model(config)
    tokenizer = load_tokenizer(config)
    check_tokenizer(tokenizer)
    if config.checkpoint.keep_best and not any(held_out for *_, held_out in read_documents(config.data)):
        raise ConfigError(
            "--checkpoint.keep-best needs text to validate on; give --eval-data FILE, or a --data.validation-fraction "
            "of more documents"
        )
    task, known = config.data.task, known_classes(config)
    check_padding(task, tokenizer)
    classes_of(config.data, known)
    if task != "classification" and (config.data.file or config.data.eval_file is not None):
        for where, record, _ in read_documents(config.data):
            for side in [record] if task == "causal" else completions(checked_task(task, record, where)):
                check_record(side, tokenizer, where)
    rows, stops = rows_of(config), stop_marks(config, tokenizer)
    if max(tokenizer.get_vocab().values()) >= rows:  # the data may do without such tokens, so the windows decide
        length = config.model.sequence_length
        windows = open_windows(config.data.cache / prepare_windows(config.data, length, tokenizer, stops, known))
        check_rows(windows.header, rows, tokenizer)


def _run(config: TuneConfig, plan: TunePlan, launch: Launch) -> object:
    from core.finetune.job import run_tuning

    return run_tuning(config, plan, launch)


def _dry_run(config: TuneConfig, ranks: int, ranks_here: int, device: str | None, says: bool) -> int:
    from core.finetune.planned import PlannedTuning
    from core.plan.dry_run import dry_run

    return dry_run(PlannedTuning(config), config.run, ranks, ranks_here, device, says=says)


def check_fit(config: TuneConfig, ranks: int, ranks_here: int) -> None:
    """Find out by the plan whether the job cannot fit. A job that is far from it is not planned."""
    if not config.run.check_memory or config.data.task != "causal":
        return
    from core.finetune.planned import PlannedTuning, most_bytes
    from core.plan.dry_run import refuse_what_cannot_fit, this_machine

    here = this_machine(config.run, ranks_here)
    if most_bytes(config, ranks) > here.room(ranks_here):
        refuse_what_cannot_fit(PlannedTuning(config), config.run, ranks, ranks_here)


FINETUNE: Command[TuneConfig, TunePlan] = Command(
    load_config, plan_tuning, check_extras, check_places, _run, _dry_run, check_fit
)
