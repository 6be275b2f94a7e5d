"""``python -m core generate runs/latest``: continue a text with a trained model of any layout.

The model is a GPT of the main job, or a directory of transformers, such as a fine-tuned model.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core import parallel_state
from core.checkpoint import CheckpointError, find_intact, load_checkpoint
from core.checkpoint.transformers_files import is_of_transformers
from core.extras import MissingExtra, require_installed
from core.hugging_face import load_split
from core.hugging_face.read.transformers_plans import transformers_package
from core.models.gpt import GPTModel
from core_plan.job.config import JobConfig, ModelOptions, ParallelOptions
from core_plan.job.config_file import saved_options
from core_plan.job.errors import ConfigError
from core_plan.job.hub import cached_model, how_to_download
from core_plan.job.model_config import transformer_config
from core_plan.job.run_directory import CHECKPOINTS, CONFIGURATION
from core_plan.job.sizes import check_vocabulary
from core_plan.machine.launch import Launch, find_launch, say_once
from core_plan.machine.own_ranks import become_rank, start_ranks
from core_train.commands.model_directory import Tuned, load_directory, model_directory, prompt_ids
from core_train.job import on_started_ranks
from core_train.tokenizer import ByteTokenizer, Tokenizer, read_tokenizer
from core_train.tokens import TOKENIZER

UNKNOWN = "unknown"  # the tokenizer of a model that came without one
Forward = Callable[[Tensor], Tensor]  # token ids [1, s] to logits [s, 1, vocabulary or more]


@dataclass(frozen=True)
class Trained:
    """Unsplit model of a run, with the tokenizer of --data.tokenizer."""

    model: GPTModel
    options: ModelOptions
    step: int
    tokenizer: str


def checkpoints_of(place: Path) -> Path:
    """The root of the checkpoints of a run's directory; another directory is taken for the root itself."""
    if not place.is_dir():
        raise ConfigError(
            f"{place} is no directory (from {Path.cwd()}); give a run's directory, such as runs/latest"
            + how_to_download(str(place), "model")
        )
    if (place / CHECKPOINTS).is_dir():
        return place / CHECKPOINTS
    if (place / CONFIGURATION).is_file():
        content = json.loads((place / CONFIGURATION).read_text())
        if not isinstance(content, dict) or "run" not in content:
            raise ConfigError(
                f"{place / CONFIGURATION} is neither a run's configuration (it has no 'run') nor a model's of "
                "transformers (it has no 'model_type'); give the directory of a run or of a model"
            )
        named = content.get("checkpoint", {}).get("dir")
        if named is None:
            raise ConfigError(
                f"the run in {place} has left no checkpoint: it did not end, or had --checkpoint.no-at-end"
            )
        return Path(named)
    return place


def load_trained(place: Path, step: int | None = None) -> Trained:
    """Load the model of a run or of a directory of checkpoints on the CPU, in eval mode.

    Without ``step`` the newest intact checkpoint is loaded. Raises ConfigError if there is no such model, and
    CheckpointError if no checkpoint is intact.
    """
    root = checkpoints_of(place)
    found = find_intact(root, step)
    saved = found.meta.get("configuration", {})
    if "model" not in saved:
        raise ConfigError(
            f"{found.path} does not contain the model's configuration; give a checkpoint of the main job, or one "
            "written by python -m core convert"
        )
    options = saved_options(ModelOptions, saved["model"])
    counted = int(found.meta.get("extra", {}).get("text", {}).get("vocab_size") or options.vocab_size or 0)
    config = JobConfig(model=options, parallel=ParallelOptions(tp=1))
    model = GPTModel(transformer_config(config, check_vocabulary(counted, options, tp=1)))
    load_checkpoint(root, [model], step=found.step)
    data = saved.get("data", {})
    known = "bytes" if data.get("megatron") is None else UNKNOWN  # tokens that came without a tokenizer
    tokenizer = data.get("tokenizer", UNKNOWN)
    return Trained(model.eval(), options, found.step, known if tokenizer == "bytes" else tokenizer)


def load_tuned(place: Path, step: int | None = None) -> Tuned | None:
    """Load a model of transformers or an adapter, or one of their checkpoints. None for models of the main job."""
    directory = model_directory(place, step)
    if directory is None:
        return None
    require_installed("transformers", "a model of transformers", "transformers")
    transformers_package().utils.logging.disable_progress_bar()
    return load_directory(directory)


def tokenizer_of(place: Path, trained: Trained, given: Path | None = None) -> Tokenizer:
    """Return the tokenizer of a run's model, or of a ``given`` tokenizer.json."""
    if given is None and trained.tokenizer == "bytes":
        return ByteTokenizer()
    own = (place / TOKENIZER, checkpoints_of(place).parent / TOKENIZER)
    path = given or next((path for path in own if path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"the model's tokenizer is {trained.tokenizer!r}, and {own[0]} is not there; give --tokenizer"
        )
    return read_tokenizer(path)


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
    """At most ``count`` tokens that follow ``tokens``, one by one; stops before ``end``.

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
    parser = argparse.ArgumentParser(prog="python -m core generate", description=__doc__)
    parser.add_argument(
        "place", type=Path, help="a run's directory (runs/latest), a directory of checkpoints, or one of transformers"
    )
    parser.add_argument("--prompt", default="", help="the text to continue (default: the beginning of a document)")
    parser.add_argument("--chat", action="store_true", help="--prompt is a user's message; answer it by the template")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a model of transformers (default 1)")
    parser.add_argument("--tokens", "--max-new-tokens", type=int, default=200, help="how many at most (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default 0.8)")
    parser.add_argument("--top-k", type=int, default=40, help="draw from so many; 0 for all (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json in place of the run's own")
    options = parser.parse_args(arguments)
    for name, low in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0), ("tp", 1)):
        value = getattr(options, name)
        if not low <= value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} is {value}; give a number from {low} on")
    return options


def print_ours(options: argparse.Namespace) -> None:
    """Print the text and its continuation by the main job's GPT, token by token."""
    if options.chat or options.tp > 1:
        raise ConfigError(
            f"--chat and --tp are for transformers models, but {options.place} contains a GPT of this project; leave "
            "them out"
        )
    trained = load_trained(options.place, options.step)
    tokenizer = tokenizer_of(options.place, trained, options.tokenizer)
    tokens = tokenizer.tokens_of(options.prompt)
    if not tokens and tokenizer.end is None:
        raise ConfigError("this tokenizer has no mark for the end of a document to begin after; give a --prompt")
    made = continued(
        trained.model,
        tokens or [tokenizer.end or 0],
        options.tokens,
        length=trained.options.sequence_length,
        vocab_size=trained.model.config.vocab_size,
        temperature=options.temperature,
        top_k=options.top_k or None,
        end=tokenizer.end,
        generator=torch.Generator().manual_seed(options.seed),
    )
    shown = ""
    for token in made:
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # the first bytes of a character
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(tokenizer.decode(tokens)[len(shown) :])


def print_theirs(tuned: Tuned, options: argparse.Namespace, shows: bool = True) -> None:
    """Print a transformers model's continuation of the prompt, token by token. Collective if the model is split."""
    model, tokenizer = tuned
    if options.tokenizer is not None:
        raise ConfigError(
            "--tokenizer is for a GPT of this project; a transformers model uses the tokenizer in its directory, so "
            "leave it out"
        )
    if not model.can_generate():
        raise ConfigError(
            f"{options.place} holds a {type(model).__name__}, which continues no text; give it texts by "
            'transformers.pipeline("text-classification", model=DIRECTORY)'
        )
    if options.chat:
        if tokenizer.chat_template is None:
            raise ConfigError(f"--chat: the tokenizer of {options.place} has no chat template; leave --chat out")
        messages = [{"role": "user", "content": options.prompt}]
        given = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        text = options.prompt or tokenizer.bos_token or tokenizer.eos_token
        if text is None:
            raise ConfigError("this tokenizer has no mark for the end of a document to begin after; give a --prompt")
        ids = prompt_ids(tokenizer, text)
        if not ids:
            raise ConfigError(
                f"the tokenizer of {options.place} knows {len(tokenizer)} tokens and makes none of {text!r}; put the "
                "model's tokenizer.json and tokenizer_config.json into that directory, or give another --prompt"
            )
        given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    streamer = transformers_package().TextStreamer(tokenizer, skip_prompt=options.chat, skip_special_tokens=True)
    draws = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if options.temperature > 0:
        draws = {"do_sample": True, "temperature": options.temperature, "top_k": options.top_k}
    torch.manual_seed(options.seed)  # alike on all ranks, which draw the same tokens
    with torch.no_grad():
        model.generate(
            given["input_ids"].to(model.device),
            attention_mask=given["attention_mask"].to(model.device),
            max_new_tokens=options.tokens,
            use_cache=True,
            streamer=streamer if shows else None,
            **draws,
        )


def print_split(options: argparse.Namespace, directory: Path, launch: Launch) -> None:
    """Print as ``print_theirs``, with a model that all ranks of the job share. Collective over the job."""

    def run(device: torch.device) -> None:
        transformers_package().utils.logging.disable_progress_bar()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tp)
        tokenizer = transformers_package().AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        model = load_split(directory, dtype="auto", device=device).eval()
        print_theirs(Tuned(model, tokenizer), options, shows=launch.rank == 0)

    on_started_ranks(run, "auto", 10, launch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the text and its continuation, and return the exit status."""
    options = read_arguments(arguments)
    try:
        options.place = Path(cached_model(str(options.place)))
        return _run(options)
    except (ConfigError, CheckpointError, MissingExtra, OSError, ValueError) as error:
        launch = find_launch(os.environ) if "RANK" in os.environ else None
        say_once(f"error: {error}", launch, os.environ)
        return 2


def _run(options: argparse.Namespace) -> int:
    directory = model_directory(options.place, options.step)
    if options.tp == 1 or directory is None:
        tuned = load_tuned(options.place, options.step)
        print_ours(options) if tuned is None else print_theirs(tuned, options)
        return 0
    if not is_of_transformers(directory):
        raise ConfigError(
            f"--tp takes the directory of a model, and {directory} is an adapter's; merge it by python -m core convert"
        )
    launch = find_launch(os.environ)
    if launch is None:
        return start_ranks(options.tp)
    become_rank(launch)
    print_split(options, directory, launch)
    return 0
