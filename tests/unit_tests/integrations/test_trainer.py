"""`from core.integrations import Trainer`: Transformers' Trainer trains like one process, saves and resumes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.integrations import LoopOptimizer
from tests.unit_tests.integrations.loops import STRATEGIES, launched
from tests.unit_tests.ranks import ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE["initializer_range"] = 0.3
STEPS, A_STEP, MAX_NORM, RATE = 4, 8, 0.4, 2.0  # samples a step: 2 ranks x 2 microbatches x 2


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, of unequal numbers of labels: a mean of means is not the mean."""

    def __len__(self) -> int:
        return STEPS * A_STEP

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(40, (12,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 7] = -100
        return {"input_ids": tokens, "labels": labels}


def new_model(tied: bool) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config).double()


def trainer_of(folder: Path, strategy: Any, tied: bool = False, whole: Any = False, **options: Any) -> Any:
    from core.integrations import Trainer

    class InOrder(Trainer):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    arguments = {
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "logging_steps": 1},
        **{"optim": "sgd", "learning_rate": RATE, "max_grad_norm": MAX_NORM, "lr_scheduler_type": "linear"},
        **{"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
    }
    config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy,
        keep_params_whole=whole,
        overlap_grad_reduce=True,
        bucket_size=500,
        initial_weights="broadcast",
    )
    given = transformers.TrainingArguments(str(folder), **(arguments | options))
    return InOrder(new_model(tied), given, train_dataset=Rows(), ddp_config=config)


def on_one_process(
    tied: bool = False, optimizer_class: Any = torch.optim.SGD, rate: float = RATE, **options: Any
) -> tuple[Any, list[float], list[float]]:
    """(model, losses, norms before clipping) of the same steps: the mean over the tokens of a whole step's rows."""
    model = new_model(tied)
    optimizer = optimizer_class(model.parameters(), lr=rate, **options)
    rows, losses, norms = Rows(), [], []
    for step in range(STEPS):
        batch = [rows[number] for number in range(A_STEP * step, A_STEP * (step + 1))]
        tokens, labels = (torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels"))
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / STEPS)
        optimizer.step()
        losses.append(loss.item())
    return model, losses, norms


def assert_trained(found: dict[str, torch.Tensor], expected: nn.Module, tied: bool = False) -> None:
    start = new_model(tied).state_dict()
    for name, value in expected.state_dict().items():
        moved = (value - start[name]).abs().max()
        assert moved > 1e-4, f"{name} has hardly moved"
        # Transformers computes norms and the loss in fp32 whatever the model is in.
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.in_suite(2)
def test_the_trainer_trains_like_one_process_and_saves_what_from_pretrained_loads(
    rank: int, world: int, strategy: str, tmp_path: Path
) -> None:
    with launched(rank, world):
        trainer = trainer_of(tmp_path, strategy, tied=strategy == "optim")
        trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert isinstance(trainer.optimizer.optimizer, LoopOptimizer)
        expected, losses, norms = on_one_process(tied=strategy == "optim")
        logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        assert [entry["loss"] for entry in logs] == pytest.approx(losses, abs=2e-4)  # logged with four digits
        assert [entry["grad_norm"] for entry in logs] == pytest.approx(norms, rel=1e-4)
        assert min(norms) > MAX_NORM, "nothing is clipped"
        assert_trained(trainer.model_wrapped.state_dict(), expected, tied=strategy == "optim")
        trainer.save_model(str(tmp_path / "model"))
        dist.barrier()
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
        assert_trained(again.state_dict(), expected, tied=strategy == "optim")


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.in_suite(2)
def test_a_job_that_is_resumed_ends_as_one_that_did_not_stop(
    rank: int, world: int, strategy: str, tmp_path: Path
) -> None:
    options = {"optim": "adamw_torch", "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2}
    with launched(rank, world):
        whole = trainer_of(tmp_path, strategy, **options)
        whole.train()
        with whole.model_wrapped.gathered():
            expected = {name: value.clone() for name, value in whole.model.state_dict().items()}
        dist.barrier()
        resumed = trainer_of(tmp_path, strategy, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert resumed.state.global_step == STEPS
        with resumed.model_wrapped.gathered():
            for name, value in resumed.model.state_dict().items():
                torch.testing.assert_close(value, expected[name], atol=1e-12, rtol=0)
                assert not torch.equal(value, new_model(False).state_dict()[name])


@ranks(2)
def test_evaluation_counts_every_row_once(rank: int, world: int, tmp_path: Path) -> None:
    with launched(rank, world):
        trainer = trainer_of(tmp_path, "optim_grads_params", per_device_eval_batch_size=4)
        trainer.train()
        found = trainer.evaluate(Rows())["eval_loss"]
        model = on_one_process()[0]
        losses = []
        with torch.no_grad():
            for begin in range(0, STEPS * A_STEP, 4):  # a batch's mean, as the Trainer's
                batch = [Rows()[number] for number in range(begin, begin + 4)]
                tokens, labels = (torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels"))
                losses.append(float(model(input_ids=tokens, labels=labels).loss))
        assert found == pytest.approx(sum(losses) / len(losses), abs=2e-4)


@ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_evaluation_and_prediction_before_training_change_nothing(
    rank: int, world: int, strategy: str, tmp_path: Path
) -> None:
    with launched(rank, world):
        trainer = trainer_of(tmp_path, strategy, per_device_eval_batch_size=4)
        fresh = trainer.evaluate(Rows())["eval_loss"]
        assert trainer.predict(Rows()).metrics["test_loss"] == pytest.approx(fresh)
        trainer.train()
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        expected, _, _ = on_one_process()
        assert_trained(trainer.model_wrapped.state_dict(), expected)
        assert trainer.evaluate(Rows())["eval_loss"] < fresh
        trainer.args.max_steps = STEPS + 1
        trainer.train()  # once more: a fresh schedule, and the same optimizer
        assert trainer.state.global_step == STEPS + 1
        with trainer.model_wrapped.gathered():
            kept = dict(trainer.model.state_dict())
            assert (kept["lm_head.weight"] - expected.lm_head.weight).abs().max() > 1e-3


@ranks(2)
@pytest.mark.parametrize(
    "strategy, whole", [("no_shard", False), ("optim", "all"), ("optim_grads", "all"), ("optim_grads_params", "all")]
)
@pytest.mark.in_suite(2)
def test_adafactor_of_transformers_trains_like_one_process_and_is_resumed(
    rank: int, world: int, strategy: str, whole: Any, tmp_path: Path
) -> None:
    options = {"optim": "adafactor", "learning_rate": 0.05, "save_strategy": "steps", "save_steps": 2}
    own = {"scale_parameter": False, "relative_step": False}
    expected, losses, _ = on_one_process(False, transformers.optimization.Adafactor, 0.05, **own)
    with launched(rank, world):
        trainer = trainer_of(tmp_path, strategy, whole=whole, **options)
        trainer.train()
        assert type(trainer.optimizer.optimizer.user) is transformers.optimization.Adafactor
        logs = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
        assert logs == pytest.approx(losses, abs=2e-4)
        assert_trained(trainer.model_wrapped.state_dict(), expected)
        dist.barrier()
        resumed = trainer_of(tmp_path, strategy, whole=whole, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert_trained(resumed.model_wrapped.state_dict(), expected)


@ranks(2)
def test_a_schedule_that_reads_the_state_of_adafactor_logs_what_plain_trainer_logs(
    rank: int, world: int, tmp_path: Path
) -> None:
    """It takes a group's rate from the size of its first parameter, which a bucket has last."""

    def first_rates(kind: Any, model: Any, **given: Any) -> list[float]:
        adafactor = transformers.optimization.Adafactor(model.parameters(), warmup_init=True)
        options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "max_steps": 3, "logging_steps": 1}
        arguments = transformers.TrainingArguments(str(tmp_path), disable_tqdm=True, **options)
        schedule = transformers.optimization.AdafactorSchedule(adafactor)
        trainer = kind(model, arguments, train_dataset=Rows(), optimizers=(adafactor, schedule), **given)
        trainer.train()
        return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]

    from core.integrations import Trainer

    with launched(rank, world):
        config = DistributedDataParallelConfig(bucket_size=500, initial_weights="broadcast")
        found = first_rates(Trainer, new_model(False), ddp_config=config)
        expected = first_rates(transformers.Trainer, new_model(False))
    assert found == pytest.approx(expected, rel=1e-6)
    assert expected[-1] > expected[1] > 0


@ranks(1)
def test_fsdp_of_the_arguments_is_refused_with_what_to_write_instead(rank: int, world: int, tmp_path: Path) -> None:
    with launched(rank, world):
        trainer = r"TrainingArguments\(fsdp=\.\.\.\).*data_parallel_sharding_strategy=\"optim_grads_params\""
        with pytest.raises(ValueError, match=trainer):
            trainer_of(tmp_path, "optim", fsdp="full_shard")


@ranks(2)
@pytest.mark.parametrize("says", [None, True])
def test_options_of_torchs_ddp_are_obeyed_refused_or_warned_of(
    rank: int, world: int, says: bool | None, tmp_path: Path
) -> None:
    """Transformers itself asks for a search for unused parameters; only where a user does, a warning follows."""
    with launched(rank, world), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(tmp_path, "optim", ddp_find_unused_parameters=says)
        with pytest.raises(ValueError, match=r"\(bucket_cap_mb=5\), or TrainingArguments\(ddp_bucket_cap_mb=5\)"):
            trainer_of(tmp_path, "optim", ddp_bucket_cap_mb=5)
    found = [each for each in caught if "find_unused_parameters=True" in str(each.message)]
    assert len(found) == (says is True and rank == 0)
