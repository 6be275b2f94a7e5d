"""Checks that sizes fit together. Pure; each error names the options, the arithmetic and the nearest fit."""

from __future__ import annotations

import math

from core.context_parallel import check_heads, check_sequence_length
from core.groups.rank_grid import RankGrid
from core.number_ranges import either, nearest_divisors, nearest_multiples
from core.tensor_parallel.initialization import padded_vocab_size
from core_plan.job.config import JobConfig, ModelOptions, ParallelOptions
from core_plan.job.errors import ConfigError


def check_divides(what: str, size: int, by: str, divisor: int, *, instead: str = "") -> None:
    """Raise ConfigError unless the size called ``what`` is a multiple of the divisor called ``by``.

    The error suggests other divisors, or ``instead`` if the divisor follows from other sizes.
    """
    if size % divisor == 0:
        return
    raise ConfigError(
        f"{what} {size} is not divisible by {by} {divisor}: {size} / {divisor} = {size / divisor:g}; use "
        f"{either(nearest_multiples(size, divisor))}, or {instead or f'{by} {either(nearest_divisors(size, divisor))}'}"
    )


def check_ranks(parallel: ParallelOptions, world_size: int, context: str = "cp") -> RankGrid:
    """Return the grid of ranks of the parallel sizes. ``context`` is the user's name for the axis cp."""
    tp, pp, cp, ep = parallel.tp, parallel.pp, parallel.cp, parallel.ep
    etp = tp if parallel.etp is None else parallel.etp
    for product, words in (
        (tp * cp * pp, f"tp {tp} x {context} {cp} x pp {pp}"),
        (etp * ep * pp, f"etp {etp} x ep {ep} x pp {pp}, which one copy of all experts needs,"),
    ):
        if world_size % product:
            raise ConfigError(
                f"{world_size} ranks are not divisible by {words} = {product}: {world_size} / {product} = "
                f"{world_size / product:g}; start {either(nearest_multiples(world_size, product))} ranks "
                "(--run.ranks, or the launcher's number), or change a size"
            )
    try:
        grid = RankGrid(world_size, tp=tp, pp=pp, cp=cp, ep=ep, expt_tp=etp, order=parallel.order)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--parallel.order {parallel.order}: {error}") from error
    if parallel.dp is not None and parallel.dp != grid.dp:
        raise ConfigError(
            f"--parallel.dp is {parallel.dp}, and {world_size} ranks / (tp {tp} x {context} {cp} x pp {pp}) leave "
            f"{grid.dp}; start {parallel.dp * tp * cp * pp} ranks (--run.ranks, or the launcher's number), or leave "
            "--parallel.dp out"
        )
    return grid


def check_model(config: JobConfig) -> None:
    """Check heads, widths, sequence and experts of the model against the ranks that share them."""
    model, parallel = config.model, config.parallel
    heads, groups = model.num_attention_heads, model.query_groups
    group_option = "the number of query groups"
    check_divides("--model.hidden-size", model.hidden_size, "--model.num-attention-heads", heads)
    check_divides("--model.num-attention-heads", heads, group_option, groups)
    check_divides("--model.num-attention-heads", heads, "tp", parallel.tp)
    check_divides(group_option, groups, "tp", parallel.tp)
    check_divides("the feed-forward width", model.ffn_width, "tp", parallel.tp)
    head_size = model.hidden_size // heads
    if model.position_embedding_type == "rope" and head_size % 2:
        raise ConfigError(
            f"rotary positions need an even head size; --model.hidden-size {model.hidden_size} / "
            f"--model.num-attention-heads {heads} = {head_size}; use --model.hidden-size "
            f"{either(nearest_multiples(model.hidden_size, 2 * heads))}"
        )
    _check_sequence(model, parallel)
    _check_experts(model, parallel)


def _check_sequence(model: ModelOptions, parallel: ParallelOptions) -> None:
    tp, cp = parallel.tp, parallel.cp
    if parallel.uses_sequence_parallel and tp == 1:
        raise ConfigError("--parallel.sequence-parallel True splits activations over tp, and tp is 1; use False")
    try:
        check_sequence_length(model.sequence_length, cp, tp, parallel.uses_sequence_parallel)
    except ValueError as error:
        raise ConfigError(f"--model.sequence-length: {error}") from error
    if cp > 1 and model.attention_dropout > 0.0:
        raise ConfigError(
            f"--model.attention-dropout is {model.attention_dropout} with --parallel.cp {cp}: no rank has all shares "
            "of a token's attention; use 0.0"
        )
    if parallel.cp_comm_type == "a2a":
        try:
            check_heads(model.num_attention_heads // tp, model.query_groups // tp, cp)
        except ValueError as error:
            raise ConfigError(f"--parallel.cp-comm-type a2a: {error}") from error


def _check_experts(model: ModelOptions, parallel: ParallelOptions) -> None:
    experts, topk = model.num_experts, model.moe_router_topk
    etp = parallel.tp if parallel.etp is None else parallel.etp
    if experts is None:
        for axis, size in (("ep", parallel.ep), ("etp", parallel.etp or 1)):
            if size > 1:
                raise ConfigError(
                    f"--parallel.{axis} is {size} and the model has no experts; leave it out, or say how many there "
                    f"are, --model.num-experts {nearest_multiples(1, parallel.ep)[0]} for example"
                )
        return
    if not 1 <= topk <= experts:
        raise ConfigError(
            f"--model.moe-router-topk {topk} and --model.num-experts {experts}: a token goes to {topk} different "
            f"experts of {experts}; use --model.moe-router-topk 1 to {experts}, or --model.num-experts {topk} or more"
        )
    check_divides("--model.num-experts", experts, "ep", parallel.ep)
    check_divides("an expert's hidden size (--model.moe-ffn-hidden-size)", model.expert_width, "etp", etp)
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None:
        check_divides("--model.moe-shared-expert-intermediate-size", shared, "tp", parallel.tp)


def check_vocabulary(tokens: int, model: ModelOptions, tp: int) -> int:
    """Return the model's vocabulary size for a tokenizer.

    A vocabulary that is not divisible by tp is padded with rows that no token uses; each rank must hold a used one.

    Raises:
        ConfigError: If it is smaller than the number of ``tokens``, or cannot be split.
    """
    vocab_size = tokens if model.vocab_size is None else model.vocab_size
    if vocab_size < tokens:
        raise ConfigError(
            f"--model.vocab-size {vocab_size} is smaller than the tokenizer's vocabulary of {tokens}; use {tokens} or "
            "more, or leave it out"
        )
    if not _fills_every_rank(vocab_size, tp):
        padded = padded_vocab_size(vocab_size, tp)
        rows = padded // tp
        smaller = next(size for size in range(tp - 1, 0, -1) if _fills_every_rank(vocab_size, size))
        larger = next(size for size in range(vocab_size + 1, padded + tp) if _fills_every_rank(size, tp))
        raise ConfigError(
            f"a vocabulary of {vocab_size} over tp {tp} is padded to {padded} rows, {rows} a rank, so that the last "
            f"rank's, {padded - rows} to {padded - 1}, are all padding; use tp {smaller}, or --model.vocab-size "
            f"{larger}"
        )
    return vocab_size


def check_memory(config: JobConfig, ranks: int, memory_bytes: int, where: str = "this machine") -> None:
    """Raise ConfigError if parameters and gradients of some ranks exceed their shared memory.

    Optimizer state and activations are not counted, so a model that passes may still be too large.
    """
    model, parallel = config.model, config.parallel
    count = count_parameters(model)
    gradients = 0 if config.ddp.shards_gradients else 1
    itemsize = {"float64": 8, "float32": 4}.get(model.dtype, 2)
    shared_by = parallel.tp * parallel.pp * (1 if model.num_experts is None else parallel.ep)
    needed = ranks * count * itemsize * (1 + gradients) // shared_by
    if needed > memory_bytes:
        raise ConfigError(
            f"the model has about {count:,} parameters; with their gradients {ranks} rank{'s' * (ranks > 1)} on "
            f"{where} would hold {needed / 2**30:,.0f} GiB and may use {memory_bytes / 2**30:,.0f} GiB; use a smaller "
            "--model.hidden-size or --model.num-layers, or share the model among more machines (--tp, --pp)"
        )


def most_bytes(config: JobConfig, micro_batch_size: int, microbatches: int) -> int:
    """Return an upper bound of a rank's bytes by a rule of thumb, so that small jobs need no plan, which takes a
    second.

    Nothing is divided by parallel sizes, and nothing is recomputed. Parameters, gradients, masters and moments count 8
    elements each; a token of a layer four times the layer's activations, and a logit 8 elements.
    """
    model = config.model
    itemsize = 8 if model.dtype == "float64" else 4
    wide = model.ffn_width
    if model.num_experts is not None:
        wide = max(wide, model.moe_router_topk * model.expert_width)
        wide += model.num_experts + (model.moe_shared_expert_intermediate_size or 0)
    of_layer = 24 * model.hidden_size + 12 * wide + 8 * model.num_attention_heads * model.sequence_length
    known = {"bytes": 256, "bpe": config.data.bpe_vocab_size}
    vocabulary = model.vocab_size or known.get(config.data.tokenizer, 1 << 17)
    of_token = (model.num_layers + 2) * of_layer + 8 * vocabulary
    tokens = microbatches * micro_batch_size * model.sequence_length
    parameters = count_parameters(model) + 2 * vocabulary * model.hidden_size
    return itemsize * (8 * parameters + tokens * of_token)


def count_parameters(model: ModelOptions, experts_used: int | None = None) -> int:
    """Count the parameters of the unsplit model without biases and norms, with all or so many experts of a layer."""
    hidden = model.hidden_size
    attention = 2 * hidden * hidden + 2 * hidden * (hidden // model.num_attention_heads) * model.query_groups
    matrices = 3 if model.activation == "swiglu" else 2
    dense = matrices * hidden * model.ffn_width
    with_experts = 0
    experts = 0
    if model.num_experts is not None:
        with_experts = math.ceil(model.num_layers / model.moe_layer_freq)
        experts = (experts_used or model.num_experts) * matrices * hidden * model.expert_width
    embedding = (model.vocab_size or 0) * hidden
    return embedding + model.num_layers * attention + (model.num_layers - with_experts) * dense + with_experts * experts


def _fills_every_rank(vocab_size: int, tp: int) -> bool:
    return padded_vocab_size(vocab_size, tp) // tp * (tp - 1) < vocab_size
