"""Times that one can work out by hand: a pipeline's bubble, a roofline, what travels."""

import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from core.groups.rank_grid import DATA_KINDS, GRID_KINDS
from core.pipeline_parallel import PipelineLayout
from core.pipeline_parallel.schedules import actions_in, build_schedule, find_schedule
from core_plan import Link, plan_run, read_device
from core_plan.communication import hops_seconds, link_of, rate_between
from core_plan.gpt_source import run_of_job
from core_plan.job.config_file import load_config
from core_plan.live_memory import BACKWARD, Work
from core_plan.run_memory import parts_of_stages
from core_plan.schedule_order import Action, StageStandIn, actions_of_ranks
from core_plan.step_time import work_seconds
from core_plan.time_line import pipeline_spans, shared_spans

H100 = read_device("h100")
TINY = "--model.num-layers 4 --model.hidden-size 64 --model.vocab-size 256 --model.sequence-length 64"


def plan(flags: str, ranks: int, device: str = "h100"):  # noqa: ANN201
    return plan_run(load_config([*TINY.split(), *flags.split()]), ranks, device)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8)])
def test_the_bubble_of_equal_stages_is_that_of_the_paper(schedule: str, stages: int, microbatches: int) -> None:
    """(stages - 1) * (forward + backward), whatever the number of microbatches (arXiv:2104.04473)."""
    orders = actions_of_ranks(schedule, PipelineLayout.even(stages, stages), microbatches)
    seconds = {(kind, stage): {"F": 1.0, "B": 2.0}[kind] for kind in "FB" for stage in range(stages)}
    spans = pipeline_spans(orders, seconds, 0.0, stages)
    assert max(span.end_s for span in spans) == 3.0 * (microbatches + stages - 1)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_orders_of_torch_run_to_their_end(schedule: str) -> None:
    layout = PipelineLayout.even(8, 2, 2, "v" if schedule in ("ZBVZeroBubble", "DualPipeV") else "loop")
    orders = actions_of_ranks(schedule, layout, 8)
    forwards = Counter(action.stage for order in orders for action in order if action.kind == "F")
    assert forwards == dict.fromkeys(range(4), 8)
    spans = pipeline_spans(orders, {(kind, stage): 1.0 for kind in "FBIW" for stage in range(4)}, 0.0, 4)
    assert len(spans) == sum(map(len, orders))


def test_the_bubble_is_the_step_without_the_work_of_the_busiest_rank() -> None:
    """The first of two stages has one layer, the other has three and the logits; it waits, and that is no bubble.

    By hand: the second stage works without a pause between its first forward and its last backward, so the bubble is
    one forward and one backward of the first stage, and two sends.
    """
    found = plan("--tp 1 --pp 2 --run.global-batch-size 8 --parallel.layers-per-stage 1 3", 2)
    spans, time = found.time.spans, found.time
    works = [sum(s.end_s - s.start_s for s in spans if s.place == place) for place in range(2)]
    first = {s.action.kind: s.end_s - s.start_s for s in spans if s.place == 0}
    hop = next(s.start_s for s in spans if s.place == 1) - next(s.end_s for s in spans if s.place == 0)
    assert time.slower_ranks == pytest.approx(works[1] - works[0])
    assert time.bubble == pytest.approx(first["F"] + first["B"] + 2 * hop)
    assert time.slower_ranks > 2 * time.bubble > 0


def test_a_rank_with_several_stages_waits_less() -> None:
    flags = "--tp 1 --pp 2 --run.global-batch-size 8 "
    plain, several = (plan(flags + more, 2) for more in ("", "--parallel.vpp 2 --parallel.schedule Interleaved1F1B"))
    assert [memory.stages for memory in several.memories] == [(0, 2), (1, 3)]
    assert 0 < several.time.bubble < plain.time.bubble


def backward_of_layer(more: str) -> tuple[Counter[Work], list[int]]:
    """Work of a layer's backward in bf16, and elements of its parameters."""
    run = run_of_job(load_config([*TINY.split(), "--tp", "1", "--model.dtype", "bfloat16", *more.split()]), 1)
    layer = parts_of_stages(run)[0][1]
    return layer.work[BACKWARD], [numel for numel, _ in layer.params]


def bytes_of(work: Counter[Work]) -> int:
    return sum(count * one.nbytes for one, count in work.items())


def test_adding_gradients_up_takes_its_bytes_in_each_microbatch() -> None:
    """A bf16 gradient is read, and the sum read and written: 6 bytes. In fp32 a cast comes first: 6 bytes and 12."""
    (in_bf16, numels), (in_fp32, _) = backward_of_layer(""), backward_of_layer("--ddp.grad-reduce-in-fp32")
    assert bytes_of(in_fp32) - bytes_of(in_bf16) == (6 + 12 - 6) * sum(numels) > 0


@pytest.mark.parametrize(("strategy", "adds"), [("optim", True), ("optim_grads", False)])
def test_a_product_that_adds_to_the_buffer_makes_no_gradient_in_16_bits(strategy: str, adds: bool) -> None:
    """It reads and writes fp32, 8 bytes instead of 2 + 6 + 12, at the speed of bf16. Without memory of whole gradients
    there is nothing to add to."""
    more = f"--ddp.grad-reduce-in-fp32 --ddp.data-parallel-sharding-strategy {strategy}"
    (apart, numels), (fused, _) = (backward_of_layer(more + f) for f in ("", " --model.gradient-accumulation-fusion"))
    matrices = sum(numel for numel in numels if numel > 1024)
    assert bytes_of(apart) - bytes_of(fused) == (2 + 6 + 12 - 8) * matrices * adds
    products = [work for work in fused if work.name == "aten.addmm"]
    assert bool(products) == adds and {work.dtype for work in products} <= {torch.bfloat16}
    assert sum(one.flops * n for one, n in apart.items()) == sum(one.flops * n for one, n in fused.items())


def test_the_product_that_adds_is_planned_by_a_torch_that_has_it_on_gpus_alone() -> None:
    """torch 2.11 says nothing of its result where there are no values."""

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError("no kernel for the meta device")

    fused = "--ddp.grad-reduce-in-fp32 --model.gradient-accumulation-fusion"
    expected = backward_of_layer(fused)
    library = torch.library.Library("aten", "IMPL", "Meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has a kernel of its own there
        library.impl("addmm.dtype_out", refuse)
    try:
        assert backward_of_layer(fused) == expected
    finally:
        library._destroy()


def test_positions_that_wait_leave_their_cores_to_others() -> None:
    """Two stages, one microbatch and one core: no one works at once, so sharing costs nothing."""
    orders = actions_of_ranks("GPipe", PipelineLayout.even(2, 2), 1)
    seconds = {(kind, stage): {"F": 1.0, "B": 2.0}[kind] for kind in "FB" for stage in range(2)}
    spans = shared_spans(orders, seconds, 0.5, 2, float)
    assert max(span.end_s for span in spans) == pytest.approx(6.0 + 2 * 0.5)
    busy = shared_spans(actions_of_ranks("GPipe", PipelineLayout.even(2, 2), 8), seconds, 0.0, 2, float)
    assert max(span.end_s for span in busy) == pytest.approx(2 * 8 * 3.0)  # one core does it all
    cores = shared_spans(actions_of_ranks("1F1B", PipelineLayout.even(2, 2), 4), seconds, 0.0, 2, lambda _: 1.0)
    assert max(span.end_s for span in cores) == pytest.approx(3.0 * (4 + 1))


def test_1f1b_keeps_as_many_microbatches_as_stages_follow() -> None:
    orders = actions_of_ranks("1F1B", PipelineLayout.even(3, 3), 4)
    assert orders[2][:3] == (Action("F", 2, 0), Action("B", 2, 0), Action("F", 2, 1))
    assert [action.kind for action in orders[0]][:4] == ["F", "F", "F", "B"]


def test_an_operator_takes_as_long_as_its_arithmetic_or_its_memory() -> None:
    device = replace(
        read_device("h100"), matmul_flops={"float32": 100.0}, memory_bandwidth=10.0, operator_overhead_s=0.5
    )
    counted = {Work(1000, 10, torch.float32): 2, Work(0, 100, torch.float32): 1, Work(0, 1, torch.float32): 3}
    assert work_seconds(counted, device) == 2 * 10.0 + 10.0 + 3 * 0.5


def test_attention_runs_at_its_own_speed() -> None:
    device = replace(read_device("h100"), matmul_flops={"float32": 100.0}, attention_flops={"bfloat16": 50.0})
    kernel = "aten._scaled_dot_product_flash_attention_for_cpu"
    works = [Work(1000, 10, dtype, name) for dtype in (torch.bfloat16, torch.float32) for name in (kernel, "aten.mm")]
    assert [work_seconds({work: 1}, device) for work in works] == [20.0, 10.0, 10.0, 10.0]


def test_a_ring_crosses_between_machines_on_the_links_of_all_its_ranks_there() -> None:
    device = replace(H100, inside=Link(0.0, 300.0), between=Link(0.0, 40.0))
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        assert rate_between(collective, 16, 8, device) == 80.0
        assert rate_between(collective, 64, 8, device) == 300.0  # 8 links of 40, and no more than inside
        assert rate_between(collective, 8, 8, device) == 40.0
    assert rate_between("all_to_all", 16, 2, device) == 40.0 * 15 / 8  # 8 of 15 peers are on the other machine
    assert rate_between("send", 16, 2, device) == 40.0
    flags = "--ddp.data-parallel-sharding-strategy optim_grads_params --ddp.no-overlap-param-gather"
    (gathers,) = [
        row
        for row in plan(f"{flags} --tp 1 --run.global-batch-size 64", 64).time.communication
        if row.collective == "all_gather"
    ]
    waits = hops_seconds("all_gather", 64, 8, H100.inside, H100.between) + H100.between.latency_s
    assert gathers.seconds == pytest.approx(gathers.calls * waits + gathers.nbytes / (8 * 40e9))


def test_latency_grows_with_the_ranks_of_a_ring_and_the_logarithm_of_a_tree() -> None:
    """2,048 ranks on 256 machines: a ring has 1,792 hops inside machines and 255 between them."""
    inside, between = Link(0.0, 1.0, 3.0), Link(0.0, 1.0, 14.0)
    ring = 1792 * 3.0 + 255 * 14.0
    assert hops_seconds("all_gather", 2048, 256, inside, between) == ring
    assert hops_seconds("reduce_scatter", 8, 1, inside, between) == 7 * 3.0
    assert hops_seconds("all_reduce", 2048, 256, inside, between) == 2 * (7 * 3.0 + 8 * 14.0)  # the tree
    assert hops_seconds("all_reduce", 2, 1, inside, between) == 2 * 3.0
    assert hops_seconds("all_to_all", 8, 1, inside, between) == 3.0
    assert hops_seconds("send", 8, 2, inside, between) == 14.0
    flags = "--tp 1 --ddp.data-parallel-sharding-strategy optim_grads_params --ddp.no-overlap-param-gather"
    waits = [
        sum(
            row.seconds / row.calls
            for row in plan(f"{flags} --run.global-batch-size {ranks}", ranks).time.communication
        )
        for ranks in (64, 1024)
    ]
    assert waits[1] > 10 * waits[0]


def test_a_hidden_reduction_slows_down_what_hides_it() -> None:
    flags = load_config([*TINY.split(), *["--tp", "1", "--run.global-batch-size", "8", "--ddp.bucket-size", "20000"]])
    device = replace(read_device("h100"), operator_overhead_s=1e-3)  # a backward that hides nearly all
    free, slowed = (plan_run(flags, 4, replace(device, overlap_slowdown=share)).time for share in (0.0, 0.25))
    hidden = sum(row.seconds for row in free.communication) - free.gradients
    assert hidden > 0 and slowed.gradients == pytest.approx(free.gradients + 0.25 * hidden)


def test_gradients_and_parameters_travel_once() -> None:
    """A sharded optimizer over n ranks sends (n - 1) / n of the gradients, and as much of the parameters."""
    planned = plan("--tp 1 --run.global-batch-size 8", 4)
    (memory,) = planned.memories
    sent = {row.collective: row.nbytes for row in planned.time.communication if row.group == "dp_cp"}
    numel = sum(layout.numel for layout in memory.plans[0].layout.buffers)
    assert sent == {"reduce_scatter": numel * 4 * 3 // 4, "all_gather": numel * 4 * 3 // 4}


def test_buckets_that_stay_whole_until_backward_are_gathered_half_as_often() -> None:
    """Two microbatches on 16 GPUs: a bucket is gathered in two forwards and two backwards."""
    flags = "--tp 1 --run.global-batch-size 32 --run.micro-batch-size 1 "
    flags += "--ddp.data-parallel-sharding-strategy optim_grads_params --ddp.no-overlap-param-gather "

    def gathers(how: str) -> dict[str, tuple[str, int, int]]:
        communication = plan(f"{flags} --ddp.{how}reshard-after-forward", 16).time.communication
        return {row.group: (row.link, row.calls, row.nbytes) for row in communication if row.collective == "all_gather"}

    _, calls, nbytes = gathers("")["dp_cp"]
    assert gathers("no-") == {"dp_cp": ("between", calls // 2, nbytes // 2)}


def test_model_flops_do_not_depend_on_how_a_model_is_split() -> None:
    """MFU x peak x ranks x seconds is the model's work; recomputation is not the model's."""
    flags = "--run.global-batch-size 8 --model.num-attention-heads 4 "
    splits = ["--tp 1", "--tp 2", "--tp 1 --pp 2", "--tp 1 --cp 2", "--tp 1 --model.recompute-granularity full"]
    work = [planned.time.mfu * planned.time.seconds for planned in (plan(flags + split, 4) for split in splits)]
    assert work == pytest.approx([work[0]] * len(work), rel=0.02)


def test_ranks_of_another_machine_are_reached_over_the_slower_link() -> None:
    near, far = (plan("--tp 1 --run.global-batch-size 16", ranks).time for ranks in (8, 16))
    assert {row.link for row in near.communication} == {"inside"}
    assert {row.link for row in far.communication} == {"between"}


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (24, "--tp 6"),
        (24, "--tp 3 --pp 4"),
        (16, "--tp 2 --cp 2 --pp 2"),
        (36, "--tp 3 --pp 2 --parallel.order tp-pp-dp"),
        (32, "--tp 2 --pp 2 --ddp.num-distributed-optimizer-instances 2"),
        (24, "--tp 1 --ddp.num-distributed-optimizer-instances 4"),
        (24, "--tp 1 --ep 3 --model.num-experts 6"),
    ],
)
def test_a_kind_of_group_is_as_slow_as_the_slowest_of_the_job(ranks: int, flags: str) -> None:
    """Against the groups of all ranks one by one. Of 24 ranks by six, the first are on one machine and others not."""
    more = "--model.num-attention-heads 6 --model.hidden-size 96 --model.num-layers 12 --model.sequence-length 96"
    batch = f"--run.global-batch-size {ranks}"
    run = run_of_job(load_config([*TINY.split(), *more.split(), *batch.split(), *flags.split()]), ranks)
    device = read_device("h100")
    instances = [f"{side}_{kind}" for side in ("intra", "inter") for kind in DATA_KINDS]
    links = {}
    for name in (*GRID_KINDS, "embd", "pos_embd", *instances):
        members = [groups for groups in map(run.groups_of, range(ranks)) if groups.size(name) > 1]
        spread = any(len({rank // 8 for rank in groups.ranks(name)}) > 1 for groups in members)
        links[name] = "between" if spread else "inside"
        assert {link_of(groups, name, device) for groups in members} <= {links[name]}, name
    if flags in ("--tp 6", "--tp 3 --pp 4"):
        assert links["tp"] == "between" and links["pp"] == ("inside" if "pp" not in flags else "between")


def test_the_time_of_a_step_is_that_of_groups_on_two_machines() -> None:
    flags = "--model.num-attention-heads 6 --model.hidden-size 96 --model.sequence-length 96 --run.global-batch-size 24"
    (link,) = {row.link for row in plan(f"--tp 6 {flags}", 24).time.communication if row.group == "tp"}
    (within,) = {row.link for row in plan(f"--tp 2 {flags}", 24).time.communication if row.group == "tp"}
    assert (link, within) == ("between", "inside")


@pytest.mark.parametrize(("pp", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (2, 3, 3), (4, 3, 2), (3, 2, 12)])
def test_an_interleaved_order_is_torchs(pp: int, chunks: int, microbatches: int) -> None:
    layout = PipelineLayout.even(pp * chunks, pp, chunks)
    stages: list[Any] = [StageStandIn(stage, layout.num_stages, pp, 0) for stage in layout.stages_of(0)]
    table = build_schedule(find_schedule("Interleaved1F1B"), stages, microbatches).pipeline_order
    orders = actions_of_ranks("Interleaved1F1B", layout, microbatches)
    assert [list(order) for order in orders] == [actions_in(table[rank]) for rank in range(pp)]
