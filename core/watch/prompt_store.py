"""PromptStore: a store whose every call ends, also when the network to the host that holds it is cut."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist


@dataclass
class _Question:
    ask: Callable[[], Any]
    done: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: Exception | None = None


class PromptStore:
    """A torch store; a call that takes longer than limit_s raises RuntimeError, and so does each call after it.

    The client of torch's TCPStore reads its socket without a limit, so calls are made by a thread that no other waits
    for. Several threads may use it at once.
    """

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        self._store = store
        self._limit_s = limit_s
        self._silent = False
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="core-store", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, getattr(self._store, name))

    def close(self) -> None:
        """End the thread; each later call raises RuntimeError."""
        self._questions.put(None)
        self._silent = True
        self._thread.join(1.0)  # it does not end while a call hangs

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        question = _Question(partial(call, *args))
        if not self._silent:
            self._questions.put(question)
            self._silent = not question.done.wait(self._limit_s)
        if not question.done.is_set():
            raise RuntimeError(f"no answer within {self._limit_s:.0f} s: its host is lost, or the network to it")
        if question.error is not None:
            raise question.error
        return question.answer

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                question.answer = question.ask()
            except Exception as error:  # the caller's
                question.error = error
            question.done.set()
