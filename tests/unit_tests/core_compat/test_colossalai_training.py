"""Optimizers and schedules by ColossalAI's names: values against formulas, and under ZeRO against one process."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core_compat.colossalai.nn.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
    ExponentialLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LambdaLR,
    LinearWarmupLR,
    MultiplicativeLR,
    MultiStepLR,
    MultiStepWarmupLR,
    OneCycleLR,
    PolynomialLR,
    PolynomialWarmupLR,
    StepLR,
)
from torch import Tensor, nn

from core.optimizer.algorithms.layerwise import CAME, Lamb, Lars
from core_compat.colossalai.optimizers import CPUAdam, FusedAdam, FusedSGD, HybridAdam
from core_compat.colossalai.without_booster import GeminiDDP, GeminiOptimizer, LowLevelZeroOptimizer
from tests.unit_tests.booster.booster_reference import mean_loss
from tests.unit_tests.booster.test_low_level_zero_training import (
    assert_equal_training,
    both_ways,
    net_loss,
    new_booster,
)
from tests.unit_tests.ranks import ranks
from tests.unit_tests.reference import batch, make_net

State = dict[str, Any]


# -- what each optimizer does, written plainly, in fp64 ------------------------------------------------------------


def adam(p: Tensor, g: Tensor, s: State, decoupled: bool, lr: float, decay: float, eps: float) -> Tensor:
    g = g if decoupled else g + decay * p
    p = p * (1 - lr * decay) if decoupled else p
    s["t"] = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
    return p - lr * s["m"] / (1 - 0.9 ** s["t"]) / ((s["v"] / (1 - 0.999 ** s["t"])).sqrt() + eps)


def lamb(p: Tensor, g: Tensor, s: State, corrected: bool, lr: float, decay: float, adam: bool = False) -> Tensor:
    s["t"] = s.get("t", 0) + 1
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.99 * s.get("v", 0) + 0.01 * g * g
    r = s["m"] / (s["v"].sqrt() + 1e-3) + decay * p
    if corrected:
        lr *= math.sqrt(1 - 0.99 ** s["t"]) / (1 - 0.9 ** s["t"])
    sizes = math.sqrt(float((p * p).sum())), math.sqrt(float((r * r).sum()))
    trust = sizes[0] / sizes[1] if all(sizes) and not adam else 1.0
    return p - lr * trust * r


def lars(p: Tensor, g: Tensor, s: State, lr: float, momentum: float, eeta: float, decay: float) -> Tensor:
    sizes = math.sqrt(float((p * p).sum())), math.sqrt(float((g * g).sum()))
    trust = min(eeta * sizes[0] / (sizes[1] + decay * sizes[0]), 50.0) if all(sizes) else 1.0
    d = torch.clamp(g + decay * p, -10, 10)
    s["b"] = momentum * s["b"] + d if "b" in s else d
    return p - lr * trust * s["b"]


def came(p: Tensor, g: Tensor, s: State, lr: float, decay: float) -> Tensor:
    def root(name: str, squares: Tensor, beta: float) -> Tensor:
        if squares.dim() < 2:
            s[name] = beta * s.get(name, 0) + (1 - beta) * squares
            return s[name].sqrt()
        r = s[name + "r"] = beta * s.get(name + "r", 0) + (1 - beta) * squares.mean(1)
        c = s[name + "c"] = beta * s.get(name + "c", 0) + (1 - beta) * squares.mean(0)
        return (torch.outer(r, c) / r.mean()).sqrt()

    u = g / root("v", g * g + 1e-30, 0.9)
    u = u / max(1.0, math.sqrt(float((u * u).mean())) / 1.5)
    s["m"] = 0.8 * s.get("m", 0) + 0.2 * u
    step = s["m"] / root("i", (u - s["m"]) ** 2 + 1e-16, 0.95) if g.dim() > 1 else s["m"]
    return p * (1 - lr * decay) - lr * step


Make = Callable[[Any], torch.optim.Optimizer]
Rule = Callable[[Tensor, Tensor, State], Tensor]
RULES: dict[str, tuple[Make, Rule]] = {
    "hybrid": (lambda p: HybridAdam(p, lr=0.05, weight_decay=0.1), lambda *a: adam(*a, True, 0.05, 0.1, 1e-8)),
    "cpu": (
        lambda p: CPUAdam(p, 0.05, adamw_mode=False, weight_decay=0.1),
        lambda *a: adam(*a, False, 0.05, 0.1, 1e-8),
    ),
    "fused": (lambda p: FusedAdam(p, 0.05, eps=1e-3), lambda *a: adam(*a, True, 0.05, 0.0, 1e-3)),
    "lamb": (lambda p: Lamb(p, 0.05, (0.9, 0.99), 1e-3, 0.1), lambda *a: lamb(*a, False, 0.05, 0.1)),
    "lamb corrected": (
        lambda p: Lamb(p, 0.05, (0.9, 0.99), 1e-3, 0.1, bias_correction=True),
        lambda *a: lamb(*a, True, 0.05, 0.1),
    ),
    "lamb as adam": (
        lambda p: Lamb(p, 0.05, (0.9, 0.99), 1e-3, 0.1, adam=True),
        lambda *a: lamb(*a, False, 0.05, 0.1, True),
    ),
    "lars": (lambda p: Lars(p, 2.0, 0.9, 0.02, 0.1), lambda *a: lars(*a, 2.0, 0.9, 0.02, 0.1)),
    "came": (
        lambda p: CAME(p, 0.02, clip_threshold=1.5, betas=(0.8, 0.9, 0.95), weight_decay=0.1),
        lambda *a: came(*a, 0.02, 0.1),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_an_optimizer_updates_as_its_formula(name: str) -> None:
    make, rule = RULES[name]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((5, 3), (7,))]
    params.append(nn.Parameter(torch.zeros(4)))  # without a size to trust, its ratio is 1
    wanted: list[Tensor] = [param.detach().double().clone() for param in params]
    states: list[State] = [{} for _ in params]
    start = [value.clone() for value in wanted]
    optimizer = make(params)
    for step in range(5):
        for number, param in enumerate(params):
            param.grad = torch.randn(param.shape, generator=generator) * 12**step  # beyond the bound of LARS
            wanted[number] = rule(wanted[number], param.grad.double(), states[number])
        optimizer.step()
    for param, want, begin in zip(params, wanted, start, strict=True):
        torch.testing.assert_close(param.double(), want, atol=2e-5, rtol=2e-5)
        assert (want - begin).abs().max() > 1e-2


def test_the_rate_of_lars_is_at_most_fifty_times_the_given_one() -> None:
    weight = nn.Parameter(torch.full((4,), 3.0))
    weight.grad = torch.full((4,), 0.01)  # |w| / |g| is 300
    Lars([weight], lr=0.1, eeta=1.0).step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), 3.0 - 0.1 * 50 * 0.01))


def test_a_closure_is_called_once_and_its_loss_is_returned() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Lamb([weight], lr=0.1)

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert not torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda p: HybridAdam(p, bias_correction=False), "bias_correction"),
        (lambda p: CPUAdam(p, nvme_offload_fraction=0.5), "nvme_offload_fraction"),
        (lambda p: FusedSGD(p, 0.1, wd_after_momentum=True), "wd_after_momentum"),
        (lambda p: Lars(p, -1.0), "lr is -1.0"),
        (lambda p: CAME(p), "lr="),
    ],
)
def test_what_would_be_another_update_is_refused_by_name(make: Make, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make([nn.Parameter(torch.ones(2))])


def test_fused_sgd_is_torchs_sgd_and_runs_its_fused_kernel() -> None:
    ours, theirs = (nn.Parameter(torch.arange(4.0)) for _ in range(2))
    optimizers = FusedSGD([ours], 0.1, 0.9, nesterov=True), torch.optim.SGD([theirs], 0.1, 0.9, nesterov=True)
    for _ in range(3):
        for param, optimizer in zip((ours, theirs), optimizers, strict=True):
            param.grad = torch.full((4,), 2.0)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    assert optimizers[0].param_groups[0]["fused"]


# -- schedules -----------------------------------------------------------------------------------------------------


def cosine(t: float, total: float, base: float, end: float = 0.0) -> float:
    return end + (base - end) * (1 + math.cos(math.pi * t / total)) / 2


Schedule = tuple[Callable[[Any], Any], Callable[[int, float], float]]
SCHEDULES: dict[str, Schedule] = {
    "cosine": (lambda o: CosineAnnealingLR(o, 10, 0.01), lambda t, b: cosine(t, 10, b, 0.01)),
    "cosine, warm": (
        lambda o: CosineAnnealingWarmupLR(o, 10, warmup_steps=3, eta_min=0.01),
        lambda t, b: b * (t + 1) / 3 if t < 3 else cosine(t - 3, 7, b, 0.01),
    ),
    "flat": (lambda o: FlatAnnealingLR(o, 10, 0.72), lambda t, b: b if t < 7 else cosine(t - 7, 3, b)),
    "flat, warm": (
        lambda o: FlatAnnealingWarmupLR(o, 10, 4, 0.5, 0.01),
        lambda t, b: b * (t + 1) / 4 if t < 4 else b if t < 7 else cosine(t - 7, 3, b, 0.01),
    ),
    "linear": (lambda o: LinearWarmupLR(o, 10), lambda t, b: b * (10 - t) / 10),
    "linear, warm": (
        lambda o: LinearWarmupLR(o, 10, warmup_steps=4),
        lambda t, b: b * (t + 1) / 5 if t < 4 else b * (10 - t) / 6,
    ),
    "multistep": (lambda o: MultiStepLR(o, 10, [3, 6], 0.5), lambda t, b: b * 0.5 ** ((t >= 3) + (t >= 6))),
    "multistep, warm": (
        lambda o: MultiStepWarmupLR(o, 10, 2, [6, 1, 4], 0.5),
        lambda t, b: b * (t + 1) / 2 if t < 2 else b * 0.5 ** ((t >= 4) + (t >= 6)),
    ),
    "polynomial": (lambda o: PolynomialLR(o, 10, 0.01, 2.0), lambda t, b: 0.01 + (b - 0.01) * (1 - t / 10) ** 2),
    "polynomial, warm": (
        lambda o: PolynomialWarmupLR(o, 10, 4, 0.01, 2.0),
        lambda t, b: b * (t + 1) / 4 if t < 4 else 0.01 + (b - 0.01) * (1 - (t - 4) / 6) ** 2,
    ),
    "step": (lambda o: StepLR(o, 10, 4, 0.5), lambda t, b: b * 0.5 ** (t // 4)),
    "exponential": (lambda o: ExponentialLR(o, 10, 0.9), lambda t, b: b * 0.9**t),
    "lambda": (lambda o: LambdaLR(o, 10, lambda t: 1 / (1 + t)), lambda t, b: b / (1 + t)),
    "multiplicative": (lambda o: MultiplicativeLR(o, 10, lambda t: 0.8), lambda t, b: b * 0.8**t),
}


def two_groups() -> torch.optim.Optimizer:
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.SGD([{"params": params[:1], "lr": 0.4}, {"params": params[1:]}], lr=1.5, momentum=0.9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_has_its_formulas_rate_at_each_step_and_after_it_was_saved(name: str) -> None:
    make, formula = SCHEDULES[name]
    optimizer = two_groups()
    scheduler = make(optimizer)
    for t in range(11):
        for group, base in zip(optimizer.param_groups, (0.4, 1.5), strict=True):
            assert group["lr"] == pytest.approx(formula(t, base), rel=1e-12, abs=1e-15), t
        if t == 4 and name not in ("lambda", "multiplicative"):  # functions are not in a state
            state = pickle.loads(pickle.dumps((optimizer.state_dict(), scheduler.state_dict())))
            optimizer = two_groups()
            scheduler = make(optimizer)
            optimizer.load_state_dict(state[0])
            scheduler.load_state_dict(state[1])
        optimizer.step()
        scheduler.step()


def test_the_linear_schedule_stays_at_zero_after_its_end() -> None:
    optimizer = two_groups()
    scheduler = LinearWarmupLR(optimizer, 3)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]


def test_one_cycle_reaches_the_groups_own_rates() -> None:
    optimizer = two_groups()
    scheduler = OneCycleLR(optimizer, 20)
    rates = []
    for _ in range(20):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if len(rates) < 20:
            scheduler.step()
    assert rates[0] == pytest.approx([0.4 / 25, 1.5 / 25])
    assert rates[5] == pytest.approx([0.4, 1.5])  # the warm-up ends at step 0.3 * 20 - 1
    assert rates[-1] == pytest.approx([0.4 / 25e4, 1.5 / 25e4])


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda o: CosineAnnealingWarmupLR(o, 10, 10), "warmup_steps"),
        (lambda o: MultiStepLR(o, 10), "milestones"),
        (lambda o: PolynomialLR(o, 10, -1.0), "end_lr"),
        (lambda o: FlatAnnealingLR(o, 10, 1.5), "pct_start"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(make: Callable[[Any], Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make(two_groups())


# -- under ZeRO ----------------------------------------------------------------------------------------------------

SHARDED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "hybrid": lambda model: HybridAdam(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.1),
    "lamb": lambda model: Lamb(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.1),
    "lars": lambda model: Lars(model.parameters(), lr=2.0, momentum=0.9, eeta=0.02, weight_decay=0.1),
    "came": lambda model: CAME(model.parameters(), lr=0.02, betas=(0.8, 0.9, 0.95)),
}


@ranks(2)
def test_optimizers_with_a_step_of_their_own_train_sharded_as_on_one_process(rank: int, world: int) -> None:
    start = make_net(torch.float32)
    for name, make in SHARDED.items():
        for options in ({"stage": 1}, {"stage": 2, "cpu_offload": name == "hybrid"}):
            ours, reference = both_ways(start, make, net_loss, rank, world, new_booster(**options))
            assert_equal_training(ours, reference, start, bound=5e-6)


@ranks(2)
def test_the_optimizer_of_zero_trains_a_model_that_nothing_wraps(rank: int, world: int) -> None:
    for stage_2 in (False, True):
        start = make_net(torch.float32)
        model, reference = copy.deepcopy(start), copy.deepcopy(start).double()
        plain = torch.optim.AdamW(reference.parameters(), lr=0.05, eps=1e-3)
        optimizer = LowLevelZeroOptimizer(
            HybridAdam(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.01),
            partition_grad=stage_2,
            clip_grad_norm=0.65,
            overlap_communication=True,
            reduce_bucket_size=64,
        )
        assert optimizer.model.ddp_config.data_parallel_sharding_strategy == ("optim_grads" if stage_2 else "optim")
        for step in range(4):
            plain.zero_grad()
            parts = [batch(r, 2 * step + m) for r in range(world) for m in range(2)]
            sum((mean_loss(reference(x), y) / len(parts) for x, y in parts), torch.zeros(())).backward()
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.65)
            plain.step()
            optimizer.zero_grad()
            for m in range(2):
                x, y = batch(rank, 2 * step + m, torch.float32)
                loss = mean_loss(model(x), y) / 2
                if m == 0:
                    with optimizer.no_sync():
                        optimizer.backward(loss)
                else:
                    optimizer.backward(loss)
            optimizer.step()
            assert optimizer.get_grad_norm() == pytest.approx(float(norm), rel=1e-5)
        assert_equal_training(model, reference, start, bound=2e-6)
        sizes = [value.numel() for value in optimizer.state_dict()["state"][0].values() if value.dim()]
        assert sizes == [start.state_dict()[next(iter(start.state_dict()))].numel()] * 2
        states = optimizer.unwrap().state.values()
        held = torch.tensor(sum(value.numel() for state in states for value in state.values() if value.dim()))
        dist.all_reduce(held)
        assert held == 2 * sum(param.numel() for param in start.parameters()), "each moment is on one rank"


@ranks(2)
def test_gemini_without_a_booster_trains_as_one_process_and_shards_parameters(rank: int, world: int) -> None:
    start = make_net(torch.float32)
    reference = copy.deepcopy(start).double()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.05, eps=1e-3)
    model = GeminiDDP(copy.deepcopy(start), mixed_precision=torch.float32, min_chunk_size_m=1e-4, search_range_m=1e-3)
    inner = HybridAdam(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.01)
    optimizer = GeminiOptimizer(inner, model, max_norm=0.65)
    for step in range(4):
        plain.zero_grad()
        sum((net_loss(reference, r, step) / world for r in range(world)), torch.zeros(())).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.65)
        plain.step()
        x, y = batch(rank, step, torch.float32)
        optimizer.zero_grad()
        optimizer.backward(mean_loss(model(x), y))
        optimizer.step()
    assert optimizer.model.ddp_config.data_parallel_sharding_strategy == "optim_grads_params"
    with optimizer.model.gathered():
        assert_equal_training(model, reference, start, bound=2e-6)
    with pytest.raises(TypeError, match="make it again"):
        GeminiOptimizer(inner, model)
    with pytest.raises(ValueError, match="nowhere"):
        GeminiDDP(start, placement_policy="nowhere")


@ranks(2)
def test_the_optimizer_of_zero_refuses_what_it_would_not_obey(rank: int, world: int) -> None:
    def plain(dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=dtype))]
        return torch.optim.SGD(params, lr=0.1)

    for option in ("pg_to_param_list", "extra_dp_group", "forced_dtype", "overlap_allgather", "backward_context"):
        with pytest.raises(ValueError, match=option):
            LowLevelZeroOptimizer(plain(), **{option: True})
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*torch\.float32"):
        LowLevelZeroOptimizer(plain(torch.bfloat16))


def test_a_keyword_that_a_schedule_does_not_have_is_an_error() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    with pytest.raises(TypeError, match="warmup_step"):
        CosineAnnealingWarmupLR(optimizer, 10, warmup_step=3)  # type: ignore[call-arg]
