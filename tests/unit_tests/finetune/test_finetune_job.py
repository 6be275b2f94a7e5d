"""The fine-tuning job: equal to a plain loop of transformers, resumed bit for bit, and a plain directory at the end."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("tyro")

from core import parallel_state
from core.finetune.config import TuneConfig, load_config
from core.finetune.job import tune
from core.finetune.model import boosted, check_model, directory_of
from core.finetune.model_files import merged
from core.finetune.plan import plan_tuning
from core.finetune.trainer import TuneTrainer
from core.finetune.windows import IDS, LABELS, POSITIONS, UNLEARNED, open_windows
from core.training.errors import ConfigError
from core.training.sampler import GlobalBatchSampler
from tests.unit_tests.ranks import ranks

CPU = torch.device("cpu")
PLAIN = ["--optimizer.weight-decay", "0", "--optimizer.clip-grad", "0", "--optimizer.decay", "constant"]


def config_in(folder: Path, *flags: str) -> TuneConfig:
    """A small job on a chat of 60 lines, in a folder. The same in every process."""
    data = folder / "chats.jsonl"
    if not data.exists():
        lines = []
        for number in range(60):
            question = {"role": "user", "content": "count " + "a" * (number % 7)}
            answer = {"role": "assistant", "content": "b" * (3 + number % 5)}
            lines.append(json.dumps({"messages": [question, answer]}))
        partial = data.with_suffix(f".{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}")
        partial.write_text("\n".join(lines) + "\n")
        partial.rename(data)
    where = ["--run.directory", str(folder / "runs"), "--data.cache", str(folder / "cache"), "--logging.no-plots"]
    size = ["--model.sequence-length", "96", "--run.global-batch-size", "4", "--optimizer.lr", "2e-3"]
    return load_config(["--data", str(data), *where, *size, "--optimizer.warmup-steps", "0", *flags])


def tuned(config: TuneConfig, rank: int, world: int) -> list[float]:
    """Losses of a run on the started ranks."""
    if rank == 0:
        check_model(config)  # makes the tiny model
    torch.distributed.barrier()
    return tune(config, plan_tuning(config, world), CPU, prepares_data=rank == 0, keeps=True).losses


def documents_of(windows: Any, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ids, labels) of each document of a window, one by one."""
    window = torch.from_numpy(windows.train[index].astype("int64"))
    starts = [*(window[POSITIONS] == 0).nonzero().flatten().tolist(), window.shape[-1]]
    parts = [slice(*pair) for pair in zip(starts, starts[1:], strict=False)]
    return [(window[IDS, part], window[LABELS, part]) for part in parts]


def losses_of_a_plain_loop(config: TuneConfig, steps: int, lora: Any = None) -> tuple[list[float], Any]:
    """One process, each document alone in its forward, torch's Adam: (losses, the model)."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory_of(config))
    if lora is not None:
        import peft

        torch.manual_seed(config.run.seed)
        model = peft.get_peft_model(model, lora)
    windows = open_windows(next(config.data.cache.glob("windows-*")))
    sampler = GlobalBatchSampler(len(windows.train), config.run.global_batch_size, config.run.seed)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learning, lr=2e-3, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for _ in range(steps):
        documents = [each for index in sampler.next_global_batch() for each in documents_of(windows, index)]
        count = sum(int((labels != UNLEARNED).sum()) for _, labels in documents)
        optimizer.zero_grad()
        total = 0.0
        for ids, labels in documents:
            if len(ids) > 1 and (labels != UNLEARNED).any():
                logits = model(input_ids=ids[None]).logits[0, :-1]
                loss = F.cross_entropy(logits, labels[1:], ignore_index=UNLEARNED, reduction="sum") / count
                loss.backward()
                total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, model


@ranks(4, timeout_s=120.0)
@pytest.mark.parametrize(
    "layout",
    [
        "--tp 2 --pp 2 --zero 3 --model.logits-chunk 5",
        "--plugin gemini --tp 2 --model tiny:llama --model.gradient-checkpointing",
        pytest.param("--plugin low_level_zero --zero 2 --model.logits-chunk 5", marks=pytest.mark.nightly),
        pytest.param("--plugin torch_fsdp", marks=pytest.mark.nightly),
        pytest.param("--plugin torch_ddp", marks=pytest.mark.nightly),
        pytest.param("--plugin torch_fsdp --model tiny:gemma3", marks=pytest.mark.nightly),  # tied embeddings
        pytest.param("--sp 2 --parallel.sp-mode all_to_all --zero 3", marks=pytest.mark.nightly),
        pytest.param("--tp 2 --parallel.sp-mode split_gather --ep 2 --model tiny:qwen3_moe", marks=pytest.mark.nightly),
        pytest.param("--plugin gemini", marks=pytest.mark.nightly),
        pytest.param("--plugin low_level_zero --model tiny:gemma3", marks=pytest.mark.nightly),  # tied embeddings
        pytest.param("--tp 2 --zero 1", marks=pytest.mark.nightly),
        pytest.param("--tp 2 --pp 2", marks=pytest.mark.nightly),
        pytest.param("--tp 2 --zero 3", marks=pytest.mark.nightly),
        pytest.param("--sp 2 --tp 2 --zero 2 --model.logits-chunk 3", marks=pytest.mark.nightly),
        pytest.param("--tp 2 --ep 2 --model tiny:qwen3_moe", marks=pytest.mark.nightly),
        pytest.param("--pp 2 --zero 2 --model tiny:gemma3", marks=pytest.mark.nightly),  # scaled and tied embeddings
        pytest.param("--tp 2 --pp 2 --model tiny:gpt2 --data.no-packing", marks=pytest.mark.nightly),
        pytest.param("--tp 2 --zero 0", marks=pytest.mark.nightly),
    ],
)
def test_20_losses_in_a_layout_are_those_of_a_plain_loop(rank: int, world: int, layout: str, tmp_path: Path) -> None:
    import transformers

    flags = [*layout.split(), "--run.steps", "20", "--run.micro-batch-size", "1", *PLAIN]
    config = config_in(tmp_path, *flags)
    losses = tuned(config, rank, world)
    if rank == 0:
        expected, reference = losses_of_a_plain_loop(config, 20)
        assert losses == pytest.approx(expected, abs=1e-5)
        assert losses[0] - losses[-1] > 1
        directory = tmp_path / "runs" / "finetune" / "model"
        saved = transformers.AutoModelForCausalLM.from_pretrained(directory)
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(saved.get_parameter(name), parameter, rtol=1e-3, atol=2e-4)
        assert transformers.AutoTokenizer.from_pretrained(directory).chat_template
    torch.distributed.barrier()


@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize(
    "how",
    [
        *("--tp 2", *(f"--plugin {name} --model.logits-chunk 7" for name in ("low_level_zero", "gemini"))),
        pytest.param("--tp 1", marks=pytest.mark.nightly),
        "--plugin torch_ddp",
        pytest.param("--plugin torch_fsdp --model.gradient-checkpointing", marks=pytest.mark.nightly),
        pytest.param("--plugin gemini --tp 2", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.in_suite(1)
def test_adapters_train_as_in_a_plain_loop_and_load_on_the_base(
    rank: int, world: int, how: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    config = config_in(tmp_path, *how.split(), "--lora.r", "4", "--lora.alpha", "8", "--run.steps", "8", *PLAIN)
    losses = tuned(config, rank, world)
    if rank == 0:
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        expected, reference = losses_of_a_plain_loop(config, 8, lora)
        assert losses == pytest.approx(expected, abs=1e-5)
        assert losses[0] - losses[-1] > 0.01
        base = transformers.AutoModelForCausalLM.from_pretrained(directory_of(config))
        saved = peft.PeftModel.from_pretrained(base, tmp_path / "runs" / "finetune" / "model")
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(saved.get_parameter(name), parameter, rtol=1e-3, atol=2e-4)
    torch.distributed.barrier()


def change_config(folder: Path, **values: Any) -> None:
    """Other values in a directory's config.json."""
    content = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(content))


def base_with_settings(folder: Path) -> Path:
    """A checkpoint directory as people have it: more files, and more settings than transformers' defaults need."""
    check_model(load_config(["--model.sequence-length", "96", "--run.directory", str(folder / "made")]))
    base = folder / "base"
    shutil.copytree(next((folder / "made" / "tiny").iterdir()), base)
    settings = {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.3, "note": "théâtre"}
    (base / "generation_config.json").write_text(json.dumps(settings))
    change_config(base, use_cache=True, note={"of": "its maker"}, torch_dtype="float16", transformers_version="4.1")
    written = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({name: written[name] for name in written if name != "dtype"}))
    for name in ("LICENSE", "README.md", "tokenizer.model", ".hidden", "tf_model.h5", "own.py"):
        (base / name).write_text(f"the base's {name}")
    (base / "original").mkdir()
    return base


@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize(
    "how",
    [
        *("--tp 2 --model.dtype bfloat16", "--plugin low_level_zero", "--tp 2 --lora.r 2"),
        pytest.param("--pp 2 --zero 2", marks=pytest.mark.nightly),
        pytest.param("--plugin gemini", marks=pytest.mark.nightly),
        pytest.param("--plugin torch_fsdp", marks=pytest.mark.nightly),
    ],
)
def test_what_training_does_not_change_comes_out_as_it_was(rank: int, world: int, how: str, tmp_path: Path) -> None:
    import transformers

    base, model = tmp_path / "base", tmp_path / "runs" / "finetune" / "model"
    if rank == 0:
        base_with_settings(tmp_path)
    torch.distributed.barrier()
    flags = ["--model", str(base), "--run.steps", "1", "--run.validate-every", "0", "--data.limit", "20"]
    tuned(config_in(tmp_path, *flags, *how.split()), rank, world)
    if rank == 0:
        stays = {"LICENSE", "own.py", "tokenizer.model", *(file.name for file in base.glob("tokenizer*.json"))}
        stays |= {"chat_template.jinja"} | ({"generation_config.json"} if "lora" not in how else set())
        assert {name for name in stays if (base / name).read_bytes() != (model / name).read_bytes()} == set()
        not_copied = {".hidden", "tf_model.h5", "original"}
        assert not not_copied & {path.name for path in model.iterdir()}
        if "lora" in how:
            assert not (model / "config.json").exists() and not (model / "generation_config.json").exists()
        else:
            written = json.loads((base / "config.json").read_text())
            del written["torch_dtype"]
            dtype = "bfloat16" if "bfloat16" in how else "float32"
            assert json.loads((model / "config.json").read_text()) == written | {"dtype": dtype}
            loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
            assert loaded.generation_config.eos_token_id == [2, 0] and loaded.config.use_cache
    torch.distributed.barrier()


def test_a_configuration_keeps_what_training_did_not_change() -> None:
    written = {"model_type": "x", "text_config": {"a": 1, "own": [2]}, "torch_dtype": "float16", "rope_scaling": None}
    before = {"model_type": "x", "text_config": {"a": 1, "b": 0, "tie": True}, "dtype": "float16", "c": 3}
    after = {"model_type": "x", "text_config": {"a": 1, "b": 0, "tie": False}, "dtype": "float32", "c": 3, "_x": 1}
    assert merged(written, before, after) == {
        "model_type": "x",
        "text_config": {"a": 1, "own": [2], "tie": False},
        "dtype": "float32",
        "rope_scaling": None,
    }


@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize(
    "how",
    [
        *("--tp 2 --lora.r 2 --lora.dropout 0.1", "--pp 2 --zero 2", "--plugin gemini --model.gradient-checkpointing"),
        pytest.param("--tp 2 --model.gradient-checkpointing", marks=pytest.mark.nightly),
        pytest.param("--pp 2 --lora.r 2", marks=pytest.mark.nightly),
        pytest.param("--ep 2 --model tiny:mixtral", marks=pytest.mark.nightly),
        pytest.param("--plugin gemini --tp 2 --lora.r 2 --model.gradient-checkpointing", marks=pytest.mark.nightly),
        pytest.param("--plugin low_level_zero --model.gradient-checkpointing", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.in_suite(1)
def test_a_run_that_goes_on_is_the_same_bit_for_bit(rank: int, world: int, how: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    flags = [*how.split(), "--run.steps", "4", "--run.validate-every", "0"]
    whole = tuned(config_in(tmp_path, *flags, "--run.name", "whole"), rank, world)
    torch_state_is_fresh()
    kept = ["--run.name", "parts", "--checkpoint.dir", str(tmp_path / "kept")]
    first = tuned(config_in(tmp_path, *flags, *kept, "--run.stop-after", "2"), rank, world)
    torch_state_is_fresh()
    second = tuned(config_in(tmp_path, *flags, *kept, "--checkpoint.resume"), rank, world)
    assert first + second == whole
    if rank == 0:
        name = "adapter_model.safetensors" if "--lora.r" in how else "model.safetensors"
        one, other = ((tmp_path / "runs" / run / "model" / name).read_bytes() for run in ("whole", "parts"))
        assert one == other
        records = (tmp_path / "runs" / "parts" / "steps.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in records] == [1, 2, 3, 4]
        assert (tmp_path / "runs" / "latest").resolve() == tmp_path / "runs" / "parts"
    torch.distributed.barrier()


WAYS = (
    *("--plugin low_level_zero", "--plugin low_level_zero --zero 2", "--plugin gemini", "--plugin gemini --tp 2"),
    *("--tp 2", "--pp 2 --zero 2", "--zero 3", "--zero 0", "--sp 2"),
)


@ranks(2, timeout_s=300.0)
@pytest.mark.parametrize(
    ("before", "afterwards"),
    [
        (WAYS[1], (WAYS[3],)),
        *(pytest.param(way, WAYS, marks=pytest.mark.nightly) for way in WAYS),
        pytest.param("--lora.r 2 --plugin gemini", ("--lora.r 2 --tp 2", "--lora.r 2"), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.nightly
def test_a_run_goes_on_under_another_plugin(
    rank: int, world: int, before: str, afterwards: tuple[str, ...], tmp_path: Path
) -> None:
    flags = ["--run.steps", "4", "--run.validate-every", "0", "--model", "tiny:llama", *PLAIN]
    expected = tuned(config_in(tmp_path, *flags, *before.split(), "--run.name", "whole"), rank, world)
    assert expected[0] - expected[3] > 0.01
    torch_state_is_fresh()
    kept = ["--run.name", "parts", "--checkpoint.dir", str(tmp_path / "kept")]
    tuned(config_in(tmp_path, *flags, *kept, *before.split(), "--run.stop-after", "2"), rank, world)
    for number, after in enumerate(afterwards):
        torch_state_is_fresh()
        again = tmp_path / f"kept-{number}"
        if rank == 0:
            shutil.copytree(tmp_path / "kept", again)
            shutil.copytree(tmp_path / "runs" / "parts", tmp_path / f"runs-{number}" / "parts")
        torch.distributed.barrier()
        kept = [
            "--checkpoint.dir",
            str(again),
            "--checkpoint.resume",
            "--run.directory",
            str(tmp_path / f"runs-{number}"),
        ]
        losses = tuned(config_in(tmp_path, *flags, *after.split(), *kept), rank, world)
        assert losses == pytest.approx(expected[2:], abs=1e-5), f"{before}, then {after}"


@ranks(2)
@pytest.mark.parametrize("how", ["--plugin gemini --tp 2", "--tp 2", "--plugin torch_fsdp"])
def test_gradient_checkpointing_runs_each_layer_again(rank: int, world: int, how: str, tmp_path: Path) -> None:
    config = config_in(tmp_path, *how.split(), "--model.gradient-checkpointing", "--run.micro-batch-size", "1")
    if rank == 0:
        check_model(config)
    torch.distributed.barrier()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.parallel.tp)
    model, _ = boosted(config, 1)
    runs: list[str] = []
    for name, module in model.parts()[0].named_modules():
        if name.endswith("self_attn"):
            module.register_forward_hook(lambda *_, name=name: runs.append(name))
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    layers = [f"model.layers.{number}.self_attn" for number in range(4)]
    assert runs == [*layers, *reversed(layers)]


def torch_state_is_fresh() -> None:
    """A run leaves its groups to the process; the next one makes its own."""
    parallel_state.destroy_model_parallel()
    torch.manual_seed(torch.distributed.get_rank())  # whatever a new process would have


@ranks(2)
def test_a_family_that_mixes_packed_documents_is_refused_and_trains_without_packing(
    rank: int, world: int, tmp_path: Path
) -> None:
    flags = ["--model", "tiny:bloom", "--tp", "2", "--run.steps", "2", *PLAIN]
    with pytest.raises(ConfigError, match="packed documents apart.*use --data.no-packing"):
        tuned(config_in(tmp_path, *flags), rank, world)
    torch_state_is_fresh()
    config = config_in(tmp_path, *flags, "--data.no-packing", "--data.cache", str(tmp_path / "unpacked"))
    losses = tuned(config, rank, world)
    if rank == 0:
        assert losses == pytest.approx(losses_of_a_plain_loop(config, 2)[0], abs=1e-5)
    torch.distributed.barrier()


@ranks(1)
@pytest.mark.parametrize(
    ("share", "dtype", "refused"),
    [
        (0.0, torch.float32, False),
        (1e-6, torch.float32, False),  # rounding
        (0.006, torch.float32, True),  # what a random falcon_h1 lets through
        (0.006, torch.bfloat16, False),  # rounding
        (0.1, torch.bfloat16, True),
    ],
)
def test_a_small_part_of_another_document_is_seen(
    rank: int, world: int, share: float, dtype: torch.dtype, refused: bool
) -> None:
    def logits(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        packed = bool((positions == 0).sum() > 1)
        return (ids.cumsum(1) * (share if packed else 1.0)).double().unsqueeze(-1)

    model = torch.nn.Linear(2, 2, dtype=dtype)
    trainer = SimpleNamespace(packing=True, device=CPU, chunks=[model], logits=logits)
    if refused:
        with pytest.raises(ConfigError, match="does not keep packed documents apart"):
            TuneTrainer.check_documents_are_apart(trainer)
    else:
        TuneTrainer.check_documents_are_apart(trainer)
    assert model.training


def test_marks_at_which_a_model_stops_are_those_of_its_files(tmp_path: Path) -> None:
    from core.finetune.model import load_tokenizer, stop_marks

    base = base_with_settings(tmp_path)
    config = load_config(["--model", str(base)])
    tokenizer = load_tokenizer(config)
    assert stop_marks(config, tokenizer) == sorted(tokenizer.convert_ids_to_tokens([0, 2]))
    change_config(base, eos_token_id=[1, 7, None, "x", [2], 9999])
    (base / "generation_config.json").unlink()
    assert stop_marks(config, tokenizer) == [tokenizer.convert_ids_to_tokens(1)]
    (base / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config.json cannot be read: "):
        stop_marks(config, tokenizer)
