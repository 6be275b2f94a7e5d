"""count_labels: by it the losses of rows add up to the loss of all rows together, for every head."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from core.hugging_face.run.loss.label_counts import count_labels
from tests.unit_tests.hugging_face.models import VOCABULARY, small, tokens

BERT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
BART = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}


def built(name: str) -> Any:
    transformers.logging.set_verbosity_error()
    if name in ("llama", "gpt2"):
        return small(name, num_hidden_layers=1).eval()
    kind = getattr(transformers, name)
    sizes: dict[str, Any] = BERT
    if name.startswith("Bart"):
        sizes = {**BART, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2}
    elif name.startswith("T5"):
        sizes = {**T5, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    return kind(kind.config_class(**sizes, num_labels=5)).double().eval()


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gpt2", "BartForCausalLM", "BartForConditionalGeneration", "T5ForConditionalGeneration"),
        *("BertForMaskedLM", "BertLMHeadModel", "BertForTokenClassification", "BertForSequenceClassification"),
    ],
)
def test_the_losses_of_rows_weighted_by_their_labels_are_that_of_all_rows(name: str) -> None:
    model = built(name)
    ids = tokens(3, 8)
    labels = ids.clone() % 5
    labels[0, 1:7] = -100  # its first label counts for some heads alone
    labels[1, :4] = -100
    labels = labels if "Sequence" not in name else labels[:, 7]
    total, count = 0.0, 0.0
    for row in range(3):
        inputs = {"input_ids": ids[row : row + 1], "labels": labels[row : row + 1]}
        number = count_labels(model, inputs)
        assert number is not None
        total += float(model(**inputs).loss.detach() * number)
        count += float(number)
    assert total / count == pytest.approx(float(model(input_ids=ids, labels=labels).loss.detach()), rel=1e-6)


def test_a_loss_that_is_no_mean_over_labels_has_no_count() -> None:
    model = built("BertForPreTraining")
    ids = tokens(2, 8)
    assert count_labels(model, {"input_ids": ids, "labels": ids, "next_sentence_label": ids[:, 0]}) is None
    assert count_labels(built("llama"), {"input_ids": ids}) is None
    assert count_labels(torch.nn.Linear(2, 2), {"labels": ids}) is None


def test_labels_that_are_shifted_already_are_counted_as_they_are() -> None:
    ids = tokens(2, 8)
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    assert count_labels(built("llama"), {"labels": ids, "shift_labels": shifted}) == 14
    assert count_labels(built("llama"), {"labels": ids}) == 14
