"""Fine-tuning on split models: LoRA, and gradient checkpointing by the models' own switch."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.hugging_face import PlanError, add_lora, save_split, split_model
from core.hugging_face.read.transformers_plans import checkpoint_each_layer
from core.hugging_face.run.sequence import OVER_CONTEXT
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.verify.in_double import InDouble
from tests.families.tiny import families, families_with_policy, tiny_config, tiny_model
from tests.unit_tests.hugging_face.models import small, tokens, whole
from tests.unit_tests.ranks import ranks

TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "deepseek_v3": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}


def base_of(family: str) -> Any:
    if family == "gpt2":
        return tiny_model(tiny_config(families_with_policy()["gpt2/GPT2Config"]))
    if family == "deepseek_v3":
        return tiny_model(tiny_config(families()["deepseek_v3/DeepseekV3Config"]))
    return small(family, num_key_value_heads=1)  # keys are shared by ranks


def config_of(family: str) -> Any:
    conv = family == "gpt2"
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[family], fan_in_fan_out=conv)


def steps_of_sgd(model: Any, wrapped: Any, batches: list[list[torch.Tensor]], data_rank: int | None) -> list[float]:
    """Losses; the whole batch on one process, or a part of it on one rank of a job."""
    optimizer: Any
    if data_rank is None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0)
    else:
        options = OptimizerConfig(lr=2.0, optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0)
        optimizer = get_megatron_optimizer(options, [wrapped])
    losses = []
    for parts in batches:
        if data_rank is None:
            optimizer.zero_grad()
            loss = torch.stack([wrapped(input_ids=part, labels=part).loss for part in parts]).mean()
            loss.backward()
        else:
            wrapped.zero_grad_buffer()
            loss = wrapped(input_ids=parts[data_rank], labels=parts[data_rank]).loss
            loss.backward()
            finalize_model_grads([wrapped])
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@ranks(4)
@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.in_suite(2)
def test_adapters_train_as_on_one_process_and_are_a_plain_adapter_directory(
    rank: int, world: int, family: str, tmp_path: Path
) -> None:
    model = base_of(family)
    base = copy.deepcopy(model)
    torch.manual_seed(5)
    reference = peft.get_peft_model(copy.deepcopy(base), config_of(family)).double()
    start = {name: p.detach().clone() for name, p in reference.named_parameters() if p.requires_grad}
    batches = [[tokens(length=8, seed=10 * step + n) % 90 for n in range(2)] for step in range(3)]
    with InDouble():
        steps_of_sgd(reference, reference, batches, None)

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    split_model(model)
    torch.manual_seed(5 + parallel_state.get_tensor_model_parallel_rank())  # the first rank's draws are taken
    adapted = add_lora(model, config_of(family)).double()
    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), adapted)
    with InDouble():
        steps_of_sgd(adapted, wrapped, batches, parallel_state.get_data_parallel_rank())
    found = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert found.keys() == start.keys()
    for name, parameter in found.items():
        expected = reference.get_parameter(name).detach()
        torch.testing.assert_close(whole(adapted, name, parameter.detach()), expected, rtol=1e-9, atol=1e-12)
    moved = max(float((reference.get_parameter(name) - start[name]).abs().max()) for name in start)
    assert moved > 1e-3
    save_split(wrapped, tmp_path)
    torch.distributed.barrier()
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    for name in start:
        if name in adapted.split_report.plan.splits:
            saved = whole(adapted, name, found[name].detach())
            assert torch.equal(loaded.get_parameter(name), saved.to(loaded.get_parameter(name).dtype)), name
    again = copy.deepcopy(base)
    split_model(again)
    resumed = add_lora(again, directory=tmp_path)
    for name, parameter in found.items():
        assert torch.equal(resumed.get_parameter(name), parameter.to(resumed.get_parameter(name).dtype)), name


@ranks(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "knows use_dora=False alone, and the LoraConfig has True"),
        ({"trainable_token_indices": [1]}, r"knows trainable_token_indices=None alone, and the LoraConfig has \[1\]"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', which needs the unsplit base weights"),
        ({"target_modules": ["embed_tokens"]}, "LoRA on 'model.embed_tokens': adapters of a split Embedding"),
    ],
)
def test_adapters_that_cannot_be_split_are_refused(
    rank: int, world: int, options: dict[str, Any], message: str
) -> None:
    model = small("llama")
    with pytest.raises(PlanError, match="add_lora takes a model that was split, and was given a LlamaForCausalLM"):
        add_lora(model, config_of("llama"))
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    split_model(model)
    with pytest.raises(PlanError, match=message):
        add_lora(model, peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options}))


@ranks(2)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_gradient_checkpointing_leaves_the_gradients_as_they_are(rank: int, world: int, family: str) -> None:
    if family == "t5":
        model = tiny_model(tiny_config(families_with_policy()["t5/T5Config"]))
    else:
        model = small("llama")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    split_model(model)
    model.config.decoder_start_token_id = 0
    other = copy.deepcopy(model)
    checkpoint_each_layer(other)
    ids = tokens() % 90
    calls = [0, 0]
    for number, each in enumerate((model, other)):
        layer = each.encoder.block[1] if family == "t5" else each.model.layers[1]
        inner = layer.layer[0].SelfAttention.q if family == "t5" else layer.mlp.up_proj

        def count(*_: Any, number: int = number) -> None:
            calls[number] += 1

        inner.register_forward_hook(count)
        each.train()(input_ids=ids, labels=ids).loss.backward()
    assert calls == [1, 2]  # computed again in backward
    for name, parameter in model.named_parameters():
        expected = parameter.grad
        if expected is not None:
            torch.testing.assert_close(other.get_parameter(name).grad, expected, rtol=1e-12, atol=1e-14)


def compile_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")


def keep_products_alone(model: Any) -> None:
    """Recompute everything in a layer but the products of matrices."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
    options = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, products)}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


@ranks(2)
@pytest.mark.parametrize("sp", [None, "split_gather", "all_to_all", "ring_attn"])
@pytest.mark.in_suite(2)
def test_selectively_recomputed_layers_are_those_of_one_process(rank: int, world: int, sp: str | None) -> None:
    compare_two_steps(world, sp, keep_products_alone)


@pytest.mark.nightly
@ranks(2, timeout_s=600.0)
@pytest.mark.parametrize("sp", [None, "split_gather", "all_to_all", "ring_attn"])
def test_compiled_layers_are_those_of_one_process(rank: int, world: int, sp: str | None) -> None:
    compare_two_steps(world, sp, compile_layers)


def compare_two_steps(world: int, sp: str | None, change: Callable[[Any], None]) -> None:
    """Losses and gradients of a split llama whose layers a function has changed, next to those of one process."""
    model = small("llama", num_hidden_layers=1)
    reference = copy.deepcopy(model)
    tp, cp = (1, world) if sp in OVER_CONTEXT else (world, 1)
    parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
    split_model(model, sequence_parallel=sp)
    change(model)
    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), model)
    ids = tokens(2, 12)
    for _ in range(2):  # the second step runs what the first one has compiled
        wrapped.zero_grad_buffer()
        found, expected = (each(input_ids=ids, labels=ids).loss for each in (wrapped, reference))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        reference.zero_grad()
        expected.backward()
        found.backward()
        finalize_model_grads([wrapped])
        for name, parameter in model.named_parameters():
            wanted = reference.get_parameter(name).grad
            torch.testing.assert_close(whole(model, name, parameter.grad), wanted, rtol=1e-5, atol=1e-7)
