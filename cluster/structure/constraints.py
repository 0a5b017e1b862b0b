"""The structures of an engine's requests, from their arrival to their end.

    prepare      a request has come; `ready` is called when its grammar is here
    constraint   of one of its choices: a matcher after the tokens that the choice has
    may_draw     whether a step can draw for a choice now
    start, take  the masks of a step
    forget       the request has ended

If an answer goes on here that began elsewhere (preemption, replay), its tokens are matched again before the
request is ready. Used on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.errors import ClusterError
from cluster.structure.compiler import Call, Grammar, GrammarCompiler
from cluster.structure.masks import MaskFiller, Wanted
from cluster.structure.matcher import Effort, Matcher
from cluster.types.request import GenerateRequest
from cluster.types.structure import Structure

Ready = Callable[[str, ClusterError | None], None]


class Constraints:
    def __init__(self, compiler: GrammarCompiler, filler: MaskFiller | None = None):
        self._compiler = compiler
        self._filler = filler or MaskFiller()
        self._starts: dict[str, Matcher | None] = {}  # by request id; None: its grammar is not here yet
        self._num_words = 0

    def attach(self, call: Call) -> None:
        """`call(function, *args)` runs it on the engine's thread."""
        self._compiler.attach(call)
        self._filler.attach(call)

    def close(self) -> None:
        self._compiler.close()
        self._filler.close()

    def prepare(self, request: GenerateRequest, structure: Structure, ready: Ready) -> None:
        """`ready(request_id, error)` is called on the engine's thread; at once if the grammar is here and the
        answer has no tokens; never if the request is forgotten before."""
        request_id = request.request_id
        self._starts[request_id] = None

        def on_grammar(grammar: Grammar | ClusterError) -> None:
            if request_id not in self._starts:
                return
            if isinstance(grammar, ClusterError):
                return ready(request_id, grammar)
            self._num_words = grammar.vocabulary.num_words
            matcher = _start(grammar, request, structure)
            if not request.prompt.num_generated:
                return on_matched(matcher)
            self._compiler.work(lambda: _behind(matcher, request), on_matched)

        def on_matched(matcher: Matcher | ClusterError) -> None:
            if request_id not in self._starts:
                return
            if isinstance(matcher, Matcher):
                self._starts[request_id] = matcher
            ready(request_id, None if isinstance(matcher, Matcher) else matcher)

        self._compiler.get(structure, on_grammar)

    def forget(self, request_id: str) -> None:
        """Unknown requests are ignored."""
        self._starts.pop(request_id, None)

    def constraint(self, request: GenerateRequest, generated: Sequence[int]) -> Matcher | None:
        """The matcher of a choice that has these tokens, those of earlier attempts first. None: it has no
        structure."""
        start = self._starts.get(request.request_id)
        if start is None:
            return None
        matcher = start.copy()
        for token_id in generated[request.prompt.num_generated :]:
            matcher.accept(token_id)
        return matcher

    def may_draw(self, matcher: Matcher) -> bool:
        return self._filler.may_draw(matcher)

    def start(self, wanted: Wanted) -> None:
        self._filler.start(wanted, self._num_words)

    def take(self) -> tuple[np.ndarray, frozenset[int]]:
        return self._filler.take()


def _start(grammar: Grammar, request: GenerateRequest, structure: Structure) -> Matcher:
    ends = grammar.vocabulary.ends(request.stop.stop_token_ids)
    matcher = grammar.root.copy(ends, structure.param, Effort())
    if matcher.mask is not None:
        matcher.mask = matcher.mask.copy()
        matcher.put_ends(matcher.mask)
    return matcher


def _behind(matcher: Matcher, request: GenerateRequest) -> Matcher:
    prompt = request.prompt
    for token_id in prompt.token_ids[len(prompt.token_ids) - prompt.num_generated :]:
        matcher.accept(token_id)
    matcher.make_mask()
    matcher.effort.forgive()
    return matcher
