"""Directories: what split models save and plain `from_pretrained` loads, and the other way with slices only."""

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.hugging_face import PlanError, load_split, save_split, split_model
from core.pipeline_parallel import plan_pipeline
from tests.unit_tests.hugging_face.models import small, tokens, whole
from tests.unit_tests.ranks import ranks

GIB = 2**30
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "phi": {},
}


def files_of(directory: Path) -> dict[str, tuple[torch.dtype, torch.Tensor]]:
    from safetensors.torch import load_file

    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update({key: (tensor.dtype, tensor) for key, tensor in load_file(file).items()})
    return found


@ranks(4)
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.in_suite()
def test_a_saved_directory_is_that_of_the_whole_model(
    rank: int, world: int, family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = small(family, dtype, **MODELS[family])
    reference = copy.deepcopy(model)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    split_model(model)
    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), model)
    save_split(wrapped, tmp_path / "split", max_shard_size="20KB")
    if rank == 0:
        reference.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
        ours, theirs = files_of(tmp_path / "split"), files_of(tmp_path / "whole")
        assert ours.keys() == theirs.keys()
        for key, (kind, tensor) in theirs.items():
            assert ours[key][0] == kind
            assert torch.equal(ours[key][1], tensor), key
        loaded = type(reference).from_pretrained(tmp_path / "split", dtype="auto")
        for name, parameter in reference.named_parameters():
            assert torch.equal(loaded.get_parameter(name), parameter), name
    torch.distributed.barrier()


@ranks(2)
@pytest.mark.parametrize("family", MODELS)
def test_a_rank_reads_its_slices_and_computes_what_the_whole_model_does(
    rank: int, world: int, family: str, tmp_path: Path
) -> None:
    reference = small(family, torch.float32, **MODELS[family]).eval()
    if rank == 0:
        reference.save_pretrained(tmp_path, max_shard_size="20KB")
    torch.distributed.barrier()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    model = load_split(tmp_path, experts_implementation="eager")
    assert type(model) is type(reference)
    sizes = {name: p.numel() * p.element_size() for name, p in reference.named_parameters()}
    splits = model.split_report.plan.splits
    uncut = sum(size for name, size in sizes.items() if name not in splits)
    # An odd row of the vocabulary is read by one rank of the two.
    assert model.bytes_read <= uncut + (sum(sizes.values()) - uncut) / 2 + 2 * 32 * 4
    assert model.bytes_read < 0.6 * sum(sizes.values())
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(model, name, parameter.detach()), reference.get_parameter(name)), name
    ids = tokens()
    torch.testing.assert_close(model.eval()(input_ids=ids).logits, reference(input_ids=ids).logits)


@ranks(2)
def test_a_checkpoint_that_lacks_a_cut_parameter_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    if rank == 0:
        small("llama", torch.float32).save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    torch.distributed.barrier()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with pytest.raises(PlanError, match=r"has no 'model.layers.1.mlp.up_proj.weight', which is cut"):
        load_split(tmp_path)


@ranks(2)
def test_a_checkpoint_that_lacks_a_whole_parameter_is_refused_unless_it_is_a_new_head(
    rank: int, world: int, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification

    if rank == 0:
        small("llama").save_pretrained(tmp_path)
    torch.distributed.barrier()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    scored = load_split(tmp_path, AutoModelForSequenceClassification)  # its head is drawn
    assert "score.weight" in dict(scored.named_parameters())
    torch.distributed.barrier()
    if rank == 0:
        weights = load_file(tmp_path / "model.safetensors")
        weights.pop("model.norm.weight")
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    torch.distributed.barrier()
    for kind in (None, AutoModelForSequenceClassification):
        with pytest.raises(PlanError, match=r"lacks 1 of the model's weights, the first 'model\.norm\.weight'"):
            load_split(tmp_path, kind)


@ranks(2)
def test_a_config_without_architectures_is_loaded_as_a_causal_model(rank: int, world: int, tmp_path: Path) -> None:
    import transformers

    reference = small("llama", torch.float32)
    named = {"none": None, "null": None, "unknown": ["LlamaForMine"]}
    if rank == 0:
        for place, architectures in named.items():
            reference.save_pretrained(tmp_path / place)
            content = json.loads((tmp_path / place / "config.json").read_text())
            content.pop("architectures")
            content |= {} if place == "none" else {"architectures": architectures}
            (tmp_path / place / "config.json").write_text(json.dumps(content))
    torch.distributed.barrier()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    for place, kind in (("none", None), ("null", None), ("unknown", transformers.AutoModelForCausalLM)):
        model = load_split(tmp_path / place, kind)
        assert type(model) is type(reference)
        torch.testing.assert_close(model(input_ids=tokens()).logits, reference(input_ids=tokens()).logits)
    with pytest.raises(PlanError, match=r"names the class 'LlamaForMine', which transformers does not have; pass kind"):
        load_split(tmp_path / "unknown")
    with pytest.raises(PlanError, match=r"AutoModelForMaskedLM has no class for the model type 'llama'; pass kind="):
        load_split(tmp_path / "none", transformers.AutoModelForMaskedLM)


@ranks(2)
def test_a_directory_that_cannot_be_written_is_an_error_on_every_rank(rank: int, world: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model = small("llama")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    split_model(model)
    with pytest.raises((OSError, RuntimeError), match=r"file|saving to"):
        save_split(model, tmp_path / "file" / "below")
    with pytest.raises(PlanError, match="was given a Linear"):
        save_split(torch.nn.Linear(2, 2), tmp_path)


STAGED: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
}


@ranks(4)
@pytest.mark.parametrize("family", STAGED)
def test_stages_read_their_part_and_save_a_directory_of_the_whole(
    rank: int, world: int, family: str, tmp_path: Path
) -> None:
    """Over tp 2 and pp 2; the second stage of tied embeddings reads them under its own name."""
    values = {"num_hidden_layers": 4, "experts_implementation": "eager", **STAGED[family]}
    reference = small(family, torch.float32, **values).eval()
    if rank == 0:
        reference.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    torch.distributed.barrier()
    layout = plan_pipeline(4, 2)
    parallel_state.initialize_model_parallel(
        2, 2, get_embedding_ranks=layout.embedding_ranks, create_gloo_process_groups=False
    )
    groups = parallel_state.get_process_groups()
    stages = load_split(tmp_path / "whole", layout=layout, experts_implementation="eager")
    assert [type(stage) for stage in stages] == [type(reference)]
    sizes = {name: p.numel() * p.element_size() for name, p in reference.named_parameters(remove_duplicate=False)}
    mine = sum(sizes[name] for name, _ in stages[0].named_parameters())
    assert stages[0].bytes_read < 0.6 * mine
    own = [name for name, _ in stages[0].named_parameters()]
    assert not any(f"layers.{number}." in name for name in own for number in ((2, 3), (0, 1))[groups.rank("pp")])
    for name, parameter in stages[0].named_parameters():
        assert torch.equal(whole(stages[0], name, parameter.detach()), reference.get_parameter(name)), name
    twice = plan_pipeline(4, 2, schedule="Interleaved1F1B", chunks=2)
    for stage in load_split(tmp_path / "whole", layout=twice, experts_implementation="eager"):
        for name, parameter in stage.named_parameters():
            assert torch.equal(whole(stage, name, parameter.detach()), reference.get_parameter(name)), name
    for name, buffer in stages[0].named_buffers():  # rotary tables, which no file holds
        assert torch.equal(buffer, reference.get_buffer(name)), name
    with torch.no_grad():
        for parameter in stages[0].parameters():
            parameter.mul_(2)
    save_split(stages, tmp_path / "saved", max_shard_size="20KB")
    ours, theirs = files_of(tmp_path / "saved"), files_of(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    for key, (kind, tensor) in theirs.items():
        assert ours[key][0] == kind
        assert torch.equal(ours[key][1], 2 * tensor), key
    again = type(reference).from_pretrained(tmp_path / "saved", dtype="auto")
    for name, parameter in reference.named_parameters():
        assert torch.equal(again.get_parameter(name), 2 * parameter), name
    torch.distributed.barrier()


@pytest.mark.nightly
@ranks(4, timeout_s=300.0)
def test_a_gibibyte_over_four_ranks_is_read_and_held_in_quarters(rank: int, world: int, tmp_path: Path) -> None:
    values = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 32000}
    largest = 32000 * 1024 * 4
    if rank == 0:
        import transformers

        config = transformers.LlamaConfig(num_attention_heads=16, num_key_value_heads=16, **values)
        full_model = transformers.LlamaForCausalLM(config)
        assert sum(p.numel() * p.element_size() for p in full_model.parameters()) > 0.99 * GIB
        full_model.save_pretrained(tmp_path)
        del full_model
    torch.distributed.barrier()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    before, seen, done = own_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        model = load_split(tmp_path)
    finally:
        done.set()
        watcher.join()
    print(f"rank {rank}: read {model.bytes_read / GIB:.3f} GiB, peak {(max(seen) - before) / GIB:.3f} GiB")
    assert model.bytes_read <= 0.30 * GIB
    assert max(seen) - before <= 0.25 * GIB + largest
    assert len(seen) > 20


def own_bytes() -> int:
    """Memory of this process that is no file's. Pages of files that were only read can be taken back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
