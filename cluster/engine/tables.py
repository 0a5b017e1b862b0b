"""Which blocks a request holds: those of its prompts, of which a cached prefix is shared; then its choices
take them over, grow, and free the blocks behind a window.

Functions of the engine's thread over the records of a request and the pool. The runner copies the bytes.
"""

from __future__ import annotations

from cluster.engine.sequence import TokenSequence
from cluster.engine.snapshots import plan_snapshots, register_snapshots, share_snapshot
from cluster.engine.state import AnswerChoice, LanguageRequest
from cluster.kvcache.blocks import BlockPool
from cluster.model.language import LanguageModel
from cluster.scheduling.chunks import Span, usable_prefix
from cluster.types.media import Modality
from cluster.types.request import NUM_PLACES, Prompt
from cluster.worker.blame import bookkeeping


def try_allocate_prompts(
    request: LanguageRequest, blocks: BlockPool, num_spare: int, spans: tuple[tuple[Span, ...], ...],
    state_blocks: int = 0,
) -> bool:  # fmt: skip
    """Allocates blocks for all prompts of the request and their states, and for copies of their last blocks.
    The blocks of a cached prefix are shared, unless the log-probabilities of its tokens are wanted: nothing
    keeps these.
    False, and no change, if fewer than `num_spare` blocks would be left. spans: per prompt, what is computed
    in one piece. state_blocks: of one state."""
    if request.was_tried and not _may_fit(request, blocks, num_spare, state_blocks):
        return False
    request.note_try()
    size = blocks.block_size
    snapshot_size, num_known = (state_blocks if request.computes else 0), []
    for sequence, uncut in zip(request.sequences, spans, strict=True):
        if request.scores_prompt and sequence is request.main:
            num_known.append(0)
        else:
            known = _share_cached(sequence, blocks, uncut, snapshot_size, is_computed=request.computes)
            num_known.append(known)
    missing = [
        -(-sequence.num_prompt_tokens // size) - len(sequence.block_table) for sequence in request.sequences
    ]
    num_copies, num_states = request.num_copies(size, state_blocks), NUM_PLACES * state_blocks
    if sum(missing) + num_states * len(missing) + num_copies + num_spare > blocks.num_free:
        for sequence in request.sequences:
            blocks.free(sequence.reset())
        return False
    for sequence, count in zip(request.sequences, missing, strict=True):
        sequence.hold(blocks.allocate(count))
        sequence.hold_states(blocks.allocate(num_states))
    request.hold_copies(blocks.allocate(num_copies))
    if snapshot_size:
        for sequence, known, uncut in zip(request.sequences, num_known, spans, strict=True):
            plan_snapshots(sequence, known, blocks, uncut, snapshot_size, num_spare)
    return True


def _may_fit(request: LanguageRequest, blocks: BlockPool, num_spare: int, state_blocks: int) -> bool:
    """False if the request does not fit, even if all that is cached of its prompt can be used. A request that
    waits is tried in every step: this takes no references, which costs most of a try with a long cached
    prefix. The first try has made the prefix the one that is evicted last."""
    if len(request.sequences) > 1 or request.scores_prompt:
        return True  # the prompts may share blocks with each other; or none are shared
    (sequence,) = request.sequences
    num_blocks = -(-sequence.num_prompt_tokens // blocks.block_size) + NUM_PLACES * state_blocks
    num_copies = request.num_copies(blocks.block_size, state_blocks)
    num_lacking = num_blocks + num_copies + num_spare - blocks.num_free
    if num_lacking <= 0 or sequence.hashes is None:
        return num_lacking <= 0
    return num_lacking <= blocks.num_held(sequence.hashes.hashes)


def _share_cached(
    sequence: TokenSequence, blocks: BlockPool, uncut: tuple[Span, ...], snapshot_size: int, *,
    is_computed: bool,
) -> int:  # fmt: skip
    """`is_computed`: the rest of the prompt is computed here; else all that is cached can be used.
    snapshot_size: blocks of a state, without which the rest cannot be computed; 0: it can. Returns how many
    blocks of KV were known."""
    if sequence.hashes is None:
        return 0
    cached, size = blocks.lookup(sequence.hashes.hashes), blocks.block_size
    if snapshot_size:
        num_shared = share_snapshot(sequence, cached, blocks, uncut, snapshot_size)
    else:
        usable = len(cached) * size
        if is_computed:
            usable = usable_prefix(usable, sequence.num_prompt_tokens, size, uncut)
        num_shared = usable // size
        sequence.share(cached[:num_shared], usable)
    blocks.free(cached[num_shared:])
    return len(cached)


def register_computed(sequence: TokenSequence, blocks: BlockPool) -> None:
    """Makes blocks findable that have become full."""
    if sequence.hashes is None:
        return
    num_full = sequence.num_computed_tokens // blocks.block_size
    if num_full > sequence.num_registered:
        num_full = min(num_full, len(sequence.hashes.hashes))
        for i in range(max(sequence.num_registered, sequence.num_dropped), num_full):
            blocks.register(sequence.block_table[i], sequence.hashes.hashes[i])
        sequence.registered(num_full)
    if sequence.state:
        register_snapshots(sequence, blocks)


def uncut_spans(model: LanguageModel, prompt: Prompt) -> tuple[Span, ...]:
    """Placeholder ranges in which the model attends in both directions, sorted. Empty for most families. No
    two of them touch: the processors of the others put marker tokens around each."""
    if not model.chunk_cut_spans:
        return ()
    seen = (item for item in prompt.media if item.modality is not Modality.AUDIO)
    ranges = sorted(one for item in seen for one in item.ranges)
    return tuple((offset, offset + length) for offset, length in ranges)


def share_prompts(request: LanguageRequest, blocks: BlockPool) -> tuple[list[int], list[int]]:
    """The first live choice takes over the sequences of the prompts. The other choices share the full blocks
    and get a copy of the last one, and of the state: from here on every choice writes to its own blocks only.
    Returns the blocks to be copied, and their targets."""
    sources: list[int] = []
    targets: list[int] = []
    choices, copies = request.live_choices, request.take_copies()
    for sequence in request.sequences if choices else ():
        num_full = sequence.num_prompt_tokens // blocks.block_size
        for choice in choices[1:]:
            table = sequence.block_table[:num_full]
            blocks.share(table)
            if num_full < len(sequence.block_table):
                sources.append(sequence.block_table[num_full])
                targets.append(copies.pop())
                table.append(targets[-1])
            states = [copies.pop() for _ in range(NUM_PLACES * len(sequence.state))]
            sources += sequence.state
            targets += states[: len(sequence.state)]
            choice.take(sequence.fork(f"{sequence.sequence_id}/{choice.idx}", table, states))
    if choices:
        request.hand_over(choices[0])
    blocks.free(copies)  # blocks for choices that have ended already
    return sources, targets


def try_grow(request: LanguageRequest, blocks: BlockPool) -> bool:
    """Allocates blocks for the next token of every choice, and for its drafts if there is room. False: there
    is no room for the next tokens."""
    if _try_cover(request, blocks):
        return True
    for choice in request.live_choices:
        choice.drop_drafts()
    return _try_cover(request, blocks)


def _try_cover(request: LanguageRequest, blocks: BlockPool) -> bool:
    missing = blocks_missing(request, blocks.block_size)
    fresh = blocks.try_allocate(sum(count for _, count in missing))
    if fresh is None:
        return False
    for sequence, count in missing:
        sequence.hold(fresh.pop() for _ in range(count))
    return True


def blocks_missing(request: LanguageRequest, block_size: int) -> list[tuple[TokenSequence, int]]:
    """The sequences that lack blocks for their next token and drafts, and how many; in most steps none."""
    missing = []
    for choice in request.live_choices:
        num_new = 1 + len(choice.drafts)
        for sequence in choice.sequences:
            if count := sequence.num_blocks_missing(num_new, block_size):
                missing.append((sequence, count))
    return missing


@bookkeeping
def free_blocks_behind_window(choice: AnswerChoice, blocks: BlockPool, window: int | None) -> None:
    """Frees the blocks that no later step of the choice can see. A block that other choices share loses one
    reference."""
    if window is None:
        return
    for sequence in choice.sequences:
        first_visible = max(0, sequence.num_computed_tokens + 1 - window)
        blocks.free(sequence.drop_behind_window(first_visible // blocks.block_size))
