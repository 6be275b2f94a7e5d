"""How much of what programs take from Megatron Core is here, counted from lists of names, import lines and calls.

    python -m tests.unit_tests.core_compat.megatron_counts

megatron_names.txt: the most used names of the areas that this package claims, their uses in eleven public projects
(1,262 files), and what can be passed to them in versions 0.16 and 0.19. megatron_imports.txt, megatron_calls.txt:
import lines and the calls of a training loop as such projects write them.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import core_compat.megatron as mcore
from core import parallel_state
from core_compat.megatron import SURFACE
from tests.unit_tests.core_compat.megatron_like import built

HERE = Path(__file__).parent


def names() -> Iterator[tuple[str, int, list[str]]]:
    """(dotted name, uses, parameters)."""
    for line in (HERE / "megatron_names.txt").read_text().splitlines():
        name, uses, parameters = line.split()
        yield name, int(uses), [] if parameters == "-" else parameters.split(",")


def found(dotted: str) -> Any:
    """The object at Megatron's path; None where there is none."""
    path, _, name = dotted.rpartition(".")
    try:
        return SURFACE.resolve(path, name)
    except (AttributeError, ImportError):
        return None


def takes(thing: Any, parameters: list[str]) -> list[str]:
    """The parameters that an object cannot be given by name; those of typing's aliases are never asked for.

    A class whose constructor is refused takes none of them.
    """
    if not callable(thing) or not parameters:
        return []
    if "is_never_made" in vars(thing):
        return parameters
    try:
        known = inspect.signature(thing).parameters
    except ValueError:
        return []
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return []
    return [name for name in parameters if name not in known]


def count_names() -> tuple[int, int, int, list[str], dict[str, list[str]]]:
    """(uses, uses at the path, those of them that take all parameters, names that are not here, what others lack)."""
    uses = at_path = same = 0
    absent, lacking = [], {}
    for name, count, parameters in names():
        uses += count
        thing = found(name)
        if thing is None:
            absent.append(name)
            continue
        at_path += count
        lacks = takes(thing, parameters)
        if lacks:
            lacking[name] = lacks
        else:
            same += count
    return uses, at_path, same, absent, lacking


def import_lines() -> tuple[list[str], list[str]]:
    """(lines that work with their package's name changed, lines that do not)."""
    works: list[str] = []
    fails: list[str] = []
    for line in (HERE / "megatron_imports.txt").read_text().splitlines():
        try:
            exec(line.replace("megatron.core", "core_compat.megatron"), {})
        except ImportError:
            fails.append(line)
        else:
            works.append(line)
    return works, fails


def calls() -> list[str]:
    """The calls of a loop, in the order in which it makes them."""
    return (HERE / "megatron_calls.txt").read_text().splitlines()


def make_calls(directory: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Make the calls one after the other, in a started group: (those that are refused: the sentence, all variables).

    The model is not made by them: it is one that has Megatron's call and tags.
    """
    tokens = torch.randint(32, (2, 16), generator=torch.Generator().manual_seed(0))

    def forward_step(data_iterator: Any, model: torch.nn.Module) -> Any:
        batch = next(data_iterator)
        output = model(batch, None, None, labels=batch)

        def loss_func(losses: torch.Tensor, non_loss_data: bool = False) -> Any:
            return losses.detach().sum() if non_loss_data else (losses.mean(), {"lm loss": losses.mean().detach()})

        return output, loss_func

    (directory / "checkpoint").mkdir()
    parallel_state.initialize_model_parallel()
    model, positions = built(), torch.arange(16).expand(2, 16)
    parallel_state.destroy_model_parallel()
    space: dict[str, Any] = {
        **{"mcore": mcore, "mpu": mcore.mpu, "torch": torch, "argparse": argparse, "forward_step": forward_step},
        **{"labels": tokens, "model": model, "config": model.config},
        **{"logits": model(tokens, positions, None).transpose(0, 1), "losses": model(tokens, positions, None, tokens)},
        **{"iterator": iter([tokens] * 10), "directory": str(directory / "checkpoint")},
    }
    refused = {}
    for call in calls():
        try:
            exec(call, space)
        except NotImplementedError as error:
            refused[call] = str(error)
    return refused, space


def main() -> None:
    """Print the counts."""
    uses, at_path, same, absent, lacking = count_names()
    print(
        f"names: {at_path} of {uses} uses at Megatron's path ({at_path / uses:.1%}); of them {same} take all parameters"
    )
    print(f"  not here: {', '.join(absent)}")
    for name, lacks in lacking.items():
        print(f"  {name} lacks {', '.join(lacks)}")
    works, fails = import_lines()
    print(f"import lines: {len(works)} of {len(works) + len(fails)}")
    for line in fails:
        print(f"  {line}")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as directory:
        refused, _ = make_calls(Path(directory))
    dist.destroy_process_group()
    print(f"calls of a loop: {len(calls()) - len(refused)} of {len(calls())}")
    for call in refused:
        print(f"  {call}")


if __name__ == "__main__":
    main()
