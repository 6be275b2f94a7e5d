"""What the checkpoint tests share: a model with every kind of parameter at any layout, and values planted in it.

Values come from the name and the key alone, as whole tensors; each layout gets its slices by the tests' own arithmetic.
"""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core import parallel_state
from core.checkpoint.optimizer_pieces import leaves
from core.distributed import DistributedDataParallelConfig, finalize_model_grads
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.pipeline_parallel import PipelineLayout, build_gpt_stages, wrap_stages
from core.transformer import TransformerConfig
from tests.unit_tests.moe.moe_reference import my_slice
from tests.unit_tests.pipeline_parallel.pipeline_reference import full_name

VOCAB = 13  # divides into no number of ranks


@dataclass(frozen=True)
class Layout:
    """Sizes, strategy and precision of one job."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    strategy: str = "no_shard"
    dtype: torch.dtype = torch.float32
    instances: int = 1
    experts: int | None = 4
    tied: bool = True
    algorithm: str = "adam"
    seed: int = 1
    dropout: float = 0.0

    def __str__(self) -> str:
        sizes = f"{self.world}ranks-tp{self.tp}-pp{self.pp}-vpp{self.vpp}-cp{self.cp}-ep{self.ep}-etp{self.etp}"
        return f"{sizes}-{self.strategy}-{str(self.dtype).removeprefix('torch.')}"


def model_config(layout: Layout) -> TransformerConfig:
    """Two dense and two expert layers, gated, biased, tied; every size small and uneven where it may be."""
    return TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=4,
        ffn_hidden_size=12,
        vocab_size=VOCAB,
        max_sequence_length=8,
        activation="swiglu",
        qk_layernorm=True,
        share_embeddings_and_output_weights=layout.tied,
        params_dtype=layout.dtype,
        bf16=layout.dtype is torch.bfloat16,
        fp16=layout.dtype is torch.float16,
        init_seed=layout.seed,
        init_method_std=0.2,
        hidden_dropout=layout.dropout,
        attention_dropout=layout.dropout,
        num_moe_experts=layout.experts,
        moe_layer_freq=2,
        moe_ffn_hidden_size=8,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=layout.experts is not None,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=4 if layout.experts else None,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
    )


@dataclass
class Job:
    """One rank's part of a job."""

    layout: Layout
    config: TransformerConfig
    groups: ProcessGroups
    pipeline: PipelineLayout
    chunks: list[Any]
    optimizer: Any

    def named(self) -> list[tuple[str, Tensor]]:
        """(name in the whole model, parameter or persistent buffer), by the tests' own rule of names."""
        found: list[tuple[str, Tensor]] = []
        numbers = [list(spec.layer_numbers) for spec in self._specs()]
        for chunk, layers in zip(self.chunks, numbers, strict=True):
            for name, param in chunk.module.named_parameters():
                found.append((full_name(name, layers, tied=self.layout.tied), param))
            for name, buffer in chunk.module.named_buffers():
                if name.endswith("expert_bias"):
                    found.append((full_name(name, layers, tied=False), buffer))
        return found

    def by_optimizer_name(self) -> dict[str, tuple[str, Tensor]]:
        """The optimizer's name of a parameter -> (name in the whole model, parameter)."""
        names = {id(param): name for name, param in self.named()}
        return {
            mine: (names[id(param)], param)
            for leaf in leaves(self.optimizer)
            for chunk in self.chunks
            for param in chunk.module.parameters()
            if (mine := leaf.names.get(id(param))) is not None
        }

    def entries(self) -> list[tuple[str, dict[str, Any]]]:
        """(the optimizer's name of a parameter, what this rank holds of its state)."""
        return [
            (name, entry)
            for leaf in leaves(self.optimizer)
            for name, held in leaf.state_by_parameter().items()
            for entry in held
        ]

    def _specs(self) -> list[Any]:
        return [self.pipeline.stage(stage) for stage in self.pipeline.stages_of(self.groups.rank("pp"))]


def build(layout: Layout, **options: Any) -> Job:
    """Start the groups of a layout and build its model and optimizer."""
    pipeline = PipelineLayout.even(4, layout.pp, layout.vpp or 1)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=layout.instances,
        get_embedding_ranks=pipeline.embedding_ranks,
    )
    config = model_config(layout)
    ddp_config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=layout.strategy,
        grad_reduce_in_fp32=True,
        bucket_size=100,
        overlap_grad_reduce=True,
        num_distributed_optimizer_instances=layout.instances,
    )
    chunks = wrap_stages(config, ddp_config, build_gpt_stages(config, pipeline))
    settings: dict[str, Any] = {"optimizer": layout.algorithm, "lr": 0.01}
    settings |= {"bf16": layout.dtype is torch.bfloat16, "fp16": layout.dtype is torch.float16}
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**settings, **options}), chunks)
    return Job(layout, config, parallel_state.get_process_groups(), pipeline, chunks, optimizer)


def gathered(chunks: list[Any]) -> ExitStack:
    """Whole parameters of all chunks, for what the tests plant and compare."""
    stack = ExitStack()
    for chunk in chunks:
        stack.enter_context(chunk.gathered())
    return stack


def step_once(job: Job, shapes: dict[str, tuple[int, ...]]) -> None:
    """A step from gradients that differ in every element, the same ones at every layout."""
    for chunk in job.chunks:
        chunk.zero_grad_buffer()
    loss = torch.zeros(())
    with gathered(job.chunks):
        for name, param in job.named():
            if param.requires_grad:
                mine = my_slice(planted("gradient", name, shapes[name]), param, job.groups)
                loss = loss + (param.float() * mine).sum()
        (loss * job.optimizer.get_loss_scale()).sum().backward()
    finalize_model_grads(job.chunks)
    assert job.optimizer.step()[0]


def whole_shapes(experts: int | None = 4, tied: bool = True) -> dict[str, tuple[int, ...]]:
    """Shapes of the model on one process."""
    model = GPTModel(model_config(Layout(experts=experts, tied=tied)), ProcessGroups())
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    shapes |= {n: tuple(b.shape) for n, b in model.named_buffers() if n.endswith("expert_bias")}
    return shapes


def planted(key: str, name: str, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor that stands for one key ('model', 'exp_avg', ...) of one parameter."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key}/{name}".encode()))
    return torch.randn(shape, generator=generator)


def whole_value(key: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The same as the model holds it: a 16-bit parameter is its master, rounded."""
    if key in ("model", "master"):
        value = planted("model", name, shape)
        return value.to(dtype) if key == "model" and not name.endswith("expert_bias") else value
    return planted(key, name, shape)


def plant(job: Job, shapes: dict[str, tuple[int, ...]]) -> None:
    """Give a job that has stepped its slices of the planted values."""
    with gathered(job.chunks):
        for name, tensor in job.named():
            tensor.data.copy_(my_slice(whole_value("model", name, shapes[name], job.layout.dtype), tensor, job.groups))
    names = job.by_optimizer_name()
    for leaf in leaves(job.optimizer):
        state = leaf.state_by_parameter()
        for mine, held in state.items():
            for entry in held:
                for key in entry.keys() - {"offset", "numel"}:
                    entry[key] = torch.tensor(7.0)
                    if key != "step":
                        entry[key] = flat_part(job, key, *names[mine], entry, shapes)
        leaf.load_state_by_parameter(state)


def flat_part(
    job: Job, key: str, name: str, param: Tensor, entry: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> Tensor:
    """What one entry must hold of a planted value."""
    local = my_slice(whole_value(key, name, shapes[name], job.layout.dtype), param, job.groups)
    return local.reshape(-1)[entry["offset"] : entry["offset"] + entry["numel"]]


def assert_planted(job: Job, shapes: dict[str, tuple[int, ...]], keys: set[str]) -> None:
    """Every parameter, and every key of every entry, is bit for bit what was planted."""
    with gathered(job.chunks):
        for name, tensor in job.named():
            expected = my_slice(whole_value("model", name, shapes[name], job.layout.dtype), tensor, job.groups)
            assert torch.equal(tensor.data, expected.to(tensor.dtype)), f"{name} on {job.layout}"
    names = job.by_optimizer_name()
    for mine, entry in job.entries():
        name, param = names[mine]
        assert set(entry) - {"offset", "numel"} == keys, f"{name} holds {sorted(entry)}"
        for key in keys:
            if key == "step":
                assert float(entry[key]) == 7.0
            else:
                expected = flat_part(job, key, name, param, entry, shapes)
                assert torch.equal(entry[key], expected), f"{key} of {name} on {job.layout}"
