"""Measures what a lossy codec does to this model, before the worker serves: tokens are predicted over the KV
as it was computed and over the KV as it would arrive, and both are compared. The prompt consists of random
token ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel, SequenceChunk
from kv_transfer.codecs.wire_memory import Wire

CODED_TOKENS, PREDICTED_TOKENS = 256, 64
MIN_AGREEMENT = 0.98  # of the most probable tokens
MAX_DIVERGENCE = 0.01  # nats, Kullback-Leibler, mean over positions


@dataclass(frozen=True)
class CodecError:
    agreement: float  # share of positions whose most probable token stays the same
    divergence: float  # nats

    @property
    def is_small(self) -> bool:
        return self.agreement >= MIN_AGREEMENT and self.divergence <= MAX_DIVERGENCE

    def __str__(self) -> str:
        return f"{self.agreement:.1%} of the most probable tokens stay, divergence {self.divergence:.4f} nats"


def check_codec(model: LanguageModel, kv: BlockMemory, wire: Wire) -> CodecError:
    """Raises ConfigError, with the figures, if answers would change too much. Overwrites the first blocks of
    `kv`."""
    error = codec_error(model, kv, wire)
    if not error.is_small:
        raise ConfigError(
            f"transfer.codec {wire.codec.name} changes this model's answers too much: {error}; "
            f"at least {MIN_AGREEMENT:.0%} and at most {MAX_DIVERGENCE} are required",
            param="transfer.codec",
        )
    return error


def codec_error(model: LanguageModel, kv: BlockMemory, wire: Wire) -> CodecError:
    """Raises ConfigError if `kv` is too small for the probe."""
    num_tokens = CODED_TOKENS + PREDICTED_TOKENS
    block_table = list(range(-(-num_tokens // model.block_size)))
    if len(block_table) > kv.num_blocks:
        raise ConfigError(f"a probe of the codec needs {num_tokens} tokens of KV cache")
    token_ids = torch.randint(
        model.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0)
    ).tolist()

    def chunk(start: int, end: int, num_logits: int) -> SequenceChunk:
        positions = torch.arange(start, end)
        return SequenceChunk(token_ids[start:end], positions, start, block_table, num_logits=num_logits)

    predicted = chunk(CODED_TOKENS, num_tokens, PREDICTED_TOKENS)
    model.forward([chunk(0, CODED_TOKENS, 0)], kv)
    computed = model.forward([predicted], kv).log_softmax(-1)
    layers, length = range(wire.codec.num_layers), wire.blocks_per_group
    for first in wire.first_blocks([CODED_TOKENS]):  # one by one: the wire memory may be small
        group = [block_table[first : first + length]]
        wire.encode(group, [0], layers)
        wire.decode([0], group)
        wire.begin()
    arrived = model.forward([predicted], kv).log_softmax(-1)
    agreement = (computed.argmax(-1) == arrived.argmax(-1)).double().mean()
    divergence = (computed.exp() * (computed - arrived)).sum(-1).mean()
    return CodecError(float(agreement), float(divergence))
