"""The key of an item in every cache. It depends on the content, on how it is processed, and on the tenant."""

from __future__ import annotations

import hashlib

import msgspec

from cluster.types.media import MediaOptions, Modality

_encoder = msgspec.json.Encoder(order="deterministic")


def media_hash(
    modality: Modality, digest: bytes, settings_fingerprint: str, options: MediaOptions, tenant: str
) -> str:
    """Hex SHA-256. `digest` is the SHA-256 of the item's bytes. Items of different tenants never share a
    hash."""
    meaning = _encoder.encode((modality, settings_fingerprint, options, tenant))
    return hashlib.sha256(digest + meaning).hexdigest()
