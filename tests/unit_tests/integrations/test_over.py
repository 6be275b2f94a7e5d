"""`over(trainer_class)`: a Trainer of TRL, or of a user's own, trains in any layout as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.booster.plugin import HybridParallelPlugin
from core.distributed import DistributedDataParallelConfig
from tests.unit_tests.integrations.loops import alone, launched
from tests.unit_tests.integrations.over_cases import arguments_of, llama, logged, rows, tokenizer, without_updates
from tests.unit_tests.ranks import ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def test_a_class_is_derived_once_and_keeps_its_name() -> None:
    from core.integrations import Trainer, over

    class Mine(transformers.Trainer):  # type: ignore[misc, name-defined]
        pass

    derived = over(Mine)
    assert derived.__name__ == "Mine" and issubclass(derived, Mine)
    assert over(Mine) is derived and over(derived) is derived and over(transformers.Trainer) is Trainer
    with pytest.raises(TypeError, match="over takes a class derived from transformers.Trainer, and was given 3"):
        over(3)


def test_the_trainers_of_trl_are_there_by_name() -> None:
    trl = pytest.importorskip("trl")
    from core import integrations

    for name in ("SFTTrainer", "DPOTrainer", "RewardTrainer"):
        found = getattr(integrations, name)
        assert issubclass(found, getattr(trl, name)) and found is integrations.over(getattr(trl, name))


def plugin_of(tp: int, pp: int, **options: Any) -> HybridParallelPlugin:
    micro = {"num_microbatches": 2} if pp > 1 else {}
    return HybridParallelPlugin(tp, pp, **{"precision": "fp32", "zero_stage": 1, **micro, **options})


def of_trl(kind: str, folder: Path, batch: int, parts: Any = None, model: Any = None, **options: Any) -> Any:
    """A trainer of TRL, as "DPO", or with adapters as "DPO LoRA". parts: `over`, or None for TRL's own."""
    trl = pytest.importorskip("trl")
    kind, _, adapters = kind.partition(" ")
    config, task = getattr(trl, f"{kind}Config"), "sft" if kind == "SFT" else "pairs"
    more = {name: options.pop(name) for name in ("plugin", "ddp_config", "ref_model", "peft_config") if name in options}
    name = "AutoModelForSequenceClassification" if kind == "Reward" else "AutoModelForCausalLM"
    model = model or llama(name, **({"num_labels": 1} if kind == "Reward" else {}))
    if adapters:
        peft = pytest.importorskip("peft")
        more["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    elif kind == "DPO":
        more.setdefault("ref_model", llama())
    trainer = getattr(trl, f"{kind}Trainer")
    given = arguments_of(config, folder, batch, **options)
    data = {"train_dataset": rows(task), "eval_dataset": rows(task, 13), "processing_class": tokenizer()}
    torch.manual_seed(1)  # of adapters
    return (trainer if parts is None else parts(trainer))(model, args=given, **data, **more)


FIGURES = {
    "SFT": ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"),
    "DPO": ("loss", "grad_norm", "entropy", "logits/chosen", "rewards/margins", "logps/rejected", "num_tokens"),
    "Reward": ("loss", "grad_norm", "accuracy", "max_reward", "mean_reward", "num_tokens"),
}


@ranks(2)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["SFT", "DPO", "Reward", "SFT LoRA", "DPO LoRA"])
@pytest.mark.in_suite(6)
def test_a_trainer_of_trl_logs_in_any_layout_what_it_logs_on_one_process(
    rank: int, world: int, kind: str, tp: int, pp: int, tmp_path: Path
) -> None:
    from core.integrations import over

    replicas = world // (tp * pp)
    with launched(rank, world):
        if pp > 1 and not kind.startswith("SFT"):
            with pytest.raises(ValueError, match="Trainer.compute_loss with pp_size=2: a pipeline computes"):
                of_trl(kind, tmp_path, 4, over, plugin=plugin_of(tp, pp))
            return
        trainer = of_trl(kind, tmp_path, 4 // replicas, over, plugin=plugin_of(tp, pp))
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    with alone():
        single = of_trl(kind, tmp_path, 4)
        single.train()
        expected = single.evaluate()["eval_loss"]
    names = FIGURES[kind.split()[0]][: None if pp == 1 else 2]
    found, wanted = torch.tensor(logged(trainer, *names)), torch.tensor(logged(single, *names))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert (wanted[0, 0] - wanted[-1, 0]).abs() > 1e-3, "nothing is learned"
    assert loss == pytest.approx(expected, abs=1e-5)


@ranks(2)
def test_dpo_goes_on_from_adapters_that_are_split_with_their_reference(rank: int, world: int, tmp_path: Path) -> None:
    """TRL adds a second adapter with their values as the reference, and switches to it."""
    from core.integrations import over

    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)

    def trained(parts: Any, **options: Any) -> Any:
        torch.manual_seed(1)
        trainer = of_trl("DPO", tmp_path, 4, parts, peft.get_peft_model(llama(), config), ref_model=None, **options)
        trainer.train()
        return trainer

    with launched(rank, world):
        trainer = trained(over, plugin=plugin_of(2, 1))
    with alone():
        single = trained(None)
    assert "ref" in single.model.peft_config and trainer.model.active_adapter == "default"
    found, wanted = (torch.tensor(logged(each, *FIGURES["DPO"])) for each in (trainer, single))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert (wanted[-1, 0] - wanted[0, 0]).abs() > 1e-3, "nothing is learned"


SHARDED = DistributedDataParallelConfig(
    data_parallel_sharding_strategy="optim_grads_params", initial_weights="broadcast"
)


@pytest.mark.nightly
@ranks(2)
@pytest.mark.parametrize("kind", ["SFT", "DPO", "DPO LoRA", "Reward"])
@pytest.mark.parametrize("layout", ["plugin", "ddp_config", "sequence"])
def test_a_trainer_of_trl_logs_over_shards_and_parts_of_the_sequence_what_it_logs_alone(
    rank: int, world: int, kind: str, layout: str, tmp_path: Path
) -> None:
    from core.integrations import over

    with launched(rank, world):
        if layout == "ddp_config":
            options, batch = {"ddp_config": SHARDED}, 2
        elif layout == "plugin":
            options, batch = {"plugin": plugin_of(1, 1, zero_stage=3)}, 2
        else:
            options, batch = {"plugin": plugin_of(2, 1, enable_sequence_parallelism=True), "pad_to_multiple_of": 2}, 4
        trainer = of_trl(kind, tmp_path, batch, over, **options)
        trainer.train()
    with alone():
        single = of_trl(kind, tmp_path, 4, **({"pad_to_multiple_of": 2} if layout == "sequence" else {}))
        single.train()
    names = FIGURES[kind.split()[0]]
    torch.testing.assert_close(
        torch.tensor(logged(trainer, *names)), torch.tensor(logged(single, *names)), atol=1e-5, rtol=1e-5
    )


@ranks(2)
@pytest.mark.parametrize("layout", ["tp", "dp", "ddp_config"])
@pytest.mark.in_suite(1)
def test_fp16_logs_what_trl_logs_in_fp32_on_one_process_that_skips_as_many_steps(
    rank: int, world: int, layout: str, tmp_path: Path
) -> None:
    from core.integrations import over

    half = {"precision": "fp16", "initial_scale": 2.0**18}  # the first steps overflow
    with launched(rank, world):
        options: dict[str, Any] = {"ddp_config": SHARDED, "fp16": True}
        if layout != "ddp_config":
            options = {"plugin": plugin_of(2 if layout == "tp" else 1, 1, **half)}
        trainer = of_trl("SFT", tmp_path, 4 if layout == "tp" else 2, over, **options)
        trainer.train()
    losses, norms, rates = torch.tensor(logged(trainer, "loss", "grad_norm", "learning_rate")).T
    skipped = int(norms.isinf().sum())
    assert 0 < skipped < 4 if layout != "ddp_config" else skipped == 0
    with alone():
        single = of_trl("SFT", tmp_path, 4)
        single.add_callback(without_updates(range(skipped)))
        single.train()
    wanted, expected_norms, expected_rates = torch.tensor(logged(single, "loss", "grad_norm", "learning_rate")).T
    torch.testing.assert_close(losses, wanted, atol=2e-3, rtol=0)
    torch.testing.assert_close(norms[skipped:], expected_norms[skipped:], atol=0, rtol=1e-2)
    torch.testing.assert_close(rates, expected_rates)


@ranks(2)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_adapters_that_a_trainer_saves_are_peft_s_and_it_resumes_from_them(
    rank: int, world: int, tp: int, pp: int, tmp_path: Path
) -> None:
    """Every checkpoint had the base's config.json, and loaded as a model of random weights."""
    from core.integrations import over

    peft = pytest.importorskip("peft")
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    with launched(rank, world):
        trainer = of_trl(
            "SFT LoRA", tmp_path, 4, over, plugin=plugin_of(tp, pp), load_best_model_at_end=True, **options
        )
        trainer.train()
        trainer.save_model(str(tmp_path / "end"))
        dist.barrier()
        resumed = of_trl("SFT LoRA", tmp_path, 4, over, plugin=plugin_of(tp, pp), **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        resumed.save_model(str(tmp_path / "resumed"))
        dist.barrier()
    with alone():
        single = of_trl("SFT LoRA", tmp_path, 4, **{**options, "save_strategy": "no", "eval_strategy": "no"})
        single.train()
    for name in ("end", "checkpoint-4", "resumed"):
        loaded = dict(peft.PeftModel.from_pretrained(llama(), str(tmp_path / name)).named_parameters())
        for key, value in single.model.named_parameters():
            torch.testing.assert_close(loaded[key], value.detach(), atol=1e-5, rtol=0, msg=f"{name}: {key}")
    begun = dict(peft.PeftModel.from_pretrained(llama(), str(tmp_path / "checkpoint-2")).named_parameters())
    assert max(float((begun[key] - value).abs().max()) for key, value in single.model.named_parameters()) > 1e-3


class Backwards(torch.utils.data.Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Any:
        return iter(range(self.count - 1, -1, -1))


def weighted_trainer(base: Any) -> Any:
    """A user's own: a loss of the logits, an entry of every log, an order of the rows, a step size, a metric."""

    class Weighted(base):  # type: ignore[misc]
        loss_is_scaled_for_ga = False

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            logits = outputs["logits"][:, :-1]
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
            loss = 3 * losses.view(len(labels), -1).square().mean()
            return (loss, outputs) if return_outputs else loss

        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log({**logs, "thrice": 3 * logs.get("loss", 0.0)}, *args, **kwargs)

        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return Backwards(len(self.train_dataset))

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.5)
            return self.optimizer

    return Weighted


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(40, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def own_trainer(kind: Any, folder: Path, batch: int, **options: Any) -> Any:
    class Counter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Counter.steps += 1
            control.should_evaluate = state.global_step == 2

    def accuracy(given: Any) -> dict[str, float]:
        guessed, wanted = torch.tensor(given.predictions).argmax(-1)[:, :-1], torch.tensor(given.label_ids)[:, 1:]
        return {"accuracy": float((guessed == wanted).float().mean()), "rows": float(len(wanted))}

    options.setdefault("compute_metrics", accuracy)
    more = {name: options.pop(name) for name in ("label_smoothing_factor",) if name in options}
    given = arguments_of(transformers.TrainingArguments, folder, batch, per_device_eval_batch_size=2, **more)
    data = {"train_dataset": Tokens(32), "eval_dataset": Tokens(13)}
    trainer = kind(llama(), given, **data, callbacks=[Counter], **options)
    trainer.counter = Counter
    return trainer


def assert_same(trainer: Any, single: Any) -> None:
    """All that was logged is equal, and so is the number of rows of the evaluation."""
    assert trainer.counter.steps == single.counter.steps == 4
    found, wanted = trainer.state.log_history, single.state.log_history
    names = [name for name in wanted[0] if name in ("loss", "grad_norm", "thrice")]
    assert "loss" in names and len(found) == len(wanted)
    torch.testing.assert_close(
        torch.tensor(logged(trainer, *names)), torch.tensor(logged(single, *names)), atol=1e-5, rtol=1e-5
    )
    for entry, expected in zip(found, wanted, strict=True):
        for name in ("eval_loss", "eval_accuracy", "eval_rows"):
            assert entry.get(name) == pytest.approx(expected.get(name), abs=1e-5)
    assert any("eval_loss" in entry for entry in wanted)


@ranks(2)
@pytest.mark.parametrize("derive", ["over", "subclass"])
@pytest.mark.parametrize("tp", [2, 1])
@pytest.mark.in_suite()
def test_a_trainer_of_ones_own_logs_what_it_logs_on_one_process(
    rank: int, world: int, tp: int, derive: str, tmp_path: Path
) -> None:
    """Its loss was dropped for the model's: a third of the gradient, without a word."""
    from core.integrations import Trainer, over

    kind = over(weighted_trainer(transformers.Trainer)) if derive == "over" else weighted_trainer(Trainer)
    with launched(rank, world):
        trainer = own_trainer(kind, tmp_path, 4 * tp // world, plugin=plugin_of(tp, 1))
        trainer.train()
    with alone():
        single = own_trainer(weighted_trainer(transformers.Trainer), tmp_path, 4)
        single.train()
    assert_same(trainer, single)


class Rated(Tokens):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": super().__getitem__(index)["input_ids"], "labels": torch.tensor(index % 3)}


def classifier_trainer(kind: Any, folder: Path, batch: int, **options: Any) -> Any:
    given = arguments_of(transformers.TrainingArguments, folder, batch)
    model = llama("AutoModelForSequenceClassification", num_labels=3)
    return kind(model, given, train_dataset=Rated(32), **options)


@ranks(2)
@pytest.mark.parametrize("by", ["ddp_config", "plugin"])
def test_a_classifier_trains_on_two_ranks_as_on_one_process(rank: int, world: int, by: str, tmp_path: Path) -> None:
    """Its loss takes no number of items, and was multiplied by the number of processes all the same."""
    from core.integrations import Trainer

    options: dict[str, Any] = {"plugin": plugin_of(1, 1)} if by == "plugin" else {}
    with launched(rank, world):
        trainer = classifier_trainer(Trainer, tmp_path, 4 // world, **options)
        trainer.train()
    with alone():
        single = classifier_trainer(transformers.Trainer, tmp_path, 4)
        single.train()
    names = ("loss", "grad_norm")
    torch.testing.assert_close(
        torch.tensor(logged(trainer, *names)), torch.tensor(logged(single, *names)), atol=1e-5, rtol=1e-5
    )


def smooth(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.3)
    return total / (num_items_in_batch if num_items_in_batch is not None else labels[:, 1:].numel())


@ranks(2)
@pytest.mark.parametrize("option", [{"compute_loss_func": smooth}, {"label_smoothing_factor": 0.3}])
@pytest.mark.parametrize("tp", [2, 1])
@pytest.mark.in_suite()
def test_a_loss_that_the_options_ask_for_is_the_one_of_one_process(
    rank: int, world: int, tp: int, option: dict[str, Any], tmp_path: Path
) -> None:
    from core.integrations import Trainer

    with launched(rank, world):
        trainer = own_trainer(Trainer, tmp_path, 4 * tp // world, plugin=plugin_of(tp, 1), **option)
        trainer.train()
    with alone():
        single = own_trainer(transformers.Trainer, tmp_path, 4, **option)
        single.train()
        plain = own_trainer(transformers.Trainer, tmp_path, 4)
        plain.train()
    assert_same(trainer, single)
    assert abs(logged(single, "loss")[0][0] - logged(plain, "loss")[0][0]) > 1e-3, "the option changes nothing"


@ranks(2)
def test_what_a_pipeline_would_drop_is_refused_by_name(rank: int, world: int, tmp_path: Path) -> None:
    from core.integrations import Trainer

    kind = weighted_trainer(Trainer)
    with launched(rank, world):
        with pytest.raises(ValueError, match="Weighted.compute_loss with pp_size=2: a pipeline computes the model's"):
            own_trainer(kind, tmp_path, 4, plugin=plugin_of(1, 2), compute_metrics=None)
        with pytest.raises(ValueError, match="label_smoothing_factor=0.3\\) with a plugin: a pipeline computes"):
            options = {"compute_metrics": None, "label_smoothing_factor": 0.3}
            own_trainer(Trainer, tmp_path, 4, plugin=plugin_of(1, 2), **options)
        with pytest.raises(ValueError, match="compute_metrics and pp_size=2: the logits are on the last stage"):
            own_trainer(Trainer, tmp_path, 4, plugin=plugin_of(1, 2))


@ranks(2)
@pytest.mark.parametrize("layout", ["sharded", "tp", "pp", "dp"])
def test_an_evaluation_is_the_one_of_one_process(rank: int, world: int, layout: str, tmp_path: Path) -> None:
    """13 rows of unequal numbers of labels: the last rows filled batches, and were weighed with others' labels."""
    from core.integrations import Trainer
    from tests.unit_tests.integrations.test_trainer import Rows, new_model

    data = [Rows()[number] for number in range(13)]

    def losses(kind: Any, **options: Any) -> list[float]:
        found = []
        for size in (2, 16):
            batches = {"per_device_eval_batch_size": size, "per_device_train_batch_size": 2, "max_steps": 1}
            more = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
            given = transformers.TrainingArguments(str(tmp_path), learning_rate=1e-9, **batches, **more)
            trainer = kind(new_model(False), given, train_dataset=Rows(), eval_dataset=data, **options)
            trainer.train()
            found.append(trainer.evaluate()["eval_loss"])
        return found

    with launched(rank, world):
        if layout == "sharded":
            config = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim", initial_weights="broadcast")
            found = losses(Trainer, ddp_config=config)
        else:
            sizes = {"tp": (2, 1), "pp": (1, 2), "dp": (1, 1)}
            found = losses(Trainer, plugin=plugin_of(*sizes[layout]))
    with alone():
        expected = losses(transformers.Trainer)
    assert found == pytest.approx(expected, abs=1e-6)
    assert max(expected) - min(expected) > 1e-3, "the batches make no difference"
