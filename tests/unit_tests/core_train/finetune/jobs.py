"""Small jobs: their records, their options, and what TRL or Transformers alone makes of them on one process."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.unit_tests.integrations.over_cases import without_updates

STEPS, ROWS = 8, 4
LETTERS = "abc"


def records(kind: str) -> list[dict[str, Any]]:
    """Rows of unequal lengths."""
    rows: list[dict[str, Any]] = []
    for number in range(ROWS * STEPS):
        question, answer = "count " + "a" * (number % 7), "b" * (3 + number % 5)
        said = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        pair = {"chosen": answer, "rejected": "c" * (2 + number % 4)}
        rows.append(
            {
                "completion": {"prompt": question, "completion": answer},
                "messages": {"messages": said},
                "alpaca": {"instruction": question, "input": "", "output": answer},
                "sharegpt": {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]},
                "pairs": {"prompt": question, **pair},
                "texts": {"text": question + answer, "label": ["no", "so", "yes"][number % 3]},
            }[kind]
        )
    return rows


def written(folder: Path, kind: str) -> Path:
    """Write the file of a kind of records, unless it is there."""
    file = folder / f"{kind}.jsonl"
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in records(kind)))
    return file


def kind_of(task: str) -> str:
    """The records of a task."""
    return {"sft": "completion", "dpo": "pairs", "reward": "pairs", "classification": "texts"}[task]


def options(folder: Path, task: str, *more: str, dp: int = 1) -> list[str]:
    """SGD with clipping shows a wrong scale; the rate is constant, and rows come in their order."""
    rate = "0.05" if task == "dpo" else "0.3"
    length = [] if task == "classification" else ["--max_length", "64"]
    return [
        *("--task", task, "--data", str(written(folder, kind_of(task)))),
        *("--model", str(folder / "model"), "--output_dir", str(folder / f"out {'-'.join([task, *more, str(dp)])}")),
        *("--max_steps", str(STEPS), "--per_device_train_batch_size", str(ROWS // dp), "--logging_steps", "1"),
        *("--optim", "sgd", "--learning_rate", rate, "--lr_scheduler_type", "constant", "--max_grad_norm", "0.5"),
        *("--save_strategy", "no", "--use_cpu", "true", "--disable_tqdm", "true", "--seed", "7"),
        *("--dataloader_drop_last", "true"),
        *(["--lora_dropout", "0"] if "--use_peft" in more else []),
        *length,
        *more,
    ]


def make_model(folder: Path, family: str = "qwen3", name: str = "model") -> None:
    """Write a small model and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from core.hugging_face.read.tiny import byte_tokenizer, tiny_of_bytes

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_of_bytes(family, 128)).float().save_pretrained(folder / name)
    byte_tokenizer().save_pretrained(folder / name)


def of_peer(folder: Path, saved: Path, task: str, *more: str, skipped: Collection[int] = ()) -> list[float]:
    """Losses of TRL's trainer, or Transformers', as its page says to use it, on this process. Saves the model.

    skipped: Steps, from 0, whose update is left out.
    """
    import peft
    import transformers
    import trl
    from datasets import Dataset

    directory = more[more.index("--model") + 1] if "--model" in more else str(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    settings: dict[str, Any] = {
        **{"output_dir": str(folder / "peer"), "max_steps": STEPS, "per_device_train_batch_size": ROWS},
        **{"logging_steps": 1, "optim": "sgd", "learning_rate": 0.05 if task == "dpo" else 0.3, "max_grad_norm": 0.5},
        **{"lr_scheduler_type": "constant", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "seed": 7},
        **{"report_to": "none", "dataloader_drop_last": True},
    }
    adapters = None
    scored = task in ("reward", "classification")
    if "--use_peft" in more:
        kind = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]} if scored else {"task_type": "CAUSAL_LM"}
        kind |= {"modules_to_save": ["lm_head"]} if "--lora_modules_to_save" in more else {}
        adapters = peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", **kind)
    rows = Dataset.from_list(records(kind_of(task)))
    if task == "classification":
        names = sorted(set(rows["label"]))
        transformers.set_seed(7)
        model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(directory, num_labels=len(names))
        model = model if adapters is None else peft.get_peft_model(model, adapters)
        rows = rows.map(lambda row: {**tokenizer(row["text"]), "labels": names.index(row["label"])})
        trainer: Any = transformers.Trainer(
            model,
            transformers.TrainingArguments(**settings),
            train_dataset=rows.remove_columns(["text", "label"]),
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
        )
    else:
        config, kind = {
            "sft": (trl.SFTConfig, trl.SFTTrainer),
            "dpo": (trl.DPOConfig, trl.DPOTrainer),
            "reward": (trl.RewardConfig, trl.RewardTrainer),
        }[task]
        flags = {flag.removeprefix("--"): True for flag in more if flag in ("--packing", "--precompute_ref_log_probs")}
        if task in ("sft", "dpo"):
            settings["router_aux_loss_coef"] = 0.0
        theirs = config(**settings, **flags, bf16=False, max_length=64)
        trained: Any = directory
        if (Path(directory) / "adapter_config.json").exists():  # TRL reads such a directory by peft alone
            trained = peft.AutoPeftModelForCausalLM.from_pretrained(directory, is_trainable=True)
        trainer = kind(trained, args=theirs, train_dataset=rows, processing_class=tokenizer, peft_config=adapters)
    trainer.add_callback(without_updates(skipped))
    trainer.train()
    trainer.save_model(str(saved))
    return losses_of(trainer)


def losses_of(trainer: Any) -> list[float]:
    """Of each step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
