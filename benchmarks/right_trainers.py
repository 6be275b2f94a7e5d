"""Small programs over accelerate, Transformers' Trainer, and TRL on the CPU, checked as by `python -m core verify`."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.right_program import last_report, launched
from core.verify import GradientReport

VOCABULARY, LENGTH, STEPS, PARTS = 40, 12, 3, 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "initializer_range": 0.3,
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        loop: 'accelerate', 'Trainer', or 'SFTTrainer'.
        layout: 'dp', 'fsdp', or 'tp'.
        fault: Name of a planted mistake; '' for none.
    """

    loop: str
    layout: str = "dp"
    fault: str = ""

    def __str__(self) -> str:
        return f"{self.loop}, {self.layout} 2{self.fault and f', {self.fault}'}"


LOOPS = ("accelerate", "Trainer", "SFTTrainer")
RIGHT = [*(Program(loop, layout) for loop in LOOPS for layout in ("dp", "fsdp")), Program("accelerate", "tp")]


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of tokens with unequal numbers of labels, so that a mean of means is not the mean."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.clone().index_fill(0, torch.arange(index % 7), -100)}


def report_of(program: Program) -> GradientReport:
    """Run a program, compare its gradients and weights, and return the last report. Collective over the world."""
    from accelerate.state import AcceleratorState, GradientState

    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        stack.enter_context(launched(LOCAL_WORLD_SIZE=str(dist.get_world_size())))
        stack.callback(GradientState._reset_state)
        stack.callback(AcceleratorState._reset_state, True)
        if program.layout != "dp":
            stack.enter_context(_sharding(program.layout))
        return last_report(partial(_accelerated if program.loop == "accelerate" else _trained, program))


@contextlib.contextmanager
def _sharding(layout: str) -> Iterator[None]:
    """Let accelerate shard on the CPU; it does so on accelerators only."""
    import accelerate
    from accelerate.state import AcceleratorState, DistributedType

    init = AcceleratorState.__init__
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )

    def sharding_init(state: Any, *args: Any, **options: Any) -> None:
        init(state, *args, **options)
        if layout == "fsdp":
            state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}

    with (
        mock.patch.object(AcceleratorState, "__init__", sharding_init),
        mock.patch.object(accelerate.ParallelismConfig, "_validate_accelerator", lambda *_: None),
    ):
        yield


def _model() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))


def _split_model() -> Any:
    """Load a model with its predefined tensor-parallel plan."""
    import transformers

    folder: list[str] = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        _model().save_pretrained(folder[0])
    dist.barrier()
    return transformers.AutoModelForCausalLM.from_pretrained(folder[0], tp_plan="auto").train()


def _left_out(optimizer: Any) -> None:
    """Leave the first parameter out of rank 1's optimizer."""
    if dist.get_rank() == 1:
        group = optimizer.param_groups[0]
        group["params"] = group["params"][1:]


def _accelerated(program: Program) -> None:
    from accelerate import Accelerator

    fault, tp = program.fault, program.layout == "tp"
    accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    model = _split_model() if tp else _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if not tp:
        model, optimizer = accelerator.prepare(model, optimizer)
    if fault == "left out":
        _left_out(optimizer)
    if fault == "norm":
        _norm_of_half(model)
    rank, rows = 0 if tp else dist.get_rank(), Rows()
    for step in range(STEPS):
        for part in range(PARTS):
            first = 2 * (PARTS * (2 * step + rank) + part)
            batch = {name: torch.stack([rows[first][name], rows[first + 1][name]]) for name in rows[0]}
            is_last = part == PARTS - 1
            accelerator.gradient_state._set_sync_gradients(is_last)
            unsynced = not is_last or fault == "no_sync"
            with accelerator.no_sync(model) if unsynced else contextlib.nullcontext():
                loss = model(**batch).loss
                if fault == "divided twice":
                    loss = loss / PARTS
                if (fault, part) == ("doubled", 1):
                    loss = 2 * loss
                if (fault, part, dist.get_rank()) == ("skipped", 0, 1):
                    loss = 0 * loss
                accelerator.backward(loss)
            if is_last:
                accelerator.gradient_state._set_sync_gradients(True)
                if not tp:  # torch's norm takes no mixture of DTensors and plain tensors
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
                optimizer.step()
                if fault != "not zeroed":
                    optimizer.zero_grad()


def _norm_of_half(model: nn.Module) -> None:
    """Double the gradient of a norm, as if a second reduction had added it."""
    norm = next(param for name, param in model.named_parameters() if name.endswith("layers.1.input_layernorm.weight"))
    norm.register_hook(lambda grad: 2 * grad)


def _trained(program: Program) -> None:
    """Train with Transformers' Trainer or TRL's SFTTrainer."""
    import transformers

    fault = program.fault
    base: Any = transformers.Trainer
    settings: Any = transformers.TrainingArguments
    more: dict[str, Any] = {"train_dataset": Rows()}
    if program.loop == "SFTTrainer":
        base, settings, more = _of_trl()

    class Faulty(base):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if fault == "mean of means":
                kwargs["num_items_in_batch"] = None
            loss = super().compute_loss(*args, **kwargs)
            return 2 * loss if fault == "doubled" else loss

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            optimizer = super().create_optimizer(*args, **kwargs)
            if fault == "left out":
                _left_out(self.optimizer)
            if fault == "other rate" and dist.get_rank() == 1:
                self.optimizer.param_groups[0]["lr"] = 0.25
            return optimizer

    arguments = settings(
        tempfile.mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=PARTS, max_steps=STEPS,
        optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0.4, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_strategy="no", gradient_checkpointing=False,
        average_tokens_across_devices=fault != "labels of a rank", bf16=False,
    )  # fmt: skip
    trainer = Faulty(_split_model() if program.layout == "tp" else _model(), arguments, **more)
    if fault == "mean of means":
        trainer.model_accepts_loss_kwargs = False
    if fault == "norm":
        _norm_of_half(trainer.model)
    trainer.train()


def _of_trl() -> tuple[Any, Any, dict[str, Any]]:
    import datasets
    import tokenizers
    import transformers
    import trl

    words = tokenizers.models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="1", eos_token="2", unk_token="0"
    )
    rows = [{name: tensor.tolist() for name, tensor in Rows()[index].items()} for index in range(len(Rows()))]
    return trl.SFTTrainer, trl.SFTConfig, {
        "train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer
    }  # fmt: skip
