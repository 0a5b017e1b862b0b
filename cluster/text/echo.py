"""A prompt as text, as its tokens write it: what an answer with `echo` begins with. Pure; blocks for a long
prompt."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cluster.text.tokenizer import TextProcessor


class EchoedPrompt(msgspec.Struct, frozen=True):
    text: str
    offsets: tuple[int, ...]  # characters of the text before each token of the prompt


def echo_of(text: TextProcessor, prompt: str | Sequence[int], token_ids: Sequence[int]) -> EchoedPrompt:
    """`prompt`: as the client sent it, `token_ids`: its tokens. Special tokens have text, but not those that
    the tokenizer has put before a text."""
    num_added = _num_added(text, prompt, token_ids) if isinstance(prompt, str) else 0
    detokenizer = text.detokenizer(skips_special=False)
    pieces: list[str] = []
    offsets = [0] * num_added
    num_chars = 0
    for token_id in token_ids[num_added:]:
        offsets.append(num_chars)
        pieces.append(detokenizer.push((token_id,)))
        num_chars += len(pieces[-1])
    return EchoedPrompt("".join((*pieces, detokenizer.flush())), tuple(offsets))


def _num_added(text: TextProcessor, prompt: str, token_ids: Sequence[int]) -> int:
    num_added = 0
    for token_id in token_ids:
        skipping = text.detokenizer()
        is_special = not skipping.push((token_id,)) + skipping.flush()
        if not is_special or prompt.startswith(text.text((token_id,))):
            break
        num_added += 1
    return num_added
