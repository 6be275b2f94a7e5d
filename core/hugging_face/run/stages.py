"""Pipeline stages of transformers models in a PipelineRunner: find, step, and describe a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.hugging_face.read.plan import PlanError
from core.hugging_face.run.stage_forward import StageForward
from core.hugging_face.run.streams import Sizes, sizes_of
from core.model_parallel_config import ModelParallelConfig
from core.pipeline_parallel.layout import PipelineLayout
from core.pipeline_parallel.runner import MicrobatchLoss


def stage_of(chunk: nn.Module) -> StageForward:
    """Return the stage forward inside a model, wrapped or not. Raises PlanError if the model is not a stage."""
    for module in chunk.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, StageForward):
            return forward
    raise PlanError(f"a {type(chunk).__name__} is no stage of a transformers model; make it by split_stages")


def stage_forward_step(chunk: nn.Module, microbatch: Mapping[str, Any], hidden: Tensor | None) -> Any:
    """Run one microbatch through one stage: the forward step for a PipelineRunner.

    ``microbatch`` has the model's arguments with labels, the same on every stage. The step's loss is the mean over
    microbatches. Return the tensors to send, or on the last stage the model's own loss; ValueError if there is none.
    """
    stage = stage_of(chunk)
    output = chunk(received=hidden, **microbatch)
    if not stage.part.post_process:
        return output
    if getattr(output, "loss", None) is None:
        raise ValueError(f"{stage.cut.family} gave no loss; the microbatch needs labels")
    return MicrobatchLoss(output.loss)


def stage_activations(
    chunk: nn.Module, microbatch_size: int, sequence_length: int, target_length: int = 0
) -> Callable[[int], list[Tensor]]:
    """Return a function from a stage index to the meta tensors that the stage sends, for a PipelineRunner.

    These are hidden states [microbatch, sequence, hidden]. Stages of an encoder-decoder also send the inputs of the
    decoder's first layer, the encoder's output, and T5's position biases. ``sequence_length`` counts the tokens of the
    encoder, or of a causal model, and ``target_length`` those of the decoder.
    """
    stage = stage_of(chunk)
    sizes = Sizes(microbatch_size, sequence_length, target_length)
    begins = [stage.layout.stage(number).layer_numbers[0] for number in range(stage.layout.num_stages)]
    return lambda number: [form.meta(sizes) for form in stage.streams.sent_to(begins[number + 1])]


def activations_of(chunk: nn.Module, microbatch: Mapping[str, Any]) -> Callable[[int], list[Tensor]]:
    """Return the activations that each stage sends for one microbatch, like ``stage_activations``.

    Raises PlanError if the model does not take token ids and is not an encoder-decoder, and ValueError if the
    microbatch lacks the model's main input.
    """
    stage = stage_of(chunk)
    main = stage.model.main_input_name
    if main != "input_ids" and not stage.streams.decoder:
        raise PlanError(f"{stage.cut.family}: a pipeline needs a model of token ids (input_ids), or an encoder-decoder")
    if not isinstance(microbatch.get(main), Tensor):
        raise ValueError(
            f"{stage.cut.family}: a pipeline's batch is a mapping with {main!r}, and this one has {sorted(microbatch)}"
        )
    sizes = sizes_of(microbatch, main)
    return stage_activations(chunk, sizes.rows, sizes.source, sizes.target)


def stages_config(layout: PipelineLayout, tp: int = 1) -> ModelParallelConfig:
    """Create the config for ``wrap_stages``, which defines the chunks of a rank that form one model."""
    virtual = layout.chunks if layout.chunks > 1 else None
    return ModelParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=virtual,
    )


def received_example(chunk: Any, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Create the ``received`` argument of a stage that runs alone: random numbers, the same on all ranks.

    It is empty for the first stage.
    """
    stage = stage_of(chunk)
    if stage.part.pre_process:
        return {}
    generator = torch.Generator("cpu").manual_seed(5)
    device = next(chunk.parameters()).device
    received = []
    for form, like in zip(
        stage.streams.sent_to(stage.first), activations_of(chunk, arguments)(stage.part.index - 1), strict=True
    ):
        values = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
        received.append(values.to(device, like.dtype).requires_grad_())
        received[-1].tensor_model_parallel = form.is_split
    return {"received": tuple(received)}
