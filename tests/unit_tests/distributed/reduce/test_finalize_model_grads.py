"""finalize_model_grads, rule by rule, on real groups, with gradients whose digits say which ranks they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.distributed import ContractError, GradSyncRule, LayoutMismatch, declare_gradient, finalize_model_grads
from core.distributed.reduce import sync_rules as grad_sync
from core.model_parallel_config import ModelParallelConfig
from tests.unit_tests.rank_codes import ODD, Bag, check, digits, step
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import wrap_unwatched as wrap

both_strategies = pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])


def start(config: ModelParallelConfig | None = None, **changes: Any) -> ModelParallelConfig:
    """Groups of the config's sizes."""
    config = config or ModelParallelConfig(**changes)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
    )
    return config


# --- data parallelism -------------------------------------------------------------------------------------------------


@ranks(4)
@both_strategies
@pytest.mark.parametrize("average_in_collective", [False, True])
def test_data_parallel_gradients_are_the_mean(
    rank: int, world: int, strategy: str, average_in_collective: bool
) -> None:
    config = start()
    ddp = wrap(
        Bag(w=ODD, scalar=()),
        config,
        data_parallel_sharding_strategy=strategy,
        average_in_collective=average_in_collective,
    )
    for _ in range(2):
        (found,) = step([ddp])
        check(found, {"w": 1111 / 4, "scalar": 1111 / 4})


@ranks(4)
@both_strategies
def test_context_parallel_ranks_are_part_of_the_mean(rank: int, world: int, strategy: str) -> None:
    config = start(context_parallel_size=2)
    (found,) = step([wrap(Bag(w=ODD), config, data_parallel_sharding_strategy=strategy)])
    check(found, {"w": 1111 / 4})


@ranks(4)
@both_strategies
def test_context_parallelism_next_to_tensor_parallelism(rank: int, world: int, strategy: str) -> None:
    # tp groups [0, 1] [2, 3]; data-and-context groups [0, 2] [1, 3]
    config = start(tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)
    bag = Bag(split=ODD, norm=ODD).tag("split", tensor_model_parallel=True, partition_dim=0)
    bag.tag("norm", sequence_parallel=True)
    (found,) = step([wrap(bag, config, data_parallel_sharding_strategy=strategy)])
    check(found, {"split": (digits(0, 2) if rank % 2 == 0 else digits(1, 3)) / 2, "norm": 1111 / 2})


# --- tensor parallelism: groups [0, 1] and [2, 3], data groups [0, 2] and [1, 3] --------------------------------------


def own_data_group(rank: int) -> float:
    return digits(0, 2) if rank % 2 == 0 else digits(1, 3)


@ranks(4)
@both_strategies
@pytest.mark.parametrize("overlap", [False, True])
def test_sequence_parallel_gradients_are_the_sum_over_tensor_parallel_ranks(
    rank: int, world: int, strategy: str, overlap: bool
) -> None:
    config = start(tensor_model_parallel_size=2, sequence_parallel=True)
    bag = Bag(split=ODD, norm=ODD, bias=(3,), complete=ODD)
    bag.tag("split", tensor_model_parallel=True, partition_dim=0)
    bag.tag("norm", sequence_parallel=True).tag("bias", sequence_parallel=True)
    bag.tag("complete", sequence_parallel=False)
    ddp = wrap(bag, config, data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=400)
    for _ in range(2):
        (found,) = step([ddp])
        own = own_data_group(rank) / 2
        check(found, {"split": own, "norm": 1111 / 2, "bias": 1111 / 2, "complete": own})


@ranks(4)
@both_strategies
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_gradient_declared_partial_is_summed_with_and_without_sequence_parallelism(
    rank: int, world: int, strategy: str, sequence_parallel: bool
) -> None:
    config = start(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    bag = Bag(q_norm=ODD, other=ODD).tag("other", sequence_parallel=False)
    declare_gradient(bag.q_norm, partial_over=("tp",))
    (found,) = step([wrap(bag, config, data_parallel_sharding_strategy=strategy)])
    check(found, {"q_norm": 1111 / 2, "other": own_data_group(rank) / 2})


@ranks(4)
def test_q_and_k_layernorms_are_summed_when_the_config_has_them(rank: int, world: int) -> None:
    config = start(tensor_model_parallel_size=2, qk_layernorm=True)
    (found,) = step([wrap(Bag(q_layernorm=ODD, k_layernorm=ODD, input_layernorm=ODD), config)])
    check(found, {"q_layernorm": 1111 / 2, "k_layernorm": 1111 / 2, "input_layernorm": own_data_group(rank) / 2})


@ranks(4)
@both_strategies
def test_parameters_averaged_over_tensor_parallelism_are_the_mean(rank: int, world: int, strategy: str) -> None:
    config = start(tensor_model_parallel_size=2, sequence_parallel=True)
    bag = Bag(router=ODD, norm=ODD).tag("router", average_gradients_across_tp_domain=True)
    bag.tag("norm", sequence_parallel=True)
    (found,) = step([wrap(bag, config, data_parallel_sharding_strategy=strategy)])
    check(found, {"router": 1111 / 2 / 2, "norm": 1111 / 2})


@ranks(4)
@both_strategies
@pytest.mark.parametrize("in_place, packed", [(1, 1), (10**9, 1), (10**9, 60), (10**9, 10**9), (40, 10)])
@pytest.mark.in_suite()
def test_large_parameters_travel_alone_and_small_ones_together(
    rank: int, world: int, strategy: str, in_place: int, packed: int
) -> None:
    grad_sync.IN_PLACE_NUMEL, before_in_place = in_place, grad_sync.IN_PLACE_NUMEL
    grad_sync.PACK_NUMEL, before_pack = packed, grad_sync.PACK_NUMEL
    try:
        config = start(tensor_model_parallel_size=2, sequence_parallel=True)
        bag = Bag(a=(3,), b=ODD, c=(), d=(110,), e=(9, 9), f=(0,))
        for name, _ in bag.named_parameters():
            bag.tag(name, sequence_parallel=True)
        ddp = wrap(bag, config, data_parallel_sharding_strategy=strategy)
        (found,) = step([ddp])
        del found["f"]  # an empty parameter has no gradient to speak of
        check(found, dict.fromkeys("abcde", 1111 / 2))
    finally:
        grad_sync.IN_PLACE_NUMEL, grad_sync.PACK_NUMEL = before_in_place, before_pack


# --- pipeline parallelism: with 4 ranks and pp 2, stages [0, 1] and [2, 3], pp groups [0, 2] and [1, 3] ---


@ranks(4)
@pytest.mark.parametrize(
    ("strategy", "tag"),
    [
        *((strategy, "pipeline_parallel") for strategy in ("no_shard", "optim", "optim_grads")),
        ("optim", "flextron_router_pp_sync"),
    ],
)
def test_pipeline_replicated_gradients_are_the_sum_over_stages(rank: int, world: int, strategy: str, tag: str) -> None:
    config = start(pipeline_model_parallel_size=2)
    bag = Bag(layer=ODD, embedder=ODD).tag("embedder", **{tag: True})
    (found,) = step([wrap(bag, config, data_parallel_sharding_strategy=strategy)])
    check(found, {"layer": (digits(0, 1) if rank < 2 else digits(2, 3)) / 2, "embedder": 1111 / 2})


@ranks(4)
@both_strategies
def test_copies_in_virtual_chunks_are_added_and_all_get_the_result(rank: int, world: int, strategy: str) -> None:
    config = start(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    chunks = [
        wrap(
            Bag(layer=ODD, embedder=ODD).tag("embedder", pipeline_parallel=True),
            config,
            data_parallel_sharding_strategy=strategy,
        )
        for _ in range(2)
    ]
    found = step(chunks)  # chunk 0 brings 1 a rank, chunk 1 brings 2
    stage = digits(0, 1) if rank < 2 else digits(2, 3)
    for number, got in enumerate(found):
        check(got, {"layer": (number + 1) * stage / 2, "embedder": 3333 / 2})


@ranks(2, 3, 4)
@both_strategies
def test_tied_word_embedding_is_the_sum_of_first_and_last_stage(rank: int, world: int, strategy: str) -> None:
    config = start(pipeline_model_parallel_size=world)
    names = {0: "embedding", world - 1: "output"}
    bag = Bag(layer=ODD, **{names[rank]: (23, 11)} if rank in names else {})
    if rank in names:
        bag.tag(names[rank], shared_embedding=True)
    expected = {"layer": digits(rank)}
    if rank in names:
        expected[names[rank]] = digits(0, world - 1)
    (found,) = step([wrap(bag, config, data_parallel_sharding_strategy=strategy)])
    check(found, expected)


@ranks(4)
@both_strategies
def test_tied_word_embedding_with_data_parallelism(rank: int, world: int, strategy: str) -> None:
    config = start(pipeline_model_parallel_size=2)
    # Different neighbours on the two stages: the copies' shards must be the same slices nevertheless.
    first = Bag(word=(23, 11), layer=ODD) if rank < 2 else Bag(layer=(13,), more=(20, 9), word=(23, 11))
    first.tag("word", shared_embedding=True)
    (found,) = step([wrap(first, config, data_parallel_sharding_strategy=strategy)])
    check({"word": found["word"]}, {"word": 1111 / 2})


@ranks(4)
@both_strategies
def test_tied_word_embedding_split_over_tensor_parallelism(rank: int, world: int, strategy: str) -> None:
    config = start(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    bag = Bag(word=(23, 11)).tag("word", shared_embedding=True, tensor_model_parallel=True, partition_dim=0)
    (found,) = step([wrap(bag, config, data_parallel_sharding_strategy=strategy)])
    check(found, {"word": digits(0, 2) if rank % 2 == 0 else digits(1, 3)})


class Tied(Bag):
    """Tells of its tied weight the way Megatron's models do."""

    share_embeddings_and_output_weights = True

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        return self.word


@ranks(2)
def test_a_model_that_names_its_tied_weight_needs_no_attribute(rank: int, world: int) -> None:
    config = start(pipeline_model_parallel_size=2)
    (found,) = step([wrap(Tied(word=ODD, layer=ODD), config)])
    check(found, {"word": 11, "layer": digits(rank)})


@ranks(4)
@both_strategies
def test_tied_word_embedding_of_the_first_and_the_last_virtual_chunk(rank: int, world: int, strategy: str) -> None:
    config = start(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    # chunk 0 of stage 0 begins the model, chunk 1 of stage 1 ends it
    tied_chunk = 0 if rank < 2 else 1
    chunks = []
    for number in range(2):
        bag = Bag(layer=ODD, **{"word": (23, 11)} if number == tied_chunk else {})
        if number == tied_chunk:
            bag.tag("word", shared_embedding=True)
        chunks.append(wrap(bag, config, data_parallel_sharding_strategy=strategy))
    found = step(chunks)
    stage = digits(0, 1) if rank < 2 else digits(2, 3)
    for number, got in enumerate(found):
        expected = {"layer": (number + 1) * stage / 2}
        if number == tied_chunk:
            expected["word"] = (1 * digits(0, 1) + 2 * digits(2, 3)) / 2
        check(got, expected)


@ranks(3)
def test_position_embedding_is_the_sum_over_its_group(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=3, get_position_embedding_ranks=lambda stages: [stages[0], stages[1]]
    )
    config = ModelParallelConfig(pipeline_model_parallel_size=3)
    bag = Bag(layer=ODD, **{"position": (5, 2)} if rank < 2 else {})
    if rank < 2:
        bag.tag("position", shared_position_embedding=True)
    (found,) = step([wrap(bag, config)])
    check(found, {"layer": digits(rank), **({"position": digits(0, 1)} if rank < 2 else {})})


@ranks(2)
def test_stages_that_bring_different_copies_are_refused_on_all_ranks(rank: int, world: int) -> None:
    config = start(pipeline_model_parallel_size=2)
    ddp = wrap(Bag(word=(23, 11) if rank == 0 else (23, 12)).tag("word", shared_embedding=True), config)
    with pytest.raises(LayoutMismatch, match="word embedding"):
        step([ddp])


@ranks(3)
def test_a_mismatch_of_first_and_last_stage_reaches_the_stage_between(rank: int, world: int) -> None:
    config = start(pipeline_model_parallel_size=3)
    bag = Bag(word=(23, 11) if rank == 0 else (23, 12))
    if rank != 1:
        bag.tag("word", shared_embedding=True)
    ddp = wrap(bag, config)
    with pytest.raises(LayoutMismatch):
        step([ddp])


# --- experts ----------------------------------------------------------------------------------------------------------


@ranks(4)
@both_strategies
@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("average_in_collective", [False, True])
def test_expert_gradients_are_divided_by_the_whole_data_group(
    rank: int, world: int, strategy: str, ep: int, average_in_collective: bool
) -> None:
    config = start(expert_model_parallel_size=ep)
    bag = Bag(dense=ODD, expert=ODD).tag("expert", allreduce=False)
    ddp = wrap(bag, config, data_parallel_sharding_strategy=strategy, average_in_collective=average_in_collective)
    (found,) = step([ddp])
    holders = digits(rank) if ep == 4 else own_data_group(rank)
    check(found, {"dense": 1111 / 4, "expert": holders / 4})


@ranks(4)
@both_strategies
def test_experts_split_over_tensor_parallelism(rank: int, world: int, strategy: str) -> None:
    # dense: tp [0, 1] [2, 3], data [0, 2] [1, 3]. experts: tp 2 x ep 2 fill the world, so no one shares one.
    config = start(tensor_model_parallel_size=2, expert_model_parallel_size=2, sequence_parallel=True)
    bag = Bag(dense=ODD, norm=ODD, expert=ODD)
    bag.tag("dense", tensor_model_parallel=True).tag("norm", sequence_parallel=True)
    bag.tag("expert", allreduce=False, tensor_model_parallel=True)
    (found,) = step([wrap(bag, config, data_parallel_sharding_strategy=strategy)])
    check(found, {"dense": own_data_group(rank) / 2, "norm": 1111 / 2, "expert": digits(rank) / 2})


@ranks(4)
@both_strategies
def test_whole_experts_next_to_split_dense_layers(rank: int, world: int, strategy: str) -> None:
    # dense as above; experts with expert tp 1 x ep 2: expert data groups [0, 2] [1, 3], divided by the data size 2
    config = start(tensor_model_parallel_size=2, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    bag = Bag(dense=ODD, expert=ODD).tag("dense", tensor_model_parallel=True).tag("expert", allreduce=False)
    (found,) = step([wrap(bag, config, data_parallel_sharding_strategy=strategy)])
    check(found, {"dense": own_data_group(rank) / 2, "expert": own_data_group(rank) / 2})


@ranks(8)
@both_strategies
def test_experts_over_eight_ranks_with_two_of_everything(rank: int, world: int, strategy: str) -> None:
    # tp 2 x ep 2 x expert dp 2: an expert shard is held by r and r + 4; the dense data size is 4.
    config = start(tensor_model_parallel_size=2, expert_model_parallel_size=2)
    bag = Bag(dense=ODD, expert=ODD).tag("dense", tensor_model_parallel=True)
    bag.tag("expert", allreduce=False, tensor_model_parallel=True)
    (found,) = step([wrap(bag, config, data_parallel_sharding_strategy=strategy)])
    first = rank % 2
    check(
        found,
        {"dense": digits(first, first + 2, first + 4, first + 6) / 4, "expert": digits(rank % 4, rank % 4 + 4) / 4},
    )


@ranks(4)
def test_experts_of_tensor_parallel_ranks_that_differ_are_never_added(rank: int, world: int) -> None:
    # tp groups [0, 1] [2, 3] hold different experts here: expert tp 1 x ep 2
    config = start(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
    )
    bag = Bag(expert=ODD).tag("expert", allreduce=False, sequence_parallel=True)
    try:
        ddp = wrap(bag, config)
    except ContractError as refusal:
        assert "'expert'" in str(refusal)
    else:
        (found,) = step([ddp])
        check(found, {"expert": own_data_group(rank) / 2})


# --- rules of the user ------------------------------------------------------------------------------------------------


@ranks(4)
@both_strategies
def test_a_rule_of_the_user_runs_after_the_built_in_ones(rank: int, world: int, strategy: str) -> None:
    config = start(expert_model_parallel_size=2)
    rule = GradSyncRule("shared by experts", "ep", "sum", lambda contract: "ep" in contract.partial_over)
    bag = Bag(expert=ODD, common=ODD).tag("expert", allreduce=False).tag("common", allreduce=False)
    declare_gradient(bag.common, partial_over=("ep",))
    ddp = wrap(bag, config, data_parallel_sharding_strategy=strategy, sync_rules=(rule,))
    (found,) = step([ddp])
    check(found, {"expert": own_data_group(rank) / 4, "common": 1111 / 4})
    assert "sum over ep (shared by experts)" in ddp.describe()


@ranks(4)
def test_two_rules_on_one_parameter_run_one_after_the_other(rank: int, world: int) -> None:
    config = start(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    bag = Bag(embedder=ODD).tag("embedder", pipeline_parallel=True, sequence_parallel=True)
    (found,) = step([wrap(bag, config)])
    check(found, {"embedder": 1111})


@ranks(2)
def test_a_partial_gradient_that_no_rule_reduces_is_refused_when_wrapping(rank: int, world: int) -> None:
    config = start(expert_model_parallel_size=2)
    bag = Bag(common=ODD).tag("common", allreduce=False)
    declare_gradient(bag.common, partial_over=("ep",))
    with pytest.raises(ContractError, match="'common'.*'ep'"):
        wrap(bag, config)


# --- force_all_reduce -------------------------------------------------------------------------------------------------


@ranks(4)
@both_strategies
@pytest.mark.parametrize("instances", [1, 2])
def test_force_all_reduce_leaves_whole_gradients_on_every_rank(
    rank: int, world: int, strategy: str, instances: int
) -> None:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    ddp = wrap(
        Bag(w=ODD),
        None,
        data_parallel_sharding_strategy=strategy,
        num_distributed_optimizer_instances=instances,
    )
    (found,) = step([ddp], force_all_reduce=True)
    check(found, {"w": 1111 / 4})
    whole = ddp.module.w.grad
    assert whole is not None and torch.equal(whole, torch.arange(1.0, 324.0).double().view(ODD) * 1111 / 4)


@ranks(4)
def test_force_all_reduce_also_completes_the_tensor_parallel_sum(rank: int, world: int) -> None:
    config = start(tensor_model_parallel_size=2, sequence_parallel=True)
    ddp = wrap(Bag(norm=ODD).tag("norm", sequence_parallel=True), config, use_distributed_optimizer=True)
    step([ddp], force_all_reduce=True)
    assert float(ddp.module.norm.grad.view(-1)[-1]) == 323 * 1111 / 2


# --- process groups ---------------------------------------------------------------------------------------------------


@ranks(4)
def test_groups_may_be_passed_and_must_be_those_of_the_wrapper(rank: int, world: int) -> None:
    config = start(tensor_model_parallel_size=2, sequence_parallel=True)
    groups = parallel_state.get_process_groups()
    ddp = wrap(Bag(norm=ODD).tag("norm", sequence_parallel=True), config, pg_collection=groups)
    (found,) = step([ddp], pg_collection=groups)
    check(found, {"norm": 1111 / 2})
    from core.groups.process_groups import ProcessGroups

    (found,) = step([ddp], pg_collection=ProcessGroups(tp=groups.tp, dp_cp=groups.dp_cp))
    check(found, {"norm": 1111 / 2})
    ddp.zero_grad_buffer()
    ddp(1.0).backward()
    with pytest.raises(ValueError, match="pg_collection.dp_cp"):
        finalize_model_grads([ddp], pg_collection=ProcessGroups(dp_cp=groups.tp))


@ranks(2)
def test_a_model_that_is_not_wrapped_is_refused(rank: int, world: int) -> None:
    start()
    with pytest.raises(ValueError, match="not wrapped"):
        finalize_model_grads([Bag(w=ODD)])
    with pytest.raises(ValueError, match="no model chunk"):
        finalize_model_grads([])
    assert dist.get_rank() == rank
