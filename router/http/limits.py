"""Limits of one request to this model and this door. A request beyond them is refused before any work is done
for it.

A valid call has only values that workers can handle: token ids are in the vocabulary, counts fit the context,
numbers fit 64 bits. Texts are bounded in characters, because tokenising is the first work that a long text
costs. Bodies are bounded by their structure, because parsing is the first work that a large body costs.
"""

from __future__ import annotations

import msgspec

MAX_BODY_BYTES = 64 << 20
MAX_INT = 2**31 - 1  # of counts: the engines keep them in 32 bits
MAX_TOKEN_CHARS = 32  # longer tokens are runs of spaces or dashes, which no text consists of
MIN_TEXT_BYTES = 256 << 10
# 64 prompts of 4,096 token ids. The costliest body (objects within objects: `chains` in
# tests/unit/http/test_bodies.py) takes 0.15 s and 74 MiB to parse, four times as many values take 0.8 s and
# 300 MiB
MIN_MARKS = 1 << 18
MIN_ESCAPES = 1 << 16
# Log-probabilities of prompts are cheap to ask for and large in an answer: 140 bytes each until they are
# written, and 100 then. Enough for 64 prompts of 4,096 tokens with four each
MIN_PROMPT_SCORES = 1 << 20


class Limits(msgspec.Struct, frozen=True):
    max_model_len: int = MAX_INT
    vocab_size: int = MAX_INT
    max_token_chars: int = MAX_TOKEN_CHARS  # characters of the vocabulary's longest token
    min_priority: int = 0  # the most urgent that a client may ask for
    shares_caches: bool = False  # tenants reuse each other's KV and embeddings
    shows_workers: bool = False  # timelines name the workers
    held_body_bytes: int = 1 << 30  # of all requests at this door together
    keep_responses_s: float = 0.0  # background responses, from their end on; 0: there are none
    max_body_bytes: int = MAX_BODY_BYTES

    @property
    def max_text_chars(self) -> int:
        """The characters of all texts of one prompt. A longer prompt certainly has too many tokens."""
        return self.max_model_len * min(self.max_token_chars, MAX_TOKEN_CHARS)

    @property
    def max_text_bytes(self) -> int:
        """The bytes of a body without media. A character takes up to six bytes in JSON."""
        return min(self.max_body_bytes, max(MIN_TEXT_BYTES, MAX_TOKEN_CHARS * self.max_model_len))

    @property
    def max_marks(self) -> int:
        """Commas and opening brackets in a body, which bound the number of its values. Prompts as token ids
        have one comma per token, log-probabilities that are sent back about five per token that they name."""
        return max(MIN_MARKS, 2 * self.max_model_len)

    @property
    def max_escapes(self) -> int:
        """Backslashes in a body, apart from those that some clients write into base64. Text as `\\uXXXX` has
        one per character."""
        return max(MIN_ESCAPES, 8 * self.max_model_len)

    @property
    def max_prompt_scores(self) -> int:
        """Log-probabilities that one answer has of all its prompts. One prompt may always have them all."""
        return max(MIN_PROMPT_SCORES, 21 * self.max_model_len)


class ClientTimeouts(msgspec.Struct, frozen=True):
    body_s: float = 20.0  # until the body is complete; extended as bytes arrive
    read_s: float = 60.0  # without reading anything of the answer


CLIENT_TIMEOUTS = ClientTimeouts()
