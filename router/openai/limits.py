"""What one request may ask of this model and this door. Everything beyond it is refused before any work is done for it.

A valid call has no value that a worker could stumble over: token ids are of the vocabulary, counts fit the context, numbers
fit 64 bits. Texts are bounded in characters, because tokenising is the first work that a long text costs; bodies are bounded by
their structure, because parsing is the first work that a large body costs.
"""

from __future__ import annotations

import msgspec

MAX_BODY_BYTES = 64 << 20
MAX_INT = 2**31 - 1  # of counts: the engines keep them in 32 bits
MAX_TOKEN_CHARS = 32  # longer tokens are runs of spaces or dashes, of which no text consists
MIN_TEXT_BYTES = 256 << 10
MIN_MARKS = 1 << 16


class Limits(msgspec.Struct, frozen=True):
    """`max_token_chars`: characters of the vocabulary's longest token. `min_priority`: the most urgent that a client may ask for.
    `shares_caches`: tenants find each other's KV and embeddings. `shows_workers`: the ledger names them. `held_body_bytes`: of all
    requests at this door together."""

    max_model_len: int = MAX_INT
    vocab_size: int = MAX_INT
    max_token_chars: int = MAX_TOKEN_CHARS
    min_priority: int = 0
    shares_caches: bool = False
    shows_workers: bool = False
    held_body_bytes: int = 1 << 30
    max_body_bytes: int = MAX_BODY_BYTES

    @property
    def max_text_chars(self) -> int:
        """Of all texts of one prompt: more have too many tokens for certain."""
        return self.max_model_len * min(self.max_token_chars, MAX_TOKEN_CHARS)

    @property
    def max_text_bytes(self) -> int:
        """Of a body without media; a character takes up to six bytes in JSON."""
        return min(self.max_body_bytes, max(MIN_TEXT_BYTES, MAX_TOKEN_CHARS * self.max_model_len))

    @property
    def max_marks(self) -> int:
        """Commas and opening brackets in a body, which bound its values: a prompt as token ids has one comma per token."""
        return max(MIN_MARKS, 2 * self.max_model_len)

    @property
    def max_escapes(self) -> int:
        """Backslashes in a body, beside those that some clients write into base64: text as `\\uXXXX` has one per character."""
        return max(MIN_MARKS, 8 * self.max_model_len)


class ClientTimeouts(msgspec.Struct, frozen=True):
    """How long a client may take. `body_s`: for its body, and more as bytes come; `read_s`: without reading anything of its answer."""

    body_s: float = 20.0
    read_s: float = 60.0


CLIENT_TIMEOUTS = ClientTimeouts()
