"""From file bytes to embedding rows: `prepare` on CPU threads, `encode` on the engine's thread (device code)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cluster.errors import MediaError
from cluster.media.decode import decode
from cluster.media.processor import MediaProcessor
from cluster.model.encoder import EncoderModel
from cluster.types.media import MediaItem, Modality


class EncoderRunner:
    def __init__(self, model: EncoderModel, processor: MediaProcessor):
        self._model = model
        self._processor = processor

    def prepare(self, item: MediaItem) -> Mapping[str, torch.Tensor]:
        """The processor's tensors for one item. Thread-safe; raises MediaError for bytes that cannot be used.

        The error does not number the item: requests that share it know it by different numbers, and their doors do.
        """
        decoded = decode(item.modality, item.data, self._processor.settings, item_idx=None)
        return self._processor.prepare(item.modality, decoded, item_idx=None)

    @torch.inference_mode()
    def encode(self, modality: Modality, items: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """[num_tokens, feature_width] for each item. Blocks; synchronises the device."""
        return self._model.encode(modality, items)


def check_rows(item: MediaItem, rows: torch.Tensor) -> None:
    """The door has promised prefill this many rows; anything else must not be sent."""
    if len(rows) != item.geometry.num_tokens:
        raise MediaError(f"it has {len(rows)} embedding rows; its header promised {item.geometry.num_tokens}")
