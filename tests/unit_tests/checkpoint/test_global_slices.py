"""Boxes and global slices against painting: number every element of a whole tensor, cut it, put it together."""

import itertools
import math
import operator

import pytest
import torch
from torch import Tensor, nn

from core.checkpoint.boxes import Box, Split, cut_to_range, range_boxes, row_strides, split_boxes
from core.checkpoint.global_slices import GlobalSlice, buffer_slices, global_slices, written_here
from core.groups.global_names import global_name
from core.groups.process_groups import ProcessGroups
from core.tensor_parallel import tensor_parallel_slice
from core.transformer import TransformerConfig

SHAPES = [(), (0,), (1,), (7,), (3, 5), (1, 4), (4, 1), (2, 3, 4), (2, 0, 3), (2, 1, 3, 2)]


class At:
    """A rank's places, as ProcessGroups tells them, without processes."""

    def __init__(self, **axes: tuple[int, int]) -> None:
        self.axes = axes

    def rank(self, name: str) -> int:
        return self.axes.get(name, (0, 1))[0]

    def size(self, name: str) -> int:
        return self.axes.get(name, (0, 1))[1]


def painted(shape: tuple[int, ...]) -> Tensor:
    """Every element another number, none of them the zero of padding."""
    return torch.arange(1, math.prod(shape) + 1).view(shape)


def part(tensor: Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(first, first + length) for first, length in zip(offset, size, strict=True))]


def tagged(param: nn.Parameter, **tags: object) -> nn.Parameter:
    for name, value in tags.items():
        setattr(param, name, value)
    return param


# -- splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("section", [1, 4, 5, 12])
def test_boxes_say_what_a_slice_of_a_split_tensor_holds(ranks: int, stride: int, dim: int, section: int) -> None:
    shape = [3, 3]
    shape[dim] = section * stride
    whole = painted(tuple(shape))
    seen = torch.zeros_like(whole)
    for rank in range(ranks):
        local = tensor_parallel_slice(whole, dim, ranks, rank, stride)
        _, boxes = split_boxes(tuple(local.shape), [Split(dim, ranks, rank, stride, shape[dim])])
        for box in boxes:
            assert torch.equal(part(local, box.local_offset, box.size), part(whole, box.global_offset, box.size))
            part(seen, box.global_offset, box.size).add_(1)
        assert sum(box.numel for box in boxes) == int((local != 0).sum()), "padding, and nothing else, is left out"
    assert bool((seen == 1).all()), "every element is held once"


def test_experts_are_cut_over_ep_and_their_gate_and_value_over_expt_tp() -> None:
    experts, wide, hidden = 4, 12, 3  # wide: 6 rows of the gate, then 6 of the value
    whole = painted((experts, wide, hidden))
    seen = torch.zeros_like(whole)
    for ep, etp in itertools.product(range(2), range(3)):
        local = tensor_parallel_slice(whole.chunk(2, 0)[ep], 1, 3, etp, 2)
        _, boxes = split_boxes(tuple(local.shape), [Split(0, 2, ep), Split(1, 3, etp, 2)])
        assert len(boxes) == 2
        for box in boxes:
            assert torch.equal(part(local, box.local_offset, box.size), part(whole, box.global_offset, box.size))
            part(seen, box.global_offset, box.size).add_(1)
    assert bool((seen == 1).all())


def test_a_rank_whose_rows_are_all_padding_has_no_box() -> None:
    assert split_boxes((2, 5), [Split(0, 4, 3, length=5)])[1] == ()
    assert split_boxes((2, 5), [Split(0, 4, 2, length=5)])[1] == (Box((4, 0), (0, 0), (1, 5)),)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split(2, 2, 0), "dimension 2"),
        (Split(0, 2, 0, stride=4), "4 sections"),
        (Split(0, 2, 0, length=13), "length 13 in all and 2 ranks hold 6 each"),
    ],
)
def test_splits_that_cannot_be_are_refused_with_the_numbers(split: Split, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_boxes((6, 5), [split])


# -- flat ranges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_range_of_a_flattened_tensor_is_a_few_boxes(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for start, end in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        boxes = range_boxes(shape, start, end)
        found = [part(whole, offset, size).reshape(-1) for offset, size in boxes]
        assert torch.cat([torch.arange(0), *found]).tolist() == list(range(start, end)), "in flat order"
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (4, 3), (0, 16)])
def test_a_range_outside_the_tensor_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=r"shape \[3, 5\], which has 15"):
        range_boxes((3, 5), start, end)


@pytest.mark.parametrize("length", [12, 10])  # 10: the last rank's rows are partly padding
def test_shards_of_split_parameters_make_the_whole_one(length: int) -> None:
    """Strided, tensor-parallel and then cut into uneven flat shards: boxes put the numbered tensor together."""
    whole = painted((length, 3))
    rebuilt = torch.zeros_like(whole)
    for rank in range(3):
        local = tensor_parallel_slice(whole, 0, 3, rank, 2)
        flat = local.reshape(-1)
        _, boxes = split_boxes(tuple(local.shape), [Split(0, 3, rank, 2, length)])
        edges = [0, 1, 2, 7, flat.numel()]
        for start, end in itertools.pairwise(edges):
            shard = flat[start:end]  # all that a data rank has
            for box in cut_to_range(boxes, local.shape, start, end):
                place = sum(map(operator.mul, box.local_offset, row_strides(local.shape))) - start
                held = shard.as_strided(box.size, row_strides(local.shape), shard.storage_offset() + place)
                assert not bool(part(rebuilt, box.global_offset, box.size).any()), "held twice"
                part(rebuilt, box.global_offset, box.size).copy_(held)
    assert torch.equal(rebuilt, whole)


# -- names, shapes, replicas of a model ------------------------------------------------------------------------------


class Stage(nn.Module):
    """Layers 4 and 5 of a model, with a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.head = nn.Linear(3, 5, bias=False)
        self.global_names = {"layers.0": "layers.4", "layers.1": "layers.5", "head.weight": "embedding.weight"}
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_names_are_those_of_the_whole_model_wherever_a_module_says_so() -> None:
    model = nn.Sequential(Stage())
    assert [global_name(model, name) for name, _ in model.named_parameters()] == [
        "0.layers.4.weight",
        "0.layers.4.bias",
        "0.layers.5.weight",
        "0.layers.5.bias",
        "0.embedding.weight",
    ]
    assert set(global_slices(model, At())) == {name for name, _ in model.named_parameters()}
    assert [piece.name for piece in buffer_slices(model, At(dp_cp=(1, 3))).values()] == ["0.count"]


def test_the_copy_of_a_tied_weight_on_another_stage_is_never_written() -> None:
    stage = Stage()
    stage.head.weight.shared_embedding = True
    assert global_slices(stage, At(embd=(1, 2)))["head.weight"].is_copy
    assert not global_slices(stage, At(embd=(0, 2)))["head.weight"].is_copy
    copies = global_slices(stage, At(embd=(1, 2))).values()
    assert written_here(copies) == {"layers.4.weight", "layers.4.bias", "layers.5.weight", "layers.5.bias"}
    stage.head.weight.shared = True  # as Megatron's models mark it
    assert global_slices(stage, At())["head.weight"].is_copy


def test_a_dense_parameter_is_replicated_over_data_and_where_it_is_not_split_over_tensor_parallelism() -> None:
    model = nn.Linear(4, 6)
    tagged(model.weight, tensor_model_parallel=True, partition_dim=0, partition_stride=2, partition_length=10)
    found = global_slices(model, At(tp=(1, 2), dp_cp=(2, 3)))
    weight, bias = found["weight"], found["bias"]
    assert (weight.shape, weight.replica_axes, weight.replica, weight.replicas) == ((10, 4), ("dp_cp",), 2, 3)
    assert [(box.global_offset, box.local_offset, box.size) for box in weight.boxes] == [
        ((3, 0), (0, 0), (2, 4)),  # rows 3 and 4 of a section of 5; this rank's third row is padding
        ((8, 0), (3, 0), (2, 4)),
    ]
    assert (bias.shape, bias.replica_axes, bias.replica, bias.replicas) == ((6,), ("tp", "dp_cp"), 5, 6)


def test_an_expert_is_replicated_over_its_own_groups() -> None:
    model = nn.ParameterDict({"w": torch.zeros(2, 6, 3), "bias": torch.zeros(2, 3)})
    tagged(model["w"], allreduce=False, expert_dim=0, tensor_model_parallel=True, partition_dim=1, partition_stride=2)
    tagged(model["bias"], allreduce=False, expert_dim=0)
    places = At(tp=(1, 4), dp_cp=(3, 4), ep=(1, 2), expt_tp=(1, 2), expt_dp=(2, 4))
    found = global_slices(model, places)
    assert (found["w"].shape, found["w"].replica_axes, found["w"].replica) == ((4, 12, 3), ("expt_dp",), 2)
    assert [(box.global_offset, box.local_offset) for box in found["w"].boxes] == [
        ((2, 3, 0), (0, 0, 0)),
        ((2, 9, 0), (0, 3, 0)),
    ]
    bias = found["bias"]
    assert (bias.shape, bias.replica_axes, bias.replica, bias.replicas) == ((4, 3), ("expt_tp", "expt_dp"), 6, 8)


def test_experts_that_no_one_counts_are_refused_and_those_with_names_of_their_own_are_not() -> None:
    model = nn.Module()
    model.experts = nn.ModuleList([nn.Linear(3, 3, bias=False)])
    tagged(model.experts[0].weight, allreduce=False)
    with pytest.raises(ValueError, match=r"'experts.0.weight' is an expert's.*2 ranks of 'ep'.*expert_dim"):
        global_slices(model, At(ep=(1, 2)))
    model.global_names = {"experts.0": "experts.1"}
    assert global_slices(model, At(ep=(1, 2)))["experts.0.weight"].name == "experts.1.weight"


def test_a_split_parameter_without_a_dimension_is_refused_only_where_it_is_split() -> None:
    model = nn.Linear(4, 6)
    tagged(model.weight, tensor_model_parallel=True, partition_dim=-1)
    assert global_slices(model, At())["weight"].shape == (6, 4)
    with pytest.raises(ValueError, match=r"'weight' is tensor_model_parallel and its partition_dim is -1"):
        global_slices(model, At(tp=(0, 2)))


def test_parameters_without_elements_or_dimensions_have_slices_too() -> None:
    model = nn.ParameterDict({"scalar": torch.tensor(2.0), "empty": torch.zeros(0, 3)})
    found = global_slices(model, At(dp_cp=(1, 2)))
    assert found["scalar"].boxes == (Box((), (), ()),)
    assert (found["empty"].shape, found["empty"].boxes) == ((0, 3), ())


# -- who writes ------------------------------------------------------------------------------------------------------


def replica_of(name: str, numel: int, replica: int, replicas: int, axes: tuple[str, ...] = ("dp_cp",)) -> GlobalSlice:
    box = Box((0,), (0,), (numel,))
    return GlobalSlice(name, name, (numel,), (numel,), (box,), axes, replicas, replica)


def test_every_replicated_tensor_is_written_by_one_rank_and_the_work_is_even() -> None:
    sizes = {f"p{i}": size for i, size in enumerate([90, 10, 10, 10, 60, 60, 30, 0, 1])}
    writers = [written_here([replica_of(n, s, rank, 3) for n, s in sizes.items()]) for rank in range(3)]
    assert sorted(itertools.chain(*writers)) == sorted(sizes)
    assert max(sum(sizes[name] for name in mine) for mine in writers) <= 100, "of 271 elements in all"
    backwards = [written_here([replica_of(n, s, rank, 3) for n, s in reversed(sizes.items())]) for rank in range(3)]
    assert backwards == writers, "the order of registration does not matter"


# -- our own models --------------------------------------------------------------------------------------------------


def test_our_gpt_in_one_piece_has_the_names_and_shapes_it_shows() -> None:
    from core.models import GPTModel

    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=13, activation="swiglu")
    model = GPTModel(config, ProcessGroups())
    found = global_slices(model, ProcessGroups())
    for name, param in model.named_parameters():
        piece = found[name]
        assert (piece.name, piece.shape) == (name, tuple(param.shape))
        assert sum(box.numel for box in piece.boxes) == param.numel()


def test_a_stage_of_our_gpt_counts_layers_over_the_whole_model() -> None:
    from core.models import GPTModel

    config = TransformerConfig(
        num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=13, pipeline_model_parallel_size=2
    )
    whole = GPTModel(TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=13))
    expected = {name: tuple(param.shape) for name, param in whole.named_parameters()}
    stages = [
        GPTModel(config, ProcessGroups(), post_process=False, layer_numbers=[0]),
        GPTModel(config, ProcessGroups(), pre_process=False, layer_numbers=[1, 2, 3]),
    ]
    found = [piece for stage in stages for piece in global_slices(stage, ProcessGroups()).values()]
    assert {piece.name: piece.shape for piece in found} == expected
    copies = [piece.local_name for piece in found if piece.is_copy]
    assert copies == ["output_layer.weight"] and len(found) == len(expected) + 1
