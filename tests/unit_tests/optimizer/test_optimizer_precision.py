"""Masters and moments in other dtypes than fp32, against plain torch in fp32 and fp64 on one process.

Remainders must be equal bit for bit; 16-bit moments and masters must stay within BOUNDS, relative to the distance that
the parameters have travelled.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.masters import master_weights, scratch
from core.optimizer.masters.master_storage import CopyStorage
from tests.unit_tests.optimizer.test_optimizer import ALGORITHMS
from tests.unit_tests.optimizer.test_optimizer_fp16 import assert_bit_equal
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import loss_of, make_net, wrap

STRATEGIES = ("no_shard", "optim", "optim_grads")
# One strategy in every run, and all of them among the long sweeps.
ONE_STRATEGY = ("optim_grads", *(pytest.param(name, marks=pytest.mark.nightly) for name in STRATEGIES[:2]))
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 12


def aware(**options: Any) -> dict[str, Any]:
    return {"use_precision_aware_optimizer": True, **options}


THROUGHOUT = aware(main_grads_dtype=BF16, main_params_dtype=BF16, exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16)


def gradient(param: nn.Parameter, index: int, rank: int, step: int) -> torch.Tensor:
    """Numbers of very different sizes, in the parameter's dtype; the same whatever the gradient is reduced in."""
    generator = torch.Generator().manual_seed(1000 * index + 10 * step + rank)
    size = 2.0 ** (-12 * torch.rand(param.shape, generator=generator))
    return (torch.randn(param.shape, generator=generator) * size).to(param.dtype)


def train(ddp: Any, optimizer: Any, rank: int, steps: range) -> list[float]:
    """Steps on made-up gradients, so that no forward can hide or enlarge a difference."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        products = [(p * gradient(p, i, rank, step)).sum() for i, p in enumerate(ddp.module.parameters())]
        torch.stack(products).sum().backward()
        ddp.reducer.note_forward()
        finalize_model_grads([ddp])
        updated, norm, _ = optimizer.step()
        assert updated
        norms.append(norm)
    return norms


def build(
    strategy: str, options: dict[str, Any], *, dtype: torch.dtype = BF16, grads_in_fp32: bool = True, width: int = 61
) -> tuple[Any, Any]:
    ddp = wrap(
        make_net(dtype, width=width),
        data_parallel_sharding_strategy=strategy,
        grad_reduce_in_fp32=grads_in_fp32,
        scale_in_optimizer=True,
        overlap_grad_reduce=True,
        bucket_size=600,
    )
    return ddp, get_megatron_optimizer(OptimizerConfig(**options), [ddp])


def masters_by_name(optimizer: Any, ddp: Any) -> dict[str, torch.Tensor]:
    """The owned part of each master in fp32; parameters that are their own are read from the model."""
    found = {}
    for name, entries in optimizer.state_by_parameter().items():
        flat = ddp.module.get_parameter(name).detach().reshape(-1)
        parts = [e.get("master", flat[e["offset"] : e["offset"] + e["numel"]]) for e in entries]
        found[name] = torch.cat([part.float() for part in parts])
    return found


@ranks(3, nightly=(1, 2))
@pytest.mark.parametrize("strategy", ONE_STRATEGY)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.in_suite(1)
def test_remainders_make_the_steps_of_fp32_masters_bit_for_bit(
    rank: int, world: int, strategy: str, algorithm: str
) -> None:
    parallel_state.initialize_model_parallel()
    for grads_in_fp32, short_scratch in ((True, False), (True, True), (False, False)):
        whole = scratch.CPU_NUMEL
        scratch.CPU_NUMEL = 128 if short_scratch else whole
        try:
            options = {**ALGORITHMS[algorithm], "clip_grad": 0.5}
            dtype = FP32 if grads_in_fp32 else BF16
            plain, plain_optimizer = build(strategy, options, grads_in_fp32=grads_in_fp32)
            ddp, optimizer = build(strategy, {**options, **aware(main_grads_dtype=dtype)}, grads_in_fp32=grads_in_fp32)
        finally:
            scratch.CPU_NUMEL = whole
        waves = max((len(masters.waves) for masters in optimizer.masters), default=0)
        assert rank > 0 or (waves > 1 if short_scratch else waves == 1)  # the last shards hold little but padding
        assert not any(isinstance(masters.storage, CopyStorage) for masters in optimizer.masters)
        assert train(plain, plain_optimizer, rank, range(6)) == train(ddp, optimizer, rank, range(6))
        want, got = plain_optimizer.state_by_parameter(), optimizer.state_by_parameter()
        assert want.keys() == got.keys()
        for name in want:
            for key in want[name][0]:
                if isinstance(want[name][0][key], torch.Tensor) and want[name][0][key].dim():
                    one = torch.cat([entry[key] for entry in want[name]])
                    other = torch.cat([entry[key] for entry in got[name]])
                    assert torch.equal(one, other), f"{name} {key}"
        start = make_net(BF16, width=61)
        for name, entries in got.items():
            param = ddp.module.get_parameter(name).detach()
            begun = start.get_parameter(name).detach().float().view(-1)
            for entry in entries:
                assert not torch.equal(entry["master"], begun[entry["offset"] : entry["offset"] + entry["numel"]])
                part = param.view(-1)[entry["offset"] : entry["offset"] + entry["numel"]]
                # Halfway between two bf16 numbers torch rounds to the even one, and a remainder away from zero.
                tie = (entry["master"].view(torch.int32) & 0xFFFF) == 0x8000
                assert torch.equal(part[~tie], entry["master"][~tie].bfloat16()), name
                assert torch.allclose(part.float(), entry["master"], rtol=2.0**-8, atol=0)


class Plain:
    """torch.optim on one process in fp64, over fp32 copies of the whole 16-bit model."""

    def __init__(self, dtype: torch.dtype, world: int, options: dict[str, Any]) -> None:
        self.model = make_net(dtype, width=61)
        self.world = world
        self.masters = [nn.Parameter(p.detach().double()) for p in self.model.parameters()]
        self.start = [p.detach().clone() for p in self.masters]
        decay = options["weight_decay"]
        groups = [{"params": [p], "weight_decay": decay if p.dim() > 1 else 0.0} for p in self.masters]
        self.optimizer = torch.optim.AdamW(groups, lr=options["lr"], eps=options["adam_eps"])
        self.clip = options["clip_grad"]

    def train(self, steps: range) -> list[float]:
        norms = []
        for step in steps:
            for index, (master, param) in enumerate(zip(self.masters, self.model.parameters(), strict=True)):
                grads = [gradient(param, index, r, step).double() for r in range(self.world)]
                master.grad = torch.stack(grads).mean(0)
            norms.append(nn.utils.clip_grad_norm_(self.masters, self.clip).item())
            self.optimizer.step()
        return norms


CASES: dict[str, tuple[torch.dtype, torch.dtype, dict[str, Any]]] = {
    # parameters, gradients, options
    "bf16 remainder": (BF16, FP32, aware()),
    "bf16 remainder, bf16 gradients": (BF16, BF16, aware(main_grads_dtype=BF16)),
    "bf16 with fp32 copies, bf16 gradients": (BF16, BF16, {}),
    "bf16 moments": (BF16, FP32, aware(exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16)),
    "fp32 parameters, bf16 moments": (FP32, FP32, aware(exp_avg_dtype=BF16)),
    "fp16 parameters, fp32 copies": (FP16, FP16, {"loss_scale": 1.0}),
    "fp16 parameters are the masters": (FP16, FP32, {**aware(main_params_dtype=FP16), "loss_scale": 1.0}),
    "bf16 parameters are the masters": (BF16, FP32, aware(main_params_dtype=BF16)),
    "bf16 throughout": (BF16, BF16, THROUGHOUT),
}
# Distance from fp64 after 12 steps of AdamW, as a part of the distance that masters have moved.
BOUNDS = {
    "bf16 moments": 4e-3,
    "fp16 parameters are": 3e-3,
    "bf16 parameters are": 2e-2,
    "bf16 throughout": 2e-2,
    "bf16 gradients": 5e-3,
    "fp16 parameters": 1e-3,
    "": 1e-6,
}


def bound_of(case: str) -> float:
    return next(bound for words, bound in BOUNDS.items() if words in case)


@ranks(3, nightly=(1, 2, 4))
@pytest.mark.parametrize("strategy", ONE_STRATEGY)
def test_steps_stay_within_the_stated_bound_of_fp64(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    for case, (dtype, grads, extra) in CASES.items():
        options = {**ALGORITHMS["adamw"], "clip_grad": 3.0, **extra}
        ddp, optimizer = build(strategy, options, dtype=dtype, grads_in_fp32=grads == FP32)
        plain = Plain(dtype, world, options)
        norms, want_norms = train(ddp, optimizer, rank, range(STEPS)), plain.train(range(STEPS))
        assert norms == pytest.approx(want_norms, rel=1e-2 if grads != FP32 else 1e-5), case
        assert min(want_norms) > 3.0, "nothing was clipped"
        got = masters_by_name(optimizer, ddp)
        error, moved = torch.zeros(2, dtype=torch.float64), 0.0
        for index, (name, _) in enumerate(ddp.module.named_parameters()):
            for entry in optimizer.state_by_parameter().get(name, [])[:1]:
                low, high = entry["offset"], entry["offset"] + got[name].numel()
                want = plain.masters[index].detach().view(-1)[low:high]
                start = plain.start[index].view(-1)[low:high]
                error += torch.stack([(got[name] - want).norm().square(), (want - start).norm().square()])
        dist.all_reduce(error)
        relative, moved = (error[0] / error[1]).sqrt().item(), error[1].sqrt().item()
        assert moved > 1.0
        assert relative <= bound_of(case), f"{case}: off by {relative:.3g} of the way"
        assert relative > 0


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.in_suite(1)
def test_every_precision_resumes_bit_for_bit(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    for case, (dtype, grads, extra) in CASES.items():
        options = {**ALGORITHMS["adamw"], **extra}
        ddp, optimizer = build(strategy, options, dtype=dtype, grads_in_fp32=grads == FP32)
        train(ddp, optimizer, rank, range(3))
        weights, state = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
        train(ddp, optimizer, rank, range(3, 6))
        again, resumed = build(strategy, options, dtype=dtype, grads_in_fp32=grads == FP32)
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        assert_bit_equal(resumed.state_dict(), state, case)
        train(again, resumed, rank, range(3, 6))
        assert_bit_equal(again.state_dict(), ddp.state_dict(), case)
        assert_bit_equal(resumed.state_dict(), optimizer.state_dict(), case)


@ranks(2)
def test_a_state_loads_into_another_precision(rank: int, world: int) -> None:
    """fp32 masters become remainders and back without losing a bit; moments are rounded to what is kept here."""
    parallel_state.initialize_model_parallel()
    options = ALGORITHMS["adamw"]
    ddp, optimizer = build("optim", options)
    train(ddp, optimizer, rank, range(3))
    weights, state = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
    kinds = [aware(), aware(exp_avg_dtype=BF16, exp_avg_sq_dtype=BF16), {}]
    for kind in kinds:
        other, receiving = build("no_shard" if kind else "optim", {**options, **kind})
        other.load_state_dict(weights)
        if kind:  # a replicated optimizer needs all of it
            receiving = None
            other, receiving = build("optim", {**options, **kind})
            other.load_state_dict(weights)
        receiving.load_state_dict(state)
        want = masters_by_name(optimizer, ddp)
        assert_bit_equal(masters_by_name(receiving, other), want)
        for name, entries in receiving.state_by_parameter().items():
            kept = torch.cat([entry["exp_avg"] for entry in entries])
            given = torch.cat([entry["exp_avg"] for entry in state["state"][name]])
            dtype = kind.get("exp_avg_dtype", FP32)
            assert kept.dtype == dtype
            assert torch.equal(kept, given.to(dtype)), name


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.in_suite(1)
def test_parameters_frozen_on_the_way_stand_still_in_every_precision(rank: int, world: int, strategy: str) -> None:
    parallel_state.initialize_model_parallel()
    for case, (dtype, grads, extra) in CASES.items():
        ddp, optimizer = build(strategy, {**ALGORITHMS["adamw"], **extra}, dtype=dtype, grads_in_fp32=grads == FP32)
        train(ddp, optimizer, rank, range(2))
        frozen = [ddp.module.second.weight, ddp.module.first.bias]
        for param in frozen:
            param.requires_grad_(False)
        still = [param.clone() for param in frozen]
        others = {n: p.clone() for n, p in ddp.module.named_parameters() if p.requires_grad}
        for step in range(2, 4):
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            finalize_model_grads([ddp])
            assert optimizer.step()[0]
        for param, value in zip(frozen, still, strict=True):
            assert torch.equal(param, value), case
            param.requires_grad_(True)
        for name, value in others.items():
            assert not torch.equal(ddp.module.get_parameter(name), value), f"{case}: {name}"
        train(ddp, optimizer, rank, range(4, 6))
        for param, value in zip(frozen, still, strict=True):
            assert not torch.equal(param, value), case


@ranks(1)
def test_dtypes_that_contradict_the_model_are_refused(rank: int, world: int) -> None:
    parallel_state.initialize_model_parallel()
    with pytest.raises(ValueError, match="main_grads_dtype is torch.float32 and the gradients of .* torch.bfloat16"):
        build("optim", {"lr": 0.1, **aware()}, grads_in_fp32=False)
    with pytest.raises(ValueError, match="use_precision_aware_optimizer is False"):
        OptimizerConfig(exp_avg_dtype=BF16)
    for name, dtype in (("exp_avg_dtype", torch.int8), ("exp_avg_dtype", FP16), ("exp_avg_sq_dtype", FP16)):
        with pytest.raises(ValueError, match=f"{name} is {dtype}; it must be one of torch.float32, torch.bfloat16"):
            OptimizerConfig(**aware(**{name: dtype}))
    for dtype, other in ((BF16, FP16), (FP16, BF16)):
        with pytest.raises(ValueError, match=f"main_params_dtype is {other} and parameter '.*' is in {dtype}"):
            build("optim", {"lr": 0.1, "loss_scale": 1.0, **aware(main_params_dtype=other)}, dtype=dtype)
    with pytest.raises(ValueError, match="is in fp16 and there is no loss scale"):
        build("optim", {"lr": 0.1}, dtype=FP16)
    with pytest.raises(ValueError, match="fp16 is True and no parameter is in torch.float16"):
        build("optim", {"lr": 0.1, "fp16": True}, dtype=BF16)


class Odd(nn.Module):
    """A bf16 matrix whose memory is transposed, a bf16 vector, and fp32 norm weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.matrix = nn.Parameter(torch.randn(5, 7, generator=generator).to(BF16).t())
        self.vector = nn.Parameter(torch.randn(9, generator=generator).to(BF16))
        self.norm = nn.Parameter(torch.randn(6, generator=generator))


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("grads", [BF16, FP32])
@pytest.mark.in_suite()
def test_mixed_dtypes_and_transposed_memory_have_exact_masters_too(
    rank: int, world: int, strategy: str, grads: torch.dtype
) -> None:
    """Gradients are equal on both ranks, so their mean is exact in bf16 as well."""
    parallel_state.initialize_model_parallel()
    trained = []
    for options in ({}, aware(main_grads_dtype=grads)):
        model = Odd()
        assert not model.matrix.is_contiguous()
        ddp = wrap(model, data_parallel_sharding_strategy=strategy, grad_reduce_in_fp32=grads == FP32)
        optimizer = get_megatron_optimizer(OptimizerConfig(**ALGORITHMS["adamw"], clip_grad=0.0, **options), [ddp])
        train(ddp, optimizer, 0, range(STEPS))
        trained.append((masters_by_name(optimizer, ddp), model))
    assert_bit_equal(trained[0][0], trained[1][0])
    for name, param in Odd().named_parameters():
        master = torch.nn.Parameter(param.detach().double())
        reference = torch.optim.AdamW([master], lr=0.05, weight_decay=0.1 * (param.dim() > 1), eps=1e-3)
        index = list(dict(Odd().named_parameters())).index(name)
        for step in range(STEPS):
            master.grad = gradient(param, index, 0, step).double()
            reference.step()
        got = trained[1][1].get_parameter(name).double()
        assert torch.allclose(got, master, rtol=2.0**-8, atol=1e-5), name
        assert (master - param).abs().max() > 0.1


@ranks(1, 2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.in_suite(2)
def test_bf16_throughout_is_stepped_where_it_lies_with_the_bits_of_scratch(
    rank: int, world: int, strategy: str
) -> None:
    """Parameters are frozen, thawed and edited on the way; each of the two forms resumes what the other has saved."""
    parallel_state.initialize_model_parallel()
    options = {**ALGORITHMS["adamw"], "clip_grad": 0.5, **THROUGHOUT}

    def make(*, by_scratch: bool, **others: Any) -> tuple[Any, Any]:
        ddp, optimizer = build(strategy, {**options, **others}, grads_in_fp32=False)
        assert all(segment.in_scratch == by_scratch for masters in optimizer.masters for segment in masters.segments)
        return ddp, optimizer

    def through_scratch() -> Any:
        return mock.patch.object(master_weights, "steps_16_bits", lambda *unused: False)

    saved, results = {}, {}
    for by_scratch in (False, True):
        with through_scratch() if by_scratch else contextlib.nullcontext():
            ddp, optimizer = make(by_scratch=by_scratch)
        for steps, trains in ((range(2), True), (range(2, 4), False), (range(4, 6), True)):
            for param in (ddp.module.second.weight, ddp.module.first.bias):
                param.requires_grad_(trains)
            train(ddp, optimizer, rank, steps)
        with torch.no_grad():
            ddp.module.norm.weight.clamp_(max=0.75)
        train(ddp, optimizer, rank, range(6, 8))
        saved[by_scratch] = copy.deepcopy((ddp.state_dict(), optimizer.state_dict()))
        with contextlib.nullcontext() if by_scratch else through_scratch():
            ddp, optimizer = make(by_scratch=not by_scratch)
        ddp.load_state_dict(saved[by_scratch][0])
        optimizer.load_state_dict(saved[by_scratch][1])
        train(ddp, optimizer, rank, range(8, 10))
        results[by_scratch] = (ddp.state_dict(), optimizer.state_dict())
    assert_bit_equal(saved[False], saved[True])
    assert_bit_equal(results[False], results[True])
    for other in ({"optimizer": "lion"}, {"optimizer": "AdamW"}, {"optimizer_backend": "foreach"}):
        make(by_scratch=True, **other)


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
@pytest.mark.in_suite()
def test_every_algorithm_passes_through_scratch_unchanged(rank: int, world: int, strategy: str) -> None:
    """Elementwise ones in pieces, Muon with whole matrices in their shape; none of them knows of remainders."""
    parallel_state.initialize_model_parallel()
    whole = scratch.CPU_NUMEL
    scratch.CPU_NUMEL = 128
    try:
        for algorithm in ("muon", "lion", "NAdam", "Adagrad"):
            trained = []
            for extra in ({}, aware(main_grads_dtype=BF16)):
                ddp = wrap(
                    make_net(BF16, width=61),
                    data_parallel_sharding_strategy=strategy,
                    grad_reduce_in_fp32=False,
                    keep_params_whole=strategy == "optim",
                )
                config = OptimizerConfig(optimizer=algorithm, lr=0.02, weight_decay=0.1, **extra)
                optimizer = get_megatron_optimizer(config, [ddp])
                train(ddp, optimizer, rank, range(4))
                trained.append(masters_by_name(optimizer, ddp))
            assert_bit_equal(trained[1], trained[0], algorithm)
            for name, value in trained[0].items():
                entry = make_net(BF16, width=61).get_parameter(name).detach().float().view(-1)
                moved = min((value - part).abs().max() for part in entry.unfold(0, value.numel(), 1))
                assert moved > 1e-3, f"{algorithm}: {name}"
    finally:
        scratch.CPU_NUMEL = whole
