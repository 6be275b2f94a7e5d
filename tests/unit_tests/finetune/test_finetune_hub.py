"""Names on the Hugging Face Hub: used where the cache has them, else answered with the line that downloads them."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tyro")

import huggingface_hub

from core.finetune.config import load_config
from core.finetune.job import tune
from core.finetune.main import main
from core.finetune.model import check_model, directory_of
from core.finetune.plan import plan_tuning
from core.finetune.windows import read_documents
from core.jobs import convert, generate
from tests.unit_tests.finetune.test_finetune_job import CPU, config_in
from tests.unit_tests.ranks import ranks

COMMIT = "0123456789" * 4
NAME = "people/small-model"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, with a cache of its own, and without a network."""

    def refuse(*arguments: Any, **options: Any) -> None:
        pytest.fail("the network was used")

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("core.training.main.start_ranks", lambda _: 77)
    return tmp_path


def cache_model(place: Path, *left_out: str) -> Path:
    """The snapshot of a small model, as huggingface_hub lays it out: links to blobs, and a reference to a commit."""
    check_model(load_config(["--model.sequence-length", "64", "--run.directory", str(place / "made")]))
    (made,) = (place / "made" / "tiny").iterdir()
    repository = place / "hub" / "models--people--small-model"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(made.iterdir())):
        if file.name not in left_out:
            file.rename(blobs / str(number))
            (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return snapshot


def test_a_model_in_the_cache_is_used_by_its_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = cache_model(place)
    flags = ["--model", NAME, "--model.sequence-length", "64", "--data.limit", "3", "--run.device", "cpu"]
    assert directory_of(load_config(flags)) == snapshot
    assert main([*flags, "--logging.no-plots"]) == 77, capsys.readouterr().err
    assert main([*flags, "--logging.no-plots", "--dry-run"]) == 0, capsys.readouterr().err
    own = place / NAME  # a directory of one's own wins
    own.mkdir(parents=True)
    assert directory_of(load_config(flags)) == Path(NAME)


DOWNLOAD = "hf download people/small-model --local-dir small-model, and give small-model"


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
@pytest.mark.parametrize("left_out", [(), ("model.safetensors",), ("config.json",)])
def test_a_model_that_the_cache_lacks_is_answered_with_the_line_that_downloads_it(
    left_out: tuple[str, ...], flags: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if left_out:
        cache_model(place, *left_out)
    assert main(["--model", NAME, "--logging.no-plots", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert NAME in line
    assert line.replace(f"{NAME} config.json", NAME).endswith(DOWNLOAD)  # a plan needs no more than that file


def test_data_in_the_cache_is_used_by_its_name(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = place / "hub" / "datasets--people--small-data"
    snapshot = repository / "snapshots" / COMMIT / "data"
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "train.jsonl").write_text('{"text": "to train on"}\n' * 3)
    (snapshot / "test.jsonl").write_text('{"text": "to test"}\n')
    flags = ["--data", "people/small-data", "--eval-data", "people/small-data", "--logging.no-plots"]
    assert main([*flags, "--run.device", "cpu"]) == 77, capsys.readouterr().err
    found = [(record["text"], held_out) for _, record, held_out in read_documents(load_config(flags).data)]
    assert found == [("to train on", False)] * 3 + [("to test", True)]


def test_generate_and_convert_take_a_name_in_the_cache(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache_model(place)
    assert generate.main([NAME, "--prompt", "ab", "--tokens", "2", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("ab")
    assert generate.main(["people/other"]) == 2
    assert "hf download people/other --local-dir other, and give other" in capsys.readouterr().err
    assert convert.main(["people/other", "out"]) == 2
    assert "hf download people/other --local-dir other, and give other" in capsys.readouterr().err
    assert convert.main([NAME, "out"]) == 2  # a qwen3 is no GPT of ours: so the directory in the cache was read
    assert "hf download" not in capsys.readouterr().err


@ranks(1)
def adapt(rank: int, world: int, folder: Path, flags: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
        config = config_in(folder, *flags)
        tune(config, plan_tuning(config, world), CPU, prepares_data=True, keeps=True)


@pytest.mark.parametrize("how", ["--zero 1", "--plugin low_level_zero"])  # in slices, and whole
def test_an_adapter_of_a_model_in_the_cache_names_the_model_and_not_the_cache(
    how: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    cache_model(place)
    flags = ["--model", NAME, "--model.sequence-length", "64", "--run.steps", "1", "--lora.r", "2", *how.split()]
    adapt(world=1, folder=place, flags=flags)
    adapter = place / "runs" / "finetune" / "model"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == NAME
    assert generate.main([str(adapter), "--prompt", "ab", "--tokens", "2"]) == 0, capsys.readouterr().err
    (place / "hub").rename(place / "gone")
    assert generate.main([str(adapter), "--prompt", "ab", "--tokens", "2"]) == 2
    assert "hf download people/small-model --local-dir small-model" in capsys.readouterr().err


def test_data_of_the_hub_is_answered_with_the_line_that_downloads_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", "people/small-data", "--logging.no-plots"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "hf download people/small-data --repo-type dataset --local-dir small-data, and give small-data" in line


@pytest.mark.parametrize("path", ["nowhere", "runs/model", "/people/small", "../a/b", "a/b/c", "people/chats.jsonl"])
def test_a_path_that_is_wrong_is_no_name_on_the_hub(path: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "runs").mkdir()
    for flag in ("--model", "--data"):
        assert main([flag, path, "--logging.no-plots"]) == 2
        message = capsys.readouterr().err
        assert path in message and ("hf download" not in message or (path, flag) == ("people/chats.jsonl", "--model"))
