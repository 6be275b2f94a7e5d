"""Encoder-decoders, and models of images and text, in pipeline stages: against one process that holds the whole."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from core.booster import Booster
from core.booster.plugin import HybridParallelPlugin
from core.groups.process_groups import ProcessGroups
from core.hugging_face import PlanError
from core.hugging_face.cut.order import watch_order
from core.hugging_face.cut.parts import copied, keep_stage
from core.hugging_face.cut.places import find_cut
from core.hugging_face.read.example import example_of
from core.hugging_face.run.stages import activations_of
from core.pipeline_parallel import PipelineLayout
from core.verify.in_double import InDouble
from tests.families.tiny import tiny_config
from tests.unit_tests.ranks import ranks

ROWS, SOURCE, TARGET, STEPS = 4, 10, 7, 3
ENCODER, DECODER = 4, 3


def built(family: str) -> Any:
    """In fp64, without dropout, and nothing at its initial value."""
    transformers.logging.set_verbosity_error()
    config = SIGHTED[family]() if family in SIGHTED else with_decoder(family)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name and parameter.dim() == 1) + 0.1 * torch.randn(parameter.shape))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.double().train()


def with_decoder(family: str) -> Any:
    """With fewer layers in the decoder than in the encoder; T5 is tied, its layers begin with position biases."""
    config = tiny_config(getattr(transformers, f"{family}Config"))
    for name in ("num_layers", "encoder_layers"):
        if hasattr(config, name):
            setattr(config, name, ENCODER)
    for name in ("num_decoder_layers", "decoder_layers"):
        if hasattr(config, name):
            setattr(config, name, DECODER)
    config.decoder_start_token_id, config.pad_token_id, config.forced_eos_token_id = 1, 0, None
    return config


IMAGE, VOCABULARY = 90, 96
TEXT = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 8},
    **{"num_key_value_heads": 4, "vocab_size": VOCABULARY},
}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "image_size": 8, "num_attention_heads": 4}
GRID_TOWER = {"hidden_size": 32, "intermediate_size": 64, "depth": 3, "num_heads": 4, "patch_size": 4}
GRID_TOWER |= {"out_hidden_size": 64}
OF_PLACES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
SIGHTED: dict[str, Callable[[], Any]] = {
    "Llava": lambda: transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **TOWER, "patch_size": 4, "num_hidden_layers": 3},
        text_config={"model_type": "llama", **TEXT},
        image_token_index=IMAGE,
    ),
    "Gemma3": lambda: transformers.Gemma3Config(
        vision_config={**TOWER, "patch_size": 2, "num_hidden_layers": 3},
        text_config={**TEXT, "sliding_window": 5},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
    ),
    "Qwen2_5_VL": lambda: transformers.Qwen2_5_VLConfig(
        vision_config={**GRID_TOWER, "fullatt_block_indexes": [1]},
        text_config={**TEXT, **OF_PLACES},
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
    ),
    "Qwen3VL": lambda: transformers.Qwen3VLConfig(
        vision_config={**GRID_TOWER, "deepstack_visual_indexes": [0, 1]},
        text_config={**TEXT, **OF_PLACES},
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
    ),
}
ALONE = cast(ProcessGroups, SimpleNamespace(size=lambda axis: 1))


def seen_batch(model: Any, step: int, data_rank: int) -> dict[str, torch.Tensor]:
    """An image in each row, other ones; row 1 of a model with grids has two."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    example = example_of(model, ALONE, with_images=True)
    example.pop("use_cache")
    marks = (example["input_ids"] == IMAGE).sum(1)[0]
    ids = torch.randint(3, 80, (ROWS, 2 * int(marks) + SOURCE), generator=generator)
    ids[:, :marks] = IMAGE
    made = {"input_ids": ids, "labels": ids.masked_fill((ids == IMAGE) | (ids % 5 == 0), -100)}
    made["labels"][0] = -100
    images = ROWS
    if "image_grid_thw" in example:
        ids[1, 1 + marks : 1 + 2 * marks] = IMAGE
        images += 1
        made["image_grid_thw"] = example["image_grid_thw"][:1].repeat(images, 1)
    per_image = len(example["pixel_values"]) // 2
    shape = images * per_image, *example["pixel_values"].shape[1:]
    made["pixel_values"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    kinds = (name for name in ("token_type_ids", "mm_token_type_ids") if name in example)
    return {**made, **dict.fromkeys(kinds, (ids == IMAGE).long())}


def batch_of(model: Any, step: int, data_rank: int = 0, *, shifted: bool = False) -> dict[str, torch.Tensor]:
    """Different rows, of which one is padded; row 0 has no label that counts, and the others ever more.

    shifted: leave the decoder's tokens to the model, which makes them of the labels.
    """
    if not model.config.is_encoder_decoder:
        return seen_batch(model, step, data_rank)
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    target = torch.randint(3, 90, (ROWS, TARGET), generator=generator)
    labels = target.clone()
    for row in range(ROWS):
        labels[row, : TARGET - 2 * row - data_rank] = -100
    batch = {"labels": labels} if shifted else {"labels": labels, "decoder_input_ids": target.flip(1)}
    if model.main_input_name == "input_ids":
        ids = torch.randint(3, 90, (ROWS, SOURCE), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        return {**batch, "input_ids": ids, "attention_mask": mask}
    shape = ROWS, model.config.num_mel_bins, 2 * model.config.max_source_positions
    return {**batch, "input_features": torch.randn(shape, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        *(("T5", (4, 3)), ("T5", (2, 2, 2, 1)), ("T5", (2, 4, 1)), ("Bart", (3, 4)), ("Whisper", (2, 2, 2, 1))),
        *(("Llava", (1, 3)), ("Gemma3", (1, 1, 2)), ("Qwen2_5_VL", (2, 2)), ("Qwen3VL", (2, 2))),
    ],
)
def test_stages_one_after_another_are_the_whole_model(family: str, layers: tuple[int, ...]) -> None:
    """Cuts inside the encoder, behind it and inside the decoder; the backward of what is passed on adds up all uses."""
    with InDouble():
        reference = built(family)
        model = copy.deepcopy(reference)
        batch = batch_of(reference, 0, shifted=layers == (4, 3))
        example = batch_of(reference, 1)
        for name in ("labels", "attention_mask"):
            example.pop(name, None)
        watched, _ = watch_order(model, {**example, "use_cache": False})
        cut, layout = find_cut(model, watched.sides), PipelineLayout(layers, len(layers))
        stages = [keep_stage(copied(model), cut, layout, index, watched.streams) for index in range(len(layers))]
        expected = reference(**batch).loss
        expected.backward()
        sent, received, output = activations_of(stages[0], batch), None, None
        borders = []
        for index, stage in enumerate(stages):
            output = stage(received=received, **batch)
            if index < len(layers) - 1:
                given = output if isinstance(output, tuple) else (output,)
                assert [value.shape for value in given] == [value.shape for value in sent(index)]
                received = tuple(value.detach().requires_grad_() for value in given)
                borders.append((given, received))
        assert abs(float((output.loss - expected).detach())) < 1e-12
        output.loss.backward()
        for given, received in reversed(borders):
            torch.autograd.backward(given, [value.grad for value in received])
        for name, parameter in reference.named_parameters():
            found, wanted = model.get_parameter(name).grad, parameter.grad
            assert (found is None) == (wanted is None), name
            assert wanted is None or float((found - wanted).abs().max()) < 1e-12, name
        assert max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None) > 1e-2


def train(family: str, tp: int, pp: int, world: int, directory: Path, **options: Any) -> None:
    """Three steps of a plugin are those of one process, and what it saves loads into plain transformers."""
    with InDouble():
        reference = built(family)
        model, data_ranks = copy.deepcopy(reference), world // (tp * pp)
        start = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
        plain = torch.optim.SGD(reference.parameters(), lr=0.5)
        plugin = HybridParallelPlugin(tp, pp, precision="fp32", num_microbatches=ROWS, **options)
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
        for step in range(STEPS):
            plain.zero_grad()
            batches = [batch_of(reference, step, data_rank) for data_rank in range(data_ranks)]
            whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
            loss = reference(**whole).loss
            loss.backward()
            plain.step()
            optimizer.zero_grad()
            mine = iter([batches[plugin.data_rank()]])
            found = booster.execute_pipeline(mine, boosted, None, optimizer)["loss"]
            optimizer.step()
            assert float(found) == pytest.approx(float(loss.detach()), abs=1e-6)
        booster.save_model(boosted, str(directory), shard=True)
        torch.distributed.barrier()
        loaded = type(reference).from_pretrained(directory, dtype=torch.float64)
        for name, wanted in reference.named_parameters():
            assert float((loaded.get_parameter(name) - wanted).abs().max()) < 1e-9, name
        assert max(float((p - start[name]).abs().max()) for name, p in reference.named_parameters()) > 1e-2


@ranks(4)
def test_t5_over_tp_and_stages_trains_as_one_process(rank: int, world: int, tmp_path: Path) -> None:
    train("T5", 2, 2, world, tmp_path)


@ranks(2)
def test_images_and_text_in_stages_train_as_one_process(rank: int, world: int, tmp_path: Path) -> None:
    """Microbatches of one row take the patches of their own images."""
    train("Qwen2_5_VL", 1, 2, world, tmp_path)


@pytest.mark.nightly
@ranks(4, timeout_s=120.0)
@pytest.mark.parametrize("family", ["T5", "Bart", "Whisper", "MBart", "Pegasus", *SIGHTED])
@pytest.mark.parametrize(
    ("tp", "pp", "options"),
    [
        (1, 4, {}),
        (2, 2, {}),
        (1, 2, {"zero_stage": 1}),
        (1, 2, {"zero_stage": 3}),
        (1, 2, {"pp_style": "interleaved", "num_model_chunks": 2}),
    ],
)
def test_families_of_two_lists_train_as_one_process(
    rank: int, world: int, tmp_path: Path, family: str, tp: int, pp: int, options: dict[str, Any]
) -> None:
    if family == "Qwen3VL" and pp * options.get("num_model_chunks", 1) == TEXT["num_hidden_layers"]:
        with pytest.raises(PlanError, match="features of images are added to its first 2 layers"):
            train(family, tp, pp, world, tmp_path, **options)
        return
    train(family, tp, pp, world, tmp_path, **options)


def test_features_of_images_for_layers_of_later_stages_are_refused() -> None:
    model = built("Qwen3VL")
    streams = watch_order(model, example_of(model, ALONE, with_images=True))[0].streams
    with pytest.raises(PlanError, match="added to its first 2 layers, and the first stage has 1; give it 2 or more"):
        keep_stage(model, find_cut(model), PipelineLayout((1, 3), 2), 0, streams)


def test_an_example_without_an_image_is_refused() -> None:
    """It would say nothing of what becomes of images."""
    model = built("Llava")
    with pytest.raises(PlanError, match="does not reach 'model.vision_tower.*an example= with images"):
        watch_order(model, example_of(model, ALONE))


def test_an_encoder_decoder_without_values_is_refused() -> None:
    """What passes between its stages is seen in a forward."""
    model = built("T5").to("meta")
    with pytest.raises(PlanError, match="runs one forward to find the tensors that stages send"):
        keep_stage(model, find_cut(model), PipelineLayout((4, 3), 2), 0)
