"""The loss of a causal model over chunks of tokens: plain loss and gradients, in every family that allows it."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import transformers

from core.hugging_face import PlanError, use_chunked_loss
from core.hugging_face.run.loss.chunked_loss import why_not_in_chunks
from core.hugging_face.run.loss.deferred_logits import DeferredLogits, DeferringHead
from core_plan.live_memory import LiveMemory
from tests.families.tiny import families, tiny_config, tiny_model
from tests.unit_tests.hugging_face.models import VOCABULARY, small, tokens

# Family -> what it does to its logits: nothing; a tied weight; a cap; a scale; a bias in the output layer.
SAMPLE: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gemma2": {"final_logit_softcapping": 0.7},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "phi": {},
}


def labels_of(ids: torch.Tensor, kind: str) -> torch.Tensor:
    labels = ids.clone()
    if kind == "some":
        labels[0, :7], labels[1, 3:5] = -100, -100
    elif kind == "none":
        labels[:] = -100
    return labels


def plain(model: Any, ids: torch.Tensor, labels: torch.Tensor, items: float | None = None) -> torch.Tensor:
    """By hand, in the dtype of the logits: transformers' own loss rounds to fp32."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
    return losses / (items or (labels[:, 1:] != -100).sum())


def assert_same_gradients(got: Any, expected: Any, rtol: float = 1e-11) -> None:
    wanted = dict(expected.named_parameters())
    assert max(p.grad.abs().max() for p in wanted.values() if p.grad is not None) > 1e-3
    for name, param in got.named_parameters():
        if wanted[name].grad is not None:
            torch.testing.assert_close(
                param.grad, wanted[name].grad, rtol=rtol, atol=rtol / 100, msg=lambda said, name=name: f"{name}: {said}"
            )


@pytest.mark.parametrize("kind", ["all", "some"])
@pytest.mark.parametrize("family", SAMPLE)
@pytest.mark.in_suite()
def test_loss_and_gradients_are_those_of_plain_torch(family: str, kind: str) -> None:
    model = small(family, **SAMPLE[family]).eval()
    chunked = use_chunked_loss(copy.deepcopy(model), 5)
    ids = tokens(3, 12)
    labels = labels_of(ids, kind)
    for items in (None, 7.0):
        expected = plain(model, ids, labels, items)
        output = chunked(
            input_ids=ids, labels=labels, use_cache=False, **({"num_items_in_batch": items} if items else {})
        )
        torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
        assert isinstance(output.logits, DeferredLogits) and output.logits.value is None
        expected.backward()
        output.loss.backward()
    assert_same_gradients(chunked, model)


def test_without_a_label_that_counts_the_loss_is_nan_and_the_gradients_are_zero() -> None:
    model = use_chunked_loss(small("llama"), 5)
    ids = tokens()
    loss = model(input_ids=ids, labels=labels_of(ids, "none")).loss
    loss.backward()
    assert loss.isnan()
    assert all((p.grad == 0).all() for p in model.parameters())


def test_16_bit_gradients_are_as_near_as_those_of_whole_logits() -> None:
    exact = small("gemma2", torch.float32, final_logit_softcapping=0.7).bfloat16()
    whole, chunked = copy.deepcopy(exact), use_chunked_loss(copy.deepcopy(exact), 4)
    exact.double()
    ids = tokens(4, 24)
    plain(exact, ids, ids).backward()
    whole(input_ids=ids, labels=ids).loss.backward()
    chunked(input_ids=ids, labels=ids).loss.backward()

    def off(model: Any) -> float:
        found = [(p.grad.double(), dict(exact.named_parameters())[n].grad) for n, p in model.named_parameters()]
        return max(float((got - want).norm() / want.norm()) for got, want in found)

    assert 0 < off(chunked) < 1.2 * off(whole)


def test_a_reader_of_logits_has_them_with_their_gradient() -> None:
    model = small("gemma2", final_logit_softcapping=0.7)
    chunked = use_chunked_loss(copy.deepcopy(model), 5)
    ids = tokens()
    output = chunked(input_ids=ids, labels=ids)
    logits = output.logits
    assert (logits.shape, logits.dtype, len(logits)) == ((*ids.shape, VOCABULARY), torch.float64, len(ids))
    expected = model(input_ids=ids).logits
    torch.testing.assert_close(logits + 0.0, expected)
    torch.testing.assert_close(2.0 * output.logits[:, -1].softmax(-1), 2.0 * expected[:, -1].softmax(-1))
    (output.loss + logits.pow(2).mean()).backward()
    (plain(model, ids, ids) + expected.pow(2).mean()).backward()
    assert_same_gradients(chunked, model, 1e-5)  # its norms round the sum of both gradients to fp32
    assert isinstance(chunked(input_ids=ids).logits, torch.Tensor)
    assert not isinstance(chunked(input_ids=ids).logits, DeferredLogits), "without labels nothing is deferred"
    with torch.no_grad():
        read = chunked(input_ids=ids, labels=ids)
    assert torch.equal(copy.deepcopy(read.logits), read.logits.clone()) and not read.logits.clone().requires_grad


def test_small_logits_stay_whole_by_default_and_the_loss_is_the_models_own_to_the_bit() -> None:
    model = small("llama", torch.float32)
    ids = tokens()
    expected = model(input_ids=ids, labels=ids).loss
    for chunk in (None, 0):
        chunked = use_chunked_loss(copy.deepcopy(model), chunk)
        output = chunked(input_ids=ids, labels=ids)
        assert torch.equal(output.loss, expected) and not isinstance(output.logits, DeferredLogits)


def test_adapters_and_copies_keep_the_loss_in_chunks() -> None:
    peft = pytest.importorskip("peft")
    model = small("llama")
    ids = tokens()
    expected = plain(model, ids, ids)
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for chunked in (use_chunked_loss(adapted, 5), copy.deepcopy(use_chunked_loss(copy.deepcopy(model), 5))):
        output = chunked(input_ids=ids, labels=ids)
        torch.testing.assert_close(output.loss, expected)
        assert output.logits.value is None and isinstance(output.logits, DeferredLogits)
        output.loss.backward()
        head = chunked.get_output_embeddings()
        assert head.forward.module is head and (head.weight.grad is None) == (chunked is adapted)


def test_no_tensor_as_large_as_the_logits_is_made() -> None:
    model = small("llama", torch.float32)
    ids = tokens(8, 64)
    peaks = {}
    for chunk in (0, 16):
        run = use_chunked_loss(copy.deepcopy(model), chunk)
        with LiveMemory(run.parameters()) as live:
            run(input_ids=ids, labels=ids).loss.backward()
        peaks[chunk] = max(live.peak.values())
    logits = ids.numel() * VOCABULARY * 4
    assert peaks[0] - peaks[16] > 1.5 * logits, (peaks, logits)


def test_a_family_that_computes_its_loss_otherwise_is_refused_by_name() -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(PlanError, match="logits_chunk=4, and its forward computes the loss elsewhere"):
        use_chunked_loss(model, 4)
    assert use_chunked_loss(model) is model, "by default its logits stay whole"
    model = small("llama")
    model.loss_function = sum
    with pytest.raises(PlanError, match="llama.*its loss is sum, not ForCausalLMLoss"):
        use_chunked_loss(model, 4)
    model = use_chunked_loss(small("llama"), 4)
    model.lm_head.register_forward_hook(lambda _, __, logits: logits.sort().values)
    with pytest.raises(PlanError, match="logits_chunk=4, and its forward with labels computes 'sort' of all logits"):
        model(input_ids=tokens(), labels=tokens())
    for wrong in (-1, True, 2.5):
        with pytest.raises(ValueError, match="logits_chunk is"):
            use_chunked_loss(small("llama"), wrong)


def loss_of_family(name: str) -> str:
    """'equal', or why a family's loss is not computed in chunks."""
    config = tiny_config(families()[name])
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        return "no causal model"
    torch.manual_seed(0)
    model = tiny_model(config).eval()
    why = why_not_in_chunks(model)
    if why is not None:
        return why
    chunked = use_chunked_loss(copy.deepcopy(model), 5)
    assert isinstance(chunked.get_output_embeddings().forward, DeferringHead)
    ids = torch.randint(3, 90, (2, 12))
    labels = labels_of(ids, "some")
    try:
        expected = model(input_ids=ids, labels=labels, use_cache=False).loss
    except (RuntimeError, AttributeError) as error:
        return f"without chunks too: {error}"
    try:
        loss = chunked(input_ids=ids, labels=labels, use_cache=False).loss
    except PlanError as error:
        return str(error)
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-5, atol=1e-6, msg=name)
    loss.backward()
    expected.backward()
    for (leaf, param), want in zip(chunked.named_parameters(), model.parameters(), strict=True):
        if want.grad is not None:
            torch.testing.assert_close(param.grad, want.grad, rtol=1e-3, atol=1e-6, msg=f"{name}: {leaf}")
    return "equal"


@pytest.mark.nightly
def test_every_family_is_equal_or_refused() -> None:
    found = {name: loss_of_family(name) for name in families()}
    print("\n".join(f"{name}: {answer}" for name, answer in found.items()))
    assert sum(answer == "equal" for answer in found.values()) > 80, found
