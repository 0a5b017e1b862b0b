"""A byte-level BPE vocabulary of Qwen2.5's exact size in which every short lower-case word after a space is
one token.

Nothing is trained. The tokens are the 256 bytes and then " a", " b", …, " z", " aa", " ab", … in this order;
each is the merge of its prefix with its last letter. Every merge begins with the space, so a word is merged
letter by letter, beginning with its space. Therefore the text that a server generates from such tokens
becomes the same tokens again in the next turn.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BASE_TOKENS = 151_643  # Qwen2.5: so many tokens, then the special ones
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
SPACE = "Ġ"  # how byte-level BPE writes a space
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ('image', 'image_url') -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type in ('video', 'video_url') -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def words() -> Iterator[str]:
    """a, b, …, z, aa, ab, … without end."""
    for length in itertools.count(1):
        for letters in itertools.product(string.ascii_lowercase, repeat=length):
            yield "".join(letters)


def byte_tokens() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE, sorted."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def make_merges(num_base_tokens: int = BASE_TOKENS) -> list[tuple[str, str]]:
    """One merge per word token: (the token of all but its last letter, that letter)."""
    chosen = itertools.islice(words(), num_base_tokens - 256)
    return [(SPACE + word[:-1], word[-1]) for word in chosen]


def write_tokenizer(folder: Path, num_base_tokens: int = BASE_TOKENS) -> None:
    """tokenizer.json, the older vocab.json and merges.txt that some converters ask for, and the chat
    template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = make_merges(num_base_tokens)
    tokens = byte_tokens() + [left + right for left, right in merges]
    vocabulary = {token: idx for idx, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges)
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(num_base_tokens), indent=1))


def tokenizer_config(num_base_tokens: int = BASE_TOKENS) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(num_base_tokens + idx): {"content": token, **flags}
            for idx, token in enumerate(SPECIAL_TOKENS)
        },
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32_768,
        "chat_template": CHAT_TEMPLATE,
    }
