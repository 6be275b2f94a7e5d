"""Text, tokenizers, token files and the sampler."""

from __future__ import annotations

import errno
import random
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import distributed_c10d

from core_plan.job.config import DataOptions, JobConfig, OptimizerOptions, RunOptions
from core_plan.job.config_file import load_config
from core_plan.job.errors import ConfigError
from core_plan.job.schedule import make_scheduler
from core_train.job import job_tokens
from core_train.sampler import GlobalBatchSampler, microbatches
from core_train.text import open_text, standard_library
from core_train.tokens import num_windows, open_tokens, prepare_tokens, window
from tests.unit_tests.core_train.training_reference import TINY
from tests.unit_tests.ranks import ranks


def test_the_default_text_is_the_standard_library_in_one_order() -> None:
    text = standard_library()
    assert text == standard_library()
    names = [file.as_posix() for file in text.files]
    assert any(name.endswith("/argparse.py") for name in names) and not any("site-packages" in name for name in names)
    assert names != sorted(names), "the end of the text must be a sample of it, not one subject"


def test_a_text_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="novel.txt is neither a file nor a directory"):
        open_text([tmp_path / "novel.txt"])
    with pytest.raises(FileNotFoundError, match="holds no file that ends in"):
        open_text([tmp_path])


def test_byte_tokens_are_the_bytes_of_the_documents_and_an_end_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xc3\xa9 \xff")
    options = DataOptions(text=(tmp_path / "a.txt",), cache=tmp_path / "cache", validation_fraction=0.25)
    file = open_tokens(options, prepare_tokens(options))
    assert np.concatenate([file.train, file.validation]).tobytes() == b"caf\xc3\xa9 \xff\0"
    assert len(file.train) == 6 and len(file.validation) == 2
    assert (file.header.text_bytes, file.header.tokens, file.header.dtype) == (7, 8, "uint8")
    assert "7 bytes -> 8 tokens" in file.header.describe()


def test_a_token_file_is_made_once_and_again_when_the_text_changes(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("one")
    options = DataOptions(text=(source,), cache=tmp_path / "cache")
    first = prepare_tokens(options)
    written = first.with_suffix(".tokens").stat().st_mtime_ns
    assert prepare_tokens(options) == first
    assert first.with_suffix(".tokens").stat().st_mtime_ns == written
    source.write_text("two")
    assert prepare_tokens(options) != first
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_text_has_one_order_and_one_token_file_under_every_spelling_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text" / "inner"
    text.mkdir(parents=True)
    for number in range(12):
        (text / f"{number}.txt").write_text(f"document {number:02}")
    monkeypatch.chdir(tmp_path)
    spellings = ((text,), (Path("text/inner"),), (Path("text/../text/inner"),))
    assert len({tuple(file.name for file in open_text(paths).files) for paths in spellings}) == 1
    files = {prepare_tokens(DataOptions(text=paths, cache=tmp_path / "cache")) for paths in spellings}
    assert len(files) == 1
    one_by_one = tuple(sorted(text.iterdir()))
    assert files == {prepare_tokens(DataOptions(text=one_by_one, cache=tmp_path / "cache"))}


def test_a_token_files_digest_is_that_of_its_tokens(tmp_path: Path) -> None:
    def digest(name: str, content: str) -> str:
        (tmp_path / name).write_text(content)
        options = DataOptions(text=(tmp_path / name,), cache=tmp_path / "cache")
        return open_tokens(options, prepare_tokens(options)).header.digest

    assert digest("a.txt", "one text") == digest("b.txt", "one text") != digest("c.txt", "two text")


def test_a_cut_off_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    options = DataOptions(text=(tmp_path / "a.txt",), cache=tmp_path)
    path = prepare_tokens(options)
    path.with_suffix(".tokens").write_bytes(b"some")
    with pytest.raises(ValueError, match="holds 4 tokens and its header says 10; delete "):
        open_tokens(options, path)


def test_a_header_of_a_token_file_that_was_changed_is_made_again(tmp_path: Path) -> None:
    """The bytes of the text decide the unit of the loss, and no token says how many they were."""
    (tmp_path / "a.txt").write_text("some text")
    options = DataOptions(text=(tmp_path / "a.txt",), cache=tmp_path)
    path = prepare_tokens(options)
    file = path.with_suffix(".json")
    whole = file.read_text()
    for damaged in (whole.replace('"text_bytes": 9', '"text_bytes": 90'), "[]", "{}", '{"sha256": 1}'):
        assert damaged != whole
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"json (has other content than was written|is no header of a token file)"):
            open_tokens(options, path)
        assert prepare_tokens(options) == path and file.read_text() == whole


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match="is empty: 1 files, 0 bytes"):
        prepare_tokens(DataOptions(text=(tmp_path / "a.txt",), cache=tmp_path / "cache"))


def test_bpe_tokens_decode_to_the_text_and_are_fewer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    content = "def gradient(bucket):\n    return bucket.gradient\n" * 50
    (tmp_path / "a.py").write_text(content)
    options = DataOptions(text=(tmp_path / "a.py",), tokenizer="bpe", bpe_vocab_size=300, cache=tmp_path / "cache")
    file = open_tokens(options, prepare_tokens(options))
    tokens = np.concatenate([file.train, file.validation])
    (trained,) = (tmp_path / "cache").glob("*.tokenizer")
    assert tokenizers.Tokenizer.from_file(str(trained)).decode(tokens.tolist()) == content
    assert file.header.bytes_per_token > 2 and file.header.dtype == "uint16"
    again = DataOptions(text=options.text, tokenizer=str(trained), cache=tmp_path / "cache")
    assert prepare_tokens(again) == prepare_tokens(options), "the same tokenizer from its file"


def test_damaged_tokens_and_a_damaged_tokenizer_are_made_again(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("a text that is long enough, a text that is long enough " * 20)
    options = DataOptions(text=(tmp_path / "a.txt",), tokenizer="bpe", bpe_vocab_size=300, cache=tmp_path / "cache")
    path = prepare_tokens(options)
    whole = {file.name: file.read_bytes() for file in (tmp_path / "cache").iterdir()}
    assert len(whole) == 4
    for name, intact in whole.items():
        file = tmp_path / "cache" / name
        for place in (len(intact) // 2, len(intact) - 3):
            damaged = bytearray(intact)
            damaged[place] ^= 1
            for data in (bytes(damaged), intact[:place], b""):
                file.write_bytes(data)
                assert prepare_tokens(options) == path
                now = {each.name: each.read_bytes() for each in (tmp_path / "cache").iterdir()}
                assert now.keys() == whole.keys() and now[name] == intact, name


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(FileNotFoundError, match="'bpee': not 'bytes', not 'bpe', and no such file"):
        prepare_tokens(DataOptions(text=(tmp_path / "a.txt",), tokenizer="bpee", cache=tmp_path))


def test_windows_cover_the_text_and_overlap_only_in_the_label() -> None:
    tokens = np.arange(11, dtype=np.uint8)
    assert num_windows(tokens, 5) == 2 and num_windows(tokens[:10], 5) == 1 and num_windows(tokens[:0], 5) == 0
    assert window(tokens, 0, 5).tolist() == [0, 1, 2, 3, 4, 5]
    assert window(tokens, 1, 5).tolist() == [5, 6, 7, 8, 9, 10]


def test_an_epoch_deals_every_window_once_and_the_next_in_another_order() -> None:
    sampler = GlobalBatchSampler(num_windows=12, global_batch_size=4, seed=1)
    epochs = [np.concatenate([sampler.next_global_batch() for _ in range(3)]) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(12))
    assert list(epochs[0]) != list(epochs[1])


def test_a_batch_reaches_over_the_end_of_an_epoch_even_when_it_is_larger_than_one() -> None:
    sampler = GlobalBatchSampler(num_windows=3, global_batch_size=7, seed=1)
    dealt = sampler.next_global_batch()
    assert len(dealt) == 7 and sampler.consumed == 7
    assert sorted(dealt[:3]) == sorted(dealt[3:6]) == [0, 1, 2]


def test_every_layout_trains_on_the_same_global_batches() -> None:
    """Random sizes: the slices of all data ranks and their microbatches put together are the global batch."""
    rng = random.Random(5)
    for _ in range(200):
        dp, micro, count = rng.randint(1, 8), rng.randint(1, 5), rng.randint(1, 4)
        total = dp * micro * count
        windows, seed = rng.randint(1, 100), rng.randint(0, 9)
        reference = GlobalBatchSampler(windows, total, seed)
        ranks = [GlobalBatchSampler(windows, total, seed) for _ in range(dp)]
        for _step in range(3):
            expected = reference.next_global_batch()
            parts = [microbatches(sampler.next_global_batch(), r, dp, micro) for r, sampler in enumerate(ranks)]
            assert all(len(part) == count and all(len(m) == micro for m in part) for part in parts)
            assert np.concatenate([m for part in parts for m in part]).tolist() == expected.tolist()


def test_a_sampler_goes_on_where_another_stopped_at_another_batch_size() -> None:
    whole = GlobalBatchSampler(num_windows=50, global_batch_size=12, seed=3)
    expected = np.concatenate([whole.next_global_batch() for _ in range(6)])
    first = GlobalBatchSampler(num_windows=50, global_batch_size=24, seed=3)
    dealt = [first.next_global_batch()]
    resumed = GlobalBatchSampler(num_windows=50, global_batch_size=8, seed=3)
    resumed.load_state_dict(first.state_dict())
    dealt += [resumed.next_global_batch() for _ in range(6)]
    assert np.concatenate(dealt).tolist() == expected.tolist()


def test_a_position_in_another_text_is_refused() -> None:
    state = GlobalBatchSampler(num_windows=50, global_batch_size=2, seed=3).state_dict()
    with pytest.raises(ValueError, match="belongs to num_windows 50 and this sampler has 60"):
        GlobalBatchSampler(num_windows=60, global_batch_size=2, seed=3).load_state_dict(state)


@pytest.mark.parametrize("consumed", [-5, 2.0, "3", None])
def test_a_position_that_is_no_number_of_windows_is_refused(consumed: object) -> None:
    sampler = GlobalBatchSampler(num_windows=50, global_batch_size=2, seed=3)
    with pytest.raises(ValueError, match="expected the number of windows dealt so far"):
        sampler.load_state_dict({**sampler.state_dict(), "consumed": consumed})


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter than one sequence"):
        GlobalBatchSampler(num_windows=0, global_batch_size=2, seed=3)


def rates_of(steps: int, **options: object) -> list[float]:
    config = JobConfig(
        optimizer=OptimizerOptions(lr=1.0, min_lr=0.2, **options),  # type: ignore[arg-type]
        run=RunOptions(steps=steps, global_batch_size=7),
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(config, optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=7)
    return rates


def test_the_learning_rate_warms_up_then_falls_on_a_cosine_to_its_minimum() -> None:
    rates = rates_of(14, warmup_steps=4)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[8] == pytest.approx(0.6) and rates[13] == pytest.approx(0.2)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates_of(1, warmup_steps=0) == [1.0]
    assert rates_of(3, warmup_steps=4) == [0.25, 0.5, 0.75], "a run within its warm-up never decays"
    assert rates_of(5, warmup_steps=0, decay="linear") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates_of(4, warmup_steps=2, decay="constant") == [0.5, 1.0, 1.0, 1.0]


@ranks(2)
def test_ranks_wait_for_the_text_beyond_the_limit_of_the_group(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    config = load_config([*TINY, "--data.text", str(tmp_path / "a.txt"), "--data.cache", str(tmp_path / "cache")])
    limit_s = 1.0
    distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), distributed_c10d._get_default_group())

    def prepare_slowly(options: DataOptions) -> Path:
        assert rank == 0, "one rank of a machine reads the text"
        time.sleep(3 * limit_s)
        return prepare_tokens(options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("core_train.job.prepare_tokens", prepare_slowly)
        assert len(job_tokens(config, rank == 0).train) == 99


@ranks(2)
def test_machines_with_different_texts_are_refused_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / f"{rank}.txt").write_text(f"{rank}" * 1000)
    config = load_config([*TINY, "--data.text", str(tmp_path / f"{rank}.txt"), "--data.cache", str(tmp_path / "cache")])
    with pytest.raises(ConfigError, match="the text or the tokenizer of rank 1 differs from rank 0"):
        job_tokens(config, True)  # each rank is the first of its machine


@ranks(2)
def test_a_text_that_cannot_be_prepared_is_reported_on_all_ranks(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    config = load_config([*TINY, "--data.text", str(tmp_path / "a.txt"), "--data.cache", str(tmp_path / "cache")])
    with pytest.raises(ConfigError, match="rank 0 could not prepare the text: the text .* is empty"):
        job_tokens(config, rank == 0)


@ranks(2)
def test_a_cache_on_a_full_disk_is_named_on_all_ranks_and_nothing_is_left_in_it(
    rank: int, world: int, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 1000)
    cache = tmp_path / "cache"
    config = load_config([*TINY, "--data.text", str(tmp_path / "a.txt"), "--data.cache", str(cache)])

    def fill(_: object, document: bytes) -> np.ndarray:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("core_train.tokenizer.ByteTokenizer.encode", fill)
        with pytest.raises(
            ConfigError, match=f"rank 0 could not prepare the text: cannot write {cache}: No space.*free"
        ):
            job_tokens(config, rank == 0)
    assert not list(cache.iterdir())
