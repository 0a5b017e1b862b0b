"""A worker's grammars, each compiled once. Nothing waits for one but the requests that need it.

The first request with a structure loads llguidance and the vocabulary. A compiled grammar is kept. If there
are too many, or their texts are too long, the least recently used goes; each goes that was not used for a
while.

Threads: all records belong to the engine's thread. One thread of low priority does the work. Doors have
compiled the same before, within limits of time and memory (`checker`), so that it is not held up for long.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from cluster.clock import Clock
from cluster.errors import ClusterError, InternalError
from cluster.structure.grammar import compile_structure
from cluster.structure.matcher import Matcher
from cluster.structure.vocabulary import Vocabulary, VocabularySource
from cluster.types.structure import Structure

logger = logging.getLogger(__name__)

MAX_GRAMMARS = 256
MAX_TEXT_CHARS = 8 << 20  # of all structures that are kept
MAX_IDLE_S = 3600.0
NICENESS = 10

Key = tuple[str, str]
T = TypeVar("T")
Call = Callable[..., None]


@dataclass(frozen=True)
class Grammar:
    vocabulary: Vocabulary
    root: Matcher  # at the start of an answer, with its mask; only copies are used


@dataclass
class _Kept:
    grammar: Grammar
    used_at: float


class GrammarCompiler:
    def __init__(self, load: Callable[[], VocabularySource], clock: Clock, executor: Executor | None = None):
        """`load` is called once, on the thread that compiles."""
        self._load = load
        self._clock = clock
        self._executor = executor or ThreadPoolExecutor(1, "structure", yield_to_others)
        self._call: Call = lambda function, *args: function(*args)
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._num_chars = 0
        self._waiting: dict[Key, list[Callable[[Grammar | ClusterError], None]]] = {}

    def attach(self, call: Call) -> None:
        """`call(function, *args)` runs it on the engine's thread."""
        self._call = call

    def close(self) -> None:
        """Does not wait for what is being compiled."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def get(self, structure: Structure, done: Callable[[Grammar | ClusterError], None]) -> None:
        """`done` is called on the engine's thread; at once if the grammar is here."""
        key = structure.key
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            kept.used_at = self._clock.now()
            return done(kept.grammar)
        waiting = self._waiting.setdefault(key, [])
        waiting.append(done)
        if len(waiting) == 1:
            self.work(lambda: self._compile(structure), lambda grammar: self._on_compiled(key, grammar))

    def work(self, function: Callable[[], T], done: Callable[[T | ClusterError], None]) -> None:
        """Runs `function` on the thread that compiles. `done` hears its result or error on the engine's."""
        self._executor.submit(self._run, function, done)

    def _run(self, function: Callable[[], T], done: Callable[[T | ClusterError], None]) -> None:
        try:
            self._call(done, function())
        except ClusterError as error:
            self._call(done, error)
        except Exception:  # the thread's edge; the request that waits must hear of it
            logger.exception("a structure could not be compiled")
            self._call(done, InternalError("the structure could not be compiled; see the worker's log"))

    def _compile(self, structure: Structure) -> Grammar:
        vocabulary = self._vocabulary = self._vocabulary or Vocabulary(self._load())
        root = Matcher(compile_structure(structure, vocabulary), vocabulary, (vocabulary.end_id,))
        root.make_mask()
        return Grammar(vocabulary, root)

    def _on_compiled(self, key: Key, grammar: Grammar | ClusterError) -> None:
        if isinstance(grammar, Grammar):
            self._keep(key, grammar)
        for done in self._waiting.pop(key):
            done(grammar)

    def _keep(self, key: Key, grammar: Grammar) -> None:
        now = self._clock.now()
        self._kept[key] = _Kept(grammar, now)
        self._num_chars += len(key[1])
        while len(self._kept) > 1:
            oldest, kept = next(iter(self._kept.items()))
            is_idle = now - kept.used_at > MAX_IDLE_S
            if not is_idle and len(self._kept) <= MAX_GRAMMARS and self._num_chars <= MAX_TEXT_CHARS:
                return
            del self._kept[oldest]
            self._num_chars -= len(oldest[1])


def yield_to_others() -> None:
    """Threads that compute steps go first."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
