"""Muon against one process that sees whole matrices and orthogonalizes them by a singular value decomposition, fp64."""

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from core.groups.process_groups import ProcessGroups
from core.models import GPTModel
from core.optimizer import OptimizerConfig, ParamKey, ParamPredicate, get_megatron_optimizer
from core.optimizer.algorithms.muon import MatrixLayout, Muon, joined, part_of
from core.optimizer.algorithms.names import resolve
from core.optimizer.algorithms.newton_schulz import COEFFICIENTS, coefficients_of, orthogonalize, shape_factor
from core.tensor_parallel import tensor_parallel_slice
from core.transformer import TransformerConfig
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, train, wrap

STRATEGIES = ("no_shard", "optim")
OPTIONS: dict[str, Any] = {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0}


# -- the reference: singular values through the scalar polynomials ----------------------------------------------------


def polar_by_svd(matrix: torch.Tensor, kind: str, steps: int) -> torch.Tensor:
    """What `steps` of the iteration do to U S V^T: every s becomes a s + b s^3 + c s^5, one step after the other."""
    u, s, vh = torch.linalg.svd(matrix / matrix.norm().clamp(min=1e-7), full_matrices=False)
    for a, b, c in coefficients_of(kind, steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


class PlainMuon:
    """Whole matrices, one by one; Adam by torch for the rest. `qkv`: name -> rows of (queries, key, value)."""

    def __init__(self, model: nn.Module, matrices: set[str], *, qkv: Any = None, **options: Any) -> None:
        self.model, self.options, self.qkv = model, options, qkv or {}
        self.matrices = {name: p for name, p in model.named_parameters() if name in matrices}
        self.momenta = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        rest = [p for name, p in model.named_parameters() if name not in matrices]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": options["weight_decay"]},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=options["lr"])

    @torch.no_grad()
    def step(self) -> None:
        lr, beta = self.options["lr"], self.options.get("muon_momentum", 0.95)
        for name, param in self.matrices.items():
            m = self.momenta[name]
            m.copy_(beta * m + (1 - beta) * param.grad)
            update = (1 - beta) * param.grad + beta * m if self.options.get("muon_nesterov") else m
            param -= lr * self.options["weight_decay"] * param + lr * self.direction(name, update)
        self.adam.step()

    def direction(self, name: str, update: torch.Tensor) -> torch.Tensor:
        mode = self.options.get("muon_scale_mode", "spectral")
        if update.dim() == 3:
            return torch.stack([self.direction(name, each) for each in update])
        if name in self.qkv:
            queries, keys, values = self.qkv[name]
            row_of = torch.arange(update.shape[0]) % (queries + keys + values)
            out = torch.zeros_like(update)
            for low, high in ((0, queries), (queries, queries + keys), (queries + keys, queries + keys + values)):
                chosen = (row_of >= low) & (row_of < high)
                out[chosen] = self.scaled(update[chosen], mode)
            return out
        return self.scaled(update, mode)

    def scaled(self, matrix: torch.Tensor, mode: str) -> torch.Tensor:
        rows, columns = matrix.shape
        factor = {"spectral": max(rows, columns) ** 0.5, "shape_scaling": max(1, rows / columns) ** 0.5}
        factor |= {"unit_rms_norm": (rows / columns) ** 0.5, "none": 1.0}
        kind, steps = self.options.get("muon_coefficient_type", "quintic"), self.options.get("muon_num_ns_steps", 5)
        return factor[mode] * self.options.get("muon_extra_scale_factor", 1.0) * polar_by_svd(matrix, kind, steps)


def assert_equal_after_moving(got: Any, want: Any, start: Any, rtol: float = 1e-7, least: float = 1e-3) -> None:
    for name, expected in want.items():
        moved = (expected - start[name]).norm()
        assert moved > least, f"{name}: the reference moved by {moved} only"
        error = (got[name] - expected).norm()
        assert error <= rtol * moved, f"{name}: off by {error} after a move of {moved}"


# -- the arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "steps"), [("simple", 5), ("quintic", 5), ("quintic", 10), ("polar_express", 10)])
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (1, 4), (4, 1)])
def test_newton_schulz_acts_on_singular_values_by_its_polynomials(kind: str, steps: int, shape: Any) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=torch.float64)
    got = orthogonalize(matrix, coefficients_of(kind, steps))
    torch.testing.assert_close(got, polar_by_svd(matrix, kind, steps), rtol=1e-9, atol=1e-9)
    spread = {"simple": 0.4, "quintic": 0.3, "polar_express": 0.02}[kind]
    values = torch.linalg.svdvals(got)
    assert (values - 1).abs().max() < spread, f"singular values {values.tolist()}"


def test_polar_express_brings_small_singular_values_to_one() -> None:
    """The paper's promise for singular values of 1e-3 and more, of a matrix of norm one."""
    s = torch.logspace(-3, 0, 400, dtype=torch.float64)
    for a, b, c in coefficients_of("polar_express", 10):
        s = a * s + b * s**3 + c * s**5
    assert (s - 1).abs().max() < 1e-3
    assert {len(COEFFICIENTS[kind]) for kind in ("simple", "quintic", "polar_express")} == {1, 5, 8}


def test_stacks_are_orthogonalized_one_by_one_and_zeros_stay_zeros() -> None:
    torch.manual_seed(2)
    stack = torch.randn(3, 4, 7, dtype=torch.float64)
    stack[1] = 0
    got = orthogonalize(stack, coefficients_of("quintic", 5))
    for each, one in zip(stack, got, strict=True):
        torch.testing.assert_close(one, orthogonalize(each, coefficients_of("quintic", 5)))
    assert torch.equal(got[1], torch.zeros(4, 7, dtype=torch.float64))


def test_numbers_of_steps_that_cut_a_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="muon_num_ns_steps is 6 and the 5 triples of 'quintic' belong together"):
        coefficients_of("quintic", 6)
    assert len(coefficients_of("simple", 3)) == 3 and len(coefficients_of("polar_express", 3)) == 3
    for options in ({"muon_scale_mode": "rms"}, {"muon_tp_mode": "distributed"}, {"muon_num_ns_steps": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            OptimizerConfig(optimizer="muon", **options)  # type: ignore[arg-type]


def test_shape_factors_by_hand() -> None:
    assert [shape_factor(mode, 16, 4) for mode in ("spectral", "shape_scaling", "unit_rms_norm", "none")] == [
        4,
        2,
        2,
        1,
    ]
    assert [shape_factor(mode, 4, 16) for mode in ("spectral", "shape_scaling", "unit_rms_norm")] == [4, 1, 0.5]
    # 'spectral': the entries of an orthogonal update have the root mean square of sign updates.
    torch.manual_seed(3)
    update = orthogonalize(torch.randn(40, 60, dtype=torch.float64), coefficients_of("polar_express", 10))
    assert (update * shape_factor("spectral", 40, 60)).square().mean().sqrt() == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_joined_as_tensor_parallel_layers_cut_them(stride: int, dim: int) -> None:
    whole = torch.arange(12 * 12 * 12).view(12, 12, 12)
    parts = torch.stack([tensor_parallel_slice(whole, dim, 3, rank, stride) for rank in range(3)])
    assert torch.equal(joined(parts, dim, stride), whole)


def test_muon_refuses_vectors() -> None:
    with pytest.raises(ValueError, match=r"shape \[3\]; give it another optimizer"):
        Muon([nn.Parameter(torch.zeros(3))])


# -- on ranks ---------------------------------------------------------------------------------------------------------


VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "nesterov, simple": {
        "muon_nesterov": True, "muon_coefficient_type": "simple", "muon_num_ns_steps": 3, "muon_momentum": 0.8,
        "muon_scale_mode": "unit_rms_norm", "muon_extra_scale_factor": 0.2, "lr": 0.1,
    },
}  # fmt: skip


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.in_suite()
def test_matrices_go_to_muon_and_the_rest_to_adam_in_every_sharding(
    rank: int, world: int, strategy: str, variant: str
) -> None:
    parallel_state.initialize_model_parallel()
    options = {**OPTIONS, **VARIANTS[variant]}
    model = make_net()
    start, whole = copy.deepcopy(model), copy.deepcopy(model)
    reference = PlainMuon(whole, {"first.weight", "second.weight", "third.weight"}, **options)
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=60, keep_params_whole=strategy == "optim")
    optimizer = get_megatron_optimizer(OptimizerConfig(**options), [ddp])
    for microbatch in range(4):
        train(ddp, optimizer, rank, microbatch)
        whole.zero_grad()
        for source in range(world):
            (loss_of(whole, source, microbatch) / world).backward()
        reference.step()
    assert_equal_after_moving(*(dict(net.named_parameters()) for net in (model, whole, start)))
    before = copy.deepcopy(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    train(ddp, optimizer, rank, 9)
    after = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model.load_state_dict(before)
    optimizer.reload_model_params()
    optimizer.load_state_dict(saved)
    train(ddp, optimizer, rank, 9)
    for name, value in model.state_dict().items():
        assert torch.equal(value, after[name]), f"{name}: a step after loading is another one"


@ranks(2)
def test_shards_that_may_cut_matrices_are_refused_on_all_ranks(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    ddp = wrap(make_net(width=61), use_distributed_optimizer=True)
    with pytest.raises(ValueError, match=r"'third.weight' is updated by .*keep_params_whole=True"):
        get_megatron_optimizer(OptimizerConfig(**OPTIONS), [ddp])
    matrices_whole = wrap(make_net(width=61), use_distributed_optimizer=True, keep_params_whole=True)
    factored = OptimizerConfig(optimizer="Adafactor", lr=0.1)
    with pytest.raises(ValueError, match="'third.bias' is updated by .*keep_params_whole='all'"):
        get_megatron_optimizer(factored, [matrices_whole])
    tagged = make_net()
    tagged.first.weight.is_embedding_or_output_parameter = True
    with pytest.raises(ValueError, match="'first.weight' is an embedding or output layer"):
        get_megatron_optimizer(factored, [wrap(tagged, use_distributed_optimizer=True, keep_params_whole="all")])


@ranks(2)  # the sum of two equal numbers is exact in bf16
@pytest.mark.parametrize("grads_in_fp32", [True, False])
def test_bf16_matrices_have_fp32_masters_that_follow_the_fp32_reference(
    rank: int, world: int, grads_in_fp32: bool
) -> None:
    parallel_state.initialize_model_parallel()
    model, whole = make_net(torch.bfloat16), make_net(torch.bfloat16).float()
    start = copy.deepcopy(whole)
    ddp = wrap(model, use_distributed_optimizer=True, keep_params_whole=True, grad_reduce_in_fp32=grads_in_fp32)
    options = {**OPTIONS, "muon_fp32_matmul_prec": "highest"}
    optimizer = get_megatron_optimizer(OptimizerConfig(bf16=True, **options), [ddp])
    reference = PlainMuon(whole, {"first.weight", "second.weight", "third.weight"}, **options)
    for step in range(3):
        optimizer.zero_grad()
        for number, (param, other) in enumerate(zip(model.parameters(), whole.parameters(), strict=True)):
            gradient = torch.randn(other.shape, generator=torch.Generator().manual_seed(10 * step + number))
            other.grad = gradient.bfloat16().float()  # the same on every rank, so the mean is exact
            param.grad.copy_(other.grad)
        ddp.reducer.note_forward()
        finalize_model_grads([ddp])
        assert optimizer.step()[0]
        reference.step()
    masters = {name: entry["master"] for name, [entry] in optimizer.state_by_parameter().items() if "weight" in name}
    seen = [None] * world
    dist.all_gather_object(seen, {n: m for n, m in masters.items() if n != "norm.weight"})
    found = {name: master for part in seen for name, master in part.items()}  # type: ignore[attr-defined]
    assert found.keys() == {"first.weight", "second.weight", "third.weight"}
    for name, master in found.items():
        want, before = whole.get_parameter(name).detach(), start.get_parameter(name).detach()
        error, moved = (master.view(want.shape) - want).norm(), (want - before).norm()
        assert moved > 0.1 and error < 1e-4 * moved, f"{name}: off by {error} after a move of {moved}"
        assert torch.equal(model.get_parameter(name), master.view(want.shape).bfloat16())


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_matrix_cut_over_ranks_is_orthogonalized_whole(rank: int, world: int, nesterov: bool) -> None:
    """Rows, columns, halves of rows (as SwiGLU's), stacks of experts, padded rows, fused qkv, on one to three ranks."""
    group = dist.group.WORLD
    torch.manual_seed(7)
    cases: list[tuple[torch.Tensor, MatrixLayout]] = []
    for shape, dim, stride, length in (
        ((12, 5), 0, 1, None), ((5, 12), 1, 1, None), ((12, 5), 0, 2, None), ((4, 12, 5), 1, 2, None),
        ((4, 5, 6), 2, 1, None), ((12, 9), 0, 1, 10),
    ):  # fmt: skip
        whole = torch.randn(shape, dtype=torch.float64)
        cases.append((whole, MatrixLayout(group, dim, stride, length)))
    cases.append((torch.randn(48, 6, dtype=torch.float64), MatrixLayout(group, 0, qkv_rows=(4, 2, 2))))
    params, wholes = [], []
    for whole, layout in cases:
        params.append(nn.Parameter(tensor_parallel_slice(whole, layout.dim, world, rank, layout.stride).clone()))
        wholes.append(nn.Parameter(whole.clone()))
    layouts = {id(param): layout for param, (_, layout) in zip(params, cases, strict=True)}
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.2, "scale_mode": "unit_rms_norm"}
    optimizer = Muon(params, layout_of=lambda master: layouts[id(master)], **options)
    names = {str(index): whole for index, whole in enumerate(wholes)}
    holder = nn.ParameterDict(names)
    reference = plain_without_adam(holder, len(wholes) - 1, nesterov)
    for step in range(3):
        for param, whole, (_, layout) in zip(params, wholes, cases, strict=True):
            whole.grad = torch.sin(whole.detach() * (step + 2))
            if layout.length is not None:
                whole.grad[layout.length :] = 0  # padding has no gradient
            param.grad = tensor_parallel_slice(whole.grad, layout.dim, world, rank, layout.stride).clone()
        optimizer.step()
        reference()
    for param, whole, (start, layout) in zip(params, wholes, cases, strict=True):
        expected = tensor_parallel_slice(whole.detach(), layout.dim, world, rank, layout.stride)
        assert (whole - start).norm() > 0.1
        torch.testing.assert_close(param.detach(), expected, rtol=1e-8, atol=1e-9)
        assert torch.equal(part_of(whole.detach(), layout), expected) or world == 1
    assert world == 1 or optimizer.collectives.traffic.collectives == 3 * len(cases)


def plain_without_adam(holder: nn.ParameterDict, qkv_index: int, nesterov: bool) -> Any:
    """PlainMuon over all of these; the scale of a padded matrix is that of its 10 real rows of 12."""
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "muon_momentum": 0.9, "muon_nesterov": nesterov}
    options["muon_scale_mode"] = "unit_rms_norm"
    holder.register_parameter("unused", nn.Parameter(torch.zeros(1)))  # torch's Adam takes no empty list
    plain = PlainMuon(holder, set(holder) - {"unused"}, qkv={str(qkv_index): (4, 2, 2)}, **options)
    scaled = plain.scaled

    def of_real_rows(matrix: torch.Tensor, mode: str) -> torch.Tensor:
        return scaled(matrix, mode) * (math.sqrt(10 / 12) if tuple(matrix.shape) == (12, 9) else 1.0)

    plain.scaled = of_real_rows  # type: ignore[method-assign]
    return plain.step


def gpt_config(tp: int, experts: bool = False, ep: int = 1) -> TransformerConfig:
    moe: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": ep}
    return TransformerConfig(
        **(moe if experts else {}),
        num_layers=2,
        hidden_size=16,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=24,
        vocab_size=14,
        max_sequence_length=8,
        params_dtype=torch.float64,
        init_method_std=0.3,
        position_embedding_type="rope",
        activation="swiglu",
        normalization="RMSNorm",
        share_embeddings_and_output_weights=False,
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
    )


def tokens_of(step: int, source: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + source)
    return torch.randint(0, 14, (2, 3, 8), generator=generator)


@ranks(2, 4, timeout_s=180)
def test_a_gpt_trains_alike_split_over_tensor_and_data_parallelism_and_whole(rank: int, world: int) -> None:
    """tp 2 x dp (world / 2), sharded, SwiGLU and grouped queries; embedding and output layer by Adam."""
    check_gpt(experts=False, ep=1, expert_tp=None)


@ranks(4, timeout_s=180)
@pytest.mark.parametrize("expert_tp", [1, 2])
def test_stacks_of_experts_are_updated_matrix_by_matrix_in_every_layout(rank: int, world: int, expert_tp: int) -> None:
    """tp 2 x dp 2 with the experts over ep 2, each whole or split over two ranks."""
    check_gpt(experts=True, ep=2, expert_tp=expert_tp)


def check_gpt(*, experts: bool, ep: int, expert_tp: int | None) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, expert_model_parallel_size=ep, expert_tensor_parallel_size=expert_tp
    )
    groups = parallel_state.get_process_groups()
    config = gpt_config(2, experts, ep)
    if expert_tp is not None:
        config = dataclasses.replace(config, expert_tensor_parallel_size=expert_tp)
    split, whole = GPTModel(config, groups), GPTModel(gpt_config(1, experts), ProcessGroups())
    start = {name: param.detach().clone() for name, param in whole.named_parameters()}
    options = DistributedDataParallelConfig(use_distributed_optimizer=True, keep_params_whole=True, bucket_size=2000)
    ddp = DistributedDataParallel(config, options, split)
    outer = ("embedding.word_embeddings.weight", "output_layer.weight")
    matrices = {n for n, p in whole.named_parameters() if p.dim() >= 2 and n not in outer}
    assert len(matrices) == (10 if experts else 8)
    qkv = {n: p.qkv_split_rows for n, p in whole.named_parameters() if hasattr(p, "qkv_split_rows")}
    assert set(qkv.values()) == {(4, 2, 2)} and len(qkv) == 2
    reference = PlainMuon(whole, matrices, qkv=qkv, **{**OPTIONS, "lr": 0.005})
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**OPTIONS, "lr": 0.005}), [ddp])
    for step in range(3):
        batches = [tokens_of(step, source) for source in range(groups.size("dp_cp"))]
        optimizer.zero_grad()
        ddp(*batches[groups.rank("dp_cp")]).mean().backward()
        finalize_model_grads([ddp])
        assert optimizer.step()[0]
        whole.zero_grad()
        for tokens, labels in batches:
            (whole(tokens, labels).mean() / len(batches)).backward()
        reference.step()
    local = dict(split.named_parameters())
    expected, before = (
        {n: own_part(t, local[n], groups) for n, t in tensors}
        for tensors in ([(n, p.detach()) for n, p in whole.named_parameters()], list(start.items()))
    )
    assert_equal_after_moving(local, expected, before, rtol=1e-6)


def own_part(whole: torch.Tensor, local: Any, groups: ProcessGroups) -> torch.Tensor:
    """What this rank holds of a parameter of the whole model."""
    is_expert = not getattr(local, "allreduce", True)
    if is_expert:
        whole = whole.chunk(groups.size("ep"))[groups.rank("ep")]
    axis = "expt_tp" if is_expert else "tp"
    if not getattr(local, "tensor_model_parallel", False):
        return whole
    return tensor_parallel_slice(
        whole, local.partition_dim, groups.size(axis), groups.rank(axis), local.partition_stride
    )


@ranks(1, 2)
def test_blockwise_orthogonalizes_parts(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    model = nn.Linear(4, 6 // world, bias=False).double()
    torch.manual_seed(5)
    whole = torch.randn(6, 4, dtype=torch.float64)
    model.weight.data.copy_(whole.chunk(world)[rank])
    model.weight.tensor_model_parallel, model.weight.partition_dim, model.weight.partition_stride = True, 0, 1
    ddp = wrap(model)
    options = {**OPTIONS, "weight_decay": 0.0, "lr": 0.1}
    optimizer = get_megatron_optimizer(OptimizerConfig(muon_tp_mode="blockwise", **options), [ddp])
    optimizer.zero_grad()
    (model.weight * whole.chunk(world)[rank].cos()).sum().backward()
    finalize_model_grads([ddp])
    optimizer.step()
    gradient = whole.chunk(world)[rank].cos()
    expected = whole.chunk(world)[rank] - 0.1 * max(gradient.shape) ** 0.5 * polar_by_svd(0.05 * gradient, "quintic", 5)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-9, atol=1e-9)


# -- other algorithms that need whole parameters ----------------------------------------------------------------------


@ranks(1, 3, nightly=(2, 4))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
@pytest.mark.in_suite()
def test_a_torch_class_that_needs_shapes_sees_whole_matrices(rank: int, world: int, strategy: str, name: str) -> None:
    """Against the same class of torch on one process; vectors by Adam, of which shards hold parts."""
    parallel_state.initialize_model_parallel()
    model = make_net()
    start, whole = copy.deepcopy(model), copy.deepcopy(model)
    lr = 0.05
    matrices = [p for p in whole.parameters() if p.dim() == 2]
    vectors = [p for p in whole.parameters() if p.dim() == 1]
    plain = [
        getattr(torch.optim, name)(matrices, lr=lr, weight_decay=0.1),
        torch.optim.AdamW(vectors, lr=lr, weight_decay=0.0),
    ]
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=60, keep_params_whole=strategy == "optim")
    vector = ParamKey(predicate=ParamPredicate("vector", lambda param: param.dim() == 1))
    config = OptimizerConfig(optimizer=name, lr=lr, weight_decay=0.1, clip_grad=0.0)
    overrides = {vector: {"optimizer": "adam", "wd_mult": 0.0}}
    optimizer = get_megatron_optimizer(config, [ddp], config_overrides=overrides)  # type: ignore[arg-type]
    for microbatch in range(4):
        train(ddp, optimizer, rank, microbatch)
        whole.zero_grad()
        for source in range(world):
            (loss_of(whole, source, microbatch) / world).backward()
        for each in plain:
            each.step()
    # torch's Muon works in bf16, so parameters that differ in the last bit may differ by much more after a step.
    rtol = 1e-9 if name == "Adafactor" else 2e-2
    assert_equal_after_moving(*(dict(net.named_parameters()) for net in (model, whole, start)), rtol=rtol)


@ranks(1, 3, nightly=(2,))
@pytest.mark.parametrize(("name", "strategy"), [("Adafactor", each) for each in STRATEGIES] + [("lamb", "optim")])
def test_adafactor_and_lamb_see_every_parameter_whole(rank: int, world: int, name: str, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    model = make_net()
    start, whole = copy.deepcopy(model), copy.deepcopy(model)
    kind: Any = resolve(name)
    plain = kind(whole.parameters(), lr=0.05, weight_decay=0.0)
    whole_shards = "all" if strategy == "optim" else False
    ddp = wrap(model, data_parallel_sharding_strategy=strategy, bucket_size=60, keep_params_whole=whole_shards)
    config = OptimizerConfig(optimizer=name, lr=0.05, weight_decay=0.0, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [ddp])
    for microbatch in range(4):
        train(ddp, optimizer, rank, microbatch)
        whole.zero_grad()
        for source in range(world):
            (loss_of(whole, source, microbatch) / world).backward()
        plain.step()
    assert_equal_after_moving(*(dict(net.named_parameters()) for net in (model, whole, start)), rtol=1e-9, least=1e-5)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(ddp, optimizer, rank, 5)
