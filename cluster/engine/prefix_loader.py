"""The engine's port to the second tier of its KV cache: the tier is told what the pool may lose, and
prefixes of prompts come back from it.

If a prompt's cached prefix continues in the tier, and loading should be faster than computing, the prompt
waits for its blocks until the rest of the prefix is loaded; of a hybrid model, up to the last state that is
known, with the state. The blocks are the loader's meanwhile. Then they are cached blocks like all others: the
request finds them when it is admitted, as far as they were loaded, and computes the rest. Requests that want
what is being loaded wait for the same load. A request that ends meanwhile leaves the load alone. Prompts
whose KV arrives from other workers load nothing.

Owns the loads under way. Used on the engine's thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.engine.snapshots import last_known
from cluster.engine.state import LanguageRequest
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.hashing import is_announced, snapshot_key, snapshot_names
from cluster.kvcache.tier import KeptBlock, KvTier
from cluster.scheduling.budget import StepBudget
from cluster.types.messages import BlocksChanged
from cluster.types.transfer import TierTotals


@dataclass(eq=False)
class _PrefixLoad:
    names: list[bytes]
    block_ids: list[int]
    cached: list[int]  # blocks before them, which must stay
    request_ids: list[str] = field(default_factory=list)
    is_suspect: bool = False  # what is loaded must not be used


class PrefixLoader:
    def __init__(self, tier: KvTier, blocks: BlockPool, budget: StepBudget, state_blocks: int):
        """`budget`: knows how long prompt tokens take to compute. `state_blocks`: of a model's state."""
        self._tier = tier
        self._blocks = blocks
        self._budget = budget
        self._state_blocks = state_blocks
        blocks.note_cached()
        self._offered = [-1] * blocks.num_blocks  # generation of each block when it was named to the tier
        self._loads: dict[bytes, _PrefixLoad] = {}  # by each name that is loaded

    @property
    def totals(self) -> TierTotals:
        return self._tier.totals

    def content(self) -> tuple[bytes, ...]:
        """All announced blocks that the worker has, in either tier."""
        return tuple({*self._blocks.content(), *filter(is_announced, self._tier)})

    def take_changes(self) -> BlocksChanged | None:
        """What of it has come and gone. A block that the tier keeps counts as cached."""
        return self._blocks.take_changes(filter(is_announced, self._tier.take_changes()), self._tier)

    def keep(self) -> None:
        """Names what no request holds any more, and what may therefore be evicted; each content once."""
        kept = []
        for block_id, name in self._blocks.take_cached():
            (generation,) = self._blocks.generations([block_id])
            if self._offered[block_id] != generation:
                self._offered[block_id] = generation
                kept.append(KeptBlock(block_id, generation, name))
        if kept:
            self._tier.keep(kept)

    def try_load(
        self,
        request: LanguageRequest,
        num_spare: int,
        admit: Callable[[str], None],
    ) -> bool:
        """Whether a part of the request's prompts is loaded now. Then `admit(request_id)` is called when it
        is here, or as much of it as could be loaded. `num_spare` blocks stay free for others."""
        size = self._blocks.block_size
        names: list[bytes] = []
        cached: list[int] = []
        compute_s = 0.0
        for sequence in request.sequences:
            hashes = [] if sequence.hashes is None else sequence.hashes.hashes
            hashes = hashes[: (sequence.num_prompt_tokens - 1) // size]  # the last token is computed anyway
            known = self._blocks.lookup(hashes)
            cached += known
            found = list(itertools.takewhile(self._tier.__contains__, hashes[len(known) :]))
            begin, end = len(known), len(known) + len(found)
            if self._state_blocks:
                begin = last_known(hashes[:begin], self._blocks, self._state_blocks)
                end, state, held = self._last_state(hashes[:end], begin)
                found = [*found[: max(0, end - len(known))], *state]
                cached += held
            compute_s += self._compute_s((end - begin) * size, begin * size)
            names += found
        load = self._loads.get(names[0]) if names else None
        has_room = len(names) + num_spare <= self._blocks.num_free
        if load is None and names and has_room and self._tier.is_worth(len(names), compute_s):
            load, cached = self._start(names, cached, admit), []
        self._blocks.free(cached)
        if load is None:
            return False
        load.request_ids.append(request.request_id)
        return True

    def forget(self) -> None:
        """The KV of the worker is suspect."""
        for load in self._loads.values():
            load.is_suspect = True
        self._tier.forget()

    def _last_state(self, hashes: Sequence[bytes], least: int) -> tuple[int, list[bytes], list[int]]:
        """Returns the last number of these blocks, above `least`, whose state is in either tier; which names
        of it are to be loaded; and which of its blocks need not, with a reference to each."""
        for depth in range(len(hashes), least, -1):
            key = snapshot_key(hashes[depth - 1])
            if key not in self._tier and not self._blocks.num_known([key]):
                continue
            names = snapshot_names(hashes[depth - 1], self._state_blocks)
            held = self._blocks.lookup(names)
            if all(name in self._tier for name in names[len(held) :]):
                return depth, names[len(held) :], held
            self._blocks.free(held)
        return least, [], []

    def _compute_s(self, num_tokens: int, num_before: int) -> float:
        """How much longer steps last that compute so many tokens, behind `num_before` others."""
        context = num_before + num_tokens / 2
        return self._budget.predicted_s(num_tokens, context) - self._budget.predicted_s(0, context)

    def _start(self, names: list[bytes], cached: list[int], admit: Callable[[str], None]) -> _PrefixLoad:
        load = _PrefixLoad(names, self._blocks.allocate(len(names)), cached)
        self._loads.update(dict.fromkeys(names, load))
        self._tier.load(names, load.block_ids, lambda num_loaded: self._end(load, num_loaded, admit))
        return load

    def _end(self, load: _PrefixLoad, num_loaded: int, admit: Callable[[str], None]) -> None:
        for name, block_id in zip(load.names[:num_loaded], load.block_ids, strict=False):
            if not load.is_suspect:
                self._blocks.register(block_id, name)
        self._blocks.free([*load.cached, *load.block_ids])
        for name in load.names:
            self._loads.pop(name, None)
        for request_id in load.request_ids:
            admit(request_id)
