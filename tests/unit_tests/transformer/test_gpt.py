"""The GPT: in every layout and variant its loss and every gradient are those of one process, in fp64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.distributed.contract.gradient_contract import read_contracts
from core.distributed.sharded.unsharder import Unsharder
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.tensor_parallel import draw_master, tensor_parallel_slice
from core.tensor_parallel.initialization import normal_init
from core.transformer import TransformerConfig
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import assert_same, whole_grads, wrap
from tests.unit_tests.torch_calls import added_in_place

VOCAB, SEQUENCE, BATCH = 13, 8, 2  # 13 divides by no tensor-parallel size: the vocabulary is padded

VARIANTS: dict[str, dict[str, Any]] = {
    "learned positions, GELU, LayerNorm, tied": {},
    "rotary, SwiGLU, RMSNorm, untied, no bias": {
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "share_embeddings_and_output_weights": False,
        "add_bias_linear": False,
    },
    # Rotary, because without it a key's bias shifts all scores of a row alike and has no gradient at all.
    "grouped queries, q/k norm, rotary": {
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "qk_layernorm": True,
        "position_embedding_type": "rope",
    },
    "full recompute, fusion, loss in chunks": {
        "recompute_granularity": "full",
        "gradient_accumulation_fusion": True,
        "logits_chunk": 5,  # of 16 tokens: the last chunk is smaller
    },
    "selective recompute, rotary, SwiGLU with bias, RMS q/k norm, fusion, untied, loss in chunks": {
        "logits_chunk": 3,
        "recompute_granularity": "selective",
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gradient_accumulation_fusion": True,
        "share_embeddings_and_output_weights": False,
    },
}


def make_config(tp: int = 1, **changes: Any) -> TransformerConfig:
    settings: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=24,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE + 3,
        params_dtype=torch.float64,
        init_method_std=0.3,
        tensor_model_parallel_size=tp,
    )
    return TransformerConfig(**{**settings, **changes})


def make_model(config: TransformerConfig, groups: ProcessGroups) -> GPTModel:
    """A model whose biases and norms are not the zeros and ones they start from."""
    model = GPTModel(config, groups)
    size, rank = groups.size("tp"), groups.rank("tp")
    for name, param in model.named_parameters():
        if param.dim() == 1:
            split = getattr(param, "tensor_model_parallel", False)
            noise = draw_master((param.numel() * (size if split else 1),), normal_init(0.2), name, seed=5)
            if split:
                noise = tensor_parallel_slice(noise, 0, size, rank, param.partition_stride)
            param.data += noise
    return model


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=generator)
    weights = torch.rand(BATCH, SEQUENCE, generator=generator, dtype=torch.float64)
    return tokens, labels, weights


def run_backward(model: GPTModel, microbatches: int = 2) -> Tensor:
    """Loss of each token; gradients accumulate over the microbatches."""
    tokens, labels, weights = make_batch()
    for _ in range(microbatches):
        loss = model(tokens, labels)
        (loss * weights).sum().backward()
    return loss.detach()


def keep_main_grads(model: nn.Module) -> None:
    """What the wrapper does: each gradient is a buffer that .grad and .main_grad both name."""
    for param in model.parameters():
        param.grad = param.main_grad = torch.zeros_like(param)


def assert_close(name: str, got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape, name
    error, scale = (got - expected).abs().max().item(), expected.abs().max().item()
    assert error <= 1e-10 * max(scale, 1e-3), f"{name}: off by {error:.3g}, largest value {scale:.3g}"


@ranks(2, 4)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.in_suite()
def test_loss_and_every_gradient_are_those_of_one_process(
    rank: int, world: int, sequence_parallel: bool, variant: str
) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    groups = parallel_state.get_process_groups()
    reference = make_model(
        make_config(
            **{
                **VARIANTS[variant],
                "gradient_accumulation_fusion": False,
                "recompute_granularity": None,
                "logits_chunk": 0,
            }
        ),
        ProcessGroups(),
    )
    config = make_config(world, sequence_parallel=sequence_parallel, **VARIANTS[variant])
    model = make_model(config, groups)
    keep_main_grads(model)

    expected_loss, losses = run_backward(reference), []
    fused = added_in_place(lambda: losses.append(run_backward(model)))

    assert_close("loss", losses[0], expected_loss)
    contracts = read_contracts(list(model.named_parameters()), model.modules(), groups, config)
    expected = dict(reference.named_parameters())
    assert contracts.keys() == expected.keys()
    for name, param in model.named_parameters():
        contract, grad, whole = contracts[name], param.grad.clone(), expected[name].grad
        assert param.grad is param.main_grad, name
        if contract.partial_over:
            assert contract.partial_over == ("tp",), name
            dist.all_reduce(grad, group=groups.tp)
        if contract.sharded_over:
            whole = tensor_parallel_slice(whole, param.partition_dim, world, rank, param.partition_stride)
        assert_close(name, grad, whole)
        assert expected[name].grad.abs().max() > 1e-4, f"{name}: the reference itself is zero"
    assert fused == config.gradient_accumulation_fusion


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_weights_are_the_same_in_every_dtype(dtype: torch.dtype) -> None:
    in_fp32 = GPTModel(make_config(params_dtype=torch.float32), ProcessGroups())
    model = GPTModel(make_config(params_dtype=dtype), ProcessGroups())
    for (name, param), expected in zip(model.named_parameters(), in_fp32.parameters(), strict=True):
        assert param.dtype == dtype
        assert torch.equal(param, expected.to(dtype)), name


def test_weights_depend_on_the_seed_and_not_on_the_default_stream() -> None:
    torch.manual_seed(1)
    stream = torch.get_rng_state()
    first = GPTModel(make_config(), ProcessGroups()).state_dict()
    assert torch.equal(torch.get_rng_state(), stream), "the default stream was drawn from"
    torch.manual_seed(2)
    again = GPTModel(make_config(), ProcessGroups()).state_dict()
    other = GPTModel(make_config(init_seed=5), ProcessGroups()).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.word_embeddings.weight"], other["embedding.word_embeddings.weight"])
    drawn = [weight for name, weight in first.items() if weight.dim() == 2]
    assert len({weight.flatten()[0].item() for weight in drawn}) == len(drawn), "two parameters share their numbers"


def test_a_token_does_not_see_later_ones() -> None:
    model = make_model(make_config(), ProcessGroups())
    tokens, _, _ = make_batch()
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:5], after[:5])
    assert not torch.allclose(before[5:], after[5:])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_stages_are_the_whole_model(tied: bool) -> None:
    config = make_config(share_embeddings_and_output_weights=tied)
    whole = GPTModel(config, ProcessGroups())
    first = GPTModel(config, ProcessGroups(), post_process=False, layer_numbers=[0])
    last = GPTModel(config, ProcessGroups(), pre_process=False, layer_numbers=[1])
    tokens, labels, _ = make_batch()

    expected = whole(tokens, labels)
    expected.sum().backward()
    last.set_input_tensor(first(tokens))
    loss = last(tokens, labels)
    loss.sum().backward()

    assert torch.equal(loss, expected)
    word = whole.embedding.word_embeddings.weight.grad
    if tied:
        ends = [stage.shared_embedding_or_output_weight() for stage in (first, last)]
        assert [(weight.shared_embedding, weight.shared) for weight in ends] == [(True, False), (True, True)]
        assert torch.equal(ends[0], ends[1])
        torch.testing.assert_close(ends[0].grad + ends[1].grad, word)
    else:
        torch.testing.assert_close(first.embedding.word_embeddings.weight.grad, word)
        torch.testing.assert_close(last.output_layer.weight.grad, whole.output_layer.weight.grad)
        assert last.shared_embedding_or_output_weight() is last.output_layer.weight
    with pytest.raises(RuntimeError, match="set_input_tensor"):
        GPTModel(config, ProcessGroups(), pre_process=False, layer_numbers=[1])(tokens)


@ranks(2)
def test_without_labels_each_rank_has_its_part_of_the_logits(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    tokens, _, _ = make_batch()
    expected = make_model(make_config(), ProcessGroups())(tokens)
    logits = make_model(make_config(world, sequence_parallel=True), parallel_state.get_process_groups())(tokens)
    torch.testing.assert_close(logits, tensor_parallel_slice(expected, 2, world, rank))


@ranks(2)
def test_of_sharded_parameters_the_output_layer_is_gathered_once_a_pass(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    tokens, labels, weights = make_batch()
    reference = make_model(make_config(share_embeddings_and_output_weights=False), ProcessGroups())
    (reference(tokens, labels) * weights).sum().backward()
    model = make_model(make_config(share_embeddings_and_output_weights=False, logits_chunk=2), ProcessGroups())
    ddp = wrap(
        model, data_parallel_sharding_strategy="optim_grads_params", use_distributed_optimizer=True, bucket_size=1
    )
    name, gathered = "output_layer.weight", []
    obtain = Unsharder._use

    def count(self: Unsharder, unit: Any, *args: Any, **kwargs: Any) -> Tensor:
        gathered.append(unit.names)
        return obtain(self, unit, *args, **kwargs)

    with mock.patch.object(Unsharder, "_use", count):
        loss = ddp(tokens, labels)
        in_forward = sum(name in names for names in gathered)
        (loss * weights).sum().backward()
    finalize_model_grads([ddp])
    assert (in_forward, sum(name in names for names in gathered)) == (1, 2)
    assert_same(whole_grads(ddp), {n: p.grad for n, p in reference.named_parameters()})


@ranks(2)
def test_a_16_bit_model_trains_close_to_the_fp64_one(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    reference = make_model(make_config(init_method_std=0.1), ProcessGroups())
    model = make_model(
        make_config(world, sequence_parallel=True, params_dtype=torch.bfloat16, init_method_std=0.1),
        parallel_state.get_process_groups(),
    )
    expected, loss = run_backward(reference, 1), run_backward(model, 1)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=0.02, atol=0.05)
    assert all(torch.isfinite(param.grad).all() for param in model.parameters())


@ranks(2)
def test_a_config_for_another_tensor_parallel_size_is_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with pytest.raises(ValueError, match="tensor_model_parallel_size is 1 and the tensor-parallel group has 2 ranks"):
        GPTModel(make_config())
    with pytest.raises(ValueError, match="size is 2 and the tensor-parallel group has 1 ranks"):
        GPTModel(make_config(2), ProcessGroups())


def test_a_stage_that_would_be_the_whole_model_is_refused() -> None:
    with pytest.raises(ValueError, match="pipeline_model_parallel_size is 2, but this GPTModel would hold every layer"):
        GPTModel(make_config(pipeline_model_parallel_size=2), ProcessGroups())
    with pytest.raises(ValueError, match="context_parallel_size is 2 and the context-parallel group has 1 ranks"):
        GPTModel(make_config(context_parallel_size=2), ProcessGroups())


def test_every_module_with_parameters_is_called() -> None:
    # Wrappers gather a module's parameters in its forward pre-hook; a weight taken past its module would be stale.
    called = set()
    for tied in (True, False):
        config = make_config(share_embeddings_and_output_weights=tied, qk_layernorm=True, logits_chunk=0 if tied else 4)
        model = GPTModel(config, ProcessGroups())
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda _module, _inputs, name=name: called.add(name))
        model(*make_batch()[:2])
        owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
        assert owners == called, owners ^ called
        called.clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_on_a_gpu_loss_and_gradients_are_those_of_the_cpu(variant: str) -> None:
    compare_with_the_cpu(torch.device("cuda"), variant)


def compare_with_the_cpu(device: torch.device, variant: str) -> None:
    """Compare loss and gradients on a device; the tests of the second device do so too."""
    expected, model = (make_model(make_config(**VARIANTS[variant]), ProcessGroups()) for _ in range(2))
    model.to(device)
    tokens, labels, weights = make_batch()
    loss = expected(tokens, labels)
    (loss * weights).sum().backward()
    on_gpu = model(tokens.to(device), labels.to(device))
    (on_gpu * weights.to(device)).sum().backward()
    assert_close("loss", on_gpu.detach().cpu(), loss.detach())
    for (name, param), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert_close(name, param.grad.cpu(), want.grad)


@ranks(1)
def test_the_loss_of_each_token_can_be_flattened_by_view(rank: int, world: int) -> None:
    """Megatron's loss functions do, as in `output_tensor.view(-1).float()`."""
    parallel_state.initialize_model_parallel()
    torch.manual_seed(2)
    model = GPTModel(TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=VOCAB))
    tokens = torch.randint(VOCAB, (BATCH, SEQUENCE))
    labels = tokens.roll(-1, 1)
    loss, logits = model(tokens, labels=labels), model(tokens)  # [batch, sequence], [sequence, batch, vocabulary]
    expected = nn.functional.cross_entropy(logits[..., :VOCAB].permute(1, 2, 0), labels, reduction="none")
    assert loss.shape == (BATCH, SEQUENCE) and loss.std() > 0.01
    torch.testing.assert_close(loss.view(-1), expected.flatten())
