"""`python -m core.generate runs/latest`: continue a text with a trained GPT. One process, whatever trained it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint import CheckpointError, find_intact, load_checkpoint
from core.models.gpt import GPTModel
from core.training.config import JobConfig, ModelOptions, ParallelOptions
from core.training.errors import ConfigError
from core.training.extras import MissingExtra
from core.training.model_config import transformer_config
from core.training.run_directory import CHECKPOINTS, CONFIGURATION
from core.training.sizes import check_vocabulary
from core.training.token_file import TOKENIZER
from core.training.tokenizer import FileTokenizer, read_tokenizer

END_OF_DOCUMENT = 0  # the byte that ends a document of bytes
UNKNOWN = "unknown"  # the tokenizer of a model that came without one
Forward = Callable[[Tensor], Tensor]  # token ids [1, s] to logits [s, 1, vocabulary or more]


@dataclass(frozen=True)
class Trained:
    """A model as a run left it, whole. tokenizer: what turned text into its numbers, as --data.tokenizer said it."""

    model: GPTModel
    options: ModelOptions
    step: int
    tokenizer: str


@dataclass(frozen=True)
class Words:
    """Text to the numbers of a model and back. tokenizer: None for bytes."""

    tokenizer: FileTokenizer | None

    @property
    def end(self) -> int | None:
        """The token that ends a document."""
        return END_OF_DOCUMENT if self.tokenizer is None else self.tokenizer.end

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without an end mark."""
        if self.tokenizer is None:
            return list(text.encode())
        return list(self.tokenizer.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        if self.tokenizer is None:
            return bytes(token for token in tokens if token < 256).decode(errors="replace")
        return str(self.tokenizer.tokenizer.decode(list(tokens)))


def checkpoints_of(place: Path) -> Path:
    """The root of the checkpoints of a run's directory; another directory is taken for the root itself."""
    if not place.is_dir():
        raise ConfigError(f"{place} is no directory (from {Path.cwd()}); give a run's directory, such as runs/latest")
    if (place / CHECKPOINTS).is_dir():
        return place / CHECKPOINTS
    if (place / CONFIGURATION).is_file():
        named = json.loads((place / CONFIGURATION).read_text()).get("checkpoint", {}).get("dir")
        if named is None:
            raise ConfigError(
                f"the run in {place} has left no checkpoint: it did not end, or had --checkpoint.no-at-end"
            )
        return Path(named)
    return place


def load_trained(place: Path, step: int | None = None) -> Trained:
    """The model of a run's directory, or of a directory of checkpoints, on the CPU, ready to answer.

    step: that one; None for the newest that is intact. ConfigError or CheckpointError say what is wrong.
    """
    root = checkpoints_of(place)
    found = find_intact(root, step)
    saved = found.meta.get("configuration", {})
    if "model" not in saved:
        raise ConfigError(
            f"{found.path} does not say what model it holds; give a checkpoint of the main job, or one that "
            "python -m core.convert has written"
        )
    options = options_of(saved["model"])
    counted = int(found.meta.get("extra", {}).get("text", {}).get("vocab_size") or options.vocab_size or 0)
    config = JobConfig(model=options, parallel=ParallelOptions(tp=1))
    model = GPTModel(transformer_config(config, check_vocabulary(counted, options, tp=1)))
    load_checkpoint(root, [model], step=found.step)
    data = saved.get("data", {})
    known = "bytes" if data.get("megatron") is None else UNKNOWN  # tokens that came without a tokenizer
    tokenizer = data.get("tokenizer", UNKNOWN)
    return Trained(model.eval(), options, found.step, known if tokenizer == "bytes" else tokenizer)


def words_of(place: Path, trained: Trained, given: Path | None = None) -> Words:
    """What reads and writes text for a run's model; `given` is a tokenizer.json in place of the run's own."""
    if given is None and trained.tokenizer == "bytes":
        return Words(None)
    own = (place / TOKENIZER, checkpoints_of(place).parent / TOKENIZER)
    path = given or next((path for path in own if path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"the model's tokenizer is {trained.tokenizer!r}, and {own[0]} is not there; give --tokenizer"
        )
    return Words(read_tokenizer(path))


def options_of(saved: dict[str, Any]) -> ModelOptions:
    """The model's options as a checkpoint tells them; those that have come or gone with a version are left out."""
    known = {field.name for field in fields(ModelOptions)}
    return ModelOptions(**{name: value for name, value in saved.items() if name in known})


@torch.no_grad()
def continued(
    forward: Forward,
    tokens: Sequence[int],
    count: int,
    *,
    length: int,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    end: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """At most `count` tokens that follow `tokens`, one by one; stops before `end`.

    length: tokens that the model sees at once, the last ones. temperature: 0 takes the most probable token; higher
    draws from flatter probabilities. top_k: draw from so many of the most probable tokens.
    """
    seen = list(tokens)
    for _ in range(count):
        logits = forward(torch.tensor([seen[-length:]]))[-1, 0, :vocab_size].double()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            if top_k is not None and top_k < vocab_size:
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            token = int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
        if token == end:
            return
        seen.append(token)
        yield token


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; status 2 for one that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m core.generate", description=__doc__)
    parser.add_argument("place", type=Path, help="a run's directory (runs/latest), or a directory of checkpoints")
    parser.add_argument("--prompt", default="", help="the text to continue (default: the beginning of a document)")
    parser.add_argument("--tokens", type=int, default=200, help="how many to write at most (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--top-k", type=int, default=40, help="draw from so many; 0 for all (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json in place of the run's own")
    options = parser.parse_args(arguments)
    for name, low in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        value = getattr(options, name)
        if not low <= value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} is {value}; give a number from {low} on")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the text and what follows it; the exit status."""
    options = read_arguments(arguments)
    try:
        trained = load_trained(options.place, options.step)
        words = words_of(options.place, trained, options.tokenizer)
        tokens = words.encode(options.prompt)
        if not tokens and words.end is None:
            raise ConfigError("this tokenizer has no mark for the end of a document to begin after; give a --prompt")
    except (ConfigError, CheckpointError, MissingExtra, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    begin = tokens or [words.end or END_OF_DOCUMENT]
    made = continued(
        trained.model,
        begin,
        options.tokens,
        length=trained.options.sequence_length,
        vocab_size=trained.model.config.vocab_size,
        temperature=options.temperature,
        top_k=options.top_k or None,
        end=words.end,
        generator=torch.Generator().manual_seed(options.seed),
    )
    print(words.decode([*tokens, *made]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
