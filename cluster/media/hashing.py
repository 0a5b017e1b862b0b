"""The name an item goes by in every cache: its content, how it is processed, and whose it is."""

from __future__ import annotations

import hashlib

import msgspec

from cluster.types.media import MediaOptions, Modality

_encoder = msgspec.json.Encoder(order="deterministic")


def media_hash(
    modality: Modality, digest: bytes, settings_fingerprint: str, options: MediaOptions, tenant: str
) -> str:
    """Hex SHA-256. `digest` is the SHA-256 of the item's bytes. Items of different tenants never share a name."""
    meaning = _encoder.encode((modality, settings_fingerprint, options, tenant))
    return hashlib.sha256(digest + meaning).hexdigest()
