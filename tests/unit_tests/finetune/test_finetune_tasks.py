"""Classification, reward models and DPO: equal to a plain loop of transformers that sees one row at a time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("tyro")

from core.finetune.config import TuneConfig, TunedData, load_config
from core.finetune.main import main
from core.finetune.model import directory_of
from core.finetune.plan import plan_tuning
from core.finetune.records import Example
from core.finetune.task_records import checked_task, fit_rows
from core.finetune.windows import classes_of, read_documents
from core.training.errors import ConfigError
from core.training.sampler import GlobalBatchSampler
from tests.unit_tests.finetune.test_finetune_job import PLAIN, torch_state_is_fresh, tuned
from tests.unit_tests.ranks import ranks

TEXTS = [{"text": "ab c" * (1 + n % 5) + "xyz"[n % 3], "label": ("low", "mid", "top")[n % 3]} for n in range(24)]
PAIRS = [
    {"prompt": "count " + "a" * (n % 6), "chosen": " is " + "b" * (1 + n % 4), "rejected": " or " + "c" * (1 + n % 3)}
    for n in range(24)
]
RECORDS = {"classification": TEXTS, "reward": PAIRS, "dpo": PAIRS}


def config_of(folder: Path, task: str, *flags: str) -> TuneConfig:
    """A small job on 24 records, in a folder. The same in every process."""
    file = folder / "data.jsonl"
    if not file.exists():
        partial = file.with_suffix(f".{dist.get_rank()}")
        partial.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[task]))
        partial.rename(file)
    where = ["--run.directory", str(folder / "runs"), "--data.cache", str(folder / "cache"), "--logging.no-plots"]
    size = ["--model.sequence-length", "64", "--run.global-batch-size", "4", "--data.validation-fraction", "0"]
    more = ["--data", str(file), "--optimizer.lr", "2e-3", "--optimizer.warmup-steps", "0", *PLAIN]
    return load_config(["--task", task, *where, *size, *more, *flags])


def plain_model(config: TuneConfig, lora: Any = None) -> Any:
    """What transformers makes of the base, with a head drawn under the run's seed."""
    import transformers

    torch.manual_seed(config.run.seed)
    base, task = directory_of(config), config.data.task
    if task == "dpo":
        return transformers.AutoModelForCausalLM.from_pretrained(base)
    labels = 3 if task == "classification" else 1
    return transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels)


def rows_of_record(record: Any, tokenizer: Any, side: str) -> tuple[torch.Tensor, int]:
    """([1, tokens], how many of them are the prompt's)."""
    prompt = tokenizer(record["prompt"])["input_ids"]
    answer = tokenizer(record[side])["input_ids"]
    return torch.tensor([[*prompt, *answer, tokenizer.eos_token_id]]), len(prompt)


def log_probability(model: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Of the answer, its end mark included."""
    chosen = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    return chosen[prompt - 1 :].sum()


def numbers_of(model: Any, reference: Any, record: Any, task: str, tokenizer: Any) -> tuple[torch.Tensor, ...]:
    """(loss, accuracy) of one text, or (loss, accuracy, margin) of one pair."""
    if task == "classification":
        label = ("low", "mid", "top").index(record["label"])
        logits = model(input_ids=torch.tensor([tokenizer(record["text"])["input_ids"]])).logits
        return F.cross_entropy(logits, torch.tensor([label])), (logits.argmax() == label).float()
    sides = [rows_of_record(record, tokenizer, side) for side in ("chosen", "rejected")]
    if task == "reward":
        good, bad = (model(input_ids=ids).logits[0, 0] for ids, _ in sides)
    else:
        with torch.no_grad():
            before = [log_probability(reference, *side) for side in sides]
        now = [log_probability(model, *side) for side in sides]
        good, bad = (0.1 * (policy - frozen) for policy, frozen in zip(now, before, strict=True))
    return -torch.log(torch.sigmoid(good - bad)), (good > bad).float(), good - bad


@torch.no_grad()
def means_over(model: Any, reference: Any, config: TuneConfig, records: Any) -> list[float]:
    """Of the numbers of `numbers_of`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory_of(config))
    rows = [numbers_of(model, reference, record, config.data.task, tokenizer) for record in records]
    return [float(torch.stack(column).mean()) for column in zip(*rows, strict=True)]


def losses_of_a_plain_loop(config: TuneConfig, steps: int) -> tuple[list[list[float]], Any]:
    """One process, each row alone in its forward, torch's Adam: ([loss, accuracy, margin] of each step, the model)."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory_of(config))
    model, reference = plain_model(config), plain_model(config)
    records = RECORDS[config.data.task]
    sampler = GlobalBatchSampler(len(records), config.run.global_batch_size, config.run.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.optimizer.lr, betas=(0.9, 0.999), eps=1e-8)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        rows = []
        for index in sampler.next_global_batch():
            rows.append(numbers_of(model, reference, records[index], config.data.task, tokenizer))
            (rows[-1][0] / config.run.global_batch_size).backward()
        optimizer.step()
        found.append([float(torch.stack(column).mean().detach()) for column in zip(*rows, strict=True)])
    return found, model


def recorded(folder: Path) -> list[tuple[float, ...]]:
    """(loss, *metrics) of each step of a run."""
    lines = (folder / "runs" / "finetune" / "steps.jsonl").read_text().splitlines()
    return [(line["loss"], *line["metrics"].values()) for line in map(json.loads, lines)]


ON_TWO = ("--tp 2 --run.micro-batch-size 2", "--zero 3 --run.micro-batch-size 1")
IN_SUITE = {("classification", ON_TWO[1]), ("reward", ON_TWO[0]), ("dpo", ON_TWO[0])}


@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize(
    ("task", "layout"),
    [
        pytest.param(task, layout, marks=() if (task, layout) in IN_SUITE else pytest.mark.nightly)
        for task in RECORDS
        for layout in (
            *ON_TWO,
            *("--plugin low_level_zero --zero 2", "--plugin gemini", "--zero 0", "--plugin torch_ddp"),
            *("--plugin torch_fsdp", "--tp 2 --model tiny:gpt2 --model.gradient-checkpointing"),
            "--ep 2 --model tiny:mixtral",
            ("--tp 2 --model tiny:bert", "--tp 2 --model.logits-chunk 5")[task == "dpo"]
            + " --optimizer.lr 1e-2" * (task == "classification"),
        )
    ],
)
def test_20_losses_of_a_task_are_those_of_a_plain_loop(
    rank: int, world: int, task: str, layout: str, tmp_path: Path
) -> None:
    import transformers

    config = config_of(tmp_path, task, *layout.split(), "--run.steps", "20")
    losses = tuned(config, rank, world)
    if rank == 0:
        expected, reference = losses_of_a_plain_loop(config, 20)
        # Adam makes steps of the rounding of some weights, by which logits of routers are 3e-4 away. In step 5 of a
        # classifier the second and third expert of one token are 2.4e-4 apart in fp64: transformers on one process, fed
        # with the rows in one batch in place of one by one, takes the other one too.
        others = "tiny:" in layout
        equal = 4 if "mixtral" in layout else 5 if others else 20
        assert losses[:equal] == pytest.approx([step[0] for step in expected[:equal]], abs=1e-5)
        # BERT's first token, which its head reads, does not see the last one so soon; its losses begin within 0.05.
        assert (max(losses) - min(losses) if "bert" in layout else losses[0] - losses[-1]) > 0.3
        assert losses[-1] == pytest.approx(expected[-1][0], rel=0.05)
        found = recorded(tmp_path)
        start = 1 if task == "dpo" else 0  # the first margins are 0, up to their rounding
        assert [step[1] for step in found][start:equal] == [step[1] for step in expected][start:equal]
        if task != "classification":
            assert [step[2] for step in found[:equal]] == pytest.approx(
                [step[2] for step in expected[:equal]], abs=1e-4
            )
        kind = transformers.AutoModelForCausalLM if task == "dpo" else transformers.AutoModelForSequenceClassification
        saved = kind.from_pretrained(tmp_path / "runs" / "finetune" / "model")
        for name, parameter in () if others else reference.named_parameters():
            torch.testing.assert_close(saved.get_parameter(name), parameter, rtol=1e-3, atol=2e-4)
        if task == "classification":
            assert saved.config.id2label == {0: "low", 1: "mid", 2: "top"}
    dist.barrier()


@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize("task", ["classification", pytest.param("reward", marks=pytest.mark.nightly), "dpo"])
def test_adapters_of_a_task_are_resumed_validated_and_loaded_on_the_base(
    rank: int, world: int, task: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    flags = ["--tp", "2", "--lora.r", "2", "--run.steps", "6", "--eval-data", str(tmp_path / "data.jsonl")]
    flags += ["--run.validation-windows", "24", "--run.validate-every", "0", "--data.limit", "12"]
    kept = ["--checkpoint.dir", str(tmp_path / "kept")]
    whole = tuned(config_of(tmp_path, task, *flags, "--run.name", "whole", "--run.micro-batch-size", "2"), rank, world)
    torch_state_is_fresh()
    first = tuned(config_of(tmp_path, task, *flags, *kept, "--run.stop-after", "3"), rank, world)
    torch_state_is_fresh()
    second = tuned(config_of(tmp_path, task, *flags, *kept, "--checkpoint.resume"), rank, world)
    assert first + second == pytest.approx(whole, abs=1e-6)
    if rank == 0:
        run = tmp_path / "runs" / "finetune"
        kind = peft.AutoPeftModelForCausalLM if task == "dpo" else peft.AutoPeftModelForSequenceClassification
        model = kind.from_pretrained(run / "model").eval()
        found = json.loads((run / "summary.json").read_text())
        config = config_of(tmp_path, task, *flags)
        means = means_over(model, plain_model(config), config, RECORDS[task])
        assert found["validation_loss"] == pytest.approx(means[0], abs=1e-5)
        assert found["validation_accuracy"] == pytest.approx(means[1])
        assert whole[0] - whole[-1] > 0.01
        if task != "dpo":
            head = model.base_model.model.score.modules_to_save["default"].weight
            assert (head - plain_model(config).score.weight).abs().max() > 1e-3
    dist.barrier()


@ranks(2)
def test_in_bfloat16_a_classifier_learns(rank: int, world: int, tmp_path: Path) -> None:
    import transformers

    flags = ["--zero", "2", "--model.dtype", "bfloat16", "--run.steps", "12", "--run.validate-every", "0"]
    losses = tuned(config_of(tmp_path, "classification", *flags), rank, world)
    assert losses[0] - losses[-1] > 0.3
    if rank == 0:
        directory = tmp_path / "runs" / "finetune" / "model"
        model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
        assert model.dtype == torch.bfloat16
    dist.barrier()


GOOD = {"text": "a", "label": 0}
PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("task", "bad", "words"),
    [
        ("classification", {"text": "b"}, '''the fields 'text'; --task classification expects "text" and "label"'''),
        ("classification", {"text": "b", "label": -1}, "'label' -1 is out of range"),
        ("classification", {"text": "b", "label": 7}, "'label' 7 is out of range: no record has the label 1"),
        ("classification", {"text": "b", "label": "x"}, "'label' is 'x', and that of"),
        ("classification", {"text": "b", "label": 1.5}, "'label' is 1.5; expected a whole number"),
        ("classification", {"text": "", "label": 1}, "'text' is ''; expected text"),
        ("reward", {"chosen": "b"}, 'has the fields \'chosen\'; --task reward expects "chosen" and "rejected"'),
        ("dpo", {**PAIR, "rejected": "a"}, "'chosen' and 'rejected' are equal"),
        ("dpo", {**PAIR, "chosen": ["a"]}, "must be all text, or all lists of messages"),
    ],
)
def test_a_wrong_record_is_refused_by_file_and_line(task: Any, bad: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    good = GOOD if task == "classification" else PAIR
    file.write_text("".join(json.dumps(record) + "\n" for record in (good, bad)))
    options = TunedData(task=task, file=(file,), validation_fraction=0)
    with pytest.raises(ConfigError) as raised:
        assert classes_of(options, []) == [] and list(read_documents(options))
    assert str(raised.value).startswith(f"{file}, line 2")
    assert words in str(raised.value)


def test_a_label_that_the_model_lacks_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "a", "label": "new"}))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TEXTS))
    where = ["--run.directory", str(tmp_path / "runs"), "--data.cache", str(tmp_path / "cache")]
    flags = ["--task", "classification", "--data", str(tmp_path / "data.jsonl"), "--eval-data", str(other)]
    assert main([*where, *flags]) == 2
    assert f"{other}, line 1: 'label' 'new' is out of range; the records" in capsys.readouterr().err
    for more, words in (
        (["--pp", "2"], "--parallel.pp: --task classification trains over dp, tp, ep and --zero"),
        (["--beta", "0.5"], "--model.beta is of --task dpo, and --task is classification"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_tuning(load_config([*flags, *more]), 2)


def test_a_pair_without_a_prompt_begins_with_what_both_sides_have() -> None:
    asks = {"role": "user", "content": "q"}
    sides = [[asks, {"role": "assistant", "content": answer}] for answer in "ab"]
    expected = {"prompt": [asks], "chosen": sides[0][1:], "rejected": sides[1][1:]}
    assert checked_task("dpo", {"chosen": sides[0], "rejected": sides[1]}, "") == expected
    given = {"chosen": "one two", "rejected": "one four"}
    assert checked_task("reward", given, "") == {"prompt": "one", "chosen": " two", "rejected": " four"}


def test_rows_are_cut_or_left_out_by_what_a_task_reads() -> None:
    def row(tokens: int, learned: int) -> Example:
        return Example(np.arange(tokens), np.arange(tokens) >= tokens - learned, is_text=False)

    records = [[row(4, 2), row(6, 3)], [row(3, 1), row(4, 1)], [row(3, 1), row(6, 1)]]
    for task, sizes, cut, dropped in (("reward", [[3, 4]], 0, 2), ("dpo", [[4, 4], [3, 4]], 1, 1)):
        fitting, *counts = fit_rows(task, records, 4)  # type: ignore[arg-type]
        assert [[len(row.ids) for row in rows] for rows in fitting] == sizes
        assert counts == [cut, dropped]
