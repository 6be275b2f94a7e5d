"""Forwards that do not change a model: without gradients, random numbers, or updates of running statistics."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from core.hugging_face.read.plan import AGAIN, Plan, PlanError
from core.watch.waiting import is_peers

ONCE_SPLIT = ("once it is split", "A module there needs its whole width. ")
# Errors that a model's forward raises for missing or unusable inputs.
OF_MODELS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, NotImplementedError)


def run_quietly(model: Any, example: Mapping[str, Any], *, training: bool | None = None) -> Any:
    """Run a forward without gradients, and restore the random state and training modes afterwards.

    ``training`` is as in ``in_mode``. By default, a forward with labels computes as in training.
    """
    training = "labels" in example if training is None else training
    with torch.no_grad(), torch.random.fork_rng(), in_mode(model, training=training):
        return model(**example)


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in training or evaluation mode inside the context, and restore it afterwards.

    Two forwards must give the same output, so training mode has no dropout, no noise, and no updates of running
    statistics.
    """
    modules = list(model.modules())
    configs = {id(each): each for each in (getattr(module, "config", None) for module in modules)}
    owners = [*modules, *(config for config in configs.values() if hasattr(config, "get_text_config"))]
    before = [(vars(owner), dict(vars(owner))) for owner in owners[len(modules) :]]  # a loss may set a problem's type
    chances: list[tuple[dict[str, Any], str, Any]] = []
    for owner in owners if training else ():
        is_dropout = "Dropout" in type(owner).__name__
        for name, value in vars(owner).items():
            is_positive = isinstance(value, float) and value > 0
            if is_positive and ("drop" in name or "jitter" in name or (is_dropout and name == "p")):
                chances.append((vars(owner), name, value))
    modes = [module.training for module in modules]
    stream = getattr(model, "forward_stream", None)
    try:
        for module in modules:
            module.training = training and not getattr(module, "track_running_stats", False)
        for attributes, name, _ in chances:
            attributes[name] = 0.0
        with nullcontext() if stream is None else stream.paused():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for attributes, name, value in chances:
            attributes[name] = value
        for attributes, values in before:
            attributes.clear()
            attributes.update(values)


@contextmanager
def refusing_failures(plan: Plan, when: str, advice: str = "", again: str = AGAIN) -> Iterator[None]:
    """Convert errors of the model's own code inside the context into PlanErrors that name the module.

    The message contains ``when`` the forward ran, ``advice`` for the next step, and with ``again`` the state of the
    model afterwards.
    """
    try:
        yield
    except PlanError:
        raise
    except OF_MODELS as error:
        if is_peers(error):  # another rank failed; this model's code is not the cause
            raise
        text = str(error).strip().splitlines() or [""]
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        where = next((type(owner).__name__ for owner in reversed(owners) if isinstance(owner, nn.Module)), "")
        raise PlanError(
            f"{plan.family}: its forward fails {when}: {type(error).__name__}: {text[0]} (in module {where!r}). "
            f"{advice}{again}"
        ) from error
