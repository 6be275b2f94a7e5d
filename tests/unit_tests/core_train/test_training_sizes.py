"""Sizes that do not fit are refused before any group exists, with the arithmetic and the nearest that would."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("tyro")

from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.number_ranges import nearest_divisors, nearest_multiples
from core_plan.job.config import JobConfig, ModelOptions
from core_plan.job.config_file import ConfigError, load_config
from core_plan.job.model_config import transformer_config
from core_plan.job.plan import plan_job
from core_plan.job.sizes import (
    check_memory,
    check_vocabulary,
    count_parameters,
)
from core_train.main import main

# (what it shows, flags, what the message must say, flags that follow its advice)
REFUSED = [
    (
        "ranks over tp, cp and pp",
        "--tp 3",
        "4 ranks are not divisible by tp 3 x cp 1 x pp 1 = 3: 4 / 3 = 1.33333; start 3 or 6 ranks",
        "--tp 2",
    ),
    (
        "ranks over experts",
        "--tp 1 --etp 2 --ep 4 --model.num-experts 4",
        "4 ranks are not divisible by etp 2 x ep 4 x pp 1, which one copy of all experts needs, = 8: 4 / 8 = 0.5; "
        "start 8 ranks",
        "--tp 1 --etp 1 --ep 4 --model.num-experts 4",
    ),
    (
        "a given dp",
        "--tp 1 --dp 3",
        "dp is 3, and 4 ranks / (tp 1 x cp 1 x pp 1) leave 4; start 3 ranks",
        "--tp 1 --dp 4",
    ),
    ("an order", "--parallel.order dp-cp --tp 2", "--parallel.order dp-cp: The size of (tp) is (2)", ""),
    (
        "layers over stages",
        "--tp 1 --pp 4 --model.num-layers 6",
        "6 layers do not divide over 4 stages (pp 4 x 1 chunks): 6 / 4 = 1.5. Use 4 or 8 layers, or pp 3 or 6",
        "--tp 1 --pp 4 --model.num-layers 8",
    ),
    (
        "layers over stages and chunks",
        "--pp 2 --vpp 3",
        "4 layers do not divide over 6 stages (pp 2 x 3 chunks): 4 / 6 = 0.666667. Use 6 layers",
        "--pp 2 --vpp 3 --model.num-layers 6",
    ),
    (
        "listed layers",
        "--pp 2 --parallel.layers-per-stage 1 2",
        "layers_per_stage [1, 2] places 3 layers, and the model has 4; for example [2, 2]",
        "--pp 2 --parallel.layers-per-stage 2 2",
    ),
    (
        "several stages a rank under a schedule of one",
        "--pp 2 --vpp 2 --schedule 1F1B",
        "schedule 1F1B runs one stage a rank, and the layout has 2",
        "--pp 2 --vpp 2 --schedule Interleaved1F1B",
    ),
    ("several stages without a pipeline", "--vpp 2", "--parallel.pp is 1, and --parallel.vpp 2", "--pp 2 --vpp 2"),
    ("a schedule", "--pp 2 --schedule 2F2B", "schedule is '2F2B'; expected one of GPipe, 1F1B", "--pp 2"),
    (
        "fewer microbatches than stages",
        "--tp 1 --pp 4 --run.global-batch-size 3",
        "3 microbatches do not fit schedule 1F1B with 4 stages on 4 ranks: at least one microbatch a stage is needed. "
        "Nearest: 4 (microbatches = --run.global-batch-size 3 / (dp 1 x micro batch 1) = 3)",
        "--tp 1 --pp 4 --run.global-batch-size 4",
    ),
    (
        "batch over dp",
        "--run.global-batch-size 33",
        "33 is not divisible by dp (world 4 / (tp 2 x cp 1 x pp 1) =) 2: 33 / 2 = 16.5; use 32 or 34",
        "--run.global-batch-size 34",
    ),
    (
        "share over microbatches",
        "--run.micro-batch-size 3",
        "a rank's share of the global batch, 16 / dp 2 = 8 is not divisible by --run.micro-batch-size 3: 8 / 3 = "
        "2.66667; use 6 or 9, or --run.micro-batch-size 2 or 4",
        "--run.micro-batch-size 4",
    ),
    ("a count", "--run.micro-batch-size 0", "--run.micro-batch-size must be an integer of at least 1", ""),
    ("a size", "--cp 0", "--parallel.cp must be an integer of at least 1", ""),
    (
        "vocabulary smaller than the tokenizer's",
        "--model.vocab-size 200",
        "--model.vocab-size 200 is smaller than the tokenizer's vocabulary of 256; use 256 or more",
        "--model.vocab-size 256",
    ),
    (
        "sequence over tp",
        "--model.sequence-length 33",
        "sequence length 33 is not divisible by context_parallel_size * tensor_model_parallel_size (1 * 2 = 2) under "
        "sequence_parallel: 33 / 2 = 16.5; use 32 or 34",
        "--model.sequence-length 34",
    ),
    (
        "sequence over 2 * cp",
        "--tp 1 --cp 2 --model.sequence-length 254",
        "sequence length 254 is not divisible by 2 * context_parallel_size (2 * 2 = 4): 254 / 4 = 63.5; use 252 or 256",
        "--tp 1 --cp 2 --model.sequence-length 252",
    ),
    (
        "heads over tp",
        "--tp 4 --model.num-attention-heads 2",
        "--model.num-attention-heads 2 is not divisible by tp 4: 2 / 4 = 0.5; use 4, or tp 2",
        "--tp 4 --model.num-attention-heads 4",
    ),
    (
        "hidden size over heads",
        "--model.num-attention-heads 6",
        "--model.hidden-size 128 is not divisible by --model.num-attention-heads 6: 128 / 6 = 21.3333; use 126 or 132, "
        "or --model.num-attention-heads 4 or 8",
        "--model.num-attention-heads 4",
    ),
    (
        "key/value heads over tp",
        "--model.num-query-groups 1",
        "the number of query groups 1 is not divisible by tp 2: 1 / 2 = 0.5; use 2, or tp 1",
        "--model.num-query-groups 2",
    ),
    (
        "heads over cp for a2a",
        "--tp 1 --cp 4 --parallel.cp-comm-type a2a --model.num-query-groups 2",
        "--parallel.cp-comm-type a2a:",
        "--tp 1 --cp 4 --parallel.cp-comm-type p2p --model.num-query-groups 2",
    ),
    (
        "feed-forward width over tp",
        "--model.ffn-hidden-size 333",
        "the feed-forward width 333 is not divisible by tp 2: 333 / 2 = 166.5; use 332 or 334, or tp 1 or 3",
        "--model.ffn-hidden-size 334",
    ),
    (
        "odd rotary heads",
        "--tp 1 --model.hidden-size 12",
        "--model.hidden-size 12 / --model.num-attention-heads 4 = 3; use --model.hidden-size 8 or 16",
        "--tp 1 --model.hidden-size 16",
    ),
    ("sequence parallelism over one", "--tp 1 --parallel.sequence-parallel True", "and tp is 1; use False", "--tp 1"),
    (
        "top-k over experts",
        "--model.num-experts 4 --model.moe-router-topk 5",
        "--model.moe-router-topk 5 and --model.num-experts 4: a token goes to 5 different experts of 4; use "
        "--model.moe-router-topk 1 to 4, or --model.num-experts 5 or more",
        "--model.num-experts 5 --model.moe-router-topk 5 --tp 1",
    ),
    (
        "experts over ep",
        "--ep 2 --model.num-experts 5",
        "--model.num-experts 5 is not divisible by ep 2: 5 / 2 = 2.5; use 4 or 6, or ep 1 or 5",
        "--ep 2 --model.num-experts 6",
    ),
    ("ep without experts", "--ep 2", "--parallel.ep is 2 and the model has no experts", "--ep 2 --model.num-experts 2"),
    (
        "an expert's width over etp",
        "--model.num-experts 4 --model.moe-ffn-hidden-size 33",
        "an expert's hidden size (--model.moe-ffn-hidden-size) 33 is not divisible by etp 2: 33 / 2 = 16.5",
        "--model.num-experts 4 --model.moe-ffn-hidden-size 34",
    ),
    (
        "a shared expert's width over tp",
        "--model.num-experts 4 --model.moe-shared-expert-intermediate-size 33",
        "--model.moe-shared-expert-intermediate-size 33 is not divisible by tp 2",
        "--model.num-experts 4 --model.moe-shared-expert-intermediate-size 32",
    ),
    (
        "optimizer instances over dp",
        "--ddp.num-distributed-optimizer-instances 4",
        "dp x cp 2 is not divisible by --ddp.num-distributed-optimizer-instances 4: 2 / 4 = 0.5",
        "--ddp.num-distributed-optimizer-instances 2",
    ),
    (
        "matrices that are cut anywhere",
        "--optimizer.name muon",
        "--optimizer.name muon updates full matrices",
        "--optimizer.name muon --ddp.no-use-distributed-optimizer",
    ),
    ("a fraction", "--data.validation-fraction 1.5", "must be a number above 0 and below 1, got 1.5", ""),
    (
        "a router whose gradient would be zero",
        "--model.num-experts 4 --model.moe-router-topk 1",
        "Set moe_router_pre_softmax=True",
        "--model.num-experts 4 --model.moe-router-topk 1 --model.moe-router-pre-softmax",
    ),
]


@pytest.mark.parametrize(("flags", "message"), [pytest.param(*case[1:3], id=case[0]) for case in REFUSED])
def test_what_does_not_fit_is_refused_with_the_arithmetic(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_job(load_config(flags.split()), 4)
    assert message in str(error.value)


@pytest.mark.parametrize("flags", [pytest.param(case[3], id=case[0]) for case in REFUSED if case[3]])
def test_the_advice_of_a_refusal_is_good(flags: str) -> None:
    assert plan_job(load_config(flags.split()), 4).world_size == 4


def test_a_vocabulary_that_leaves_a_rank_with_padding_alone_is_refused() -> None:
    """5 tokens over 4 ranks are 8 rows: 0 1 | 2 3 | 4 - | - -."""
    with pytest.raises(
        ConfigError, match=r"5 over tp 4 is padded to 8 rows, 2 a rank, .* 6 to 7, .*use tp 3, or .* 7$"
    ):
        check_vocabulary(5, ModelOptions(), tp=4)
    for tokens, tp in ((5, 3), (7, 4), (257, 2), (4, 4)):
        assert check_vocabulary(tokens, ModelOptions(), tp) == tokens
    assert check_vocabulary(5, ModelOptions(vocab_size=7), tp=4) == 7


@pytest.mark.parametrize(
    ("function", "size", "other", "nearest"),
    [
        (nearest_multiples, 7, 3, [6, 9]),
        (nearest_multiples, 2, 3, [3]),
        (nearest_divisors, 12, 5, [4, 6]),
        (nearest_divisors, 12, 13, [12]),
        (nearest_divisors, 7, 1, [7]),
    ],
)
def test_nearest_sizes(function: Callable[[int, int], list[int]], size: int, other: int, nearest: list[int]) -> None:
    assert function(size, other) == nearest


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_every_rank_refuses_before_it_looks_for_the_others(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"RANK": str(rank), "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["--ep", "3", "--model.num-experts", "4"]) == 2
    message = capsys.readouterr().err
    assert ("error: 8 ranks are not divisible by etp 2 x ep 3" in message) == (rank == 0), "rank 0 speaks for all"


@pytest.mark.parametrize(
    ("flags", "microbatches"),
    [
        ("--tp 1 --pp 4", 8),
        ("--tp 1 --pp 4 --run.global-batch-size 4", 4),  # two a stage there cannot be
        ("--tp 2 --pp 2 --vpp 2", 4),
        ("--tp 2 --pp 2 --run.global-batch-size 9", 9),  # 9, 3 and 1 divide it
        ("--tp 1 --pp 2", 4),
        ("--tp 2", 1),
    ],
)
def test_a_pipeline_has_several_microbatches_a_stage_unless_they_are_given(flags: str, microbatches: int) -> None:
    assert plan_job(load_config(flags.split()), 4).num_microbatches == microbatches


def test_the_default_configuration_fits_its_ranks() -> None:
    plan = plan_job(JobConfig(), JobConfig().run.ranks)
    assert (plan.dp, plan.num_microbatches) == (2, 1)


def test_a_model_that_no_machine_holds_is_refused_by_its_sizes() -> None:
    flags = ["--model.num-layers", "100", "--model.hidden-size", "16384", "--model.num-attention-heads", "128"]
    refused = r"about 322,122,547,200 parameters; .* 4 ranks on this machine would hold 4,800 GiB and may use 16 GiB"
    with pytest.raises(ConfigError, match=refused):
        check_memory(load_config(flags), 4, 16 << 30)  # fp32, with gradients, over tp 2
    check_memory(load_config([*flags, "--tp", "16", "--pp", "20"]), 1, 16 << 30)
    check_memory(load_config([]), 4, 1 << 30)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--model.activation", "swiglu", "--model.num-query-groups", "2"],
        ["--model.num-experts", "4", "--model.moe-layer-freq", "2", "--model.num-layers", "3"],
    ],
)
def test_parameters_are_counted_as_the_model_has_them(flags: list[str]) -> None:
    config = load_config(["--tp", "1", "--model.hidden-size", "64", "--model.vocab-size", "256", *flags])
    model = GPTModel(transformer_config(config, 256), ProcessGroups())
    matrices = sum(
        param.numel() for name, param in model.named_parameters() if param.dim() > 1 and "router" not in name
    )
    assert count_parameters(config.model) == matrices
