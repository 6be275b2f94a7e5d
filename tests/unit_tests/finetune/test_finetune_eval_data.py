"""A file of one's own for the validation loss: transformers' loss of its lines, one by one, is the reference."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tyro")

import torch.nn.functional as F

from core import parallel_state
from core.checkpoint import list_steps
from core.finetune.config import TunedData
from core.finetune.main import main
from core.finetune.model import byte_tokenizer, directory_of
from core.finetune.windows import open_windows, prepare_windows
from core.jobs import convert
from core.training.errors import ConfigError
from tests.unit_tests.finetune.test_finetune_job import config_in, tuned
from tests.unit_tests.ranks import ranks

ASKED = [("count ", "bbb"), ("2 + 2 = ", "4"), ("a longer question, and ", "an answer that is longer")]


def write_lines(file: Path) -> Path:
    file.write_text("".join(json.dumps({"prompt": each, "completion": answer}) + "\n" for each, answer in ASKED))
    return file


def lines_of_all_ranks(folder: Path, rank: int) -> Path:
    file = folder / "eval.jsonl"
    if rank == 0:
        write_lines(file)
    torch.distributed.barrier()
    return file


def loss_of_lines(directory: Path) -> float:
    """The mean over the tokens of all completions and their end marks."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory).double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    losses = []
    for asked, answer in ASKED:
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (asked, answer))
        ids = torch.tensor([*before, *after, tokenizer.eos_token_id])
        logits = model(input_ids=ids[None]).logits[0, len(before) - 1 : -1]
        losses.append(F.cross_entropy(logits, ids[len(before) :], reduction="none"))
    return float(torch.cat(losses).mean())


@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize("how", ["--tp 2", pytest.param("--pp 2", marks=pytest.mark.nightly)])
def test_the_validation_loss_is_that_of_the_lines_of_ones_own_file(
    rank: int, world: int, how: str, tmp_path: Path
) -> None:
    file = lines_of_all_ranks(tmp_path, rank)
    kept = ["--keep-best", "--checkpoint.dir", str(tmp_path / "kept")]
    flags = [*how.split(), "--run.steps", "3", "--eval-data", str(file), "--eval-every", "1", *kept]
    config, said = config_in(tmp_path, *flags), io.StringIO()
    with contextlib.redirect_stdout(said):
        tuned(config, rank, world)
    if rank == 0:
        run = tmp_path / "runs" / "finetune"
        losses = [json.loads(line)["validation_loss"] for line in (run / "steps.jsonl").read_text().splitlines()]
        at_end = json.loads((run / "summary.json").read_text())["validation_loss"]
        assert at_end == pytest.approx(loss_of_lines(run / "model"), abs=1e-5)
        assert f"the lowest validation loss, {at_end:.4f}, was that of step 3; it is in" in said.getvalue()
        rows = [line for line in (run / "model" / "README.md").read_text().splitlines() if "| validation" in line]
        assert rows == [f"| validation, after step 3, whose weights these are | {at_end:.4f} |"]
        start = loss_of_lines(directory_of(config))
        assert start - at_end > 0.01 and start > losses[0] > losses[1] > at_end and losses[2] is None
        header = open_windows(next(config.data.cache.glob("windows-*"))).header
        assert header.documents == 60 + 3  # no line of the data is held out
        assert header.describe().startswith(f"data: {config.data.file[0]}, with {file} to validate on, 63 documents")
    torch.distributed.barrier()


@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize(
    "how",
    [
        "--zero 3",
        pytest.param("--tp 2", marks=pytest.mark.nightly),
        # Without the output layer, adapters on random weights cannot make the validation loss rise.
        pytest.param("--pp 2 --lora.r 4 --lora.targets lm_head q_proj", marks=pytest.mark.nightly),
    ],
)
def test_the_model_that_is_written_is_the_one_with_the_lowest_validation_loss(
    rank: int, world: int, how: str, tmp_path: Path
) -> None:
    file = lines_of_all_ranks(tmp_path, rank)
    kept = tmp_path / "kept"
    flags = f"{how} --run.steps 6 --eval-data {file} --eval-every 1 --optimizer.lr 0.03 --keep-best".split()
    flags += ["--optimizer.decay", "constant", "--checkpoint.dir", str(kept), "--checkpoint.keep", "1"]
    tuned(config_in(tmp_path, *flags, "--run.stop-after", "4"), rank, world)
    parallel_state.destroy_model_parallel()
    tuned(config_in(tmp_path, *flags, "--checkpoint.resume"), rank, world)
    run = tmp_path / "runs" / "finetune"
    if rank == 0:
        log = [json.loads(line)["validation_loss"] for line in (run / "steps.jsonl").read_text().splitlines()]
        losses = [*log[:3], *log[4:5], json.loads((run / "summary.json").read_text())["validation_loss"]]
        best = losses.index(min(losses))
        assert best < 3 and min(losses) < losses[-1] - 0.03  # it is of the part before the resume
        assert [list_steps(kept), list_steps(kept / "best")] == [[6], [best + 1]]
        merged = run / "model"
        if "lora" in how:
            merged = tmp_path / "merged"
            assert convert.main([str(run / "model"), str(merged)]) == 0
        assert loss_of_lines(merged) == pytest.approx(min(losses), abs=1e-4)
    torch.distributed.barrier()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--run.validate-every 0", "keep-best compares validation losses, and --run.validate-every 0 takes one at"),
        ("--data.validation-fraction 0", "--checkpoint.keep-best needs text to validate on; give --eval-data FILE"),
        ("--data.limit 3", "--checkpoint.keep-best needs text to validate on; give --eval-data FILE"),
        ("--checkpoint.no-at-end", "--checkpoint.keep-best needs --checkpoint.dir, where it is kept"),
        ("--plugin torch_ddp --run.ranks 1", "--checkpoint.keep-best: a run by --parallel.plugin torch_ddp keeps no"),
    ],
)
def test_keeping_the_best_is_refused_where_it_cannot_be(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert main([*flags.split(), "--keep-best", "--logging.no-plots"]) == 2
    assert message in capsys.readouterr().err


def test_windows_follow_the_lines_that_are_validated_on(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    data, held_out = (write_lines(tmp_path / f"{name}.jsonl") for name in ("data", "eval"))
    both = tmp_path / "both.jsonl"
    both.write_text(data.read_text() * 2)
    cache = tmp_path / "cache"
    alone = TunedData(file=(both,), cache=cache, validation_fraction=0)
    own = TunedData(file=(data,), eval_file=held_out, limit=2, cache=cache)
    names = [prepare_windows(options, 48, tokenizer) for options in (alone, own, TunedData(file=(data,), cache=cache))]
    assert len(set(names)) == 3
    windows = open_windows(cache / names[1])
    assert windows.header.documents == 2 + 3  # --data.limit is of the lines that are trained on
    assert len(windows.validation) == 2 and len(windows.train) == 1
    held_out.write_text('{"prompt": "' + "x" * 60 + '", "completion": "y"}\n')
    with pytest.raises(ConfigError, match="eval.jsonl gives no window to validate on"):
        prepare_windows(own, 48, tokenizer)


@pytest.mark.parametrize(
    ("file", "message"),
    [("nowhere.jsonl", "--data.eval-file nowhere.jsonl is no file"), ("bad.jsonl", "bad.jsonl, line 1 has the fields")],
)
def test_a_file_to_validate_on_that_cannot_be_read_is_refused_before_ranks_start(
    file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("core.training.main.start_ranks", lambda _: 77)
    Path("bad.jsonl").write_text('{"body": "x"}\n')
    assert main(["--eval-data", file, "--logging.no-plots"]) == 2
    assert message in capsys.readouterr().err
