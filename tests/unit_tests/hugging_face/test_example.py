"""The example that proves a split, for models of pixels, sound and pairs; and which logits stay split."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.booster import Booster
from core.booster.plugin import GeminiPlugin, HybridParallelPlugin
from core.hugging_face import PlanError, gather_logits, split_model
from core.hugging_face.read.example import example_of, layer_configurations, unreached
from core.hugging_face.read.quiet import run_quietly
from core.hugging_face.run.streams import Form
from tests.families.tiny import all_families, tiny_config, tiny_inputs, tiny_model
from tests.unit_tests.hugging_face.models import small, tokens
from tests.unit_tests.ranks import ranks

INPUTS = ["vit/ViTConfig", "whisper/WhisperConfig", "sam/SamConfig", "blip_2/Blip2Config"]


def boosted_over_tp(model: Any, *, tp_size: int = 2, **options: Any) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=HybridParallelPlugin(tp_size, 1, precision="fp32", **options))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, boosted, optimizer


def first_output(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        output = model(**inputs)
    named = [output.get(name) for name in ("logits", "last_hidden_state", "pred_masks")]
    return gather_logits(next(value for value in named if isinstance(value, torch.Tensor)))


def test_heads_are_read_of_each_layer_where_layers_differ() -> None:
    """The configuration of such a model refuses to say one number for all."""
    model = tiny_model(tiny_config(all_families()["dots3_note/Dots3NoteTextConfig"]))
    with pytest.raises(RuntimeError, match="is a per-layer attribute"):
        _ = model.config.num_attention_heads
    assert {layer.num_attention_heads for layer in layer_configurations(model)} == {8, 64}
    form = Form(((0, "rows"), (64, ""), (0, "source"), (0, "source")), torch.float32)
    assert form.over({8, 64}, 2).dims[1] == (32, "") and form.over({8}, 2) is form


@ranks(2)
@pytest.mark.parametrize("name", INPUTS)
def test_models_of_other_inputs_than_tokens_are_boosted_over_tp(rank: int, world: int, name: str) -> None:
    model = tiny_model(tiny_config(all_families()[name])).eval()
    reference = copy.deepcopy(model)
    inputs = tiny_inputs(model)
    _, boosted, _ = boosted_over_tp(model)
    expected = first_output(reference, inputs)
    torch.testing.assert_close(first_output(boosted.eval(), inputs), expected, rtol=1e-6, atol=1e-6)


@ranks(2)
def test_a_model_of_several_choices_is_boosted_over_tp(rank: int, world: int) -> None:
    import transformers

    config = tiny_config(all_families()["bert/BertConfig"])
    torch.manual_seed(0)
    model = transformers.BertForMultipleChoice(config).double().eval()
    reference = copy.deepcopy(model)
    _, boosted, _ = boosted_over_tp(model)
    inputs = {"input_ids": torch.stack([tokens(), tokens(seed=2)], 1) % 90, "labels": torch.tensor([1, 0])}
    expected = reference(**inputs)
    found = boosted.eval()(**inputs)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


@ranks(2)
def test_an_example_of_the_users_own_is_taken_where_the_error_says_so(rank: int, world: int) -> None:
    model = tiny_model(tiny_config(all_families()["vit/ViTConfig"])).eval()
    inputs = tiny_inputs(model)
    model.main_input_name = "frames"
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with pytest.raises(PlanError, match="takes 'frames', and no example input can be generated for it; pass example="):
        split_model(copy.deepcopy(model))
    in_16_bits = HybridParallelPlugin(2, 1, precision="bf16", example=inputs)  # which are in fp64
    assert Booster(plugin=in_16_bits).boost(copy.deepcopy(model))[0].unwrap().dtype is torch.bfloat16
    reference = copy.deepcopy(model)
    for plugin in (
        HybridParallelPlugin(2, 1, precision="fp32", example=inputs),
        GeminiPlugin(tp_size=2, precision="fp32", example=inputs),
    ):
        boosted, *_ = Booster(plugin=plugin).boost(copy.deepcopy(model))
        expected = first_output(reference, inputs)
        torch.testing.assert_close(first_output(boosted.eval(), inputs), expected, rtol=1e-6, atol=1e-6)


@ranks(2)
@pytest.mark.parametrize("low", [True, False])
def test_a_model_that_computes_its_loss_itself_keeps_its_logits_whole(rank: int, world: int, low: bool) -> None:
    model = tiny_model(tiny_config(all_families()["t5/T5Config"], {"decoder_start_token_id": 0})).eval()
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="logits stay whole"):
        booster, boosted, optimizer = boosted_over_tp(model)
    labels = tokens(3, 7) % (40 if low else 96)
    batch = {"input_ids": tokens(3, 9) % 96, "labels": labels}
    expected = reference(**batch).loss
    found = boosted.eval()(**batch).loss
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with pytest.raises(PlanError, match="a forward with labels computes its loss elsewhere"):
        split_model(reference, parallel_output=True)


@ranks(2)
@pytest.mark.parametrize("name", ["nemotron_h/NemotronHConfig", "bamba/BambaConfig", "jamba/JambaConfig"])
def test_heads_without_a_rule_and_layers_without_a_cache_are_boosted_by_default(
    rank: int, world: int, name: str
) -> None:
    model = tiny_model(tiny_config(all_families()[name])).eval()
    reference = copy.deepcopy(model)
    inputs = tiny_inputs(model)
    _, boosted, _ = boosted_over_tp(model)
    batch = {**inputs, "labels": inputs["input_ids"]}
    assert float(boosted.eval()(**batch).loss) == pytest.approx(float(reference(**batch).loss), rel=1e-5)


@ranks(1, 2)
@pytest.mark.parametrize("name", ["bamba/BambaConfig", "jamba/JambaConfig"])
def test_layers_without_a_cache_train_as_a_user_calls_them(rank: int, world: int, name: str) -> None:
    """transformers would make a cache, because the config says so, and find no layer of attention that fills it."""
    model = tiny_model(tiny_config(all_families()[name])).eval()
    reference = copy.deepcopy(model)
    ids = tiny_inputs(model)["input_ids"]
    booster, boosted, optimizer = boosted_over_tp(model, tp_size=world)
    loss = boosted(input_ids=ids, labels=ids).loss
    assert float(loss) == pytest.approx(float(reference(input_ids=ids, labels=ids, use_cache=False).loss), rel=1e-5)
    booster.backward(loss, optimizer)
    optimizer.step()
    assert float(boosted(input_ids=ids, labels=ids).loss) < float(loss)


def with_loss_of_logits(model: Any) -> Any:
    """A model that adds the square of the logits' normalizer to its loss, as z-losses do."""

    class Model(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
            output = super().forward(input_ids, labels=labels, **more)
            if output.loss is not None:
                output.loss = output.loss + output.logits.logsumexp(-1).square().mean()
            return output

    model.__class__ = Model
    return model


@ranks(2)
def test_logits_stay_whole_where_a_loss_is_computed_of_them_next_to_the_causal_one(rank: int, world: int) -> None:
    model = with_loss_of_logits(small("llama"))
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="logits stay whole .* adds something to its loss"):
        _, boosted, _ = boosted_over_tp(model)
    batch = {"input_ids": tokens(), "labels": tokens()}
    assert float(boosted(**batch).loss) == pytest.approx(float(reference(**batch).loss), rel=1e-5)


@ranks(2)
def test_labels_of_which_a_model_makes_no_loss_change_nothing(rank: int, world: int) -> None:
    """higgs_audio_v2 without a head for text has no loss of text."""
    model = tiny_model(tiny_config(all_families()["higgs_audio_v2/HiggsAudioV2Config"])).eval()
    reference = copy.deepcopy(model)
    _, boosted, _ = boosted_over_tp(model)
    inputs = tiny_inputs(model)
    found = boosted.eval()(**inputs, labels=inputs["input_ids"])
    assert found.get("loss") is None
    torch.testing.assert_close(gather_logits(found.logits), reference(**inputs).logits, rtol=1e-6, atol=1e-6)


@ranks(2)
def test_logits_of_a_causal_model_stay_split_by_default(rank: int, world: int) -> None:
    model = small("llama")
    reference = copy.deepcopy(model)
    _, boosted, _ = boosted_over_tp(model)
    batch = {"input_ids": tokens(), "labels": tokens()}
    output = boosted(**batch)
    assert output.logits.shape[-1] == 64  # of 97, which the plugin pads to twice 64
    assert float(output.loss) == pytest.approx(float(reference(**batch).loss), rel=1e-5)


def scaled_where(model: Any, what: str, is_seen: Callable[[Any, torch.Tensor], bool]) -> Any:
    """A model that multiplies an output by the number of this rank's rows, where `is_seen` says so."""

    class Model(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
            output = super().forward(input_ids, labels=labels, **more)
            if output.get(what) is not None and is_seen(self, input_ids):
                output[what] = output[what] * self.lm_head.weight.shape[0]
            return output

    model.__class__ = Model
    return model


@ranks(2)
def test_the_example_has_labels_is_in_training_mode_and_is_longer_than_a_window(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    cases: list[tuple[str, Callable[[Any, torch.Tensor], bool]]] = [
        ("loss", lambda model, ids: True),
        ("logits", lambda model, ids: model.training),
        ("logits", lambda model, ids: ids.shape[1] > 12),
    ]
    for what, is_seen in cases:
        model = scaled_where(small("mistral", sliding_window=12, attention_dropout=0.5), what, is_seen)
        named = what.replace("logits", "output")
        with pytest.raises(PlanError, match=f"its {named} for the example differs from the unsplit model's by"):
            split_model(model)
    assert split_model(small("mistral", sliding_window=12, attention_dropout=0.5)).unreached == {}
    assert split_model(small("mistral", sliding_window=2**20)).unreached == {"sliding_window": 2**20}


@ranks(1)
def test_the_widest_window_of_layers_that_differ_is_the_models(rank: int, world: int) -> None:
    """The configuration itself refuses to be asked for one window (neomme)."""
    parallel_state.initialize_model_parallel()
    model = tiny_model(tiny_config(all_families()["neomme/NeoMMEConfig"]))
    windows = {layer.sliding_window for layer in model.config.get_text_config().per_layer_config}
    widest = max(window or 0 for window in windows)
    arguments = example_of(model, parallel_state.get_process_groups())
    assert len(windows) > 1 and arguments["input_ids"].shape[1] <= widest
    assert unreached(model, arguments) == {"sliding_window": widest}


def test_a_forward_as_in_training_drops_nothing_and_leaves_a_model_as_it_was() -> None:
    import transformers

    sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 2, "pad_token_id": 0, "num_labels": 3}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    torch.manual_seed(0)
    model = transformers.GPT2ForSequenceClassification(config)
    model.transformer.h[0].eval()
    model.add_module("statistics", torch.nn.BatchNorm1d(2))
    modes = [module.training for module in model.modules()]
    batch = {"input_ids": tokens(1) % 90, "labels": torch.tensor([1])}
    found = run_quietly(model, batch)
    assert [module.training for module in model.modules()] == modes
    assert model.config.resid_pdrop == 0.5 and model.transformer.h[1].attn.attn_dropout.p == 0.5
    assert model.config.problem_type is None  # which the loss of labels has set meanwhile
    torch.testing.assert_close(found.logits, run_quietly(model, batch, training=False).logits)
    assert not torch.equal(model(**batch).logits, found.logits)
