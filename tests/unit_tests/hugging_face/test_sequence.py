"""Sequence parallelism of transformers models against one process: gradients, documents, the loss, what is refused."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from core import parallel_state
from core.context_parallel import all_to_all, cut_sequence
from core.context_parallel.cut_sequence import CutSequence
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.distributed.guard.finite import ReplicaDriftError
from core.hugging_face import PlanError, split_model
from core.hugging_face.cut.sequence import over_sequence
from core.hugging_face.read.transformers_plans import checkpoint_each_layer
from core.hugging_face.run.sequence import MODES, OVER_CONTEXT
from core.tensor_parallel import mappings
from core.verify.in_double import InDouble
from tests.families.check import Verdict, check_on_rank
from tests.families.tiny import families, families_with_policy
from tests.unit_tests.hugging_face.models import grad_times, small, tokens, whole
from tests.unit_tests.ranks import ranks

DOCUMENTS = (5, 1, 7, 3)  # no end lies at the end of a rank's part
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LENGTH = sum(DOCUMENTS)  # 16


def verdict_on(family: str, tp: int = 1, pp: int = 1, sp: str = "split_gather", **values: Any) -> Verdict:
    import transformers

    return check_on_rank(family, transformers.CONFIG_MAPPING[family], tp, values, pp=pp, sp=sp)


@ranks(2)
@pytest.mark.parametrize(
    ("family", "tp", "sp"),
    [
        ("llama", 2, "ring"),
        ("qwen3_moe", 2, "split_gather"),
        ("llama4_text", 2, "split_gather"),  # its experts give [batch x sequence, hidden]
        ("gpt2", 2, "split_gather"),
        ("deepseek_v3", 2, "split_gather"),
        ("gpt2", 1, "all_to_all"),
        ("bert", 2, "split_gather"),
        ("qwen3", 1, "all_to_all"),
        ("gpt_oss", 1, "all_to_all"),  # windows, and sinks
        ("gemma2", 1, "all_to_all"),  # windows, and caps of scores
        ("gemma2", 1, "ring_attn"),
        ("gemma3_text", 1, "all_to_all"),  # windows in some layers
        ("mistral", 1, "all_to_all"),
        ("gpt_oss", 1, "ring_attn"),
        ("gemma3_text", 1, "ring_attn"),
        ("mistral", 1, "ring_attn"),
        ("deepseek_v3", 1, "ring_attn"),
        ("qwen2_moe", 1, "ring_attn"),  # makes a mask that no layer uses
        ("gpt2", 1, "ring_attn"),
    ],
)
@pytest.mark.in_suite(7)
def test_gradients_of_a_family_are_those_of_one_process(rank: int, world: int, family: str, tp: int, sp: str) -> None:
    verdict = verdict_on(family, tp, sp=sp)
    assert verdict.answer == "equal", verdict


@ranks(4)
@pytest.mark.parametrize(
    ("family", "tp", "pp", "sp"),
    [
        ("llama", 2, 2, "split_gather"),
        ("qwen3", 1, 2, "ring_attn"),
        ("qwen3", 2, 1, "all_to_all"),
        ("gpt2", 2, 1, "ring_attn"),
        ("qwen3", 4, 1, "split_gather"),
    ],
)
@pytest.mark.in_suite(3)
def test_gradients_over_two_axes_are_those_of_one_process(
    rank: int, world: int, family: str, tp: int, pp: int, sp: str
) -> None:
    verdict = verdict_on(family, tp, pp, sp)
    assert verdict.answer == "equal", verdict


# -- documents, loss, checkpointing -----------------------------------------------------------------------------------


def in_double(function: Callable[..., None]) -> Callable[..., None]:
    """A test in which families that cast to fp32 do not."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        with InDouble():
            function(*args, **kwargs)

    return run


def split_over(tp: int, cp: int, sp: str, family: str = "qwen3", **values: Any) -> tuple[Any, Any, Callable[..., None]]:
    """A wrapped model, its reference, and what compares all of their gradients."""
    options = values.pop("options", {})
    model = small(family, max_position_embeddings=64, **values)
    reference = copy.deepcopy(model)
    parallel_state.initialize_model_parallel(tp, context_parallel_size=cp)
    split_model(model, sequence_parallel=sp, **options)
    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), model)

    def compare(tolerance: float = 1e-12) -> None:
        finalize_model_grads([wrapped])
        largest = max(float(p.grad.abs().max()) for p in reference.parameters())
        assert largest > 1e-3
        for name, parameter in model.named_parameters():
            wanted = reference.get_parameter(name).grad
            off = float((whole(model, name, parameter.grad) - wanted).abs().max()) / largest
            assert off < tolerance, (name, off)

    return wrapped, reference, compare


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Position ids, ends of documents, and the block-diagonal mask of the packed row."""
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).unsqueeze(0)
    ends = torch.tensor([0, *torch.tensor(DOCUMENTS).cumsum(0).tolist()], dtype=torch.int32)
    mask = torch.block_diag(*(torch.ones(length, length).tril() for length in DOCUMENTS)).bool()
    return positions, ends, mask[None, None]


@ranks(2, 4)
@pytest.mark.parametrize("said", ["position_ids", "cu_seq_lens_q"])
@pytest.mark.parametrize("sp", OVER_CONTEXT)
@in_double
@pytest.mark.in_suite()
def test_packed_documents_are_those_of_the_block_diagonal_mask(rank: int, world: int, sp: str, said: str) -> None:
    model, reference, compare = split_over(1, world, sp, "mistral", sliding_window=4)  # shorter than documents
    ids = tokens(1, LENGTH)
    positions, ends, mask = packed()
    mask = mask.triu(-3)
    expected = reference(input_ids=ids, labels=ids, position_ids=positions, attention_mask=mask)
    plain = reference(input_ids=ids, labels=ids).loss
    assert abs(float((expected.loss - plain).detach())) > 1e-3  # documents matter
    expected.loss.backward()
    given = {"position_ids": positions} if said == "position_ids" else {"cu_seq_lens_q": ends}
    found = model(input_ids=ids, labels=ids, **given)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-12, atol=1e-12)
    found.loss.backward()
    compare()


@ranks(2)
@pytest.mark.parametrize("sp", MODES)
@in_double
def test_padding_on_the_left_is_masked_as_in_one_process(rank: int, world: int, sp: str) -> None:
    tp, cp = (1, world) if sp in OVER_CONTEXT else (world, 1)
    model, reference, compare = split_over(tp, cp, sp, "mistral", sliding_window=4)
    ids, mask = tokens(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.roll(1, -1) * mask == 0, -100)}
    expected, found = reference(**batch).loss, model(**batch).loss
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    expected.backward()
    found.backward()
    compare()


@ranks(4)
@pytest.mark.parametrize("num_items", [None, 7])
@pytest.mark.parametrize("sp", ["split_gather", "all_to_all", "ring_attn"])
@in_double
@pytest.mark.in_suite()
def test_the_loss_of_split_logits_is_that_of_whole_ones(rank: int, world: int, sp: str, num_items: int | None) -> None:
    tp, cp = (2, 2) if sp in OVER_CONTEXT else (4, 1)
    model, reference, compare = split_over(tp, cp, sp, options={"parallel_output": True})
    ids = tokens()
    labels = ids.masked_fill(ids % 3 == 0, -100)
    options = {} if num_items is None else {"num_items_in_batch": torch.tensor(num_items)}
    found, expected = (m(input_ids=ids, labels=labels, **options) for m in (model, reference))
    assert list(found.logits.shape) == [2, 12 // cp, -(-97 // tp)]  # never whole on a rank
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
    found.loss.backward()
    expected.loss.backward()
    compare()


@ranks(2)
@pytest.mark.parametrize("sp", ["split_gather", "all_to_all", "ring_attn"])
def test_recomputed_layers_have_the_same_gradients(rank: int, world: int, sp: str) -> None:
    tp, cp = (1, world) if sp in OVER_CONTEXT else (world, 1)
    model, reference, compare = split_over(tp, cp, sp, "gpt2", **NO_DROPOUT)
    checkpoint_each_layer(model.module)
    ids = tokens(1, LENGTH)
    positions, _, mask = packed()
    reference(input_ids=ids, labels=ids, position_ids=positions, attention_mask=mask).loss.backward()
    model(input_ids=ids, labels=ids, position_ids=positions).loss.backward()
    compare(1e-6)  # the loss is computed in fp32


# -- each reduction, dropped, doubled or rescaled, is seen ------------------------------------------------------------


def scaled(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """A function whose first result is wrong by a factor."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

    return wrong


def without_sum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    return mappings.split_first(tensor, group)


def without_others(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    return torch.cat([tensor] * group.size())


def at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A collective that is begun, and waited for to get its result."""
    return lambda *args: SimpleNamespace(wait=lambda: function(*args))


right_sum = mappings.start_reduce_scatter_first
# What is mutated -> (where it is, what takes its place).
MUTATIONS: dict[str, tuple[str, str, Any, str, Any]] = {
    "sum of the rows' outputs dropped": (
        "split_gather", "mappings", mappings, "start_reduce_scatter_first", at_once(without_sum),
    ),
    "join dropped": ("split_gather", "mappings", mappings, "start_gather_first", at_once(without_others)),
    "join of the context dropped": ("ring_attn", "join", cut_sequence, "gather_first", without_others),
    "sums doubled": (
        "split_gather", "mappings", mappings, "start_reduce_scatter_first",
        at_once(scaled(lambda *args: right_sum(*args).wait(), 2.0)),
    ),
    **{
        f"gradient of {name} times {factor}": (
            sp, "backward", function, "backward", staticmethod(scaled(function.backward, factor)),
        )
        for module, name, sp in (
            (mappings, "_GatherFirst", "split_gather"),
            (mappings, "_ReduceScatterFirst", "split_gather"),
            (mappings, "_ScatterFirst", "split_gather"),
            (mappings, "_GatherFirstReplicated", "split_gather"),
            (all_to_all, "_Exchange", "all_to_all"),
        )
        for function in [getattr(module, name)]
        for factor in (0.5, 2.0)
    },
    **{
        f"gradient of {name} under {sp} times {factor}": (
            sp, "gradient", CutSequence, name, grad_times(factor, getattr(CutSequence, name)),
        )
        for name in ("cut", "whole")
        for sp in OVER_CONTEXT
        for factor in (0.5, 2.0)
    },
}  # fmt: skip


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@ranks(2, timeout_s=120.0)
@pytest.mark.parametrize("halved", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_every_reduction_that_is_dropped_or_rescaled_is_seen(rank: int, world: int, halved: bool) -> None:
    for what, (sp, _, owner, name, wrong) in MUTATIONS.items():
        if what.endswith("times 0.5") != halved:
            continue
        with replaced(owner, name, wrong):
            verdict = verdict_on("llama", 1 if sp in OVER_CONTEXT else 2, sp=sp, num_hidden_layers=2)
        assert verdict.answer in ("wrong", "refused"), (what, verdict)
        parallel_state.destroy_model_parallel()


@ranks(2)
@in_double
def test_a_sum_of_the_loss_or_of_a_norm_that_is_dropped_or_rescaled_is_seen(rank: int, world: int) -> None:
    ids = tokens()
    for owner, name, wrong in (
        (CutSequence, "total", grad_times(0.5, CutSequence.total)),
        (CutSequence, "total", grad_times(2.0, CutSequence.total)),
        (cut_sequence, "all_reduce", lambda value, group: value.clone()),
        (cut_sequence, "all_reduce", scaled(cut_sequence.all_reduce, 2.0)),
    ):
        model, reference, compare = split_over(1, world, "ring_attn", options={"parallel_output": True})
        expected = reference(input_ids=ids, labels=ids).loss
        expected.backward()
        with replaced(owner, name, wrong):
            found = model(input_ids=ids, labels=ids).loss
            found.backward()
        assert (name == "total") == bool(torch.isclose(found, expected, rtol=1e-12))
        if name == "total":
            with pytest.raises(AssertionError, match="embed_tokens"):
                compare()
        parallel_state.destroy_model_parallel()
    model, reference, compare = split_over(world, 1, "split_gather")
    model.module.model.layers[0].input_layernorm.weight.register_hook(lambda grad: grad * 2.0)
    for each in (model, reference):
        each(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(AssertionError, match=r"layers\.0\.input_layernorm"):
        compare()


@ranks(2)
def test_a_norm_whose_gradient_is_not_summed_is_named_in_the_first_step(rank: int, world: int) -> None:
    model = small("llama")
    parallel_state.initialize_model_parallel(world)
    report = split_model(model, sequence_parallel="split_gather")
    name = "model.layers.1.input_layernorm.weight"
    assert name in report.partial and "model.norm.weight" not in report.partial
    del model.get_parameter(name).gradient_declaration
    wrapped = DistributedDataParallel(None, DistributedDataParallelConfig(), model)
    wrapped(input_ids=tokens(), labels=tokens()).loss.backward()
    with pytest.raises(ReplicaDriftError, match=r"layers\.1\.input_layernorm"):
        finalize_model_grads([wrapped])


# -- what is refused --------------------------------------------------------------------------------------------------


def test_the_plan_says_where_the_sequence_is_cut() -> None:
    from core.hugging_face import read_plan

    plan = over_sequence(small("llama"), read_plan(small("llama")), "model.layers")
    table = plan.table(2)
    assert "2 x model.layers.*.self_attn (sequence): input this rank's part of the sequence; all parts" in table
    assert "o_proj (rowwise): input unchanged; output summed over tp, and this rank's part of the sequence" in table
    assert "1 x model.layers.* (sequence): input whole; this rank's part of the sequence is taken" in table


@ranks(2)
def test_what_cannot_be_cut_is_refused_with_a_sentence(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    with pytest.raises(PlanError, match=r"needs several ranks in group 'tp'.* tensor_model_parallel_size"):
        split_model(small("llama"), sequence_parallel="split_gather")
    with pytest.raises(PlanError, match="expected one of split_gather, ring, all_to_all, ring_attn"):
        split_model(small("llama"), sequence_parallel="sideways")
    with pytest.raises(PlanError, match="'ring_attn' is causal"):
        split_model(small("gemma3_text", use_bidirectional_attention=True), sequence_parallel="ring_attn")
    with pytest.raises(PlanError, match="over 2 ranks, but a rank's 3 heads"):
        split_model(
            small("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48), sequence_parallel="all_to_all"
        )
    with pytest.raises(PlanError, match="its layers use other tokens elsewhere than in attention"):
        split_model(small("lfm2", layer_types=["conv", "full_attention"]), sequence_parallel="all_to_all")
    model = small("mistral", sliding_window=8)
    split_model(model, sequence_parallel="ring_attn")
    with pytest.raises(ValueError, match="6 tokens is not divisible by 4, .* pad it to 8, or cut it to 4"):
        model(input_ids=tokens(1, 6))
    for options, message in (
        ({"use_cache": True}, "a cache of keys and values would hold a part of the sequence"),
        ({"output_router_logits": True}, "under 'ring_attn': the routers see a part of the sequence"),
        ({"output_hidden_states": True}, "output_hidden_states under .* leave it out"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "runs from 0 to 5 and the batch is .1, 8."),
        ({"attention_mask": torch.ones(1, 1, 8, 8).tril()}, "does not read a mask of shape"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 5, 8]), "position_ids": torch.arange(8)[None]},
            "position_ids and cu_seq_lens_q name other documents",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model(input_ids=tokens(1, 8), **options)


@ranks(2)
@pytest.mark.parametrize("family", ["doge", "bloom", "t5"])
def test_a_family_that_has_no_form_for_it_is_refused(rank: int, world: int, family: str) -> None:
    verdict = verdict_on(family, 2)
    assert verdict.answer == "refused", verdict


@ranks(2)
@pytest.mark.parametrize("sp", OVER_CONTEXT)
@pytest.mark.in_suite(1)
def test_a_layer_that_counts_positions_itself_is_refused_though_the_example_is_short(
    rank: int, world: int, sp: str
) -> None:
    """llama4 takes the logarithm of a position's 8,192nds, which is that of 0 for all tokens of the example."""
    verdict = verdict_on("llama4_text", sp=sp, floor_scale=8192)
    assert verdict.answer == "refused" and "counts the positions of its tokens itself (torch.arange in" in verdict.why


@pytest.mark.nightly
@ranks(2, timeout_s=3600.0)
@pytest.mark.parametrize("sp", ["split_gather", "all_to_all", "ring_attn"])
def test_no_family_is_silently_wrong(rank: int, world: int, sp: str) -> None:
    tp = 1 if sp in OVER_CONTEXT else 2
    for name, kind in {**families(), **families_with_policy()}.items():
        verdict = check_on_rank(name, kind, tp, sp=sp)
        assert verdict.answer != "wrong", verdict
