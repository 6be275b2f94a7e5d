"""`Trainer(plugin=...)`: over tensor parallelism and stages it trains like one process, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.booster.plugin import HybridParallelPlugin
from tests.unit_tests.integrations.loops import launched
from tests.unit_tests.integrations.test_trainer import (
    A_STEP,
    MAX_NORM,
    RATE,
    STEPS,
    Rows,
    assert_trained,
    new_model,
    on_one_process,
)
from tests.unit_tests.ranks import ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def trainer_of(
    folder: Path, tp: int, pp: int, world: int, model: Any = None, data: Any = None, rows: Any = None, **options: Any
) -> Any:
    from core.integrations import Trainer

    replicas = world // (tp * pp)
    arguments = {
        **{"per_device_train_batch_size": A_STEP // 2 // replicas, "gradient_accumulation_steps": 2},
        **{"max_steps": STEPS, "logging_steps": 1, "train_sampling_strategy": "sequential"},
        **{"optim": "sgd", "learning_rate": RATE, "max_grad_norm": MAX_NORM, "lr_scheduler_type": "linear"},
        **{"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
    }
    given = transformers.TrainingArguments(str(folder), **(arguments | options))
    micro = {"num_microbatches": 2} if pp > 1 else {}
    plugin = HybridParallelPlugin(tp, pp, precision="fp32", zero_stage=1, **micro)
    return Trainer(model or new_model(False), given, train_dataset=data or Rows(), eval_dataset=rows, plugin=plugin)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Of the whole model. Collective."""
    return {name: value.clone() for name, value in trainer.booster.checkpoint_io.model_tensors(trainer.boosted)}


@ranks(4)
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (2, 1), pytest.param(1, 2, marks=pytest.mark.nightly)])
def test_a_split_model_trains_like_one_process_and_resumes(
    rank: int, world: int, tp: int, pp: int, tmp_path: Path
) -> None:
    """The mean over the tokens of a step, which microbatches, stages and replicas have unequal numbers of."""
    with launched(rank, world):
        options = {"save_strategy": "steps", "save_steps": 2, "per_device_eval_batch_size": 4}
        trainer = trainer_of(tmp_path, tp, pp, world, **options)
        trainer.train()
        expected, losses, norms = on_one_process()
        logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        assert [entry["loss"] for entry in logs] == pytest.approx(losses, abs=2e-4)  # logged with four digits
        assert [entry["grad_norm"] for entry in logs] == pytest.approx(norms, rel=1e-4)
        found = weights_of(trainer)
        assert_trained(found, expected)
        trainer.save_model(str(tmp_path / "model"))
        dist.barrier()
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        assert_trained(again.state_dict(), expected)
        if pp > 1:
            resumed = trainer_of(tmp_path, tp, pp, world, **options)
            resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
            assert resumed.state.global_step == STEPS
            for name, value in weights_of(resumed).items():
                torch.testing.assert_close(value, found[name], atol=1e-12, rtol=0)
        with pytest.raises(RuntimeError, match="train\\(\\) was called again, and the model is split by now"):
            trainer.train()


class Kinds(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens with a class each."""

    def __len__(self) -> int:
        return STEPS * A_STEP

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": Rows()[index]["input_ids"], "labels": torch.tensor(index % 3)}


def classifier() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, num_labels=3, initializer_range=0.3)
    config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    return transformers.AutoModelForSequenceClassification.from_config(config).double()


@ranks(2)
def test_a_classifier_trains_like_one_process(rank: int, world: int, tmp_path: Path) -> None:
    with launched(rank, world):
        trainer = trainer_of(tmp_path, 1, 2, world, classifier(), Kinds(), max_grad_norm=0.0, learning_rate=0.2)
        trainer.train()
        model, data = classifier(), Kinds()
        for step in range(STEPS):
            batch = [data[number] for number in range(A_STEP * step, A_STEP * (step + 1))]
            whole = {name: torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels")}
            model.zero_grad()
            model(**whole).loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.2 * (1 - step / STEPS) * parameter.grad
        found = weights_of(trainer)
        for name, wanted in model.named_parameters():
            torch.testing.assert_close(found[name], wanted.detach(), atol=1e-6, rtol=0)
        assert (found["classifier.weight"] - classifier().classifier.weight).abs().max() > 1e-3


@ranks(2)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_evaluation_is_the_loss_of_the_saved_model_and_the_best_one_is_loaded(
    rank: int, world: int, tp: int, pp: int, tmp_path: Path
) -> None:
    rows = [Rows()[number] for number in range(6)]  # batches of four and two
    options = {
        **{"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2},
        **{"load_best_model_at_end": True, "per_device_eval_batch_size": 4, "learning_rate": 0.5},
    }
    with launched(rank, world):
        trainer = trainer_of(tmp_path, tp, pp, world, rows=rows, **options)
        trainer.train()
        logged = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        dist.barrier()
        losses, saved = {}, {}
        for step in (1, 2):
            folder = tmp_path / f"checkpoint-{step}"
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
            sums = [
                model(**{key: torch.stack([row[key] for row in part]) for key in part[0]}).loss.item() * len(part)
                for part in (rows[:4], rows[4:])
            ]
            losses[step], saved[step] = sum(sums) / len(rows), model
        assert logged == pytest.approx(losses, rel=1e-6) and losses[2] > losses[1] + 1e-3, "the last one is the best"
        assert_trained(weights_of(trainer), saved[1])
        assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[1], rel=1e-6)


@ranks(1)
def test_what_a_split_model_cannot_serve_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    with launched(rank, world):
        with pytest.raises(ValueError, match="TrainingArguments\\(bf16=True\\) with a plugin: give the plugin"):
            trainer_of(tmp_path, 1, 1, world, bf16=True)
        from core.integrations import Trainer

        with pytest.raises(ValueError, match="model_init would make a second model; make the model before"):
            Trainer(plugin=HybridParallelPlugin(1, 1, precision="fp32"), model_init=lambda: new_model(False))
