"""Random streams of a rank, and recomputation that draws the same numbers again.

Note [Random streams]. `model_parallel_manual_seed` begins them all; `get_rng_tracker().fork(name)` draws from one.

| stream | alike over | its own for each | who draws from it |
|---|---|---|---|
| torch's default | all ranks | | weights of modules that draw for themselves; user code |
| "data-parallel-rng" | all ranks | | Megatron's users: weights that every rank has |
| "model-parallel-rng", of `fork()` | dp, cp, pp | tp | Megatron's users: weights that are split |
| "expert-parallel-rng" | dp, cp, pp | ep, expert tp | Megatron's users: weights of experts |
| "dropout-rng" | tp | dp, cp, pp | dropout of what tensor-parallel ranks have copies of |
| "split-dropout-rng" | | rank | dropout of heads, of positions under sequence parallelism, in experts |
| "sequence-dropout-rng" | tp, cp | dp, pp | dropout of split Hugging Face models, which see whole sequences |

Weights need numbers that data ranks share, and dropout needs others on each of them: hence streams of its own. Nothing
else draws from these, so a rank that draws a number for itself changes no mask. A module of a user drops in such a fork
too; from the default stream all data ranks would drop the same elements. Checkpoints hold all streams.
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
# Stream -> the groups in which each rank has its own; 'dp_cp' stands for both where a caller holds no more.
DROPOUT_STREAMS = {
    DROPOUT_STREAM: ("pp", "dp", "cp", "dp_cp"),
    SPLIT_DROPOUT_STREAM: ("pp", "dp", "cp", "dp_cp", "tp"),
    SEQUENCE_DROPOUT_STREAM: ("pp", "dp"),
}


class RNGState(TypedDict):
    """State of a stream, on the CPU and on this rank's GPU; a plain dict, so that checkpoints can hold it.

    gpu: None until CUDA has been used.
    """

    seed: int
    cpu: Tensor
    gpu: Tensor | None


def current_state(seed: int = 0) -> RNGState:
    """State of torch's default generators, on the CPU and on this rank's GPU."""
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return RNGState(seed=seed, cpu=torch.get_rng_state(), gpu=gpu)


def install_state(state: RNGState) -> None:
    """Put torch's default generators to where a state says."""
    torch.set_rng_state(state["cpu"])
    if state["gpu"] is not None:
        torch.cuda.set_rng_state(state["gpu"])
    elif torch.cuda.is_initialized():  # CUDA was first used after the stream began
        torch.cuda.manual_seed(state["seed"])


def begin_state(seed: int) -> None:
    """Begin a stream in torch's default generators, on the CPU and on this rank's GPU once that is used."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


class RNGStatesTracker:
    """Named random streams in addition to torch's default one."""

    def __init__(self) -> None:
        self._states: dict[str, RNGState] = {}
        self._seeds: set[int] = set()
        self.replays = False  # True while `checkpoint` of this module computes again

    def reset(self) -> None:
        """Forget every stream."""
        self._states = {}
        self._seeds = set()

    def get_states(self) -> dict[str, RNGState]:
        """State of every stream; a state is never changed in place, so this is a snapshot."""
        return dict(self._states)

    def set_states(self, states: dict[str, RNGState]) -> None:
        """Put every stream back to where a snapshot says."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a stream. ValueError if the name or the seed is taken: equal seeds would be one stream twice."""
        if name in self._states:
            raise ValueError(f"random stream {name!r} exists already; reset() the tracker before seeding it again")
        if seed in self._seeds:
            raise ValueError(f"seed {seed} of random stream {name!r} is that of another stream; choose another")
        before = current_state()
        begin_state(seed)
        self._states[name] = current_state(seed)
        self._seeds.add(seed)
        install_state(before)

    def __contains__(self, name: str) -> bool:
        return name in self._states

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from stream `name` inside the block, and from the default one again after it.

        RuntimeError for a stream of dropout in a forward that torch's own checkpoint repeats: it would drop others.
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


_TRACKER = RNGStatesTracker()  # one a process, as torch's default generator is


def get_rng_tracker() -> RNGStatesTracker:
    """The streams of this process."""
    return _TRACKER


def model_parallel_manual_seed(seed: int, pg_collection: ProcessGroups | None = None) -> None:
    """Begin all random streams of this process: Note [Random streams] at the head of this file.

    Every rank passes the same seed. Local. Streams that were seeded before are forgotten.
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
    """The seed of one of the streams of dropout at this rank's place, from the job's seed."""
    return seed_of(seed, stream, *(f"{axis} {groups.rank(axis)}" for axis in DROPOUT_STREAMS[stream]))


def seed_of(*words: object) -> int:
    """A seed that all of these decide, and that is another one where any of them is."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, words)).encode()).digest()[:8], "big") >> 1


# The names users of Megatron know; nothing in them needs CUDA.
CudaRNGStatesTracker = RNGStatesTracker
get_cuda_rng_tracker = get_rng_tracker
model_parallel_cuda_manual_seed = model_parallel_manual_seed


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool, *args: Any) -> Any:
    """Call `function(*args)` keeping only its arguments; backward calls it again, with every random stream as it stood.

    Not reentrant: gradients of parameters arrive in the one backward pass that is running, so hooks on them fire once.
    torch's own checkpoint would put back the default stream alone.
    distribute_saved_activations: must be False; under sequence parallelism the arguments are split already.
    """
    if distribute_saved_activations:
        raise ValueError("distribute_saved_activations=True is not supported; use sequence_parallel, which splits them")
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, context_fn=_stream_contexts)


def _stream_contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), _Replay(get_rng_tracker().get_states())


class _Replay(contextlib.AbstractContextManager[None]):
    """Tracker streams at `states` inside the block; torch's own checkpoint does the default one.

    A graph that is kept (`retain_graph=True`) enters one of these in each of its backwards.
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
