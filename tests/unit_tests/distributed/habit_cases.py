"""One random training: drawn from a seed, the same on every rank, and told in words."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from core.optimizer import OptimizerConfig
from tests.unit_tests.booster.test_coupled_optimizers import OneRate
from tests.unit_tests.distributed.habit_models import PARTS

STEPS = 4
SCALE = 2.0**6  # of the loss with fp16; nothing overflows

# name -> (sharding strategy, whose optimizer steps, further options of the wrapper or plugin)
STRATEGIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "no_shard, torch's optimizer": ("no_shard", "torch", {}),
    "no_shard": ("no_shard", "ours", {}),
    "optim": ("optim", "ours", {}),
    "optim, whole gradients, torch's optimizer": ("optim", "torch", {}),
    "optim_grads": ("optim_grads", "ours", {}),
    "optim_grads, every microbatch": ("optim_grads", "ours", {"reduce_microbatches": "every"}),
    "optim_grads_params": ("optim_grads_params", "ours", {}),
    "optim_grads_params, last microbatch": ("optim_grads_params", "ours", {"reduce_microbatches": "last"}),
    "LowLevelZero 1": ("optim", "booster", {"stage": 1}),
    "LowLevelZero 2": ("optim_grads", "booster", {"stage": 2}),
    "LowLevelZero 2, every microbatch": ("optim_grads", "booster", {"stage": 2, "reduce_microbatches": "every"}),
}

# name -> (torch's class and its options for the reference, the fields of OptimizerConfig that mean the same)
ALGORITHMS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}, {"optimizer": "sgd", "sgd_momentum": 0.0}),
    "SGD with momentum and decay": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2},
        {"optimizer": "sgd", "sgd_momentum": 0.9},
    ),
    "Adam with decay": (
        torch.optim.Adam,
        {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.2},
        {"optimizer": "adam", "decoupled_weight_decay": False, "adam_eps": 1e-3},
    ),
    "AdamW": (
        torch.optim.AdamW,
        {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.5},
        {"optimizer": "adam", "adam_eps": 1e-3},
    ),
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 0.01, "eps": 1e-2, "momentum": 0.5, "weight_decay": 0.1},
        {"optimizer": "RMSprop", "optimizer_kwargs": {"eps": 1e-2, "momentum": 0.5}},
    ),
    "Adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.1},
        {"optimizer": "Adagrad", "optimizer_kwargs": {"eps": 1e-3}},
    ),
    "one rate of all parameters": (OneRate, {"lr": 0.1}, {"optimizer": OneRate}),
}

BACKWARDS = (
    "one backward",
    "microbatches under no_sync",
    "microbatches without no_sync",
    "finalize after every microbatch",
    "one graph twice",
    "several losses at once",
    "losses in the order of a stack",
    "autograd.grad, assigned",
    "autograd.grad, added",
    "recomputed, reentrant",
    "recomputed, not reentrant",
    "a loss of one output",
    "only some inputs",
    "dropped and begun again",
    "in two parts",
    "hooks on tensors and parameters",
    "a hook after accumulation",
    "a penalty on gradients",
    "a forward that raises",
    "a backward that raises",
    "an evaluation in between",
    "a forward without a backward",
    "in a thread",
    "more microbatches on rank 0",
    "no backward on one rank",
    "no forward on one rank",
    "functional call",
)
# Between the reduction and the step; the Booster's optimizers have these by calls.
CLIPS = ("clip by value, then by norm", "clip by norm, then by value")
EDITS = (
    *CLIPS,
    "clip by norm",
    "clip by value",
    "scale in place",
    "assign a multiple",
    "set some to None",
    "add decay by hand",
    "look at gradients",
)
# Of the weights, at the beginning of a step.
WEIGHT_EDITS = (
    "shrink .data",
    "copy_ under no_grad",
    "load the module",
    "load the wrapper",
    "load one part",
    "vector_to_parameters",
)
# After the step.
READS = (
    "average of the weights",
    "a copy of the module",
    "norms of the weights",
    "a part's state_dict",
    "a loss that is not stepped",
)
# A layer that is frozen until the third step, and when it is added.
ADAPTERS = ("an adapter before the wrap", "an adapter after the wrap")
ZEROS = (
    "optimizer.zero_grad()",
    "optimizer.zero_grad(set_to_none=False)",
    "model.zero_grad()",
    "model.zero_grad_buffer()",
    "module.zero_grad()",
    "grad = None by hand",
    "grad.zero_() by hand",
    "forgotten",
)
# torch differs between a gradient of zeros, which lets a parameter decay, and none, which leaves it alone. After these
# ways to zero, torch has zeros also where a parameter is not used; buffers cannot tell. Only for cases that use all.
ZEROS_THAT_STAY = ("optimizer.zero_grad(set_to_none=False)", "grad.zero_() by hand", "forgotten")
LEAVES_SOME = (
    "autograd.grad, assigned",
    "a loss of one output",
    "only some inputs",
    "in two parts",
    "set some to None",
    "no backward on one rank",
    "no forward on one rank",
)
# A backward that raises is dropped: it may be on one rank only, where the others do not use the parameter concerned.
UNEQUAL = ("more microbatches on rank 0", "no backward on one rank", "no forward on one rank", "a backward that raises")
# Those whose backward has a backward.
TWICE_DIFFERENTIABLE = [name for name in PARTS if name not in ("Attention", "Words")]


@dataclass(frozen=True)
class Case:
    """One training. Tuples hold one entry a step."""

    seed: int
    world: int
    parts: tuple[str, ...]
    odd: int
    dtype: torch.dtype
    strategy: str
    options: dict[str, Any]
    algorithm: str
    clip: float  # of our optimizer, 0 for none
    backwards: tuple[str, ...]
    edits: tuple[str | None, ...]
    weight_edits: tuple[str | None, ...]
    reads: tuple[str, ...]
    zero: str
    full_gradients: bool  # finalize_model_grads(force_all_reduce=True)
    calls_module: bool  # the wrapped module is called, not the wrapper
    freezes: bool  # the first part, in the second step, until the last
    saves: bool  # the optimizer is saved, and another one loads it, after the second step
    changes_lr: bool
    adapter: str | None = None
    microbatches: int = field(default=2)

    @property
    def sharding(self) -> str:
        """The wrapper's strategy."""
        return STRATEGIES[self.strategy][0]

    @property
    def steps_by(self) -> str:
        """Whose optimizer: 'torch', 'ours' or 'booster'."""
        return STRATEGIES[self.strategy][1]

    @property
    def habits(self) -> set[str]:
        """The names of all that is done in it."""
        named = (*self.backwards, *self.edits, *self.weight_edits, *self.reads, self.zero, self.adapter)
        return {name for name in named if name is not None}

    @property
    def uses_all(self) -> bool:
        """True if every parameter gets a gradient on every rank in every step."""
        return (
            not self.freezes
            and self.adapter is None
            and "Branches" not in self.parts
            and self.habits.isdisjoint(LEAVES_SOME)
        )

    @property
    def same_uses(self) -> bool:
        """True if all ranks use the same parameters in the same order."""
        return "Branches" not in self.parts and self.habits.isdisjoint(UNEQUAL)

    @property
    def keeps_whole_gradients(self) -> bool:
        """True if every rank holds the reduced gradients whole, in `.grad`."""
        return self.sharding == "no_shard" or self.full_gradients

    @property
    def shards_parameters(self) -> bool:
        """True if a rank keeps only its shard of a parameter."""
        return self.sharding == "optim_grads_params"

    @property
    def gathers_always(self) -> bool:
        """True if whatever reads or writes parameters outside of a forward gathers them before."""
        return self.seed % 4 > 0

    @property
    def broadcasts(self) -> bool:
        """True if the first rank's buffers are everybody's before a forward."""
        return bool(self.options.get("broadcast_buffers", self.steps_by == "booster"))

    @property
    def reduces_every(self) -> bool:
        """True if each microbatch is reduced."""
        return self.options.get("reduce_microbatches", "every" if self.shards_parameters else "last") == "every"

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed} at {self.world} ranks: {self.strategy}, {self.options}",
            f"module: {', '.join(self.parts)}; odd {self.odd}, {self.dtype}"
            + (", called without the wrapper" if self.calls_module else ""),
            f"optimizer: {self.algorithm}, clip {self.clip}"
            + (", saved and loaded after step 1" if self.saves else "")
            + (", another lr from step 2" if self.changes_lr else ""),
            f"backwards: {self.backwards}, {self.microbatches} microbatches",
            f"zeroed by: {self.zero}" + ("; force_all_reduce" if self.full_gradients else ""),
        ]
        if any(self.edits):
            lines.append(f"edits of gradients: {self.edits}")
        if any(self.weight_edits):
            lines.append(f"edits of weights: {self.weight_edits}")
        if self.reads:
            lines.append(f"reads after the step: {self.reads}")
        if self.freezes:
            lines.append("the first part is frozen in step 1 and thawed in step 3")
        if self.adapter:
            lines.append(f"{self.adapter}, frozen until step 2")
        return "\n".join(lines)


def comparable_in_16_bits(case: Case) -> bool:
    """True if every sum is made in fp32, and somebody keeps masters: torch's own optimizers do not."""
    by_hand = ("autograd.grad, assigned", "autograd.grad, added", "a penalty on gradients")
    return case.steps_by != "torch" and case.habits.isdisjoint(by_hand) and "OtherDtype" not in case.parts


def drops_by_ours(case: Case) -> bool:
    """True if the engine hears of it when gradients are zeroed."""
    if case.zero in ("model.zero_grad()", "model.zero_grad_buffer()"):
        return case.steps_by != "booster"
    return case.zero.startswith("optimizer.zero_grad(") and case.steps_by != "torch"


def reduces_in_backward(case: Case) -> bool:
    """True if buckets may leave before finalize_model_grads."""
    return "overlap_grad_reduce" in case.options or "optim_grads" in case.sharding or case.steps_by == "booster"


def draw(seed: int, world: int) -> Case:
    """The case of a seed."""
    rng = random.Random(seed)
    while True:
        case = _candidate(rng, seed, world)
        if case.zero in ZEROS_THAT_STAY and not case.uses_all:
            continue
        if case.dtype.itemsize == 2 and not comparable_in_16_bits(case):
            continue
        # A state_dict of before lacks it.
        if case.adapter == ADAPTERS[1] and (case.saves or any(case.weight_edits)):
            continue
        # The state is loaded in the middle of a step, where a rank waits for another one's bucket.
        is_open = case.shards_parameters and "a loss that is not stepped" in case.reads
        if case.saves and is_open and not case.same_uses:
            continue
        # There `.grad` has the loss scale until the step.
        if case.dtype == torch.float16 and case.steps_by == "ours" and any(case.edits):
            continue
        # Without mapped memory a gather is a collective, so ranks must use their parameters in one order.
        if case.shards_parameters and not case.options["share_host_memory"] and not case.same_uses:
            continue
        # Refused in the backward of the rank whose bucket has left. Where ranks use other parameters, or had other
        # numbers of backwards in the step before and so expect other numbers of gradients, the others wait.
        same_launches = case.uses_all and not set(UNEQUAL) & set(case.backwards)
        if "a hook after accumulation" in case.habits and reduces_in_backward(case) and not same_launches:
            continue
        return _with_buffers(case)


def _with_buffers(case: Case) -> Case:
    """With `broadcast_buffers` in every second case that can have it: ranks call equally many forwards of a wrapper."""
    equal = case.habits.isdisjoint(UNEQUAL) and not case.calls_module
    if case.steps_by == "booster":  # its default; with sharded gradients there is one broadcast a step
        return (
            case
            if equal and "optim_grads" not in case.sharding
            else replace(case, options={**case.options, "broadcast_buffers": False})
        )
    if not equal or "optim_grads" in case.sharding or case.seed % 2:
        return case
    return replace(case, options={**case.options, "broadcast_buffers": True})


def _candidate(rng: random.Random, seed: int, world: int) -> Case:
    strategy = rng.choice(list(STRATEGIES))
    sharding, steps_by, further = STRATEGIES[strategy]
    backwards = _backwards(rng)
    names = TWICE_DIFFERENTIABLE if "a penalty on gradients" in backwards else list(PARTS)
    parts = tuple(rng.sample(names, rng.randint(1, 4)))
    full_gradients = strategy.startswith("optim, whole") or (
        steps_by == "ours" and sharding != "no_shard" and rng.random() < 0.15
    )
    dtype = rng.choice([*[torch.float64] * 3, *[torch.float32] * 3, torch.bfloat16, torch.float16])
    options = (
        _booster_options(rng, dtype) if steps_by == "booster" else _wrapper_options(rng, sharding, steps_by, dtype)
    )
    edits = _some(rng, CLIPS if steps_by == "booster" else EDITS, 0.35)
    return Case(
        seed=seed,
        world=world,
        parts=parts,
        odd=rng.choice([5, 7, 13]),
        dtype=dtype,
        strategy=strategy,
        options={**options, **further},
        algorithm=rng.choice(list(ALGORITHMS)),
        clip=rng.choice([0.0, 0.0, 0.3]) if steps_by == "ours" or (steps_by == "booster" and not any(edits)) else 0.0,
        backwards=backwards,
        edits=edits,
        weight_edits=_some(rng, WEIGHT_EDITS, 0.2),
        reads=tuple(name for name in READS if rng.random() < 0.15),
        zero=rng.choice(ZEROS),
        full_gradients=full_gradients,
        calls_module=rng.random() < 0.15,
        freezes=rng.random() < 0.15,
        saves=steps_by != "booster" and rng.random() < 0.15,
        changes_lr=rng.random() < 0.2,
        adapter=rng.choice(ADAPTERS) if rng.random() < 0.15 else None,
        microbatches=rng.choice([2, 3]),
    )


def _backwards(rng: random.Random) -> tuple[str, ...]:
    """One habit in every step, or two that change."""
    drawn = rng.sample(BACKWARDS, 2)
    if rng.random() < 0.5:
        return (drawn[0],) * STEPS
    return tuple(rng.choice(drawn) for _ in range(STEPS))


def _some(rng: random.Random, choices: tuple[str, ...], chance: float) -> tuple[str | None, ...]:
    """One of the choices in one step or in every step, or none."""
    name = rng.choice(choices)
    draws, when = rng.random(), rng.randrange(1, STEPS)
    if draws >= chance:
        return (None,) * STEPS
    return (name,) * STEPS if draws < chance / 3 else tuple(name if step == when else None for step in range(STEPS))


def _wrapper_options(rng: random.Random, sharding: str, steps_by: str, dtype: torch.dtype) -> dict[str, Any]:
    sharded = sharding != "no_shard"
    options: dict[str, Any] = {
        "overlap_grad_reduce": rng.random() < 0.5,
        "bucket_size": rng.choice([None, 1, 60, 400]),
        "share_host_memory": rng.random() < 0.5,
        "overlap_param_gather": sharded and sharding != "optim_grads_params" and rng.random() < 0.4,
        "average_in_collective": rng.random() < 0.2,
        "deterministic_reduction": rng.random() < 0.15,
        "check_for_nan_in_grad": rng.random() < 0.15,
        # with doubles it would round, and without it bf16 would
        "grad_reduce_in_fp32": dtype.itemsize == 2 or (dtype == torch.float32 and rng.random() < 0.2),
    }
    options["scale_in_optimizer"] = steps_by == "ours" and not options["average_in_collective"] and rng.random() < 0.2
    return {name: value for name, value in options.items() if value not in (False, None)} | {
        "share_host_memory": options["share_host_memory"]
    }


def _booster_options(rng: random.Random, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "communication_dtype": torch.float32 if dtype.itemsize == 2 else None,
        "reduce_bucket_size_in_m": rng.choice([12, 60 / 2**20, 400 / 2**20]),
        "overlap_communication": rng.random() < 0.5,
        "overlap_allgather": rng.random() < 0.4,
    }


def optimizer_config(case: Case) -> OptimizerConfig:
    """What get_megatron_optimizer takes for the algorithm of a case."""
    _, options, fields = ALGORITHMS[case.algorithm]
    return OptimizerConfig(
        lr=options["lr"],
        weight_decay=options.get("weight_decay", 0.0),
        clip_grad=case.clip,
        bf16=case.dtype == torch.bfloat16,
        fp16=case.dtype == torch.float16,
        loss_scale=SCALE if case.dtype == torch.float16 else None,
        **fields,
    )


def torch_optimizer(case: Case, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """torch's own optimizer of a case."""
    cls, options, _ = ALGORITHMS[case.algorithm]
    return cls(params, **options)
