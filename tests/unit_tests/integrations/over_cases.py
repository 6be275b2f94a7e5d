"""Models, data and trainers for the tests of `over`: the same program over a plugin and on one process."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

STEPS = 4
WORDS = [f"w{number}" for number in range(36)]


def tokenizer() -> Any:
    import tokenizers
    import transformers

    names = ["<pad>", "</s>", "<unk>", *WORDS]
    model = tokenizers.models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>")
    plain = tokenizers.Tokenizer(model)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)


def llama(kind: str = "AutoModelForCausalLM", **more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, initializer_range=0.3, pad_token_id=0, eos_token_id=1, bos_token_id=None, **more
    )
    return getattr(transformers, kind).from_config(config)


def text(number: int, least: int = 4) -> str:
    length = least + number % 7
    return " ".join(WORDS[(3 * number + 5 * place * place) % len(WORDS)] for place in range(length))


def rows(kind: str, count: int = 32) -> Any:
    import datasets

    if kind == "sft":
        made = [{"prompt": text(n), "completion": " " + text(n + 3)} for n in range(count)]
    else:
        pairs = [(text(n), " " + text(n + 3), " " + text(n + 8, 3)) for n in range(count)]
        made = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    return datasets.Dataset.from_list(made)


def arguments_of(kind: Any, folder: Path, batch: int, **more: Any) -> Any:
    options = {
        **{"per_device_train_batch_size": batch, "gradient_accumulation_steps": 2, "max_steps": STEPS},
        **{"logging_steps": 1, "train_sampling_strategy": "sequential", "optim": "sgd", "learning_rate": 0.5},
        **{"max_grad_norm": 0.5, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
        **{"lr_scheduler_type": "linear", "logging_first_step": True},
    }
    if hasattr(kind, "max_length") or "max_length" in getattr(kind, "__dataclass_fields__", {}):
        options |= {"max_length": 64, "dataset_num_proc": None, "gradient_checkpointing": False, "bf16": False}
    return kind(str(folder), **(options | more))


def logged(trainer: Any, *names: str) -> list[list[float]]:
    """Of each step that was logged, these figures, as they were before they were rounded."""
    return [[entry[name] for name in names] for entry in trainer.state.log_history if "grad_norm" in entry]


def without_updates(steps: Collection[int]) -> Any:
    """A callback that skips these steps (from 0) as an overflow of fp16 does: weights and learning rate stay."""
    import transformers

    class Skip(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step in steps:
                more["model"].zero_grad()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            more["optimizer"]._is_overflow = state.global_step in steps

    return Skip()
