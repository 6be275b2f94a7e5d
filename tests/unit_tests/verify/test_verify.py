"""The oracle says right where all is right, and names what is wrong where a reduction is spoilt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import parallel_state
from core.distributed import DistributedDataParallelConfig
from core.distributed.buffer.bucket import Bucket
from core.distributed.guard.finite import ReplicaDriftError
from core.model_parallel_config import ModelParallelConfig
from core.models import GPTModel
from core.verify import GradientReport, WrongGradientError, check_gradients
from core.verify import check as verify_check
from tests.layouts.gpt import check_gpt
from tests.layouts.layouts import Layout
from tests.layouts.tables import DENSE, HOUSES, QUICK, SINGLE, pairwise
from tests.unit_tests.rank_codes import mutate_reductions, mutate_scale, somewhere
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import Net

DP4 = Layout(dp=4, overlap=True, bucket_size=700)
DP4_OPTIM = Layout(dp=4, strategy="optim", overlap=True, bucket_size=700)
SP = Layout(dp=2, tp=2, sp=True, model="modern")
SP_OPTIM = Layout(dp=2, tp=2, sp=True, strategy="optim", model="modern")
QK_NORM = Layout(dp=2, tp=2, model="modern")
INSTANCES = Layout(dp=4, strategy="optim", instances=2)
TOKENS = Layout(dp=4, per_token=True, microbatches=2)


def check_rows(layouts: Sequence[Layout], world: int, dtype: str) -> None:
    """Those of so many ranks are right, and have the same bits where they must."""
    families: dict[Layout, set[str]] = {}
    for layout in layouts:
        if layout.world != world:
            continue
        report = check_gpt(layout, dtype)
        assert report.ok, str(report)
        assert report.bound == {"fp64": 1e-10, "fp32": None}[dtype]
        assert report.parameters > 15 and not report.unmoved, report.unmoved
        if layout.family is not None:
            families.setdefault(layout.family, set()).add(report.digest)
    assert all(len(digests) == 1 for digests in families.values()), families


@ranks(1, 2, 3, 4, timeout_s=120)
@pytest.mark.in_suite(1)
def test_quick_table_is_right(rank: int, world: int) -> None:
    check_rows(QUICK, world, "fp64")


@ranks(1, 2, 3, nightly=(4,), timeout_s=120)
def test_quick_table_is_right_in_fp32(rank: int, world: int) -> None:
    check_rows(QUICK, world, "fp32")


@ranks(8, timeout_s=170)
def test_the_full_house_is_right(rank: int, world: int) -> None:
    check_rows(QUICK, world, "fp64")


FULL = {"dense": lambda: DENSE, "single": lambda: SINGLE, "pairs": lambda: pairwise()[0], "houses": lambda: HOUSES}


@ranks(1, 2, 3, 4, 6, 8, timeout_s=1200)
@pytest.mark.timeout(1300)
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("part", FULL)
def test_full_table_is_right(rank: int, world: int, part: str, dtype: str) -> None:
    check_rows(FULL[part](), world, dtype)


# --- spoilt reductions ------------------------------------------------------------------------------------------------


def red(report: GradientReport, *words: str) -> None:
    """The report is red, the same on all ranks, and its cause holds these words."""
    assert not report.ok, "the oracle noticed nothing"
    assert report.first_wrong is not None
    for word in words:
        assert word in report.cause, f"{word!r} is not in the cause:\n{report}"
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, str(report))
    assert len(set(reports)) == 1, "ranks report differently"


SPOILT = {
    # (layout, group, mutation) -> words of the cause
    (DP4, "dp_cp", "drop"): ["not reduced over dp"],
    (DP4, "dp_cp", "double"): ["twice too large", "over dp", "done twice"],
    (DP4, "dp_cp", "rescale"): ["dp times too small", "1/n twice"],
    (DP4_OPTIM, "dp_cp", "drop"): ["not reduced over dp"],
    (DP4_OPTIM, "dp_cp", "double"): ["twice too large", "over dp"],
    (DP4_OPTIM, "dp_cp", "rescale"): ["dp times too small", "1/n twice"],
    (SP, "tp", "drop"): ["not reduced over tp"],
    (SP, "tp", "double"): ["tp times too large"],
    (SP, "tp", "rescale"): ["tp times too small", "the mean was taken where the sum was due"],
    (SP_OPTIM, "tp", "drop"): ["not reduced over tp"],
    (SP_OPTIM, "tp", "double"): ["tp times too large"],
    (SP_OPTIM, "dp_cp", "drop"): ["not reduced over dp"],
    (SP_OPTIM, "dp_cp", "rescale"): ["dp times too small", "1/n twice"],
    (QK_NORM, "tp", "drop"): ["not reduced over tp"],
    (QK_NORM, "tp", "double"): ["tp times too large"],
    (QK_NORM, "tp", "rescale"): ["tp times too small", "the mean was taken where the sum was due"],
    (TOKENS, "dp_cp", "drop"): ["not reduced over dp"],
    (TOKENS, "dp_cp", "double"): ["too large"],  # 2 is also the number of microbatches
    (TOKENS, "dp_cp", "rescale"): ["dp times too small", "1/n twice"],
    (INSTANCES, "inter_dp_cp", "drop"): ["not reduced over optimizer instances"],
    (INSTANCES, "inter_dp_cp", "double"): ["optimizer instances times too large"],
    (INSTANCES, "inter_dp_cp", "rescale"): ["optimizer instances times too small"],
    (INSTANCES, "intra_dp_cp", "drop"): ["not reduced over dp inside an instance"],
    (INSTANCES, "intra_dp_cp", "double"): ["times too large"],
    (INSTANCES, "intra_dp_cp", "rescale"): ["times too small"],
}


# Of a layout that reduces as another one does, or of a group like another one, one mutation a default run.
BY_NIGHT = {
    (DP4_OPTIM, "dp_cp", "drop"),
    (DP4_OPTIM, "dp_cp", "rescale"),
    (SP_OPTIM, "tp", "drop"),
    (SP_OPTIM, "dp_cp", "drop"),
    (QK_NORM, "tp", "double"),
    (QK_NORM, "tp", "rescale"),
    (TOKENS, "dp_cp", "drop"),
    (INSTANCES, "inter_dp_cp", "rescale"),
    (INSTANCES, "intra_dp_cp", "drop"),
    (INSTANCES, "intra_dp_cp", "double"),
}
CASES = [pytest.param(case, marks=pytest.mark.nightly if case in BY_NIGHT else ()) for case in SPOILT]


@ranks(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_oracle_names_a_spoilt_reduction(rank: int, world: int, case: tuple[Layout, str, str]) -> None:
    layout, group_name, mutation = case
    with only_gradients(group_name, mutation):
        report = check_gpt(layout)
    red(report, *SPOILT[case])
    first = report.first_wrong
    assert first is not None
    if group_name == "tp":
        assert "norm" in first.name, first  # the split layers are right, and are not blamed


class only_gradients:
    """mutate_reductions for groups that do not exist yet when the block begins."""

    def __init__(self, group_name: str, mutation: str) -> None:
        self.group_name, self.mutation = group_name, mutation

    def __enter__(self) -> None:
        build = parallel_state.initialize_model_parallel

        def built(**sizes: Any) -> None:
            build(**sizes)
            self.mutated = mutate_reductions(self.group_name, self.mutation)
            self.hits = self.mutated.__enter__()

        self.patch = mock.patch.object(parallel_state, "initialize_model_parallel", built)
        self.patch.start()

    def __exit__(self, *_: object) -> None:
        self.patch.stop()
        self.mutated.__exit__(None, None, None)
        assert somewhere(bool(self.hits)), "nothing was spoilt"


@ranks(4)
@pytest.mark.parametrize("factor, words", [(4.0, ["dp times too large", "mean"]), (0.25, ["1/n twice"])])
def test_oracle_names_a_wrong_divisor(rank: int, world: int, factor: float, words: list[str]) -> None:
    with mutate_scale(factor):
        red(check_gpt(DP4), *words)


@ranks(4)
def test_oracle_names_gradients_that_were_not_divided_by_the_tokens(rank: int, world: int) -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    with mock.patch("core.distributed.finalize_model_grads._global_num_tokens", lambda *_: one):
        red(check_gpt(TOKENS), "the number of tokens", "not divided")


@ranks(4)
@pytest.mark.parametrize("culprit", [0, 2])
def test_oracle_names_the_rank_that_was_not_synced(rank: int, world: int, culprit: int) -> None:
    complete = Bucket.complete

    def keeps_its_own(self: Bucket) -> None:
        complete(self)
        if dist.get_rank() == culprit:
            self.memory.grad.copy_(self.own)  # type: ignore[attr-defined]

    with remembered_gradients(), mock.patch.object(Bucket, "complete", keeps_its_own):
        report = check_gpt(Layout(dp=4))
    red(report, f"unsynced on rank {culprit}")
    assert {entry.rank for entry in report.wrong} == {culprit}


class remembered_gradients:
    """Buckets keep what this rank put into the reduction."""

    def __enter__(self) -> None:
        reduce = Bucket._reduce

        def remembered(self: Bucket, grad: Tensor, collectives: Any) -> Any:
            self.own = grad.clone()  # type: ignore[attr-defined]
            return reduce(self, grad, collectives)

        slots = mock.patch.object(Bucket, "_reduce", remembered)
        self.patch = slots
        slots.start()

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


@ranks(4)
def test_oracle_names_a_rank_whose_part_is_missing(rank: int, world: int) -> None:
    launch = Bucket.launch

    def without_rank_one(self: Bucket, collectives: Any, **options: Any) -> None:
        if dist.get_rank() == 1:
            for param in self.params:
                param.grad = None
        launch(self, collectives, **options)

    with mock.patch.object(Bucket, "launch", without_rank_one):
        red(check_gpt(Layout(dp=4)), "the gradient of ranks [1] is missing everywhere")


@ranks(4)
def test_oracle_names_optimizer_instances_that_were_not_added(rank: int, world: int) -> None:
    with mock.patch.object(Bucket, "all_reduce_replicas", lambda *_: None):
        red(check_gpt(INSTANCES), "not reduced over optimizer instances")


@ranks(8, timeout_s=120)
def test_oracle_distinguishes_axes_of_different_size(rank: int, world: int) -> None:
    layout = Layout(dp=4, tp=2, sp=True, strategy="optim", overlap=True, bucket_size=2000)
    with only_gradients("tp", "double"):
        red(check_gpt(layout), "tp times too large (tp is 2)")
    with mutate_scale(4.0):
        red(check_gpt(layout), "dp times too large (dp is 4)")
    with mutate_scale(1 / 8):
        red(check_gpt(layout), "dp x tp = 8 times too small")


@ranks(2)
def test_oracle_names_a_backward_that_was_done_twice(rank: int, world: int) -> None:
    launch = Bucket.launch

    def doubled(self: Bucket, collectives: Any, **options: Any) -> None:
        self.memory.grad.mul_(2.0)
        launch(self, collectives, **options)

    with mock.patch.object(Bucket, "launch", doubled):
        red(check_gpt(Layout(dp=2)), "dp times too large")


@ranks(2)
def test_oracle_notices_gradients_of_the_step_before(rank: int, world: int) -> None:
    zero = "core.distributed.buffer.grad_buffer.GradBuffer.zero"
    with mock.patch(zero, lambda self: [b.attach() for b in self.buckets]):
        red(check_gpt(Layout(dp=2)), "only from step 1 on")


@ranks(2)
def test_a_guard_that_raises_on_right_gradients_is_reported(rank: int, world: int) -> None:
    def raises(*_: Any) -> None:
        if rank == 1:
            raise ReplicaDriftError("these two differ")

    with mock.patch("core.verify.job.check_replicas", raises):
        report = check_gpt(Layout(dp=2))
    assert not report.ok and not report.wrong
    assert "every gradient is right, and the guard against drifting copies raises: these two differ" in str(report)


# --- models of users --------------------------------------------------------------------------------------------------


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x) - y).pow(2).mean() * 30


def summed_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    weight = (x[:, 0] > 0.3).double() * 0.3  # rows that count, count less than one each
    return ((model(x) - y).pow(2).sum(1) * weight).sum(), weight.sum()


def samples(count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 5, generator=generator), torch.randn(count, 3, generator=generator)


@ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.in_suite()
def test_a_plain_module_needs_no_attribute_and_no_groups(
    rank: int, world: int, dtype: torch.dtype, strategy: str
) -> None:
    torch.manual_seed(8)
    ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True)
    report = check_gradients(Net, mean_loss, samples(), dtype=dtype, ddp_config=ddp_config, microbatches=2)
    report.raise_if_wrong()
    assert report.parameters == 7 and 0 <= report.largest_error < {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    assert (report.bound is None) == (dtype == torch.float32)
    assert not parallel_state.model_parallel_is_initialized()


@ranks(2)
def test_a_model_that_is_wrapped_already_is_checked_as_it_is(rank: int, world: int) -> None:
    from tests.unit_tests.reference import wrap

    parallel_state.initialize_model_parallel()
    torch.manual_seed(8)
    ddp = wrap(Net().double(), None, use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=50)
    check_gradients(lambda: ddp, mean_loss, samples(), microbatches=3).raise_if_wrong()
    named = pytest.raises(WrongGradientError, match="(?s)first.weight.*likely cause: not reduced over dp")
    with mutate_reductions("dp_cp", "drop"), named:
        check_gradients(lambda: ddp, mean_loss, samples()).raise_if_wrong()


@ranks(3)
def test_a_loss_per_token_with_uneven_counts(rank: int, world: int) -> None:
    torch.manual_seed(8)
    config = ModelParallelConfig(calculate_per_token_loss=True)
    report = check_gradients(Net, summed_loss, samples(), config=config, microbatches=2)
    report.raise_if_wrong()
    assert "7 gradients right" in str(report)


class CrookedOnRankOne(torch.autograd.Function):
    """The identity, whose backward is wrong on one rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        bend = torch.linspace(0.5, 1.5, grad.shape[-1], dtype=grad.dtype)
        return grad * bend if dist.get_rank() == 1 else grad


class Crooked(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(CrookedOnRankOne.apply(self.first(x))[:, :5])


@ranks(2)
def test_a_wrong_backward_of_a_layer_is_distinguished_from_wrong_reductions(rank: int, world: int) -> None:
    torch.manual_seed(8)
    red(check_gradients(Crooked, mean_loss, samples()), "backward is wrong before any reduction")


@ranks(2)
def test_frozen_parameters_that_are_split_are_put_together_for_the_reference(rank: int, world: int) -> None:
    from core.groups.process_groups import ProcessGroups
    from tests.layouts.gpt import global_batch, model_config, prepare, token_mean, whole_config

    layout = Layout(tp=2, sp=True)

    def frozen_below(config: Any, groups: ProcessGroups) -> nn.Module:
        model = GPTModel(config, groups)
        prepare(model, layout, groups)
        model.decoder.layers[0].requires_grad_(False)
        return model

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = model_config(layout, torch.float64)
    report = check_gradients(
        lambda: frozen_below(config, parallel_state.get_process_groups()),
        token_mean,
        global_batch(layout),
        reference_fn=lambda: frozen_below(whole_config(layout), ProcessGroups()),
        config=config,
    )
    report.raise_if_wrong()
    assert report.parameters == 16


class Detached(nn.Module):
    """One parameter is in no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@ranks(2)
def test_parameters_without_gradient_are_named_as_not_tested(rank: int, world: int) -> None:
    torch.manual_seed(8)
    report = check_gradients(Detached, mean_loss, samples())
    assert report.ok and report.unmoved == ("unused.weight", "unused.bias")
    assert "not tested: unused.weight" in str(report)


@ranks(2)
def test_a_graph_that_is_cut_is_a_fault_although_one_process_cuts_it_too(rank: int, world: int) -> None:
    torch.manual_seed(8)
    report = check_gradients(Halved, mean_loss, samples())
    assert not report.ok and not report.wrong and report.unmoved == ("body.weight", "body.bias")
    assert "cut graph: `body` runs in forward, and no gradient comes back to it" in str(report)


class Halved(nn.Module):
    """The first of two layers gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).detach())


class Dropping(nn.Module):
    """Its second layer is random."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@ranks(2)
def test_a_model_that_is_random_is_named_as_such(rank: int, world: int) -> None:
    torch.manual_seed(8)
    report = check_gradients(Dropping, mean_loss, samples())
    red(report, "the model is random: `body.1` gives another output when the reference runs a second time")
    assert report.where is None and "set dropout to 0" in str(report)


@ranks(2)
def test_a_model_that_differs_from_its_reference_is_named(rank: int, world: int) -> None:
    torch.manual_seed(8)
    words = (
        r"no rank of the layout holds 'used.weight' \(4 in all\), and the reference has no 'first.bias' \(7 in all\)"
    )
    with pytest.raises(ValueError, match=words):
        check_gradients(Net, mean_loss, samples(), reference_fn=Detached)


@ranks(2)
def test_a_layout_whose_forward_differs_is_distinguished_from_wrong_reductions(rank: int, world: int) -> None:
    torch.manual_seed(8)

    def loss_with_the_rank_in_it(model: nn.Module, batch: Any) -> Tensor:
        # A part of the batch is not treated as it would be in the whole.
        return mean_loss(model, batch) * (1 + batch[0].shape[0])

    report = check_gradients(Net, loss_with_the_rank_in_it, samples())
    assert not report.ok and "forward passes differ already" in report.cause


@ranks(2)
def test_a_batch_that_does_not_divide_is_refused_on_all_ranks(rank: int, world: int) -> None:
    torch.manual_seed(8)
    with pytest.raises(ValueError, match=r"must divide into 10 = data-parallel ranks x microbatches"):
        check_gradients(Net, mean_loss, samples(), microbatches=5)


@ranks(1)
def test_a_loss_that_contradicts_the_config_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="calculate_per_token_loss=True"):
        check_gradients(Net, summed_loss, samples())


def test_without_a_process_group_the_way_out_is_named() -> None:
    with pytest.raises(RuntimeError, match="ranks=4"):
        check_gradients(Net, mean_loss, samples())


@ranks(2)
def test_a_model_fn_that_gives_the_same_module_each_time_is_copied_for_the_reference(rank: int, world: int) -> None:
    model = Net()  # other weights on every rank: the default wrapper sends the first rank's to the others
    check_gradients(lambda: model, mean_loss, samples(), microbatches=2).raise_if_wrong()


@ranks(2)
def test_what_the_dtype_costs_the_reference_is_the_bound_of_a_wrapped_model(rank: int, world: int) -> None:
    from tests.unit_tests.reference import wrap

    parallel_state.initialize_model_parallel()
    ddp = wrap(Net(), None, initial_weights="broadcast")
    report = check_gradients(lambda: ddp, mean_loss, samples())
    report.raise_if_wrong()
    assert report.bound is None and 0.0 < report.share < 1.0
    assert 1e-8 < report.largest_error < 1e-5


@ranks(2)
def test_stages_without_a_schedule_are_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match="Return a PipelineRunner over the wrapped stages from model_fn"):
        check_gradients(Net, mean_loss, samples())


@ranks(2)
def test_a_split_sequence_needs_to_know_what_is_split(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    with pytest.raises(ValueError, match="pass split_fn=get_batch_on_this_cp_rank"):
        check_gradients(Net, mean_loss, samples())


def summed_tokens(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    losses = model(batch["tokens"], batch["labels"])
    return losses.sum(), torch.tensor(losses.numel())


@ranks(4)
def test_a_users_pipeline_with_a_split_sequence_is_checked(rank: int, world: int) -> None:
    from core.context_parallel import get_batch_on_this_cp_rank
    from core.pipeline_parallel import (
        PipelineRunner,
        build_gpt_stages,
        gpt_activations,
        gpt_forward_step,
        plan_pipeline,
        wrap_stages,
    )
    from core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, context_parallel_size=2)
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 13}
    sizes |= {"init_method_std": 0.3, "max_sequence_length": 8, "params_dtype": torch.float64}
    config = TransformerConfig(
        **sizes, pipeline_model_parallel_size=2, context_parallel_size=2, calculate_per_token_loss=True
    )
    layout = plan_pipeline(2, 2, microbatches=3)

    def stages() -> PipelineRunner:
        chunks = wrap_stages(config, DistributedDataParallelConfig(), build_gpt_stages(config, layout))
        return PipelineRunner(chunks, layout, gpt_forward_step, gpt_activations(config, 2, 8))

    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, 13, (2, 6, 8), generator=generator)
    report = check_gradients(
        stages,
        summed_tokens,
        {"tokens": tokens, "labels": labels},
        microbatches=3,
        split_fn=get_batch_on_this_cp_rank,
    )
    report.raise_if_wrong()
    assert report.parameters > 15 and report.reference.startswith("reference")
    unknown = mock.patch.object(verify_check, "builder_of", lambda module: None)
    with unknown, pytest.raises(ValueError, match="is split into stages; pass a reference_fn"):
        check_gradients(stages, summed_tokens, tokens, microbatches=3, split_fn=get_batch_on_this_cp_rank)


class OwnExperts(nn.Module):
    """One expert a rank, and names that do not say which."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(5, 3)
        torch.nn.init.constant_(self.expert.weight, float(dist.get_rank()))
        self.global_names = {"expert": "experts.0"}
        for param in self.expert.parameters():
            param.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(x)


@ranks(2, timeout_s=30)
def test_experts_of_one_name_are_refused_on_all_ranks(rank: int, world: int) -> None:
    sizes = {"expert_model_parallel_size": 2}
    with pytest.raises(ValueError, match=r"2 ranks of 'ep' hold different ones, and nothing says which"):
        check_gradients(OwnExperts, mean_loss, samples(), reference_fn=OwnExperts, sizes=sizes)
