"""Pipeline stages of the GPT model: construction, wrapping, and the forward step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core import parallel_state
from core.context_parallel import check_sequence_length
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from core.groups.process_groups import ProcessGroups
from core.models.gpt import GPTModel
from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.runner import MicrobatchLoss
from core.transformer.transformer_config import TransformerConfig


def build_gpt_stages(
    config: TransformerConfig, layout: PipelineLayout, pg_collection: ProcessGroups | None = None
) -> list[GPTModel]:
    """Build this rank's stages in model order, with the same weights as an unsplit GPTModel of this config.

    A tied embedding is one parameter if the first and the last stage share a rank, and a copy on each otherwise. The
    call does not communicate.

    Args:
        config (TransformerConfig): Model configuration.
        layout (PipelineLayout): Pipeline layout.
        pg_collection (ProcessGroups, optional): Process groups. Defaults to those of ``parallel_state``.

    Raises:
        ValueError: If the layout contradicts the config or the groups.
    """
    groups = pg_collection if pg_collection is not None else parallel_state.get_process_groups()
    layout.check_model(config.num_layers)
    _check_sizes(config, layout, groups)
    if config.share_embeddings_and_output_weights and layout.pp > 1:
        check_embedding_group(layout, groups)
    stages: list[GPTModel] = []
    for spec in map(layout.stage, layout.stages_of(groups.rank("pp"))):
        borrows = config.share_embeddings_and_output_weights and layout.ends_share_a_rank and spec.post_process
        stages.append(
            GPTModel(
                config,
                groups,
                pre_process=spec.pre_process,
                post_process=spec.post_process,
                layer_numbers=spec.layer_numbers,
                tied_weight=stages[0].shared_embedding_or_output_weight() if borrows else None,
            )
        )
    return stages


def wrap_stages(
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    stages: Sequence[nn.Module],
    pg_collection: ProcessGroups | None = None,
) -> list[DistributedDataParallel]:
    """Wrap each stage in ``DistributedDataParallel``. Collective over each stage's ranks.

    Only the chunk that backward reaches last is split into several buckets. The other chunks each use one, whose
    reduction overlaps with the rest of the step.

    Args:
        config: Model configuration.
        ddp_config (DistributedDataParallelConfig): Configuration of the wrappers.
        stages (Sequence[Module]): This rank's stages, in model order.
        pg_collection (ProcessGroups, optional): Process groups. Defaults to those of ``parallel_state``.
    """
    return [
        DistributedDataParallel(config, ddp_config, stage, disable_bucketing=number > 0, pg_collection=pg_collection)
        for number, stage in enumerate(stages)
    ]


def gpt_activations(config: TransformerConfig, microbatch_size: int, sequence_length: int) -> list[Tensor]:
    """Return meta tensors that describe a stage's output, for ``PipelineRunner``.

    They have shape [s / cp, b, hidden], or [s / (cp * tp), b, hidden] under sequence parallelism.

    Args:
        config (TransformerConfig): Model configuration.
        microbatch_size (int): Number of sequences per microbatch.
        sequence_length (int): Length of the full sequence, before context parallelism splits it.

    Raises:
        ValueError: If the sequence does not divide. The message has the nearest valid lengths.
    """
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    check_sequence_length(sequence_length, cp, tp, config.sequence_parallel)
    positions = sequence_length // (cp * tp if config.sequence_parallel else cp)
    shape = (positions, microbatch_size, config.hidden_size)
    dtype = getattr(config, "pipeline_dtype", None) or config.params_dtype  # the first is Megatron's
    return [torch.empty(shape, dtype=dtype, device="meta")]


def gpt_forward_step(chunk: nn.Module, microbatch: Mapping[str, Tensor | None] | None, hidden: Tensor | None) -> Any:
    """Run one microbatch through one stage of a GPT.

    Args:
        chunk (Module): The stage.
        microbatch (Mapping[str, Tensor | None]): Tensors by name: 'tokens' [b, s], 'labels' [b, s] and, to mask some
            tokens, 'loss_mask' [b, s]. Packed documents also need 'document_ids' [b, s] and 'position_ids' [b, s],
            which every stage reads, so intermediate stages need the microbatch too. Under context parallelism all of
            them come from get_batch_on_this_cp_rank, and s is this rank's part of the sequence.
        hidden (Tensor): Output of the previous stage, or ``None`` on the first.

    Returns:
        Hidden states, or on the last stage the sum of the token losses and the number of tokens.
    """
    stage: Any = chunk
    while not hasattr(stage, "post_process"):
        stage = stage.module
    given: Mapping[str, Tensor | None] = microbatch if isinstance(microbatch, Mapping) else {}
    packed = {name: given[name] for name in ("position_ids", "document_ids") if given.get(name) is not None}
    labels = given["labels"] if stage.post_process and given else None
    stage.set_input_tensor(hidden)
    output = chunk(given["tokens"] if stage.pre_process and given else None, labels=labels, **packed)
    stage.set_input_tensor(None)
    if not stage.post_process:
        return output
    mask = given.get("loss_mask")
    if mask is None:
        return MicrobatchLoss(output.sum(), output.numel())
    return MicrobatchLoss((output * mask).sum(), mask.sum(dtype=torch.float64))


def _check_sizes(config: TransformerConfig, layout: PipelineLayout, groups: ProcessGroups) -> None:
    virtual = config.virtual_pipeline_model_parallel_size or 1
    if (config.pipeline_model_parallel_size, virtual) != (layout.pp, layout.chunks):
        raise ValueError(
            f"the layout has {layout.pp} pipeline ranks of {layout.chunks} chunks, and the config says "
            f"pipeline_model_parallel_size={config.pipeline_model_parallel_size} and virtual_pipeline_model_parallel_"
            f"size={config.virtual_pipeline_model_parallel_size}; make them agree"
        )
    layout.check_ranks(groups)


def check_embedding_group(layout: PipelineLayout, groups: ProcessGroups) -> None:
    """Check that group 'embd' has the ranks on which the layout places a tied embedding, or raise ValueError."""
    expected = layout.embedding_ranks(groups.ranks("pp"))
    found = groups.ranks("embd") if groups.embd is not None else []
    mine = groups.ranks("pp")[groups.rank("pp")]
    if found != (expected if mine in expected else []):
        raise ValueError(
            f"rank {mine}: the tied embedding is on ranks {expected}, but group 'embd' has {found or 'no ranks here'}; "
            "call initialize_model_parallel with get_embedding_ranks=layout.embedding_ranks"
        )
