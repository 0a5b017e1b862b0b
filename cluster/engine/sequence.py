"""A prompt and the answer after it, as one sequence of tokens: which blocks hold its KV, and how much of it
is here. It changes through its methods only, on the engine's thread.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from cluster.errors import UnavailableError
from cluster.kvcache.hashing import BlockHashes
from cluster.model.language import PromptPositions
from cluster.model.states import StateSpan
from cluster.types.logprobs import TokenLogprobs
from cluster.types.request import Prompt


@dataclass(eq=False)
class TokenSequence:
    """KV is here of the first `num_computed_tokens` tokens.

    A hybrid model's state is the one after the first `num_settled_tokens` of them: no draft of the last step
    is in it, because a state cannot give a wrong one back. The next step computes the right ones again.

    If no layer of the model looks back further than a window, blocks in front of the window are freed: their
    places in the table, [0, num_dropped), hold block 0, which is not read there."""

    sequence_id: str  # unique in the worker
    prompt: Prompt
    # None: a token's position is its index + position_delta
    positions: PromptPositions | None = None
    # Of the tokens after the prompt
    position_delta: int = 0
    # Of its tokens. None: its KV is not exact, and no other request uses it
    hashes: BlockHashes | None = None
    # One object grows; others take its place. Recorded steps look at what it has gained
    block_table: list[int] = field(default_factory=list)
    # Of a hybrid model: blocks of the state after the settled tokens, and of the state that the next step
    # leaves. Arrays: every step copies them into its inputs
    state: Sequence[int] = ()
    next_state: Sequence[int] = ()
    # The state lies here instead, in blocks that the prefix cache shares; empty: in its own
    shared_state: list[int] = field(default_factory=list)
    # A forward that is enqueued behind the step writes over the state that the step begins with
    is_overwritten: bool = False
    # By number of tokens: blocks for the state after them, which the prefix cache is to know
    snapshots: dict[int, list[int]] = field(default_factory=dict)
    num_dropped: int = 0
    num_cached_tokens: int = 0  # the part of the prompt that came from the prefix cache
    num_registered: int = 0  # prefix of the block table that other requests can find
    num_computed_tokens: int = 0
    num_unsettled_tokens: int = 0  # the last ones of them, which the state lacks
    num_blocks_sent: int = 0  # prefix of the block table that has been posted to the other worker
    # KV from this token on does not travel: the other worker computes it
    first_recomputed: int | None = None
    items_ready: set[int] = field(default_factory=set)  # media items whose embeddings are here
    # [1, vocab_size], once the prompt is computed, until a token is drawn
    last_logits: Tensor | None = None
    # Of the prompt's text tokens so far, until the first token is drawn, if the request wants them
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_settled_tokens(self) -> int:
        """Tokens that no further step computes."""
        return self.num_computed_tokens - self.num_unsettled_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens of the prompt that are still to be computed."""
        return max(0, self.num_prompt_tokens - self.num_computed_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether the KV of the prompt is here."""
        return self.num_computed_tokens >= self.num_prompt_tokens

    @property
    def num_ready_tokens(self) -> int:
        """Tokens of the prompt that can be computed now: up to the first range of an item whose embeddings
        are missing."""
        missing = (item for i, item in enumerate(self.prompt.media) if i not in self.items_ready)
        starts = (item.first_range_after(self.num_computed_tokens) for item in missing)
        first = min((start for start in starts if start is not None), default=self.num_prompt_tokens)
        return max(first, self.num_computed_tokens)

    @property
    def blocks(self) -> list[int]:
        """Blocks that the sequence holds."""
        own = [*self.block_table[self.num_dropped :], *self.state, *self.next_state]
        return [*own, *self.shared_state, *itertools.chain.from_iterable(self.snapshots.values())]

    # Blocks

    def num_blocks_missing(self, num_new: int, block_size: int) -> int:
        """Blocks that the table lacks for the next `num_new` tokens."""
        return max(0, -(-(self.num_computed_tokens + num_new) // block_size) - len(self.block_table))

    def share(self, block_ids: list[int], num_tokens: int) -> None:
        """The prefix cache has the KV of the prompt's first `num_tokens` tokens: in these blocks, which fill
        the table so far."""
        self.block_table = block_ids
        self.num_registered = len(block_ids)
        self.num_cached_tokens = self.num_computed_tokens = num_tokens

    def share_state(self, block_ids: list[int]) -> list[int]:
        """The state after the settled tokens lies in these blocks, which other requests can find; empty: in
        the sequence's own. Returns those where it lay before: the caller frees them."""
        before, self.shared_state = self.shared_state, block_ids
        return before

    def reset(self) -> list[int]:
        """Undoes `share` and `share_state`. Returns the blocks: the caller frees them."""
        block_ids, self.block_table = [*self.block_table, *self.shared_state], []
        self.shared_state = []
        self.num_cached_tokens = self.num_computed_tokens = self.num_registered = 0
        return block_ids

    def hold(self, block_ids: Iterable[int]) -> None:
        """Appends blocks to the table."""
        self.block_table += block_ids

    def hold_states(self, block_ids: Sequence[int]) -> None:
        """Takes these blocks for the state before and after a step."""
        half = len(block_ids) // 2
        self.state, self.next_state = array("q", block_ids[:half]), array("q", block_ids[half:])

    def plan_snapshot(self, num_tokens: int, block_ids: list[int]) -> None:
        """The state after so many tokens of the prompt is to be kept in these blocks."""
        self.snapshots[num_tokens] = block_ids

    def state_spans(self, num_tokens: int, num_drafts: int = 0) -> tuple[StateSpan, ...]:
        """The tokens behind the settled ones, cut where the state is kept; empty if the model keeps none. Of
        the `num_drafts` tokens behind these it is not kept. Raises UnavailableError behind `span_ahead`,
        until the step's tokens are counted: the state is lost, and another attempt can go on."""
        if not self.state:
            return ()
        if self.is_overwritten:
            raise UnavailableError("a step failed behind which the next one had been enqueued")
        at, end = self.num_settled_tokens, self.num_settled_tokens + num_tokens
        source: Sequence[int] = self.shared_state or (self.state if at else ())
        spans = []
        for cut in sorted(cut for cut in self.snapshots if at < cut <= end):
            spans.append(StateSpan(cut - at, source, self.snapshots[cut]))
            at, source = cut, self.snapshots[cut]
        if at < end:
            spans.append(StateSpan(end - at, source, self.next_state))
        if num_drafts:
            spans.append(StateSpan(num_drafts, self.next_state))
        return tuple(spans)

    def span_ahead(self) -> tuple[StateSpan, ...]:
        """Returns the span of the token behind the step that is enqueued now, without drafts: it begins with
        what the step leaves, and writes over what the step begins with. Empty if no state is kept."""
        if not self.state:
            return ()
        self.is_overwritten = True
        return (StateSpan(1, self.next_state, self.state),)

    def take_snapshots(self) -> dict[int, list[int]]:
        """Returns the snapshots whose tokens are computed: the caller makes them findable and frees them."""
        done = sorted(cut for cut in self.snapshots if cut <= self.num_computed_tokens)
        return {cut: self.snapshots.pop(cut) for cut in done}

    def registered(self, num_blocks: int) -> None:
        """Other requests can find the first `num_blocks` of the table."""
        self.num_registered = max(self.num_registered, num_blocks)

    def sent(self, num_blocks: int) -> None:
        """The first `num_blocks` of the table have been posted to the other worker."""
        self.num_blocks_sent = num_blocks

    def drop_behind_window(self, num_blocks: int) -> list[int]:
        """The window has left the first `num_blocks` of the table. Returns those that were held: the caller
        frees them."""
        left = self.block_table[self.num_dropped : num_blocks]
        self.block_table[self.num_dropped : num_blocks] = [0] * len(left)
        self.num_dropped += len(left)
        return left

    def fork(self, sequence_id: str, block_table: list[int], state_blocks: Sequence[int]) -> TokenSequence:
        """The same tokens for another choice, in these blocks."""
        hashes = None if self.hashes is None else self.hashes.fork()
        forked = replace(self, sequence_id=sequence_id, block_table=block_table, hashes=hashes, snapshots={})
        forked.hold_states(state_blocks)
        return forked

    # Tokens

    def items_arrived(self, items: Iterable[int]) -> None:
        """The embeddings of these media items are here."""
        self.items_ready.update(items)

    def computed(
        self,
        num_tokens: int,
        last_logits: Tensor | None = None,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """The KV of the next tokens has been computed here, by one step. `last_logits`: if the prompt is
        complete with them."""
        self.num_computed_tokens += num_tokens
        self.is_overwritten = False
        if self.num_computed_tokens not in self.snapshots:
            self.state, self.next_state = self.next_state, self.state
        self.last_logits = last_logits
        self.prompt_logprobs += prompt_logprobs

    def verified(self, num_tokens: int) -> None:
        """One step has computed the KV of an answer's last token and of the drafts behind it, of which
        `num_tokens` - 1 were right."""
        self.computed(num_tokens)
        self.num_unsettled_tokens = num_tokens - 1 if self.state else 0

    def leave_to_receiver(self, first_token: int) -> None:
        """The KV of the tokens from this one on is not sent: the other worker computes it."""
        self.first_recomputed = first_token

    def arrived(self, position_delta: int, first_recomputed: int | None = None) -> None:
        """The prompt's KV has come from another worker: all of it, or what is before `first_recomputed`."""
        self.position_delta = position_delta
        self.num_computed_tokens = self.num_prompt_tokens
        if first_recomputed is not None:
            self.num_computed_tokens = max(first_recomputed, self.num_cached_tokens)

    def drop_logits(self) -> None:
        """No first token is drawn any more. The row would keep the logits of a whole step."""
        self.last_logits, self.prompt_logprobs = None, []

    def extend(self, token_ids: Sequence[int]) -> None:
        """These tokens have been generated. Their KV is not here yet."""
        if self.hashes is not None:
            self.hashes.extend(token_ids)
