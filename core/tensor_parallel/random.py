"""Random streams, and activation checkpointing that reproduces random numbers.

Note [Random streams]. ``model_parallel_manual_seed`` seeds all streams; ``get_rng_tracker().fork(name)`` draws from
one.

| stream | equal over | different for each | used by |
|---|---|---|---|
| torch's default | all ranks | | weights of modules that draw their own numbers; user code |
| "data-parallel-rng" | all ranks | | Megatron's users: replicated weights |
| "model-parallel-rng", default of ``fork()`` | dp, cp, pp | tp | Megatron's users: split weights |
| "expert-parallel-rng" | dp, cp, pp | ep, expert tp | Megatron's users: weights of experts |
| "dropout-rng" | tp | dp, cp, pp | dropout of activations replicated over tensor parallelism |
| "split-dropout-rng" | | rank | dropout of heads, of positions under sequence parallelism, in experts |
| "sequence-dropout-rng" | tp, cp | dp, pp | dropout of split Hugging Face models, which see full sequences |

Weights need numbers that are equal on data-parallel ranks, and dropout needs different ones: hence the separate
streams. Nothing else draws from the dropout streams, so a rank that draws other numbers changes no mask. User modules
must also apply dropout inside such a fork; with the default stream, all data-parallel ranks would drop the same
elements. Checkpoints store all streams.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from core.distributed.buffer.grad_attribute import backward_runs
from core.groups.process_groups import ProcessGroups
from core.tensor_parallel.mappings import resolve_groups

MODEL_PARALLEL_STREAM = "model-parallel-rng"
DATA_PARALLEL_STREAM = "data-parallel-rng"
EXPERT_PARALLEL_STREAM = "expert-parallel-rng"
DROPOUT_STREAM = "dropout-rng"
SPLIT_DROPOUT_STREAM = "split-dropout-rng"
SEQUENCE_DROPOUT_STREAM = "sequence-dropout-rng"
# Stream -> the groups whose ranks have different seeds; 'dp_cp' replaces 'dp' and 'cp' for callers without them.
DROPOUT_STREAMS = {
    DROPOUT_STREAM: ("pp", "dp", "cp", "dp_cp"),
    SPLIT_DROPOUT_STREAM: ("pp", "dp", "cp", "dp_cp", "tp"),
    SEQUENCE_DROPOUT_STREAM: ("pp", "dp"),
}


class RNGState(TypedDict):
    """State of a stream on the CPU and on this rank's GPU.

    It is a plain dict so that checkpoints can store it. ``gpu`` is ``None`` until CUDA has been used.
    """

    seed: int
    cpu: Tensor
    gpu: Tensor | None


def current_state(seed: int = 0) -> RNGState:
    """Return the state of torch's default generators on the CPU and on this rank's GPU."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return RNGState(seed=seed, cpu=torch.get_rng_state(), gpu=gpu)


def install_state(state: RNGState) -> None:
    """Restore torch's default generators from a state."""
    torch.set_rng_state(state["cpu"])
    if state["gpu"] is not None:
        torch.cuda.set_rng_state(state["gpu"])
    elif torch.cuda.is_initialized():  # CUDA was first used after the stream began
        torch.cuda.manual_seed(state["seed"])


def begin_state(seed: int) -> None:
    """Seed torch's default generators on the CPU, and on this rank's GPU if CUDA is in use."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


class RNGStatesTracker:
    """Random streams by name, in addition to torch's default stream.

    Tensor-parallel ranks need different numbers for split weights and equal ones for replicated activations. Each kind
    has a stream that is seeded once and advances independently of the others.

        with get_rng_tracker().fork("split-dropout-rng"):
            hidden = F.dropout(hidden, 0.1)
    """

    def __init__(self) -> None:
        self._states: dict[str, RNGState] = {}
        self._seeds: set[int] = set()
        self.replays = False  # True while `checkpoint` of this module computes again

    def reset(self) -> None:
        """Remove all streams."""
        self._states = {}
        self._seeds = set()

    def get_states(self) -> dict[str, RNGState]:
        """Return a snapshot of every stream's state. States are never modified in place."""
        return dict(self._states)

    def set_states(self, states: dict[str, RNGState]) -> None:
        """Restore every stream from a snapshot."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a stream.

        Args:
            name (str): Name of the stream.
            seed (int): Seed of the stream, different from every other stream's seed.

        Raises:
            ValueError: If the name or the seed is already in use.
        """
        if name in self._states:
            raise ValueError(f"random stream {name!r} exists already; reset() the tracker before seeding it again")
        if seed in self._seeds:
            raise ValueError(
                f"seed {seed} of random stream {name!r} is already used by another stream; choose another seed"
            )
        before = current_state()
        begin_state(seed)
        self._states[name] = current_state(seed)
        self._seeds.add(seed)
        install_state(before)

    def __contains__(self, name: str) -> bool:
        return name in self._states

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Context manager that draws from stream ``name``, and from the default stream again after it.

        Raises:
            RuntimeError: If the stream was never seeded. Also for a dropout stream in a forward that torch's own
                checkpoint repeats, which would drop different elements.
        """
        if name not in self._states:
            raise RuntimeError(
                f"random stream {name!r} was never seeded (there are: {sorted(self._states) or 'none'}); call "
                "core.tensor_parallel.model_parallel_manual_seed(seed) on every rank after initialize_model_parallel"
            )
        if name in DROPOUT_STREAMS and not self.replays and backward_runs():
            raise RuntimeError(
                f"a forward that draws from random stream {name!r} runs again in backward. torch's checkpoint restores "
                "torch's default stream alone, so it would drop other elements. Recompute by "
                "core.tensor_parallel.checkpoint(function, False, *arguments), or by TransformerConfig("
                "recompute_granularity=...)"
            )
        before = current_state()
        install_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = current_state(self._states[name]["seed"])
            install_state(before)


_TRACKER = RNGStatesTracker()  # one per process, like torch's default generator


def get_rng_tracker() -> RNGStatesTracker:
    """Return this process's random streams."""
    return _TRACKER


def model_parallel_manual_seed(seed: int, pg_collection: ProcessGroups | None = None) -> None:
    """Seed all random streams of this process; see Note [Random streams] at the top of this file.

    Discards any previously seeded streams. Does not communicate.

    Args:
        seed (int): The job's seed, the same on every rank.
        pg_collection (ProcessGroups): Process groups. Defaults to those of ``parallel_state``, if initialized.
    """
    groups = resolve_groups(pg_collection)
    torch.manual_seed(seed)
    tracker = get_rng_tracker()
    tracker.reset()
    tracker.add(DATA_PARALLEL_STREAM, seed)
    tracker.add(MODEL_PARALLEL_STREAM, seed + 2718 + groups.rank("tp"))
    tracker.add(EXPERT_PARALLEL_STREAM, seed + 1024 + 100 * groups.rank("ep") + groups.rank("expt_tp"))
    for stream in DROPOUT_STREAMS:
        tracker.add(stream, dropout_seed(stream, seed, groups))


def dropout_seed(stream: str, seed: int, groups: ProcessGroups) -> int:
    """Derive a dropout stream's seed for this rank's position in ``groups`` from the job's seed."""
    return seed_of(seed, stream, *(f"{axis} {groups.rank(axis)}" for axis in DROPOUT_STREAMS[stream]))


def seed_of(*words: object) -> int:
    """Hash all arguments to a seed."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, words)).encode()).digest()[:8], "big") >> 1


# The names users of Megatron know; nothing in them needs CUDA.
CudaRNGStatesTracker = RNGStatesTracker
get_cuda_rng_tracker = get_rng_tracker
model_parallel_cuda_manual_seed = model_parallel_manual_seed


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Call function(*args) without saving its activations. Backward recomputes them with all random streams restored.

    It is not reentrant: parameter gradients are produced in the running backward pass, so their hooks fire once.
    torch's own checkpoint would restore only the default stream, and dropout would use different masks.

        hidden = checkpoint(layer, False, hidden)

    Args:
        function (Callable[..., Any]): Function to call.
        distribute_saved_activations (bool): Must be ``False``, since sequence parallelism already splits the arguments.
        args: Arguments of the function.

    Returns:
        The function's result.

    Raises:
        ValueError: If ``distribute_saved_activations`` is ``True``.
    """
    if distribute_saved_activations:
        raise ValueError("distribute_saved_activations=True is not supported; use sequence_parallel, which splits them")
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, context_fn=_stream_contexts)


def _stream_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), _Replay(get_rng_tracker().get_states())


class _Replay(contextlib.AbstractContextManager[None]):
    """Context in which the tracker's streams have the given states. torch's own checkpoint restores the default stream.

    A retained graph (``retain_graph=True``) enters one context in each of its backward passes.
    """

    def __init__(self, states: dict[str, RNGState]) -> None:
        self.states = states

    def __enter__(self) -> None:
        tracker = get_rng_tracker()
        self.before = tracker.get_states(), tracker.replays
        tracker.set_states(self.states)
        tracker.replays = True

    def __exit__(self, *_: object) -> None:
        tracker = get_rng_tracker()
        states, tracker.replays = self.before
        tracker.set_states(states)
