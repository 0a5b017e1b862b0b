"""What a text model is given for token ids: embedding rows and, in some families, inputs of its layers.

Inputs of layers (`per_layer_inputs`) are looked up in a table of their own, by token id. Without them
transformers would search the whole embedding table for every row, or leave them out. Rows of media replace
embedding rows, never these inputs: they stay those of the placeholder tokens.

Owns no weights. Reads nothing from the host but ids that are there, so a recorded step may look up both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_NONE: Mapping[str, object] = MappingProxyType({})


class TokenInputs:
    """`read_as`: the id as which the tokens `replaced` are read."""

    def __init__(
        self, text_model: PreTrainedModel, embed: nn.Embedding, replaced: Sequence[int] = (), read_as: int = 0
    ):
        self._embed, self._read_as = embed, read_as
        self._replaced = torch.tensor([*replaced], dtype=torch.int64, device=embed.weight.device)
        self._of_layers = layer_inputs(text_model)

    def known_ids(self, token_ids: Sequence[int]) -> np.ndarray:
        """[T] int64. Placeholder ids may lie outside the embedding table and become 0: their rows are
        replaced later."""
        ids = np.array(token_ids)
        ids[ids >= self._embed.num_embeddings] = 0
        return ids

    def known_on_device(self, token_ids: Tensor) -> Tensor:
        """`known_ids`, [T] int64 on the device."""
        return token_ids.masked_fill(token_ids >= self._embed.num_embeddings, 0)

    def rows(self, known: Tensor) -> Tensor:
        """[T] → [T, hidden_size]."""
        return self._embed(self._as_read(known))

    def of_layers(self, known: Tensor) -> Mapping[str, object]:
        """More arguments of the text model for the T tokens; empty for most families."""
        return _NONE if self._of_layers is None else self._of_layers(self._as_read(known))

    def _as_read(self, known: Tensor) -> Tensor:
        if not len(self._replaced):
            return known
        return known.masked_fill((known[:, None] == self._replaced).any(-1), self._read_as)


def layer_inputs(text_model: nn.Module) -> Callable[[Tensor], Mapping[str, object]] | None:
    """Makes the arguments that the text model takes beside embedding rows, of token ids [T]. None: it takes
    none."""
    config = cast(Any, text_model).config
    if not getattr(config, "hidden_size_per_layer_input", 0):
        return None
    look_up = cast(Callable[[Tensor], Tensor], text_model.get_per_layer_inputs)
    return lambda token_ids: {"per_layer_inputs": look_up(token_ids[None])}
