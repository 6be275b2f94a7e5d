"""PromptStore: a store whose calls always return, even if the network to its host is lost."""

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
    """Wrapper of a torch store with a time limit on every call. Thread-safe.

    A call that takes longer than ``limit_s`` raises RuntimeError, and so do all further calls until it has returned.
    The client of torch's TCPStore reads its socket without a limit, so a separate thread makes the calls.
    """

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        self._store = store
        self._limit_s = limit_s
        self._late: _Question | None = None  # the call that took longer
        self._closed = False
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="core-store", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, getattr(self._store, name))

    def close(self) -> None:
        """End the thread. Each later call raises RuntimeError."""
        self._questions.put(None)
        self._closed = True
        self._thread.join(1.0)  # it does not end while a call hangs

    @property
    def is_silent(self) -> bool:
        """True while a late call has not returned, or if it returned an error."""
        return self._late is not None and (not self._late.done.is_set() or self._late.error is not None)

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        question = _Question(partial(call, *args))
        if not (self._closed or self.is_silent):
            self._late = None
            self._questions.put(question)
            if not question.done.wait(self._limit_s):
                self._late = question
        if not question.done.is_set():
            raise RuntimeError(f"no answer within {self._limit_s:.0f} s")
        if question.error is not None:
            raise question.error
        return question.answer

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                question.answer = question.ask()
            except Exception as error:  # raised again in the calling thread
                question.error = error
            question.done.set()
