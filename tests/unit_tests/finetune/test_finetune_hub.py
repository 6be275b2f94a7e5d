"""Names on the Hugging Face Hub: used where the cache has them, else answered with the line that downloads them."""

import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tyro")

import huggingface_hub

from core.finetune.config import load_config
from core.finetune.main import main
from core.finetune.model import check_model

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
    assert load_config(flags).model.path == str(snapshot)
    assert main([*flags, "--logging.no-plots"]) == 77, capsys.readouterr().err
    assert main([*flags, "--logging.no-plots", "--dry-run"]) == 0, capsys.readouterr().err
    own = place / NAME  # a directory of one's own wins
    own.mkdir(parents=True)
    assert load_config(flags).model.path == NAME


DOWNLOAD = "hf download people/small-model --local-dir small-model, and give --model small-model"


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
@pytest.mark.parametrize("left_out", [(), ("model.safetensors",), ("config.json",)])
def test_a_model_that_the_cache_lacks_is_answered_with_the_line_that_downloads_it(
    left_out: tuple[str, ...], flags: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if left_out:
        cache_model(place, *left_out)
    assert main(["--model", NAME, "--logging.no-plots", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert NAME in line and line.endswith(DOWNLOAD)


def test_data_of_the_hub_is_answered_with_the_line_that_downloads_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", "people/small-data", "--logging.no-plots"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "hf download people/small-data --repo-type dataset --local-dir small-data, and" in line


@pytest.mark.parametrize("path", ["nowhere", "runs/model", "/people/small", "../a/b", "a/b/c", "people/chats.jsonl"])
def test_a_path_that_is_wrong_is_no_name_on_the_hub(path: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "runs").mkdir()
    for flag in ("--model", "--data"):
        assert main([flag, path, "--logging.no-plots"]) == 2
        message = capsys.readouterr().err
        assert path in message and ("hf download" not in message or (path, flag) == ("people/chats.jsonl", "--model"))
